"""One builder per key, across threads and processes.

Kernel locks on a fixed set of stripe files, never deleted: a dead holder's lock is gone with its process, and no
waiter can hold a lock on a file that another one just replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plancache.errors import StoreError
from plancache.settings import make_private

STRIPES = 64
_POLL_S = 0.01
_SAY_AFTER_S = 5.0

_log = logging.getLogger("plancache.singleflight")


class SingleFlight:
    """Locks by key under `directory`, or within this process only where there is none."""

    def __init__(self, directory: Path | None, *, timeout_s: float, on_fault: Callable[[StoreError], None]) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._stripes = tuple(threading.Lock() for _ in range(STRIPES))

    @contextmanager
    def building(self, key: bytes) -> Iterator[bool]:
        """Holds the lock of a key; yields False where another holder outlasted the timeout (build all the same)."""
        started = time.monotonic()
        stripe = key[0] % STRIPES
        if not self._stripes[stripe].acquire(timeout=self._timeout_s):
            _log.warning("another thread has been building this plan for %.0f s; building it here too", self._timeout_s)
            yield False
            return
        try:
            if self._directory is None:
                yield True
                return
            with self._file_lock(stripe, started) as held:
                yield held
        finally:
            self._stripes[stripe].release()

    @contextmanager
    def _file_lock(self, stripe: int, started: float) -> Iterator[bool]:
        from filelock import FileLock, Timeout

        assert self._directory is not None
        lock = FileLock(self._directory / f"{stripe:02}.lock", poll_interval=_POLL_S)
        held = False
        try:
            make_private(self._directory)
            for limit_s in (_SAY_AFTER_S, self._timeout_s):
                try:
                    lock.acquire(timeout=max(0.0, min(limit_s, self._timeout_s) - (time.monotonic() - started)))
                    held = True
                    break
                except Timeout:
                    _log.info("waiting since %.0f s for another process that builds this plan (%s)", limit_s, lock.lock_file)
        except OSError as error:  # no such place, or no locks there: as if alone
            self._on_fault(StoreError(f"cannot lock {lock.lock_file}: {error}"))
        else:
            if not held:
                _log.warning("another process has been building this plan for %.0f s; building it here too", self._timeout_s)
        try:
            yield held
        finally:
            if held:
                lock.release()
