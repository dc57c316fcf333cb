"""Child processes that plancache starts, `python -m MODULE`: their pipes, environment, folder and end.

A child speaks through two pipes of its own, since libraries print what they like on the standard ones. A third pipe is its
lifeline: its parent holds the other end and never writes.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import IO
from weakref import finalize

from plancache.environment import result_changing_variables
from plancache.errors import CompilerError

_SIZES = struct.Struct("<II")
_LAST_WORDS_S = 2.0


def visible_devices(ordinal: int | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for a child that sees one device of this process only, or none."""
    if ordinal is None:
        return ""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(ordinal) if own is None else own.split(",")[ordinal]


class Child:
    """A child process, its pipes, and the folder that it may write in. `visible`: see `visible_devices`.

    Its module's arguments are the numbers of its ends of the pipes, for requests, answers and lifeline, and the folder.
    """

    def __init__(self, module: str, variables: Mapping[str, str], visible: str) -> None:
        self.variables = dict(variables)
        self.owner = os.getpid()
        ambient = result_changing_variables()
        others = {name: value for name, value in os.environ.items() if name not in ambient}
        environment = {**others, **variables, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with ExitStack() as undo:
            try:
                self.folder = tempfile.mkdtemp(prefix="plancache-")
                self.clean = finalize(self, _remove, self.folder, os.getpid())
                undo.callback(self.clean)
                requests, answers, lifeline = _pipe(undo), _pipe(undo), _pipe(undo)
                theirs = requests[0], answers[1], lifeline[0]
                command = [sys.executable, "-P", "-m", module, *map(str, theirs), self.folder]
                self.process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=theirs
                )
            except (OSError, TypeError, ValueError) as error:
                raise CompilerError(f"cannot start Python ({sys.executable!r}) for a child process: {error}") from error
            undo.pop_all()
        for end in theirs:
            os.close(end)
        # not buffered, so that what was not read yet can be waited for
        self._pipes: tuple[IO[bytes], ...] = (os.fdopen(requests[1], "wb", 0), os.fdopen(answers[0], "rb", 0))
        self._lifeline = os.fdopen(lifeline[1], "wb", 0)

    def send(self, header: bytes, body: bytes = b"") -> None:
        send(self._pipes[0], header, body)

    def receive(self, limit_s: float | None = None) -> tuple[bytes, bytes]:
        """The next message. Raises `EOFError` where the child has ended, `TimeoutError` where none begins within `limit_s`."""
        answers = self._pipes[1]
        if not _is_heard(answers.fileno(), limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return receive(answers)

    def how_it_ended(self) -> str:
        """What became of it, in words; it is over then."""
        self.stop()
        code = self.process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"

    def stop(self, kill: bool = False) -> None:
        """Ends the process: at once where asked, else by closing its pipe, and by force where that does not do."""
        if self.owner != os.getpid():
            return
        if kill:
            self.process.kill()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        try:
            self.process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:  # a forked worker of the program holds the pipe open too
            self.process.kill()
            self.process.wait()
        self._lifeline.close()  # not before: who is about to end by itself is not to be killed
        self.clean()


def _pipe(undo: ExitStack) -> tuple[int, int]:
    """A pipe whose ends are none of the standard streams, which a child starts with anew."""
    ends = []
    for end in os.pipe():
        if end < 3:
            end, low = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3), end
            os.close(low)
        undo.callback(os.close, end)
        ends.append(end)
    return ends[0], ends[1]


def _remove(folder: str, process: int) -> None:
    if process == os.getpid():  # not a forked worker's to remove
        shutil.rmtree(folder, ignore_errors=True)


def send(pipe: IO[bytes], header: bytes, body: bytes = b"") -> None:
    left = memoryview(_SIZES.pack(len(header), len(body)) + header + body)
    while left:
        left = left[pipe.write(left) :]  # a pipe that is not buffered may take a part of it


def receive(pipe: IO[bytes]) -> tuple[bytes, bytes]:
    sizes = _SIZES.unpack(_exactly(pipe, _SIZES.size))
    return _exactly(pipe, sizes[0]), _exactly(pipe, sizes[1])


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    parts = []
    while size:
        part = pipe.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _is_heard(pipe: int, limit_s: float | None) -> bool:
    """Whether something, or the other end's closing, comes through a pipe in time."""
    poll = select.poll()  # select() takes the first 1,024 descriptors only
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else math.ceil(limit_s * 1e3)))


# ---- in the child ---------------------------------------------------------------------------------------------------


def end_with_parent(lifeline: int) -> None:
    """Has the kernel end this process when its parent is gone, whatever it is doing then, in cuDNN too.

    The other end of the lifeline is held by the parent, and by workers that it forked. When the last of them is gone the
    kernel sends SIGIO, which ends a process that does not handle it.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _is_heard(lifeline, 0):  # it was gone before
        signal.raise_signal(signal.SIGIO)
