"""What answers a key: memory, then the stores in their order; loaded for the thread that asks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

from plancache.entry import Entry, unpack, usable
from plancache.errors import CaptureError, ClosedError, CorruptEntryError, StoreError
from plancache.key import PlanKey
from plancache.plan import Executable, Loaded
from plancache.settings import Settings
from plancache.store.levels import Found
from plancache.stored import StoredPlans
from plancache.target import DeviceTarget

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

    def _look_up(self, key: PlanKey, target: DeviceTarget) -> tuple[Loaded, str] | None:
        """What answers a key: memory, then the stores in their order; loaded for this thread."""
        remembered = self._remembered(key, target)
        if remembered is not None or target.unknown:
            return remembered
        for found in self._levels.rows(key.digest):
            remembered = self._remembered(key, target)  # another thread stores a row after it has kept the plan
            if remembered is not None:
                return remembered
            entry = self._checked(found, key, target)
            loaded = None if entry is None else self._load(found, entry, target)
            if loaded is not None:
                return loaded, found.level
        return None

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
        reason = usable(entry, target.backend.here)
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
        seconds = time.perf_counter() - started
        with self._guard:
            self._hits[entry.key.digest] += 1
        counter = {"local": "local_hits", "sealed": "sealed_hits"}[found.level]
        self._report.count(**{counter: 1}, load_s=seconds, saved_s=entry.build_s)
        self._report.tell("hit", entry.key.digest, seconds, found.level)
        return loaded

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
        if not target.device.is_file:
            loaded.seat()
        with self._guard:
            if self._closed:  # while this plan was built or loaded
                loaded.close()
                raise ClosedError("the cache was closed while this plan was made")
            self._plans.add((key, target.device.ordinal), loaded)
        target.backend.releases.drain()
        return loaded
