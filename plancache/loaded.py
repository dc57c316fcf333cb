"""What answers a key: memory, then the stores in their order; loaded for the thread that asks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet, finalize

from plancache.capture import quietly
from plancache.entry import Entry, unpack, usable
from plancache.errors import CaptureError, ClosedError, CorruptEntryError, StoreError
from plancache.events import Reporter
from plancache.key import PlanKey
from plancache.memory import LivePlans
from plancache.plan import Executable, Loaded
from plancache.settings import Settings
from plancache.store.levels import Found, Levels
from plancache.stored import StoredPlans
from plancache.target import DeviceTarget, Targets

if TYPE_CHECKING:
    from plancache.environment import Device
    from plancache.events import Event

_log = logging.getLogger("plancache.cache")


class LoadedPlans(StoredPlans):
    """The plans that are stored, and those of them that are loaded."""

    def __init__(self, settings: Settings, device: Device | None, on_event: Callable[[Event], object] | None) -> None:
        super().__init__(settings, device, on_event)
        self._closed = False
        self._live: WeakSet[Loaded] = WeakSet()
        self._hits: Counter[bytes] = Counter()
        self._refusals: dict[bytes, tuple[bytes, str]] = {}
        self._unusable: set[bytes] = set()
        self._ahead: dict[bytes, tuple[Entry, Found]] = {}
        self._process = os.getpid()
        self._inherited: list[Any] = []
        self.end_recording: Callable[[], object] = lambda: None
        # for a cache that is dropped, and at exit
        self._finalizer = finalize(self, _release, self._process, self._targets, self._live, self._levels, self._hits, self._report)

    def _look_up(self, key: PlanKey, target: DeviceTarget) -> tuple[Loaded, str] | None:
        """What answers a key: memory, then the stores in their order; loaded for this thread."""
        remembered = self._remembered(key, target)
        if remembered is not None or target.unknown:
            return remembered
        ahead = self._taken_ahead(key, target)
        loaded = None if ahead is None else self._load(ahead[1], ahead[0], target)
        if ahead is not None and loaded is not None:
            return loaded, ahead[1].level
        for found in self._levels.rows(key.digest):
            remembered = self._remembered(key, target)  # another thread stores a row after it has kept the plan
            if remembered is not None:
                return remembered
            entry = self._checked(found, key, target)
            loaded = None if entry is None else self._load(found, entry, target)
            if loaded is not None:
                return loaded, found.level
        return None

    def _taken_ahead(self, key: PlanKey, target: DeviceTarget) -> tuple[Entry, Found] | None:
        """What was fetched ahead for a key, and may run here."""
        ahead = self._ahead.pop(key.digest, None)
        return ahead if ahead is not None and ahead[0].key == key and self._unfit(ahead[0], target) is None else None

    def _unfit(self, entry: Entry, target: DeviceTarget) -> str | None:
        """Why a whole entry is not used here: it needs what is not here, or its engine was shown wrong for such graphs since."""
        reason = usable(entry, target.backend.here)
        if reason is None and self._levels.has_suspects and entry.quality != "tuned":  # those were compared on this very graph
            from plancache.building import denial  # nearly never: on the way to a hit

            reason = self._levels.denied(denial(entry.key, entry.recipe))
        return reason

    def _remembered(self, key: PlanKey, target: DeviceTarget) -> tuple[Loaded, str] | None:
        loaded = self._plans.get((key.digest, target.device.ordinal))
        if loaded is None:
            return None
        if not target.device.is_file:
            loaded.seat()  # this thread may not have loaded it yet
        self._report.count(memory_hits=1)
        return loaded, "memory"

    def _checked(self, found: Found, key: PlanKey, target: DeviceTarget) -> Entry | None:
        """The entry of a row, where it is whole and may run here."""
        try:
            entry = unpack(found.row, key)
        except CorruptEntryError as error:
            self._levels.ban_corrupt(found)
            self._levels.record("quarantined", key.digest, str(error), found.row.checksum)
            self._report.tell("quarantine", key.digest, 0.0, str(error))
            self._report.fault("corrupt", error)
            return None
        reason = self._unfit(entry, target)
        if reason is None:
            return entry
        _log.info("%s plan %s is not usable here: %s", found.level, key.hex[:16], reason)
        if found.level == "local":
            self._unusable.add(key.digest)
        return None

    def _load(self, found: Found, entry: Entry, target: DeviceTarget) -> Loaded | None:
        """A stored entry as a plan that this thread can run; None where cuDNN refuses it."""
        started = time.perf_counter()
        try:
            loaded = self._ready(entry, target, found.row.checksum)
        except (ClosedError, CaptureError):
            raise
        except Exception as error:  # whatever cuDNN says of a stored plan: it is built anew, and says so
            self._refused(found, entry, error, target)
            return None
        self._count_hit(entry, found.level, time.perf_counter() - started)
        return loaded

    def _count_hit(self, entry: Entry, level: str, seconds: float) -> None:
        with self._guard:
            self._hits[entry.key.digest] += 1
        self._report.count(**{f"{level}_hits": 1}, load_s=seconds, saved_s=entry.build_s)
        self._report.tell("hit", entry.key.digest, seconds, level)

    def _refused(self, found: Found, entry: Entry, error: Exception, target: DeviceTarget) -> None:
        said = f"{type(error).__name__}: {error}"
        if target.backend.is_of_the_device(error):  # a good plan fails too
            self._report.fault(
                "load", StoreError(f"{found.level} plan {entry.key.hex[:16]} was not loaded, for no fault of its own ({said})")
            )
            return
        self._levels.ban(found)
        self._refusals[entry.key.digest] = found.row.checksum, f"load: {said}"
        self._report.fault("load", StoreError(f"{found.level} plan {entry.key.hex[:16]} does not load ({said}); building it anew"))

    def _ready(self, entry: Entry, target: DeviceTarget, checksum: bytes = b"") -> Loaded:
        """An entry as a plan that this thread can run, kept in memory."""
        loaded = self._loaded(entry, target, checksum)
        if not target.device.is_file:
            loaded.seat()
        self._keep(loaded, entry, target)
        return loaded

    def _loaded(self, entry: Entry, target: DeviceTarget, checksum: bytes = b"") -> Loaded:
        """An entry as a plan that each thread loads at its first use."""
        levels, key = self._levels, entry.key.digest

        def load() -> Executable:
            with levels.mark(key, "load", checksum):
                return target.backend.load(entry)

        loaded = Loaded(
            load,
            device=target.device.ordinal,
            workspace_size=entry.workspace_size,
            entry=entry,
            releases=target.backend.releases,
        )
        self._live.add(loaded)
        return loaded

    def _keep(self, loaded: Loaded, entry: Entry, target: DeviceTarget) -> None:
        with self._guard:
            if self._closed:  # while this plan was built or loaded
                loaded.close()
                raise ClosedError("the cache was closed while this plan was made")
            self._plans.add((entry.key.digest, target.device.ordinal), loaded)
        target.backend.releases.drain()

    # ---- life

    def _begin(self) -> None:
        if os.getpid() != self._process:
            self._after_fork()
        if self._closed:
            raise ClosedError("this PlanCache is closed; make a new one, or plan inside its with block")

    def _after_fork(self) -> None:
        """In a child: what the parent loaded, opened and locked is left alone, and begun anew."""
        self._process = os.getpid()
        self._guard = threading.RLock()
        self._report.after_fork()
        self._levels.after_fork()
        self._targets.after_fork()
        self._inherited += [list(self._live), self._plans, self._flight]
        self._live.clear()
        self._hits.clear()
        self._plans = LivePlans(self.settings.max_live_bytes)
        self._flight = None
        self._finalizer.detach()
        self._finalizer = finalize(self, _release, self._process, self._targets, self._live, self._levels, self._hits, self._report)

    def close(self) -> None:
        """Writes use counts, drops plans and handles, ends child processes. Its plans can then no longer run."""
        with self._guard:
            self._closed = True
            self._plans.clear()
        self.end_recording()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _release(process: int, targets: Targets, live: WeakSet[Loaded], levels: Levels, hits: Counter[bytes], report: Reporter) -> None:
    """Gives back what a cache holds, once: when it is closed or dropped, or at exit; never in a forked child."""
    if os.getpid() != process:
        return
    with quietly():  # a capture in another thread must not notice what is released
        for plan in list(live):
            plan.close()
        targets.close()
    if hits:
        try:
            levels.count_uses(dict(hits))
        except StoreError as error:
            _log.debug("use counts were not written: %s", error)
    levels.close()
    if report.statistics.hits or report.statistics.misses:
        _log.info("%s", report.statistics.summary())
