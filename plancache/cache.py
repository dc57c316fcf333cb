"""`PlanCache`: the path of a request.

    graph -> signature -> key -> memory -> local SQLite -> usable here? -> load -> plan
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
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary, WeakSet

from plancache import __version__
from plancache.entry import Entry, unpack, usable
from plancache.environment import FRONTENDS, Device, current_ordinal, result_changing_variables
from plancache.errors import (
    ClosedError,
    CorruptEntryError,
    GraphStateError,
    NotExecutableError,
    PlancacheWarning,
    PlanNotFoundError,
    SettingsError,
    StoreError,
    UncacheableGraphError,
)
from plancache.key import Constraints, PlanKey, make_key
from plancache.plan import Executable, Loaded, Plan
from plancache.settings import Build, Settings
from plancache.signature import Reading, Uncacheable, read
from plancache.singleflight import SingleFlight
from plancache.statistics import Failure, Statistics, Warmed
from plancache.store.database import Database

if TYPE_CHECKING:
    from plancache.listing import Listed
    from plancache.target import DeviceTarget

_log = logging.getLogger("plancache.cache")
logging.getLogger("plancache").addHandler(logging.NullHandler())  # else a warning is printed twice where logging is not set up


class PlanCache:
    """A cache of cuDNN execution plans: in memory, then in SQLite in `directory` (the user's cache directory).

    `device`: a `Device`; by default the CUDA device that is current when a graph is planned. With a device file plans
    are built, stored and inspected, not run. `constraints`: for graphs planned without any of their own. Other
    settings, by name: see `Settings`. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        device: Device | None = None,
        constraints: Constraints | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        if settings is not None and (directory is not None or options):
            raise SettingsError("give settings=, or a directory and options, not both")
        if not isinstance(device, Device | None):
            raise SettingsError(f"device must be a plancache.Device, such as Device.from_file('h200'), not {device!r}")
        if not isinstance(constraints, Constraints | None):
            raise SettingsError(f"constraints must be plancache.Constraints(...), not {constraints!r}")
        self.settings = settings or Settings.load(directory=directory, **options)
        self._closed = False
        self._device = device
        self._constraints = constraints or Constraints()
        self._database = Database(self.settings.database, lock_timeout_s=self.settings.lock_timeout_s)
        self._stores = self.settings.mode != "off"
        locks = self.settings.directory / "locks" if self.settings.mode == "readwrite" else None
        self._flight = SingleFlight(locks, timeout_s=self.settings.lock_timeout_s, on_fault=lambda error: self._fault("lock", error))
        self._targets: dict[int | None, DeviceTarget] = {}
        self._loaded: dict[tuple[bytes, int | None], Loaded] = {}
        self._hits: Counter[bytes] = Counter()
        self._condemned: dict[bytes, bytes] = {}
        self._unusable: set[bytes] = set()
        self._live: WeakSet[Loaded] = WeakSet()
        self._seen: WeakKeyDictionary[Any, tuple[bytes, bytes] | None] = WeakKeyDictionary()
        self._statistics = Statistics()
        self._guard = threading.RLock()
        self._warned: set[str] = set()

    # ---- the path of a request

    @overload
    def plan(self, graph: Any, *, build: Literal["lookup"], constraints: Constraints | None = None) -> Plan | None: ...

    @overload
    def plan(
        self, graph: Any, *, build: Literal["allow", "forbid"] | None = None, refresh: bool = False, constraints: Constraints | None = None
    ) -> Plan: ...

    def plan(self, graph: Any, *, build: Build | None = None, refresh: bool = False, constraints: Constraints | None = None) -> Plan | None:
        """A ready plan for a described graph (`cudnn.pygraph`), which is left as it is.

        `build`: on a miss `allow` builds and keeps the plan, `forbid` raises `PlanNotFoundError`, `lookup` returns
        None (the only case that does). `refresh`: builds anew and replaces what is stored. Raises `GraphStateError`
        for an empty or planned graph, and cuDNN's own error where it has no plan.
        """
        build = build or self.settings.build
        if build not in ("allow", "forbid", "lookup"):
            raise SettingsError(f"build must be 'allow', 'forbid' or 'lookup', not {build!r}")
        if not isinstance(constraints, Constraints | None):
            raise SettingsError(f"constraints must be plancache.Constraints(...), not {constraints!r}")
        constraints = constraints or self._constraints
        target, variables = self._target(), result_changing_variables()
        try:
            self._check_environment(target, variables)
            reading = read(graph, target.device, self._seen)
        except Uncacheable as error:
            return self._plan_uncached(graph, error.reason, target, build, constraints)
        key = make_key(reading.signature, target.place, variables, constraints)
        found = None if refresh else self._look_up(key, target)
        if found is None:
            if build == "lookup":
                return None
            if build == "forbid":
                raise _not_found(key)
            try:
                found = self._build(reading, key, target, constraints, variables, refresh)
            except Uncacheable as error:
                return self._plan_uncached(graph, error.reason, target, build, constraints)
        loaded, origin = found
        entry = loaded.entry
        assert entry is not None
        tensors = [reading.tensors[uid - 1] for uid in entry.operands]
        return Plan(loaded, tensors, [entry.layouts[uid] for uid in entry.operands], graph, origin)

    def _look_up(self, key: PlanKey, target: DeviceTarget) -> tuple[Loaded, str] | None:
        """What answers a key: memory, then the store; loaded for this thread."""
        loaded = self._loaded.get((key.digest, target.device.ordinal))
        if loaded is not None:
            if not target.device.is_file:
                loaded.executable()  # this thread may not have loaded it yet
            self._statistics.memory_hits += 1
            return loaded, "memory"
        fetched = self._fetch(key, target)
        if fetched is None:
            return None
        entry, checksum = fetched
        started = time.perf_counter()
        try:
            loaded = self._ready(entry, target)
        except ClosedError:
            raise
        except Exception as error:  # whatever cuDNN says of a stored plan: it is built anew, and says so
            self._condemned[key.digest] = checksum
            self._fault("load", StoreError(f"stored plan {key.hex[:16]} does not load ({type(error).__name__}: {error}); building it anew"))
            return None
        with self._guard:
            self._statistics.local_hits += 1
            self._statistics.load_s += time.perf_counter() - started
            self._statistics.saved_s += entry.build_s
            self._hits[key.digest] += 1
        return loaded, "local"

    def _fetch(self, key: PlanKey, target: DeviceTarget) -> tuple[Entry, bytes] | None:
        """A checked entry that may run here, and its checksum."""
        if not self._stores or target.unknown:
            return None
        row = None
        try:
            row = self._database.get(key.digest)
            if row is None or row.checksum == self._condemned.get(key.digest):
                return None
            entry = unpack(row, key)
            reason = usable(entry, target.backend.here)
            if reason is None:
                return entry, row.checksum
            _log.info("stored plan %s is not usable here: %s", key.hex[:16], reason)
            self._unusable.add(key.digest)
            return None
        except CorruptEntryError as error:
            self._fault("corrupt", error)
        except StoreError as error:
            self._fault("read", error)
        if row is not None:
            self._condemned[key.digest] = row.checksum
        return None

    def _ready(self, entry: Entry, target: DeviceTarget) -> Loaded:
        """An entry as a plan that this thread can run, kept in memory."""
        loaded = Loaded(
            lambda: target.backend.load(entry),
            device=target.device.ordinal,
            workspace_size=entry.workspace_size,
            entry=entry,
        )
        self._live.add(loaded)
        if not target.device.is_file:
            loaded.executable()
        with self._guard:
            if self._closed:  # while this plan was built or loaded
                loaded.close()
                raise ClosedError("the cache was closed while this plan was made")
            self._loaded[entry.key.digest, target.device.ordinal] = loaded
        return loaded

    def _build(
        self, reading: Reading, key: PlanKey, target: DeviceTarget, constraints: Constraints, variables: dict[str, str], refresh: bool
    ) -> tuple[Loaded, str]:
        with self._flight.building(key.digest):
            found = None if refresh else self._look_up(key, target)  # another one may have built it meanwhile
            if found is not None:
                return found
            self._statistics.misses += 1
            _check_outputs(reading.graph)
            target.backend.check_copy(reading)
            built = target.builder.build(reading.signature, constraints, variables)
            entry = Entry.of(
                built,
                key=key,
                quality="compiled" if target.device.is_file else "heuristic",
                created_at=time.time(),
                provenance={"plancache": __version__, "cudnn": target.backend.libraries.cudnn_version},
            )
            loaded = self._ready(entry, target)  # before it is stored: what does not load is not kept
            with self._guard:
                self._statistics.builds += 1
                self._statistics.build_s += entry.build_s
            _log.info("built %s with %s in %.0f ms", entry.description.summary, entry.engine, entry.build_s * 1e3)
            self._store(entry, target, refresh)
        return loaded, "built"

    def _store(self, entry: Entry, target: DeviceTarget, refresh: bool) -> None:
        if self.settings.mode != "readwrite" or target.unknown:
            return
        if "unknown" in entry.requirements.values():
            self._warn("requirement", f"{entry.engine} is not stored: {dict(entry.requirements)} cannot be checked when it is loaded")
            return
        replace_equal = refresh or entry.key.digest in self._unusable
        try:
            self._database.put(entry, replace_equal=replace_equal, condemned=self._condemned.pop(entry.key.digest, None))
        except StoreError as error:
            self._fault("write", error)

    # ---- what cannot be cached

    def _check_environment(self, target: DeviceTarget, variables: dict[str, str]) -> None:
        """Raises `Uncacheable` where what is built would not be what a key says."""
        if target.builder is target.backend and variables != target.variables:
            changed = ", ".join(sorted({name for name, _ in variables.items() ^ target.variables.items()}))
            why = f"{changed} changed since this process first planned"
            cure = "set result-changing variables before the first plan"
            self._warn("variables", f"{why}, and cuDNN may not have noticed: nothing is cached; {cure}")
            raise Uncacheable(why)
        version = target.backend.libraries.frontend_version
        if not target.backend.libraries.frontend_tested:
            low, high = (".".join(map(str, bound)) for bound in FRONTENDS)
            self._warn(
                "frontend",
                f"nvidia-cudnn-frontend {version} is outside the tested range (>={low}, <{high}): nothing is cached; "
                f"install a tested one, or a plancache that knows this one",
            )
            raise Uncacheable(f"nvidia-cudnn-frontend {version} is not tested")

    def _plan_uncached(self, graph: Any, reason: str, target: DeviceTarget, build: Build, constraints: Constraints) -> Plan | None:
        """Builds a graph as its caller made it, without the cache, under the constraints."""
        with self._guard:
            self._statistics.uncacheable[reason] += 1
        _log.info("built without the cache: %s", reason)
        if build == "lookup":
            return None
        if build == "forbid":
            raise UncacheableGraphError(reason, "allow builds for this graph (build='allow')")
        if target.device.is_file:
            raise UncacheableGraphError(reason, "it can only be built on the GPU itself")
        executable, tensors, layouts, size = target.backend.build_unchanged(graph, constraints)
        with self._guard:
            self._statistics.builds += 1
        loaded = Loaded(_in_this_thread(executable), device=target.device.ordinal, workspace_size=size, entry=None)
        self._live.add(loaded)
        return Plan(loaded, tensors, layouts, graph, "built")

    # ---- many at once, and looking

    def warm(self, graphs: Iterable[Any]) -> Warmed:
        """Plans every graph, or every object with a `graph`; a graph that fails is reported and the others go on."""
        if not isinstance(graphs, Iterable):
            raise SettingsError("warm() takes several graphs: pass [graph], or a function's generator")
        plans, failures = [], []
        for index, graph in enumerate(graphs):
            try:
                plan = self.plan(getattr(graph, "graph", graph), build="allow")
            except Exception as error:  # one graph's, whatever it is; the others go on
                failures.append(Failure(index, error))
            else:
                plans.append(plan)
        return Warmed(tuple(plans), tuple(failures))

    def entries(self) -> list[Listed]:
        """What is stored, oldest first, without the plans themselves. Needs neither a GPU nor cuDNN.

        A row that cannot be read is left out, with a warning.
        """
        from plancache.listing import Listed

        listed = []
        for row in self._database.listing():
            try:
                listed.append(Listed.of(*row[1:]))
            except CorruptEntryError as error:
                self._fault("corrupt", error)
        return listed

    def entry(self, digest: str | PlanKey) -> Entry:
        """The stored entry of a key, or whose key starts with these hex digits, checked. Raises `LookupError` for none or several."""
        digest = digest.hex if isinstance(digest, PlanKey) else digest
        if not digest:
            raise LookupError("give at least one hex digit of a key; 'plancache ls' lists them")
        keys = [row.key for row in self._database.listing() if row.key.hex().startswith(digest.lower())]
        row = self._database.get(keys[0]) if len(keys) == 1 else None
        if row is None:
            count = len(keys) or "no"
            raise LookupError(f"{count} stored entries have a key that starts with {digest!r}; 'plancache ls' lists them")
        return unpack(row)

    def statistics(self) -> Statistics:
        """Counts and seconds since this cache was opened."""
        with self._guard:
            now = self._statistics
            return replace(now, uncacheable=Counter(now.uncacheable), faults=Counter(now.faults))

    # ---- faults

    def _fault(self, kind: str, error: StoreError) -> None:
        with self._guard:
            self._statistics.faults[kind] += 1
        if self.settings.strict:
            raise error
        self._warn(kind, f"{error}; plans are right all the same, this one is built or kept in memory only")

    def _warn(self, kind: str, message: str) -> None:
        _log.warning(message)
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, PlancacheWarning, stacklevel=4)

    # ---- life

    def _target(self) -> DeviceTarget:
        """What plans for the device that was named, or is current."""
        if self._closed:
            raise ClosedError("this PlanCache is closed; make a new one, or plan inside its with block")
        if self._device is not None:
            return self._target_of(self._device)
        ordinal = current_ordinal()
        return self._targets.get(ordinal) or self._target_of(Device.current(ordinal))

    def _target_of(self, device: Device) -> DeviceTarget:
        target = self._targets.get(device.ordinal)
        if target is None:
            with self._guard:
                target = self._targets.get(device.ordinal)
                if target is None:
                    from plancache.target import DeviceTarget

                    target = self._targets[device.ordinal] = DeviceTarget(device)
            if target.unknown:
                self._warn("unknown", f"{target.unknown}: plans are kept in memory only, since what they depend on is not known")
        return target

    def close(self) -> None:
        """Writes use counts, drops plans and handles, ends child processes. Its plans can then no longer run."""
        with self._guard:
            hits, self._hits = self._hits, Counter()
            targets, self._targets = self._targets, {}
            self._closed, self._loaded = True, {}
        from plancache.backend import quietly

        with quietly() if targets else nullcontext():  # a capture in another thread must not notice what is released
            for plan in list(self._live):
                plan.close()
            for target in targets.values():
                target.close()
        if hits and self.settings.mode == "readwrite":
            try:
                self._database.count_uses(hits, time.time())
            except StoreError as error:
                _log.debug("use counts were not written: %s", error)
        self._database.close()

    def __enter__(self) -> PlanCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PlanCache {self.settings.directory}>"


def _check_outputs(graph: Any) -> None:
    if all(tensor.is_virtual for node in graph._nodes for tensor in node.outputs.values()):
        raise GraphStateError("no tensor of the graph is an output; call set_output(True) on what the graph computes")


def _in_this_thread(executable: Executable) -> Callable[[], Executable]:
    """Gives an executable to the thread that built it: there are no bytes to load it from in another one."""
    builder = threading.get_ident()

    def load() -> Executable:
        if threading.get_ident() != builder:
            raise NotExecutableError("a plan that was built without the cache runs in the thread that planned it; plan the graph here")
        return executable

    return load


def _not_found(key: PlanKey) -> PlanNotFoundError:
    from plancache.description import decode

    summary = decode(key.components["signature"]).summary
    return PlanNotFoundError(key.hex, summary, "it was never built here, or for another environment")
