"""One builder a key: what is not stored is built, checked by loading it, and stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from plancache.capture import is_capturing
from plancache.environment import FRONTENDS
from plancache.errors import CaptureError, PlanNotFoundError, StoreError
from plancache.key import Constraints, PlanKey
from plancache.loaded import LoadedPlans
from plancache.plan import Loaded
from plancache.settings import Settings
from plancache.signature import Reading, Uncacheable
from plancache.store.levels import STRIKES
from plancache.target import DeviceTarget

if TYPE_CHECKING:
    from plancache.entry import Entry
    from plancache.environment import Device
    from plancache.events import Event
    from plancache.store.database import Verdict

_log = logging.getLogger("plancache.cache")


class BuiltPlans(LoadedPlans):
    """The plans that are stored, those that are loaded, and those that are built when nothing usable is stored."""

    def __init__(self, settings: Settings, device: Device | None, on_event: Callable[[Event], object] | None) -> None:
        super().__init__(settings, device, on_event)
        self._seen: WeakKeyDictionary[Any, tuple[bytes, bytes] | None] = WeakKeyDictionary()

    def _build(
        self, reading: Reading, key: PlanKey, target: DeviceTarget, constraints: Constraints, variables: dict[str, str], refresh: bool
    ) -> tuple[Loaded, str]:
        from plancache import building  # not on the way to a hit

        with self._single_flight().building(key.digest):
            found = None if refresh else self._look_up(key, target)  # another one may have built it meanwhile
            if found is not None:
                return found
            if is_capturing():
                raise CaptureError("this plan is not ready, and the current stream is capturing; plan the graph before the capture")
            known = self._levels.verdicts(key.digest)
            if not refresh:
                building.refuse_known(known, key, target)
            self._count_miss(key)
            building.check_outputs(reading.graph)
            entry = building.build(self._levels, reading, key, target, constraints, variables)
            loaded = self._ready(entry, target)  # before it is stored: what does not load is not kept
            self._count_build(entry)
            self._store(entry, target, refresh, known)
        return loaded, "built"

    def _count_miss(self, key: PlanKey) -> None:
        self._report.count(misses=1)
        self._report.tell("miss", key.digest, 0.0, "nothing usable is stored")

    def _count_build(self, entry: Entry) -> None:
        self._report.count(builds=1, build_s=entry.build_s)
        self._report.tell("build", entry.key.digest, entry.build_s, entry.engine)
        _log.info("built %s with %s in %.0f ms", entry.description.summary, entry.engine, entry.build_s * 1e3)

    def _store(self, entry: Entry, target: DeviceTarget, refresh: bool, known: list[Verdict]) -> None:
        digest = entry.key.digest
        if self.settings.mode != "readwrite" or target.unknown:
            return
        if "unknown" in entry.requirements.values():
            what = f"{entry.engine} is not stored: {dict(entry.requirements)} cannot be checked when it is loaded"
            self._report.warn("requirement", what)
            return
        refused = [verdict.reason for verdict in known if verdict.kind == "quarantined" and verdict.reason.startswith("load:")]
        refused += [reason for _, reason in filter(None, [self._refusals.get(digest)])]
        if len(refused) >= STRIKES:
            _log.warning("plan %s is not stored any more: %d of its blobs did not load (%s)", entry.key.hex[:16], len(refused), refused[-1])
        else:
            try:
                self._report.count(stored=self._levels.put(entry, replace_equal=refresh or digest in self._unusable))
            except StoreError as error:
                self._report.fault("write", error)
                return
        if digest in self._refusals:  # the new one was loaded: the old one's bytes were at fault
            checksum, reason = self._refusals.pop(digest)
            self._levels.record("quarantined", digest, reason, checksum)
            self._report.tell("quarantine", digest, 0.0, reason)
        self._levels.lift([verdict for verdict in known if verdict.kind.startswith(("unsupported", "struck"))])

    def _check_environment(self, target: DeviceTarget, variables: dict[str, str]) -> None:
        """Raises `Uncacheable` where what is built would not be what a key says."""
        if target.builder is target.backend and variables != target.variables:
            changed = ", ".join(sorted({name for name, _ in variables.items() ^ target.variables.items()}))
            why = f"{changed} changed since this process first planned"
            cure = "set result-changing variables before the first plan"
            self._report.warn("variables", f"{why}, and cuDNN may not have noticed: nothing is cached; {cure}")
            raise Uncacheable(why)
        version = target.backend.libraries.frontend_version
        if not target.backend.libraries.frontend_tested:
            low, high = (".".join(map(str, bound)) for bound in FRONTENDS)
            self._report.warn(
                "frontend",
                f"nvidia-cudnn-frontend {version} is outside the tested range (>={low}, <{high}): nothing is cached; "
                f"install a tested one, or a plancache that knows this one",
            )
            raise Uncacheable(f"nvidia-cudnn-frontend {version} is not tested")


def not_found(key: PlanKey) -> PlanNotFoundError:
    from plancache.description import decode

    summary = decode(key.components["signature"]).summary
    return PlanNotFoundError(key.hex, summary, "it was never built here, or for another environment")
