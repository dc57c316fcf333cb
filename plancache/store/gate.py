"""Keeps forks and SQLite apart. A child that is forked while another thread is inside of SQLite finds its locks held for ever."""

from __future__ import annotations

import os
import threading
import time

_PATIENCE_S = 2.0  # a thread that waits for another process's lock in there holds none of SQLite's own


class _Gate:
    """Entered by whoever is inside of SQLite. A fork waits until nobody is, and nobody enters while it does."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a garbage collection in there may close a connection
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._forker = 0  # the thread that forks
        self._own = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._own, "depth", 0)
        if not depth:
            with self._lock:
                while self._forker and self._forker != threading.get_ident():
                    self._changed.wait()
                self._inside += 1
        self._own.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._own.depth -= 1
        if not self._own.depth:
            with self._lock:
                self._inside -= 1
                if self._forker:
                    self._changed.notify_all()

    def close(self) -> None:
        """Before a fork."""
        self._lock.acquire()
        self._forker = threading.get_ident()
        until = time.monotonic() + _PATIENCE_S
        while self._inside and self._changed.wait(max(0.0, until - time.monotonic())):
            pass

    def open(self) -> None:
        """After it, in the parent."""
        self._forker = 0
        self._changed.notify_all()
        self._lock.release()

    def open_in_child(self) -> None:
        """After it, in the child: whoever was inside is not in it."""
        self._begin()


INSIDE = _Gate()
os.register_at_fork(before=INSIDE.close, after_in_parent=INSIDE.open, after_in_child=INSIDE.open_in_child)
