"""What happened: counted, told to the log and to the program's hook, and warned of once."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from plancache.errors import PlancacheWarning, StoreError
from plancache.statistics import Statistics

Kind = Literal["hit", "miss", "build", "uncacheable", "quarantine", "fault"]

_log = logging.getLogger("plancache.cache")
logging.getLogger("plancache").addHandler(logging.NullHandler())  # else a warning is printed twice where logging is not set up

ALL_THE_SAME = "; plans are right all the same, this one is built or kept in memory only"


def log_to_stderr(level: str) -> None:
    """Shows plancache's log from a level on, once a process."""
    logger = logging.getLogger("plancache")
    logger.setLevel(level.upper())
    if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)


class Event(NamedTuple):
    """Something that a cache did. `key`: the plan's, as hex, where there is one; `seconds`: that it took."""

    kind: Kind
    key: str | None
    seconds: float
    reason: str


class Reporter:
    """Counts, logs, warns once of each kind, and calls the hook. In strict mode cache faults are raised."""

    def __init__(self, *, strict: bool, on_event: Callable[[Event], object] | None) -> None:
        self.statistics = Statistics()
        self._strict = strict
        self._on_event = on_event
        self._warned: set[str] = set()
        self._guard = threading.Lock()

    def count(self, **more: float) -> None:
        """Adds to counters."""
        with self._guard:
            for name, number in more.items():
                setattr(self.statistics, name, getattr(self.statistics, name) + number)

    def uncacheable(self, reason: str) -> None:
        with self._guard:
            self.statistics.uncacheable[reason] += 1
        _log.info("built without the cache: %s", reason)
        self.tell("uncacheable", None, 0.0, reason)

    def fell_through(self, reason: str) -> None:
        """A graph of an intercepted program goes the frontend's own road."""
        with self._guard:
            self.statistics.fell_through[reason] += 1
        _log.info("left to the frontend: %s", reason)
        self.tell("uncacheable", None, 0.0, reason)

    def fault(self, kind: str, error: StoreError) -> None:
        """A fault of the cache: a warning and a miss, or raised in strict mode."""
        with self._guard:
            self.statistics.faults[kind] += 1
        self.tell("fault", None, 0.0, f"{kind}: {error}")
        if self._strict:
            raise error
        self.warn(kind, f"{error}{ALL_THE_SAME}")

    def warn(self, kind: str, message: str) -> None:
        _log.warning(message)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, PlancacheWarning, stacklevel=5)

    def tell(self, kind: Kind, key: bytes | None, seconds: float, reason: str) -> None:
        """Calls the program's hook; what it raises is logged and goes no further."""
        if self._on_event is None:
            return
        try:
            self._on_event(Event(kind, key.hex() if key else None, seconds, reason))
        except Exception:
            _log.exception("the event hook failed")

    def snapshot(self, **now: int) -> Statistics:
        """The statistics as they are now."""
        with self._guard:
            own = self.statistics
            changed: dict[str, Any] = {name: Counter(getattr(own, name)) for name in ("uncacheable", "fell_through", "faults")}
            return replace(own, **{**changed, **now})

    def after_fork(self) -> None:
        """Makes the lock anew that another thread may have held when this process was forked."""
        self._guard = threading.Lock()
