"""Marks of risky steps: what was under way when a process died.

A process writes into one slot file of its own, through a shared mapping: the pages outlive kill -9, and a mark is a
memory write. It holds a kernel lock on that file for as long as it lives, so whoever can take the lock knows that the
owner is dead, in whichever container it ran. Nothing here can fail a caller: no writable place, no mark.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import finalize, ref

from plancache.settings import make_private

if TYPE_CHECKING:
    from mmap import mmap

Phase = Literal["build", "load"]

_log = logging.getLogger("plancache.marks")

_SUFFIX = ".mark1"  # names the format: another one is neither read nor removed
_MAGIC = b"plancachemrk"
_HEADER = struct.Struct("<12sI")  # magic, process id
_SLOT = struct.Struct("<BBBB64s64s")  # whether marked, phase, lengths of key and checksum, key, checksum
_FILE_BYTES = 4096
_OFFSETS = range(_HEADER.size, _FILE_BYTES - _SLOT.size + 1, _SLOT.size)
_PHASES: tuple[Phase, ...] = ("build", "load")
_TRIES = 5


class Casualty(NamedTuple):
    """A step that its process did not outlive. `ended`: `died`, or `restart` where the machine has restarted since."""

    key: bytes
    checksum: bytes
    phase: Phase
    pid: int
    ended: str


class Marks:
    """Marks of this process under `directory`, or none where there is none."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._marking = True
        self._file: _SlotFile | None = None
        self._guard = threading.Lock()
        self._hooked = False

    @contextmanager
    def under_way(self, key: bytes, phase: Phase, checksum: bytes = b"") -> Iterator[None]:
        """Marks a step for as long as it runs, however it ends in Python; several at a time, of any threads.

        30 steps of a process are marked at once at most; more than that go unmarked.
        """
        file = self._file or self._open()
        if file is None:
            yield
            return
        offset = None
        try:
            offset = file.take()
            file.mark(offset, _PHASES.index(phase), key, checksum)
            yield
        finally:
            file.clear(offset)

    def casualties(self, record: Callable[[Casualty], None]) -> None:
        """Calls `record` for every mark of a dead process, by one process only, and removes the mark once that returned.

        What `record` raises passes through; that mark and those after it stay for the next look.
        """
        if self._directory is None:
            return
        try:
            paths = list(self._directory.iterdir())
        except OSError:  # nobody has marked anything, or it cannot be seen from here
            return
        for path in paths:
            if path.suffix == _SUFFIX:
                _bury(path, record)

    def close(self) -> None:
        """Removes this process's slot file; steps that are still under way are no longer marked."""
        with self._guard:
            self._marking = False
            if self._file is not None:
                self._file.remove()

    def _open(self) -> _SlotFile | None:
        if self._directory is None or not self._marking:
            return None
        with self._guard:
            if self._file is None and self._marking:
                try:
                    self._hook()
                    self._file = _SlotFile.create(self, self._directory)
                except OSError as error:
                    self._marking = False
                    _log.debug("risky steps leave no mark: %s", error)
        return self._file

    def _hook(self) -> None:
        """Before the file is there; a hook cannot be taken back, so it must not keep this object."""
        if self._hooked:
            return
        this = ref(self)

        def forked() -> None:
            marks = this()
            if marks is not None:
                marks._after_fork()

        os.register_at_fork(after_in_child=forked)
        self._hooked = True

    def _after_fork(self) -> None:
        """In the child: the file is the parent's, and so is its lock, which every copy of the descriptor would keep."""
        file, self._file, self._guard = self._file, None, threading.Lock()
        if file is not None:
            file.abandon()


class _SlotFile:
    """A slot file that this process made and locked, and its mapping."""

    def __init__(self, owner: Marks, path: Path, descriptor: int, mapping: mmap) -> None:
        self._descriptor = descriptor
        self._mapping = mapping
        self._free = list(reversed(_OFFSETS))  # popped and appended to without a lock: each is one step of the interpreter
        self.remove = finalize(owner, _remove, path, descriptor, mapping, os.getpid())  # also at a normal exit

    @classmethod
    def create(cls, owner: Marks, directory: Path) -> _SlotFile:
        """Raises `OSError` where files cannot be made, locked or mapped."""
        for _ in range(_TRIES):
            path = directory / f"{os.getpid()}-{os.urandom(8).hex()}{_SUFFIX}"  # two containers can share a process id
            descriptor = _create(path)
            try:
                if _lock(descriptor):
                    return cls(owner, path, descriptor, _map(descriptor))
            except BaseException:
                with suppress(OSError):
                    path.unlink()
                os.close(descriptor)
                raise
            os.close(descriptor)  # another process looked between its making and its locking, and took it for a dead one's
        raise OSError(errno.EAGAIN, f"slot files in {directory} are taken away as soon as they are made")

    def take(self) -> int | None:
        """The offset of a slot that is free now."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def mark(self, offset: int | None, phase: int, key: bytes, checksum: bytes) -> None:
        """The mark counts once its first byte is set, so that one which is half written never does."""
        if offset is None:
            return
        slot = _SLOT.pack(0, phase, len(key), len(checksum), key, checksum)
        try:
            self._mapping[offset : offset + _SLOT.size] = slot
            self._mapping[offset] = 1
        except ValueError:  # closed meanwhile
            pass

    def clear(self, offset: int | None) -> None:
        if offset is None:
            return
        try:
            self._mapping[offset] = 0
        except ValueError:  # closed meanwhile, or this is a child that was forked within the step
            return
        self._free.append(offset)

    def abandon(self) -> None:
        """In a forked child: drops its copies and leaves the file. Once it is removed its descriptor is somebody else's."""
        if self.remove.detach() is None:
            return
        self._mapping.close()
        os.close(self._descriptor)


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_private(path.parent)
        return os.open(path, flags, 0o600)


def _lock(descriptor: int) -> bool:
    """Whether this process got the lock of a slot file that is still there."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _map(descriptor: int) -> mmap:
    from mmap import mmap

    page = _HEADER.pack(_MAGIC, os.getpid()).ljust(_FILE_BYTES, b"\0")
    if os.write(descriptor, page) < len(page):  # written, not only sized: a mapped page without its block kills on a full disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return mmap(descriptor, _FILE_BYTES)


def _remove(path: Path, descriptor: int, mapping: mmap, process: int) -> None:
    if process != os.getpid():
        return
    mapping[:] = bytes(_FILE_BYTES)  # nothing that is cut short by a normal end is a casualty
    with suppress(OSError):
        path.unlink()
    mapping.close()
    os.close(descriptor)


# ---- the dead


def _bury(path: Path, record: Callable[[Casualty], None]) -> None:
    """Records and removes the slot file of a dead process; leaves that of a living one."""
    with _claimed(path) as descriptor:
        if descriptor is None:
            return
        for offset, casualty in _marked(descriptor):
            record(casualty)
            with suppress(OSError):
                os.pwrite(descriptor, b"\0", offset)  # at once: the next one may not be recorded
        with suppress(OSError):
            path.unlink()


@contextmanager
def _claimed(path: Path) -> Iterator[int | None]:
    """The descriptor of a slot file whose owner is dead and that nobody else is looking at."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or not to be written: a mark that cannot be removed would be counted each time
        yield None
        return
    claimed = False
    try:
        with suppress(OSError):
            claimed = _lock(descriptor)
        yield descriptor if claimed else None
    finally:
        if claimed:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has a copy of the descriptor
        os.close(descriptor)


def _marked(descriptor: int) -> list[tuple[int, Casualty]]:
    """The marks of a slot file with their offsets; none in one that is truncated or not a slot file."""
    try:
        page = os.pread(descriptor, _FILE_BYTES + 1, 0)
    except OSError:
        return []
    if len(page) != _FILE_BYTES or not page.startswith(_MAGIC):
        return []
    _, pid = _HEADER.unpack_from(page)
    ended = "restart" if _is_from_before_the_restart(descriptor) else "died"
    found = []
    for offset in _OFFSETS:
        marked, phase, key_bytes, checksum_bytes, key, checksum = _SLOT.unpack_from(page, offset)
        if marked == 1 and phase < len(_PHASES) and 0 < key_bytes <= len(key) and checksum_bytes <= len(checksum):
            found.append((offset, Casualty(key[:key_bytes], checksum[:checksum_bytes], _PHASES[phase], pid, ended)))
    return found


def _is_from_before_the_restart(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
