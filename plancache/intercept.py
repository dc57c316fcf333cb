"""Unchanged code goes through the cache: `cudnn.pygraph` plans as it always did, and finds its plans here.

Five methods of `cudnn.pygraph` are wrapped. A stand-in takes the place of the lowered graph: it answers from what an entry
stores, and whatever it cannot answer sends the graph down the frontend's own road, counted with the reason. Sources: the
frontend's `_pygraph.py` (1.32).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from plancache.course import (
    CHANGED,
    FIRST_TRIED,
    Course,
    OwnRoad,
    as_described,
    config_of,
    constraints_of,
    forget_bindings,
    is_of_the_backend,
    listed,
    modes_of,
    place_anew,
    remember_modes,
    resolve,
    tell_filters,
    unfiltered,
    validator_of,
)
from plancache.errors import CaptureError, ClosedError, GraphStateError, PlanNotFoundError, SettingsError, StoreError, UncacheableGraphError
from plancache.hook import when_imported
from plancache.signature import Uncacheable, clone
from plancache.standin import StandIn

if TYPE_CHECKING:
    from plancache.backend import Planned
    from plancache.cache import PlanCache
    from plancache.entry import Candidate, Entry
    from plancache.key import Constraints
    from plancache.served import Request, Served

_FRONTEND = "cudnn._pygraph"
_WRAPPED = ("validate", "create_execution_plans", "build_plans", "_build_plan_at", "_lower_backend_plan")


class Interceptor:
    """Serves the graphs of a process from one cache, which `make` opens when the first graph is planned."""

    def __init__(self, make: Callable[[], PlanCache]) -> None:
        self._make = make
        self._cache: PlanCache | None = None

    @property
    def cache(self) -> PlanCache:
        if self._cache is None:
            self._cache = self._make()
        return self._cache

    # ---- the steps of a graph; `original`: the frontend's

    def validate(self, original: Callable[..., Any], graph: Any) -> None:
        """Types and dims are inferred as ever; a graph that is known is not lowered, and its engines are not imported."""
        course = graph.__dict__.get("_plancache")
        if isinstance(course, Course) and not graph._frozen:  # it may have been changed since
            course = None
        begun = course is None and not graph._planning_done and graph._lowered_graph is None
        if begun:
            course = graph._plancache = self._begun(graph)
            if isinstance(course, Course) and course.served is not None:
                graph._lowered_graph = StandIn(graph, course)
        try:
            original(graph)
            if isinstance(graph._lowered_graph, StandIn) and not graph._frozen:
                self._lower(graph)
        except BaseException:
            if not graph._frozen and not graph._planning_done:  # it may be mended, and is read anew then
                graph._lowered_graph = None
                graph._is_validated = False
                graph.__dict__.pop("_plancache", None)
            raise
        if begun and isinstance(course, Course):
            course.frozen = graph._frozen
        elif begun and isinstance(course, str):
            graph._plancache = self._left(course)

    def _lower(self, graph: Any) -> None:
        """What the frontend does at the end of validation, so that it accepts and refuses the same from here on."""
        validator = validator_of(graph)
        if validator is not None and validator(graph):
            graph._lowered_graph = None  # until it is planned
        else:
            graph._freeze()

    def _change(self, graph: Any, course: Course) -> str | None:
        """Why a graph is not what was read any more. The frontend lets nobody change a frozen one."""
        if course.frozen:
            return None
        try:
            return None if self._request(graph).signature == course.request.signature else CHANGED
        except Uncacheable as error:
            return error.reason
        except (ValueError, GraphStateError):
            return CHANGED

    def _request(self, graph: Any) -> Request:
        request = self.cache.request(graph, None if graph._handle is None else graph._handle._ordinal)
        uids = {tensor.uid for tensor in request.tensors}  # no part of the signature
        if len(uids) < len(request.tensors) or min(uids) < 1:
            raise Uncacheable("uids that cuDNN refuses: below 1, or one of two tensors")
        return request

    def _begun(self, graph: Any) -> Any:
        """The course of a graph, or why it goes the frontend's own road."""
        if self.cache.settings.mode == "off":
            return OwnRoad(self, "")
        at_once = validator_of(graph) is None
        if at_once and graph._workspace_limit is not None:
            return "a workspace limit that is set before validate(), which the frontend forgets"
        try:
            request = self._request(graph)
        except (ClosedError, SettingsError):
            raise
        except Uncacheable as error:
            return error.reason
        except Exception as error:  # dims that do not fit, no device: the frontend says it in its own words
            return f"it cannot be read: {_said(error)}"
        course = Course(self, request, graph.is_cuda_graph_replay_expected)
        course.options = dict(graph._cpp_graph_kwargs)
        course.untold = frozenset(graph._barred_names) if at_once else frozenset()
        for modes in FIRST_TRIED:
            served = self._known(request, modes)
            if served is not None:
                course.modes, course.served = modes, served
                return course
        course.scratch = clone(graph)[0]
        return course

    def _known(self, request: Request, modes: tuple[str, ...]) -> Served | None:
        """What is stored for a graph under these modes, where all plans of its list are of the backend."""
        served = self.cache.look_up(request, unfiltered(modes))
        return served if served is not None and is_of_the_backend(*listed(served.entry)) else None

    def create_execution_plans(self, original: Callable[..., Any], graph: Any, heuristics: Sequence[Any] | None = None) -> None:
        """The list of plans comes from the entry, or from the copy, which is planned in the place of the graph."""
        if not graph._is_validated:
            graph.validate()
        course = graph.__dict__.get("_plancache")
        if isinstance(course, Course) and not graph._planning_done:
            modes = modes_of(heuristics)
            if modes is None or course.replay != graph.is_cuda_graph_replay_expected:
                self.leave(graph, "heuristic modes, or a flag that was set late, which are not in the key")
            elif graph._backend_entries is not None:
                self.leave(graph, "its backend plans were asked for before it was planned")
            elif (change := self._change(graph, course)) is not None:
                self.leave(graph, change)
            elif self._planned(graph, course, modes):
                graph._backend_heuristics = heuristics
                return
        original(graph, heuristics)

    def _planned(self, graph: Any, course: Course, modes: tuple[str, ...]) -> bool:
        if course.modes != modes or course.served is None:
            course.modes, course.served = modes, self._known(course.request, modes)
        if course.served is not None:
            plans: Sequence[Candidate] = listed(course.served.entry)
            layouts: Any = course.served.entry.layouts
        else:
            try:
                planned = course.planned = self._plan_copy(graph, course, unfiltered(modes))
            except Exception:  # the frontend's own road says it in its own words
                self.leave(graph, "its copy cannot be planned")
                return False
            plans, layouts = planned.plans, planned.layouts
            if not is_of_the_backend(*plans):
                self.leave(graph, "engines of the frontend's own may run it")
                return False
        remember_modes(modes)
        course.plans = plans
        if not isinstance(graph._lowered_graph, StandIn):
            graph._lowered_graph = StandIn(graph, course)
        graph._freeze()
        if not graph._cpp_bog_done:  # else they are resolved
            resolve(course, layouts)
        graph._plans = [config_of(plan, index) for index, plan in enumerate(plans)]
        graph._backend_entries = list(graph._plans)
        graph._cpp_bog_done = graph._cpp_plans_created = graph._planning_done = True
        graph._plan_index = 0
        return True

    def _plan_copy(self, graph: Any, course: Course, constraints: Constraints) -> Planned:
        backend = course.request.target.backend
        return backend.planned(course.request.signature, constraints, constraints.modes, graph._handle)

    def is_supported(self, graph: Any, course: Course) -> bool:
        """Whether some plan passes the filters that are set: one is stored, or cuDNN says so of the copy."""
        constraints = constraints_of(graph, course.modes)
        if constraints is None:
            return False
        if constraints is unfiltered(course.modes) and course.served is not None:
            return True
        if self.cache.look_up(course.request, constraints) is not None:
            return True
        try:
            course.planned = course.planned or self._plan_copy(graph, course, constraints)
            tell_filters(graph, course, course.planned.native)
            course.planned.native.check_support()
        except Exception:  # the frontend's own road says it in its own words
            return False
        return True

    def build_plans(self, original: Callable[..., Any], graph: Any, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        """The plan is loaded, or built from the copy and kept."""
        if not graph._planning_done:
            graph.create_execution_plans()
        course = graph.__dict__.get("_plancache")
        if isinstance(course, Course) and isinstance(graph._lowered_graph, StandIn) and not graph._plan_pinned:
            policy = args[0] if args else kwargs.get("policy")
            constraints = constraints_of(graph, course.modes)
            if policy not in (None, sys.modules["cudnn"].build_plan_policy.HEURISTICS_CHOICE):
                self.leave(graph, "all plans are built, to pick one by its index")
            elif constraints is None:
                self.leave(graph, "a plan filter that is not known")
            elif self._built(graph, course, constraints):
                return
        elif isinstance(course, Course) and not isinstance(graph._lowered_graph, StandIn):
            self.leave(graph, "a plan is added")
        original(graph, *args, ctx=ctx, **kwargs)

    def _built(self, graph: Any, course: Course, constraints: Constraints) -> bool:
        try:
            entry, native = self._ready(graph, course, constraints)
        except (CaptureError, ClosedError, PlanNotFoundError, StoreError):  # StoreError: a strict cache's
            raise
        except Uncacheable as error:
            self.leave(graph, error.reason)
            return False
        except Exception as error:  # the frontend's own road says it in its own words
            self.leave(graph, f"it cannot be built: {_said(error)}")
            return False
        names = [plan.name for plan in course.plans]
        if entry.recipe.name not in names:  # a tuned one, from other modes
            graph._plans.append(config_of(entry.recipe, len(names)))
            course.plans, names = (*course.plans, entry.recipe), [*names, entry.recipe.name]
        course.place, course.constraints = names.index(entry.recipe.name), constraints
        course.scratch = course.planned = None
        graph._lowered_graph.seat(entry, native, course.place)
        graph._plan_index, graph._is_built = course.place, True
        graph._prepare_ordered_binding_schema()
        return True

    def _ready(self, graph: Any, course: Course, constraints: Constraints) -> tuple[Entry, Any]:
        cache, request = self.cache, course.request
        handle = _backend_handle(graph)
        served = course.served
        if constraints is not unfiltered(course.modes):
            served = cache.look_up(request, constraints)
        if served is not None:
            native = cache.load_native(served, request.target, handle)
            if native is not None:
                return served.entry, native
        scratch = course.scratch or as_described(graph, course)
        planned = course.planned or self._plan_copy(graph, course, constraints)
        return cache.build_native(request, scratch, constraints, planned, handle)

    def _build_plan_at(self, original: Callable[..., Any], graph: Any, index: int, *args: Any, **kwargs: Any) -> None:
        """A plan that is picked by its index is served where it is the one that is stored, else built as ever."""
        course = graph.__dict__.get("_plancache")
        if isinstance(course, Course) and isinstance(graph._lowered_graph, StandIn):
            constraints = constraints_of(graph, course.modes)
            if index == course.place and constraints == course.constraints:
                return
            served = course.served
            picked = served is not None and course.plans[index].name == served.entry.recipe.name
            if picked and constraints is unfiltered(course.modes) and self._built(graph, course, constraints):
                return
            if isinstance(graph._lowered_graph, StandIn):
                self.leave(graph, "a plan is picked by its index")
        left = graph.__dict__.get("_plancache")
        if isinstance(left, OwnRoad) and left.reason and self.cache.settings.build == "forbid":
            raise UncacheableGraphError(left.reason, "allow builds for this program (build='allow', PLANCACHE_BUILD=allow)")
        original(graph, index, *args, **kwargs)

    def _lower_backend_plan(self, original: Callable[..., Any], graph: Any) -> None:
        """Before it answers for a plan the frontend sees to it that it is lowered, and imports the engines of its family."""
        if not (isinstance(graph._lowered_graph, StandIn) and graph._planning_done):
            original(graph)

    # ---- the frontend's own road

    def leave(self, graph: Any, reason: str) -> None:
        """Sends a graph down the frontend's own road, from the step that it has reached."""
        course = graph._plancache
        graph._plancache = self._left(reason)
        for tensor, dim, stride in course.provisional:
            tensor.__dict__.update(dim=dim, stride=stride)
        operations_built, planned = graph._cpp_bog_done, graph._planning_done and bool(course.plans)
        if not isinstance(graph._lowered_graph, StandIn):
            return
        graph._reset_lowered_state()
        graph._backend_entries = None  # an empty list means "asked, none"
        forget_bindings(graph)
        given = {name: graph.__dict__[name] for name in ("_cpp_graph_kwargs", "_barred_names", "_workspace_limit", "_note_filters")}
        graph._cpp_graph_kwargs = course.options  # what was changed later does not count
        try:
            if planned:  # a plan that was built before a filter barred it stays built
                graph._barred_names, graph._workspace_limit, graph._note_filters = set(), None, []
                graph._lower_backend_graph()
                graph._create_backend_plans()
                place_anew(graph)
                if course.place >= 0:
                    graph._build_plan_at(course.place)
            else:
                graph._lowered_graph = graph._lower_to_cpp()
                graph._lowered_graph.validate()
                if operations_built:
                    graph.build_operation_graph()
        finally:
            graph.__dict__.update(given)
        tell_filters(graph, course, graph._lowered_graph)

    def _left(self, reason: str) -> OwnRoad:
        self.cache._report.fell_through(reason)
        return OwnRoad(self, reason)


def _said(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _backend_handle(graph: Any) -> int | None:
    """What the frontend would lower the graph with; None without a GPU."""
    found: int | None = graph._backend_handle_for_lowering(graph._cpp_graph_kwargs)
    return found


# ---- on and off -----------------------------------------------------------------------------------------------------

_active: list[Interceptor] = []


def install(cache: PlanCache | None = None) -> None:
    """Sends every `cudnn.pygraph` of this process through a cache, by default one in the user's cache directory.

    Graphs that are already planned stay as they are. Install another cache, and graphs that are planned from then on use
    that one; `uninstall` goes back to the one before.
    """
    _install(cache)


def _install(cache: PlanCache | None) -> Interceptor:
    interceptor = Interceptor(_default_cache if cache is None else lambda: cache)
    _active.append(interceptor)
    when_imported(_FRONTEND, _wrap)
    return interceptor


def uninstall() -> None:
    """Undoes the last `install`: graphs that are planned from now on go the frontend's own road, or to the cache before."""
    if not _active:
        raise SettingsError("plancache is not installed in this process; call plancache.install() first")
    _active.pop()


@contextmanager
def installed(cache: PlanCache | None = None) -> Iterator[None]:
    """`install` for the time of a block."""
    interceptor = _install(cache)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block, or another thread, uninstalled it
            _active.remove(interceptor)


def _default_cache() -> PlanCache:
    from plancache.cache import PlanCache

    return PlanCache()


def _wrap(frontend: Any) -> None:
    """Wraps the methods of `cudnn.pygraph`, once: names of the class that were imported before are the same class."""
    for name in _WRAPPED:
        original = frontend.pygraph.__dict__[name]
        if not hasattr(original, "_plancache"):
            setattr(frontend.pygraph, name, _wrapper(name, original))


def _wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def wrapped(graph: Any, *args: Any, **kwargs: Any) -> Any:
        course = graph.__dict__.get("_plancache")
        interceptor = course.interceptor if isinstance(course, Course | OwnRoad) else _active[-1] if _active and course is None else None
        return original(graph, *args, **kwargs) if interceptor is None else getattr(interceptor, name)(original, graph, *args, **kwargs)

    wrapped._plancache = True  # type: ignore[attr-defined]  # a mark: it is wrapped
    return wrapped
