"""`PlanCache`: the path of a request.

    graph -> signature -> key -> memory -> local SQLite -> sealed files -> usable here? -> load -> plan
                                   | nothing usable
                                   v
                        one builder per key (lock; look again)
                        copy -> candidates -> build -> serialize -> store -> plan

A fault of the cache is one warning and a miss: the caller gets a right plan or cuDNN's own error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from plancache.built import not_found
from plancache.capture import is_capturing
from plancache.entry import Entry
from plancache.environment import Device, result_changing_variables
from plancache.errors import (
    CaptureError,
    NotExecutableError,
    SettingsError,
    UncacheableGraphError,
)
from plancache.events import Event, log_to_stderr
from plancache.key import Constraints, PlanKey, make_key
from plancache.plan import Executable, Loaded, Plan
from plancache.served import ServedPlans
from plancache.settings import Build, Settings
from plancache.signature import Reading, Uncacheable, read
from plancache.statistics import Failure, Statistics, Warmed
from plancache.target import DeviceTarget

if TYPE_CHECKING:
    from plancache.autotune import Tuning
    from plancache.checking import Check
    from plancache.explaining import Explanation
    from plancache.jobs import Job, Tuned
    from plancache.manifest import Wanted
    from plancache.recording import Recording
    from plancache.warming import Known

_log = logging.getLogger("plancache.cache")


class PlanCache(ServedPlans):
    """A cache of cuDNN execution plans: in memory, then in SQLite in `directory` (the user's cache directory).

    `device`: a `Device`; by default the CUDA device that is current when a graph is planned. With a device file plans
    are built, stored and inspected, not run. `constraints`: for graphs planned without any of their own. `on_event`:
    called with each `Event`, in the thread where it happens. Other settings, by name: see `Settings`. Use it as a
    context manager, or call `close`. `tuning`: plans are tuned on their first miss on a GPU.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        device: Device | None = None,
        constraints: Constraints | None = None,
        tuning: Tuning | None = None,
        on_event: Callable[[Event], object] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        if settings is not None and (directory is not None or options):
            raise SettingsError("give settings=, or a directory and options, not both")
        if not isinstance(device, Device | None):
            raise SettingsError(f"device must be a plancache.Device, such as Device.from_file('h200'), not {device!r}")
        if not isinstance(constraints, Constraints | None):
            raise SettingsError(f"constraints must be plancache.Constraints(...), not {constraints!r}")
        super().__init__(settings or Settings.load(directory=directory, **options), device, on_event)
        if self.settings.log:
            log_to_stderr(self.settings.log)
        self._constraints = constraints or Constraints()
        self._tuning = tuning
        self._settled: set[bytes] = set()  # keys whose tuning brought nothing
        self._recordings: list[Recording] = []
        if self.settings.record is not None:
            from plancache.recording import record_until_the_end

            record_until_the_end(self, self.record(self.settings.record))

    # ---- the path of a request

    @overload
    def plan(self, graph: Any, *, build: Literal["lookup"], constraints: Constraints | None = None) -> Plan | None: ...

    @overload
    def plan(
        self,
        graph: Any,
        *,
        build: Literal["allow", "forbid"] | None = None,
        refresh: bool = False,
        constraints: Constraints | None = None,
        tuning: Tuning | None = None,
        inputs: Mapping[Any, Any] | None = None,
    ) -> Plan: ...

    def plan(
        self,
        graph: Any,
        *,
        build: Build | None = None,
        refresh: bool = False,
        constraints: Constraints | None = None,
        tuning: Tuning | None = None,
        inputs: Mapping[Any, Any] | None = None,
    ) -> Plan | None:
        """A ready plan for a described graph (`cudnn.pygraph`), which is left as it is.

        `build`: on a miss `allow` builds and keeps the plan, `forbid` raises `PlanNotFoundError`, `lookup` returns
        None (the only case that does). `refresh`: builds anew and replaces what is stored. `tuning`: tries cuDNN's engine
        configurations where no tuned plan is stored yet, on `inputs` (buffers by tensor, uid or name; they are only read) or
        on made-up ones. Raises `GraphStateError` for an empty or planned graph, and cuDNN's own error where it has no plan.
        """
        build = build or self.settings.build
        if build not in ("allow", "forbid", "lookup"):
            raise SettingsError(f"build must be 'allow', 'forbid' or 'lookup', not {build!r}")
        if not isinstance(constraints, Constraints | None):
            raise SettingsError(f"constraints must be plancache.Constraints(...), not {constraints!r}")
        constraints = constraints or self._constraints
        self._begin()
        target, variables = self._targets.current(), result_changing_variables()
        try:
            self._check_environment(target, variables)
            reading = read(graph, target.device, self._seen)
        except Uncacheable as error:
            return self._plan_uncached(graph, error.reason, target, build, constraints)
        key = make_key(reading.signature, target.place, variables, constraints)
        for recording in self._recordings:
            recording.asked(reading.signature, constraints)
        found = None if refresh else self._look_up(key, target)
        if found is None:
            if build == "lookup":
                return None
            if build == "forbid":
                raise not_found(key)
            try:
                found = self._build(reading, key, target, constraints, variables, refresh)
            except Uncacheable as error:
                for recording in self._recordings:
                    recording.withdrawn(reading.signature, constraints)
                return self._plan_uncached(graph, error.reason, target, build, constraints)
        tuning = tuning or self._tuning
        if tuning is not None and build == "allow" and not target.device.is_file:
            found = self._tuned(found, reading, target, constraints, variables, tuning, inputs, refresh)
        loaded, origin = found
        entry = loaded.entry
        assert entry is not None
        for recording in self._recordings:
            recording.answered(reading.signature, constraints, entry)
        tensors = [reading.tensors[uid - 1] for uid in entry.operands]
        return Plan(loaded, tensors, [entry.layouts[uid] for uid in entry.operands], graph, origin)

    def _tuned(
        self,
        found: tuple[Loaded, str],
        reading: Reading,
        target: DeviceTarget,
        constraints: Constraints,
        variables: dict[str, str],
        tuning: Tuning,
        inputs: Mapping[Any, Any] | None,
        refresh: bool,
    ) -> tuple[Loaded, str]:
        """The tuned plan, or what was found where there is none to be had."""
        entry = found[0].entry
        assert entry is not None
        if not refresh and (entry.quality == "tuned" or entry.key.digest in self._settled):
            return found
        if is_capturing():
            raise CaptureError("this plan is not tuned, and the current stream is capturing; tune it before the capture")
        from plancache.isolated import tuner_for
        from plancache.jobs import Job, by_uid

        job = Job(entry.key, entry, constraints, by_uid(reading, inputs or {}))
        tuner = tuner_for(self._levels, self.settings, target, variables, tuning, refresh=refresh, on_fault=self._report.fault)
        (tuned,) = tuner.tune([job])
        if tuned.error is not None:
            self._plans.drop(entry.key.digest)  # it may be what was shown wrong
            raise tuned.error
        if tuned.entry is None:
            _log.info("%s stays as it is: %s", entry.description.summary, tuned.reason)
            if not tuned.elsewhere:
                self._settled.add(entry.key.digest)
            return found
        self._plans.drop(entry.key.digest)
        return self._ready(tuned.entry, target), "local" if tuned.elsewhere else "built"

    def tune(
        self,
        graphs: Iterable[Any] | None = None,
        *,
        tuning: Tuning | None = None,
        refresh: bool = False,
        on_done: Callable[[Tuned], object] | None = None,
        on_step: Callable[[], object] = lambda: None,
    ) -> list[Tuned]:
        """Tunes graphs (or objects with a `graph`), stored entries, or all untuned ones that are stored for this device and environment.

        What one fails of is its `Tuned.error`, and the others go on. `refresh`: tuned ones too. `on_done`: called after each.
        `on_step`: called twice for each, when it was looked at and when it was decided. Raises `NotExecutableError` for a device file.
        """
        from plancache.autotune import Tuning
        from plancache.isolated import tuner_for

        target, variables = self._runnable_target()
        items = self.to_tune(refresh=refresh) if graphs is None else graphs
        jobs = [self._job(item, target, variables) for item in items]
        tuner = tuner_for(
            self._levels,
            self.settings,
            target,
            variables,
            tuning or self._tuning or Tuning(),
            refresh=refresh,
            on_fault=self._report.fault,
            on_step=on_step,
        )
        done = {}
        for tuned in tuner.tune({job.key: job for job in jobs}.values()):  # a graph may be given twice
            self._plans.drop(tuned.key.digest)
            self._settled.discard(tuned.key.digest)
            done[tuned.key] = tuned
            if on_done is not None:
                on_done(tuned)
        return [done[job.key] for job in jobs]

    def to_tune(self, *digests: str | PlanKey, refresh: bool = False) -> list[Entry]:
        """The stored entries that `tune` would tune here: all untuned ones, or of those whose keys start so; tuned ones too on refresh.

        Raises `LookupError` for a key that no entry has, or one that is not for this device and environment.
        """
        from plancache.jobs import is_of, stored_entries

        target, variables = self._runnable_target()
        if not digests:
            return list(stored_entries(self._levels, target, variables, refresh=refresh))
        named = {entry.key: entry for entry in map(self.entry, digests)}
        for entry in named.values():
            if not is_of(entry, target, variables):
                raise LookupError(f"{entry!r} is not for this {target.device.model} with the libraries and variables here")
        return [entry for entry in named.values() if refresh or entry.quality != "tuned"]

    def _runnable_target(self) -> tuple[DeviceTarget, dict[str, str]]:
        target = self._targets.current()
        if target.device.is_file:
            raise NotExecutableError("tuning runs plans, and this cache is for a device file; tune on the GPU itself")
        return target, result_changing_variables()

    def _job(self, item: Any, target: DeviceTarget, variables: dict[str, str]) -> Job:
        """What tuning a graph or a stored entry takes. Raises `UncacheableGraphError` for one that has no key."""
        from plancache import building
        from plancache.jobs import Job, job_of

        if isinstance(item, Entry):
            return job_of(item)
        graph = getattr(item, "graph", item)
        try:
            self._check_environment(target, variables)
            reading = read(graph, target.device, self._seen)
            key = make_key(reading.signature, target.place, variables, self._constraints)
            found = self._look_up(key, target)
            if found is None:
                building.check_outputs(graph)
                target.backend.check_copy(reading)
        except Uncacheable as error:
            raise UncacheableGraphError(error.reason, "it cannot be tuned") from None
        return Job(key, None if found is None else found[0].entry, self._constraints, {})

    # ---- what cannot be cached

    def _plan_uncached(self, graph: Any, reason: str, target: DeviceTarget, build: Build, constraints: Constraints) -> Plan | None:
        """Builds a graph as its caller made it, without the cache, under the constraints."""
        self._report.uncacheable(reason)
        for recording in self._recordings:
            recording.refused(reason)
        if build == "lookup":
            return None
        if build == "forbid":
            raise UncacheableGraphError(reason, "allow builds for this graph (build='allow')")
        if target.device.is_file:
            raise UncacheableGraphError(reason, "it can only be built on the GPU itself")
        if is_capturing():
            raise CaptureError(f"this graph cannot be cached ({reason}), and the current stream is capturing; plan it before the capture")
        executable, tensors, layouts, size = target.backend.build_unchanged(graph, constraints)
        self._report.count(builds=1)
        ready = _in_this_thread(executable)
        loaded = Loaded(ready, device=target.device.ordinal, workspace_size=size, entry=None, releases=target.backend.releases)
        self._live.add(loaded)
        return Plan(loaded, tensors, layouts, graph, "built")

    # ---- many at once, and looking

    def warm(self, graphs: Iterable[Any] | str | os.PathLike[str]) -> Warmed:
        """Plans every graph, object with a `graph`, or graph of a manifest (or of the one in a file); one that fails is reported,
        and the others go on."""
        from plancache.manifest import Manifest, Wanted

        if isinstance(graphs, str | os.PathLike):
            graphs = Manifest.read(graphs)
        if not isinstance(graphs, Iterable):
            raise SettingsError("warm() takes several graphs: pass [graph], a function's generator, or a manifest's path")
        plans, failures = [], []
        for index, graph in enumerate(graphs):
            try:
                wanted = isinstance(graph, Wanted)
                plan = self.plan_wanted(graph) if wanted else self.plan(getattr(graph, "graph", graph), build="allow")
            except Exception as error:  # one graph's, whatever it is; the others go on
                failures.append(Failure(index, error))
            else:
                plans.append(plan)
        return Warmed(tuple(plans), tuple(failures))

    def plan_wanted(self, wanted: Wanted) -> Plan:
        """A ready plan for a graph of a manifest, which is made again from its signature and built where nothing is stored.

        Raises `UncacheableGraphError` for one that this frontend does not make, and what `plan` raises.
        """
        from plancache.warming import graph_of

        self._begin()
        return self.plan(graph_of(wanted, self._targets.current()), build="allow", constraints=wanted.constraints)

    def stored_elsewhere(self) -> list[Known]:
        """The graphs that are stored for other environments (cuDNN, driver, device, variables) than the one here."""
        from plancache.warming import elsewhere

        self._begin()
        return elsewhere(self.entries(), self._targets.current().place, result_changing_variables())

    def record(self, path: str | os.PathLike[str], *, lock: bool = False) -> Recording:
        """Records what is planned in a with block, and adds it to the manifest at `path` at its end.

        `lock`: with the recipes of the plans that answered. Raises `ManifestError` at once where the file is no manifest.
        """
        from plancache.recording import Recording

        return Recording(path, lock=lock, among=self._recordings)

    def check(self, manifest: Iterable[Wanted] | str | os.PathLike[str]) -> Check:
        """Which graphs of a manifest (or of the one in a file) are answered here without a build, and why the others are not.

        Nothing is built or loaded. Raises `ManifestError`, and `StoreError` where what is stored cannot be read.
        """
        from plancache.checking import Checker

        self._begin()
        target, variables = self._targets.current(), result_changing_variables()
        return Checker(self._levels, target, variables, self._check_environment).check(manifest)

    def explain(self, graph_or_key: Any, *, constraints: Constraints | None = None) -> Explanation:
        """Why a graph, or the stored plan of a key (or of its first hex digits), is answered here without a build, or is not.

        Nothing is built or loaded. Raises `LookupError` for no such key or several.
        """
        return next(self.explanations([graph_or_key], constraints=constraints))

    def explanations(self, graphs_or_keys: Iterable[Any], *, constraints: Constraints | None = None) -> Iterator[Explanation]:
        """`explain` of several: what is stored is listed once."""
        from plancache.explaining import Explainer

        self._begin()
        target, variables = self._targets.current(), result_changing_variables()

        def key_of(graph: Any) -> PlanKey:
            self._check_environment(target, variables)
            signature = read(graph, target.device, self._seen).signature
            return make_key(signature, target.place, variables, constraints or self._constraints)

        def held(digest: bytes) -> Entry | None:
            loaded = self._plans.get((digest, target.device.ordinal))
            return loaded.entry if loaded else None

        explainer = Explainer(self._levels, target, variables, key_of, held)
        return map(explainer.explain, graphs_or_keys)

    def statistics(self) -> Statistics:
        """Counts and seconds since this cache was opened."""
        return self._report.snapshot(live_plans=len(self._plans), live_bytes=self._plans.size_bytes)

    def __repr__(self) -> str:
        return f"<PlanCache {self.settings.directory}>"


def _in_this_thread(executable: Executable) -> Callable[[], Executable]:
    """Gives an executable to the thread that built it: there are no bytes to load it from in another one."""
    builder = threading.get_ident()

    def load() -> Executable:
        if threading.get_ident() != builder:
            raise NotExecutableError("a plan that was built without the cache runs in the thread that planned it; plan the graph here")
        return executable

    return load
