"""One builder per key, across threads and processes.

Kernel locks on a fixed set of stripe files, never deleted: a dead holder's lock is gone with its process, and no
waiter can hold a lock on a file that another one just replaced. A stripe has two: whoever has waited for the first
one as long as the timeout takes the late one, so that behind a holder that hangs one more builder at a time goes on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from plancache.errors import StoreError
from plancache.settings import make_private

STRIPES = 64
_POLL_S = 0.01
_SAY_AFTER_S = 5.0
_NAME_BYTES = 128

_Outcome = Literal["held", "alone", "late"]
"""Of asking for a lock: held; it cannot be locked here; another one holds it beyond the timeout."""

_log = logging.getLogger("plancache.singleflight")


class SingleFlight:
    """Locks by key under `directory`, or within this process only where there is none."""

    def __init__(self, directory: Path | None, *, timeout_s: float, on_fault: Callable[[StoreError], None]) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._locks: dict[str, _Lock] = {}

    @contextmanager
    def building(self, key: bytes) -> Iterator[bool]:
        """Holds the lock of a key; yields False where others may be building it too (build all the same).

        Look again once it is held: another one may have built it meanwhile. Waits as long as the timeout for the
        first lock and as long for the late one, and then goes on without any.
        """
        first = self._lock(key)
        with first.held(self._timeout_s, self._on_fault) as outcome:
            if outcome != "late":
                yield outcome == "held"
                return
            holder = first.holder()
        late = self._lock(key, ".late")
        with late.held(self._timeout_s, self._on_fault) as outcome:
            others = f", and so is {late.holder()}" if outcome == "late" else ""
            _log.warning(
                "%s was still building this plan after %.0f s%s; building it here too unless it is stored by now",
                holder,
                self._timeout_s,
                others,
            )
            yield False

    @contextmanager
    def attempt(self, key: bytes) -> Iterator[bool]:
        """Holds the lock of a key where nobody else does; yields False at once where somebody does."""
        with self._lock(key).held(0.0, self._on_fault) as outcome:
            yield outcome != "late"

    def busy(self, key: bytes) -> bool:
        """Whether any thread of any process holds a lock of this key now (or of another key of its stripe)."""
        return self._lock(key).busy() or self._lock(key, ".late").busy()

    def after_fork(self) -> None:
        """To be called in a forked child: threads that held locks are not in it and will never release them."""
        self._locks = {}

    def _lock(self, key: bytes, which: str = "") -> _Lock:
        name = f"{key[0] % STRIPES:02}{which}.lock"
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks.setdefault(name, _Lock(self._directory / name if self._directory else None))
        return lock


class _Lock:
    """A lock between threads and, where it has a file, between processes too."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._threads = threading.RLock()  # it knows its owner, so an interrupted thread can release what it may have got
        self._owner = 0

    @contextmanager
    def held(self, timeout_s: float, on_fault: Callable[[StoreError], None]) -> Iterator[_Outcome]:
        if self._owner == threading.get_ident():  # it would wait for itself
            yield "held"
            return
        started = time.monotonic()
        try:
            if not self._wait(lambda left_s: self._threads.acquire(timeout=left_s), started, timeout_s):
                yield "late"
                return
            self._owner = threading.get_ident()
            if self._path is None:
                yield "held"
                return
            with self._file_held(self._path, started, timeout_s, on_fault) as outcome:
                yield outcome
        finally:
            try:
                if self._owner == threading.get_ident():
                    self._owner = 0
            finally:
                try:  # noqa: SIM105 - no call before the release, where an interrupt could come in between
                    self._threads.release()
                except RuntimeError:  # not held: timed out, or interrupted while waiting
                    pass

    @contextmanager
    def _file_held(self, path: Path, started: float, timeout_s: float, on_fault: Callable[[StoreError], None]) -> Iterator[_Outcome]:
        from filelock import FileLock, Timeout

        lock = FileLock(path, poll_interval=_POLL_S, thread_local=False, on_acquired=_sign)

        def acquire(left_s: float) -> bool:
            try:
                lock.acquire(timeout=left_s)
            except Timeout:
                return False
            return True

        outcome: _Outcome = "alone"
        try:
            try:
                make_private(path.parent)
                outcome = "held" if self._wait(acquire, started, timeout_s) else "late"
            except OSError as error:  # no such place, or no locks there: as if alone
                on_fault(StoreError(f"cannot lock {path}: {error}"))
            yield outcome
        finally:
            with suppress(OSError):  # a build that is done does not fail for its lock
                lock.release()

    def _wait(self, acquire: Callable[[float], bool], started: float, timeout_s: float) -> bool:
        for limit_s in (_SAY_AFTER_S, timeout_s) if timeout_s > _SAY_AFTER_S else (timeout_s,):
            if acquire(max(0.0, limit_s - (time.monotonic() - started))):
                return True
            if limit_s < timeout_s:
                _log.info("waiting for %.0f s so far: %s is building this plan", time.monotonic() - started, self.holder())
        return False

    def busy(self) -> bool:
        return self._owner != 0 or (self._path is not None and _is_locked(self._path))

    def holder(self) -> str:
        """Who holds it in place of this thread, in words for the log."""
        owner = self._owner
        if owner not in (0, threading.get_ident()):
            name = next((thread.name for thread in threading.enumerate() if thread.ident == owner), "that is gone")
            return f"thread {name} of this process"
        return (_signed(self._path) if self._path else None) or "another holder of its lock"


def _sign(descriptor: int) -> None:
    """Writes into a lock file who holds it now, over the name of whoever held it before."""
    program = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else sys.executable
    name = f"{os.getpid()} {time.time():.0f} {program[-80:]}"
    with suppress(OSError):
        os.pwrite(descriptor, name.encode(errors="replace")[:_NAME_BYTES].ljust(_NAME_BYTES), 0)


def _signed(path: Path) -> str | None:
    try:
        pid, since, program = path.read_bytes()[:_NAME_BYTES].decode(errors="replace").strip().split(" ", 2)
        clock = time.strftime("%H:%M:%S", time.localtime(int(since)))
        return f"process {int(pid)} ({''.join(filter(str.isprintable, program))}, since {clock})"
    except (OSError, ValueError, OverflowError):  # not signed yet, or not by plancache
        return None


def _is_locked(path: Path) -> bool:
    """Asks with a shared lock, so that two that ask do not take each other for a holder."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # never locked, or no place for locks
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # not by closing alone: a child forked meanwhile has a copy of the descriptor
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
