"""Device-less builds, in a child process that plancache starts: `python -m plancache.compiler`.

cuDNN's runtime-compiling engines want libcuda.so.1. Where there is no driver, the child compiles a stub of it
(driver_stub.c) into a private temporary folder and loads that; the caller's process never sees it. A crash in cuDNN
ends the child and is an error for one graph.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NoReturn

from plancache.children import Child, end_with_parent, receive, send, visible_devices
from plancache.entry import Built, Candidate, decode_facts, encode_facts
from plancache.environment import Device, load_frontend
from plancache.errors import ClosedError, CompilerError, PlancacheError
from plancache.key import Constraints, Place

_STUB = Path(__file__).with_name("driver_stub.c")


class Compiler:
    """Builds for a device file without a GPU, or for a GPU of this process beside it.

    One child serves all builds until `close`; a new one follows where variables changed.

    `cudnn`: which cuDNN the keys name, as `Place.cudnn` says it, where that is known; a child that loads another one
    builds nothing.
    """

    def __init__(self, device: Device, cudnn: bytes) -> None:
        self._device = device
        self._cudnn = cudnn
        self._child: Child | None = None
        self._inherited: list[Child] = []
        self._closed = False
        self._guard = threading.Lock()

    def build(
        self,
        signature: bytes,
        constraints: Constraints,
        variables: Mapping[str, str],
        candidate: Candidate | None = None,
        limit_s: float | None = None,
    ) -> Built:
        """Builds a candidate, or the heuristic's first choice, of a signature under result-changing variables, those of its key.

        Raises cuDNN's own error where it has no plan, `CompilerError` where the child fails, `TimeoutError` where it takes
        longer than `limit_s`; the child is killed then.
        """
        device = asdict(self._device if self._device.is_file else replace(self._device, ordinal=0))  # the only one that the child sees
        facts: dict[str, Any] = {"device": device, "constraints": asdict(constraints), "cudnn": self._cudnn.decode()}
        facts["candidate"] = candidate
        request = json.dumps(facts).encode()
        with self._guard:
            if self._closed:
                raise ClosedError("the cache was closed while this graph waited to be built")
            child = self._running(dict(variables))
            try:
                child.send(request, signature)
                answer, blob = child.receive(limit_s)
            except (EOFError, BrokenPipeError) as error:
                raise CompilerError(self._obituary()) from error
            except BaseException:  # interrupted, or too late: the answer would be taken for the next request's
                self._stop(kill=True)
                raise
            said = json.loads(answer)
            if said.pop("of") != _digest(request, signature):
                self._stop(kill=True)
                raise CompilerError("the process that builds without a GPU answered another request; it was ended, ask again")
        return _built_or_raise(said, blob)

    def _running(self, variables: dict[str, str]) -> Child:
        if self._child is not None and self._child.owner != os.getpid():
            self._inherited.append(self._child)  # the parent's of a fork: its pipes are not to be used or closed here
            self._child = None
        if self._child is not None and (self._child.process.poll() is not None or self._child.variables != variables):
            self._stop()
        if self._child is None:
            self._child = Child("plancache.compiler", variables, visible_devices(self._device.ordinal))
        return self._child

    def _obituary(self) -> str:
        child, self._child = self._child, None
        how = child.how_it_ended() if child else "is gone"
        return f"the process that builds without a GPU {how}; its last words are on stderr. Other graphs are not affected"

    def _stop(self, *, kill: bool = False) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop(kill)

    def abort(self) -> None:
        """Kills the child, whatever it does: a build that waits for it fails with `CompilerError`."""
        child = self._child
        if child is not None and child.owner == os.getpid():
            child.process.kill()

    def after_fork(self) -> None:
        """Makes the lock anew that another thread may have held when this process was forked."""
        self._guard = threading.Lock()

    def close(self) -> None:
        """Ends the child, once it has answered."""
        with self._guard:
            self._closed = True
            self._stop()


def _built_or_raise(answer: dict[str, Any], blob: bytes) -> Built:
    if "facts" in answer:
        facts, _ = decode_facts(answer["facts"].encode())
        return Built(blob=blob, **facts)
    kind, message = answer["error"], answer["message"]
    if kind == "unsupported":
        raise load_frontend().cudnnGraphNotSupportedError(message)
    raise CompilerError(message)


# ---- the child ------------------------------------------------------------------------------------------------------


def serve(requests: IO[bytes], answers: IO[bytes], lifeline: int, folder: str) -> None:
    """Answers requests until there are none."""
    backends: dict[str, Any] = {}
    while True:
        try:
            request, signature = receive(requests)
        except EOFError:
            return
        try:
            answer, blob = _answer(json.loads(request), signature, backends, lifeline, folder)
        except PlancacheError as error:
            answer, blob = {"error": "compiler", "message": str(error)}, b""
        except Exception as error:  # whatever cuDNN raises is this graph's answer, and the next one's turn comes
            unsupported = isinstance(error, load_frontend().cudnnGraphNotSupportedError)
            message = str(error) if unsupported else f"{type(error).__name__}: {error}"
            answer, blob = {"error": "unsupported" if unsupported else "compiler", "message": message}, b""
        send(answers, json.dumps({**answer, "of": _digest(request, signature)}).encode(), blob)


def _answer(
    request: dict[str, Any], signature: bytes, backends: dict[str, Any], lifeline: int, folder: str
) -> tuple[dict[str, Any], bytes]:
    device = Device(**request["device"])
    backend = backends.get(device.properties_json)
    if backend is None:
        if device.is_file:
            provide_driver(device.driver_version, folder)
        else:
            end_with_parent(lifeline)  # one that tunes may be killed at any time; it leaves no builder behind that hangs
            # candidates of the backend only are built here; planning norms imports torch for engines of the frontend's own,
            # which takes seconds in each child
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None bars an import
        from plancache.backend import CudnnBackend

        backend = backends[device.properties_json] = CudnnBackend(device)
    if request["cudnn"] not in ("", Place.of(device, backend.libraries).cudnn.decode()):
        raise CompilerError(
            f"the process that builds without a GPU loads another cuDNN than this one, from {backend.libraries.folder}; "
            "set LD_LIBRARY_PATH before this process starts, and leave one libcudnn in reach"
        )
    candidate = request["candidate"] and Candidate(*request["candidate"])
    built = backend.build(signature, Constraints(**request["constraints"]), {}, candidate)
    if device.is_file:
        backend.check_loads(built.blob)
    return {"facts": encode_facts(built).decode()}, built.blob


def provide_driver(driver_version: int, folder: str) -> None:
    """Loads libcuda.so.1, or a stub, made in `folder`, that reports this driver API version where there is none.

    Raises `CompilerError` that names both cures where there is no C compiler either.
    """
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    library = f"{folder}/libcuda.so.1"
    compile_stub(library, driver_version)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def c_compiler() -> str | None:
    """The C compiler: $CC, cc, gcc or clang, whichever is found first."""
    names = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    return next((found for found in map(shutil.which, names) if found), None)


def compile_stub(library: str, driver_version: int) -> None:
    """Compiles the driver stub to a path."""
    compiler = c_compiler()
    if compiler is None:
        raise CompilerError(
            "building without a GPU needs libcuda.so.1, which is not here, or a C compiler to make a stand-in for it; "
            "install a C compiler (apt-get install gcc) or the NVIDIA driver's library (libcuda.so.1)"
        )
    command = [compiler, "-shared", "-fPIC", "-O1", f"-DDRIVER_VERSION={driver_version}"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", library, str(_STUB)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(f"{compiler} cannot compile the driver stub: {done.stderr.strip()[-400:]}; install a working C compiler")


def _digest(request: bytes, signature: bytes) -> str:
    return hashlib.sha256(request + b"\0" + signature).hexdigest()


def _main(requests: str, answers: str, lifeline: str, folder: str) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the program's to answer
    with suppress(BrokenPipeError), os.fdopen(int(requests), "rb", 0) as asked, os.fdopen(int(answers), "wb", 0) as answered:
        serve(asked, answered, int(lifeline), folder)
    shutil.rmtree(folder, ignore_errors=True)  # for a program that was killed
    os._exit(0)  # cuDNN's own exit handlers have nothing to release here, and can crash beside the stub


if __name__ == "__main__":
    _main(*sys.argv[1:])
