"""What interception asks of a cache: plans for graphs that their own program plans step by step, on the program's handles."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.built import BuiltPlans, not_found
from plancache.capture import is_capturing
from plancache.entry import unpack
from plancache.environment import result_changing_variables
from plancache.errors import CaptureError, CorruptEntryError
from plancache.key import Constraints, PlanKey, make_key
from plancache.signature import Reading, Uncacheable, read
from plancache.target import DeviceTarget

if TYPE_CHECKING:
    from plancache.backend import Planned
    from plancache.entry import Built, Entry
    from plancache.recording import Recording
    from plancache.store.levels import Found


class Request(NamedTuple):
    """A graph as it was described. It does not hold the graph, which holds it; `tensors`: the graph's, in canonical order."""

    signature: bytes
    tensors: Sequence[Any]
    target: DeviceTarget
    variables: Mapping[str, str]

    def key(self, constraints: Constraints) -> PlanKey:
        return make_key(self.signature, self.target.place, self.variables, constraints)


class Served(NamedTuple):
    """A stored entry that may run here, and the row that it came from; no row for one that was built here and is in memory."""

    entry: Entry
    found: Found | None


class ServedPlans(BuiltPlans):
    """A cache whose plans are loaded into graphs of others."""

    _recordings: list[Recording]

    def request(self, graph: Any, ordinal: int | None) -> Request:
        """A described graph for the device of its handle, or for the one that is current. Raises `Uncacheable`."""
        self._begin()
        target, variables = self._targets.current(ordinal), result_changing_variables()
        if target.device.is_file is not ("device_property" in graph._cpp_graph_kwargs):
            raise Uncacheable("it is for another device than the cache: one of a GPU, the other of a device file")
        if None not in (ordinal, target.device.ordinal) and ordinal != target.device.ordinal:
            raise Uncacheable("its handle is of another device than the cache plans for")
        self._check_environment(target, variables)
        reading = read(graph, target.device, self._seen, filtered=True)
        return Request(reading.signature, reading.tensors, target, variables)

    def look_up(self, request: Request, constraints: Constraints) -> Served | None:
        """What is stored under a key and may run here; it is not loaded."""
        key, target = request.key(constraints), request.target
        remembered = self._plans.get((key.digest, target.device.ordinal))
        if remembered is not None and remembered.entry is not None:
            return Served(remembered.entry, None)
        if target.unknown:
            return None
        ahead = self._taken_ahead(key, target)
        if ahead is not None:
            return Served(*ahead)
        for found in self._levels.rows(key.digest):
            entry = self._checked(found, key, target)
            if entry is not None:
                return Served(entry, found)
        return None

    def fetch_ahead(self, tag: str) -> None:
        """Reads and checks what a program asked for in earlier runs, in one query, so that look-ups find it in memory.

        Nothing is loaded, and no device is asked for: a program that forks has none yet.
        """
        for found in self._levels.tagged(tag):
            with suppress(CorruptEntryError):  # whoever asks for it will say so
                self._ahead[found.row.key] = unpack(found.row), found

    def forget_ahead(self) -> None:
        """Lets go of what was fetched ahead and not asked for."""
        self._ahead.clear()

    def load_native(self, served: Served, target: DeviceTarget, handle: int | None) -> Any | None:
        """cuDNN's graph with a stored plan, on a caller's handle; None where cuDNN refuses it."""
        entry, found = served
        if is_capturing():
            raise CaptureError("this plan is not loaded, and the current stream is capturing; build the graph before the capture")
        started = time.perf_counter()
        try:
            with self._levels.mark(entry.key.digest, "load", found.row.checksum if found else b""):
                native = target.backend.load_native(entry, handle)
        except Exception as error:  # whatever cuDNN says of a stored plan: it is built anew, and says so
            if found is None:
                raise
            self._refused(found, entry, error, target)
            return None
        self._count_hit(entry, "memory" if found is None else found.level, time.perf_counter() - started)
        self._record(entry)
        return native

    def _record(self, entry: Entry) -> None:
        if self._recordings:
            components = entry.key.components
            constraints = Constraints(**json.loads(components["constraints"]))
            for recording in self._recordings:
                recording.asked(components["signature"], constraints)
                recording.answered(components["signature"], constraints, entry)

    def build_native(
        self, request: Request, scratch: Any, constraints: Constraints, planned: Planned, handle: int | None
    ) -> tuple[Entry, Any]:
        """The entry of a graph that is not stored, and cuDNN's graph with its plan. `scratch`: a clone of the graph as it was described.

        One builder a key: where another one has built it meanwhile, its plan is loaded. Raises cuDNN's own error,
        `Uncacheable`, or `PlanNotFoundError` where builds are forbidden.
        """
        from plancache import building  # not on the way to a hit

        target, key = request.target, request.key(constraints)
        if self.settings.build == "forbid":
            raise not_found(key)
        with self._single_flight().building(key.digest):
            served = self.look_up(request, constraints)
            native = None if served is None else self.load_native(served, target, handle)
            if served is not None and native is not None:
                return served.entry, native
            if is_capturing():
                raise CaptureError("this plan is not ready, and the current stream is capturing; build the graph before the capture")
            known = self._levels.verdicts(key.digest)
            building.refuse_known(known, key, target)
            self._count_miss(key)
            made: list[Built] = []

            def build() -> Built:
                made.append(planned.build_first(constraints))
                return made[0]

            reading = Reading(request.signature, request.tensors, scratch)
            entry = building.build(self._levels, reading, key, target, constraints, dict(request.variables), build)
            denied = entry.blob is not made[0].blob
            native = target.backend.load_native(entry, handle) if denied else planned.native
            self._count_build(entry)
            self._keep(self._loaded(entry, target), entry, target)
            self._store(entry, target, False, known)
        self._record(entry)
        return entry, native
