"""How far a graph of an intercepted program has come, and what of it is in a key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from plancache.entry import Candidate
from plancache.key import MODES, Constraints
from plancache.signature import canonical_order, clone

if TYPE_CHECKING:
    from plancache.backend import Planned
    from plancache.entry import Entry, Layout
    from plancache.served import Request, Served

CHANGED = "it was changed after it was validated"

FIRST_TRIED = [("A",), ("A", "FALLBACK"), ("A", "B"), ("B",)]
"""Heuristic modes under which a graph may be known, before it says which it plans with; the last ones used come first."""


class Guide(Protocol):
    """What leads graphs along their courses: `intercept.Interceptor`."""

    def leave(self, graph: Any, reason: str) -> None: ...

    def is_supported(self, graph: Any, course: Course) -> bool: ...


class OwnRoad(NamedTuple):
    """What `_plancache` holds on a graph that goes the frontend's own road, and why; without a reason where the cache is off."""

    interceptor: Guide
    reason: str


class Course:
    """How far a graph of the program's has come. The graph holds it, so it holds the graph by a weak reference only."""

    def __init__(self, interceptor: Guide, request: Request, replay: bool) -> None:
        self.interceptor = interceptor
        self.request = request
        self.replay = replay
        self.frozen = False  # ever since it was read: nobody changed it
        self.untold: frozenset[str] = frozenset()  # engines barred before the frontend lowers: it bars them, cuDNN does not
        self.options: dict[str, Any] = {}  # of the graph, as it was read
        self.scratch: Any = None  # a clone as it was described, to build from
        self.provisional: list[tuple[Any, Any, Any]] = []  # tensors, with the dims and strides that lowering resolves
        self.modes: tuple[str, ...] = ()
        self.served: Served | None = None
        self.planned: Planned | None = None
        self.plans: Sequence[Candidate] = ()  # as the graph lists them; none before it is planned
        self.place = -1  # of the plan that was built, in that list
        self.constraints: Constraints | None = None  # that it was built under


def resolve(course: Course, layouts: Mapping[int, Layout]) -> None:
    """Writes the dims and strides that lowering resolves into the graph's tensors, where their caller gave none."""
    for uid, tensor in enumerate(course.request.tensors, 1):
        layout = layouts[uid]
        dim = layout.dim if layout.dim and not tensor.dim_assigned else None
        stride = layout.stride if layout.stride and not tensor.stride_assigned else None
        if (dim is not None and dim != tuple(tensor.dim)) or (stride is not None and stride != tuple(tensor.stride)):
            course.provisional.append((tensor, tensor.dim, tensor.stride))
            tensor.__dict__.update(dim=dim or tensor.dim, stride=stride or tensor.stride)


def as_described(graph: Any, course: Course) -> Any:
    """A clone of a graph with the dims and strides that it had before they were resolved."""
    scratch, _ = clone(graph)
    mine = dict(zip(map(id, course.request.tensors), canonical_order(scratch), strict=True))
    for tensor, dim, stride in course.provisional:
        mine[id(tensor)].__dict__.update(dim=dim, stride=stride)
    return scratch


def modes_of(heuristics: Sequence[Any] | None) -> tuple[str, ...] | None:
    """What a program plans with, by name; None where plans of it are not kept."""
    if not heuristics:
        return ("A", "FALLBACK")
    names = tuple(dict.fromkeys(mode.name for mode in heuristics))
    return names if set(names) <= set(MODES) else None


def remember_modes(modes: tuple[str, ...]) -> None:
    if FIRST_TRIED[0] != modes:
        FIRST_TRIED[:] = [modes, *(other for other in FIRST_TRIED if other != modes)]


@lru_cache(maxsize=16)
def unfiltered(modes: tuple[str, ...]) -> Constraints:
    return Constraints(modes=modes)


def constraints_of(graph: Any, modes: tuple[str, ...]) -> Constraints | None:
    """The filters that are set on a graph; None where one is not known."""
    if not graph._note_filters and not graph._barred_names and graph._workspace_limit is None:
        return unfiltered(modes)
    notes: dict[tuple[str, bool], list[str]] = {}
    for kind, note, keep in graph._note_filters:
        notes.setdefault((kind, keep), []).append(note.name)
    limit = graph._workspace_limit
    if limit is not None and not (type(limit) is int and limit >= 0):
        return None
    if not notes.keys() <= {(kind, keep) for kind in ("behavior", "numerical") for keep in (False, True)}:
        return None
    return Constraints(
        workspace_limit_bytes=limit,
        barred_engines=tuple(graph._barred_names),
        barred_numerical_notes=tuple(notes.get(("numerical", False), ())),
        required_numerical_notes=tuple(notes.get(("numerical", True), ())),
        barred_behavior_notes=tuple(notes.get(("behavior", False), ())),
        required_behavior_notes=tuple(notes.get(("behavior", True), ())),
        modes=modes,
    )


def validator_of(graph: Any) -> Callable[[Any], bool] | None:
    """What validates the graphs of a family in place of cuDNN, and says whether it could; the frontend lowers them when they are
    planned, and all others when they are validated."""
    from cudnn.engines import manifest

    family = manifest.family_for(graph)
    found: Callable[[Any], bool] | None = None
    if family is not None and family.offered_ids():
        found = manifest.resolve_validator(family)
    return found


def tell_filters(graph: Any, course: Course, lowered: Any) -> None:
    """Hands the filters that are set on a graph to a lowered form of it, as the frontend would have when they were set."""
    names = graph._barred_names - course.untold
    if names:
        lowered.deselect_engines(list(names))
    if graph._workspace_limit is not None:
        lowered.deselect_workspace_greater_than(graph._workspace_limit)
    for kind, note, keep in graph._note_filters:
        getattr(lowered, f"{'select' if keep else 'deselect'}_{'behavior' if kind == 'behavior' else 'numeric'}_notes")([note])


def listed(entry: Entry) -> tuple[Candidate, ...]:
    """The plan list that an entry stands for: as the heuristics ranked it, of a tuned one all that were tried; with its own plan."""
    ranked = sorted(entry.trials, key=lambda trial: trial.rank)
    plans = tuple(Candidate(*trial[:3]) for trial in ranked) or entry.candidates
    return plans if any(plan.name == entry.recipe.name for plan in plans) else (*plans, entry.recipe)


def is_of_the_backend(*plans: Candidate) -> bool:
    is_python_engine = sys.modules["cudnn._pygraph"].is_python_engine
    return all(plan.engine >= 0 and not is_python_engine(plan.engine) for plan in plans)


def config_of(plan: Candidate, index: int) -> Any:
    """A plan as the frontend's plan lists have it."""
    knobs = _typed_knobs(tuple(plan.knobs.items()))
    return sys.modules["cudnn.engines.base"].PlanConfig(plan.engine, knobs, cpp_index=index)


@lru_cache(maxsize=4096)
def _typed_knobs(knobs: tuple[tuple[str, int], ...]) -> dict[Any, int]:
    """By the frontend's enum. The frontend gives out copies of them."""
    members = sys.modules["cudnn"].knob_type.__members__
    return {members[name]: value for name, value in knobs}


def forget_bindings(graph: Any) -> None:
    """What depends on the order of operands is asked anew."""
    graph._sorted_uids = graph._declared_layout_native = graph._slot_of_uid = None
    graph._ordered_binding_schema = graph._ordered_binding_uids = None


def place_anew(graph: Any) -> None:
    """Finds the plans of a graph in the list that cuDNN made just now."""
    lowered = graph._lowered_graph
    places: dict[Any, int] = {}
    for index in range(lowered.get_execution_plan_count()):
        engine, knobs = lowered.get_engine_and_knobs_at_index(index)
        places.setdefault((engine, frozenset((knob.name, value) for knob, value in knobs.items())), index)
    config = sys.modules["cudnn.engines.base"].PlanConfig
    for at, plan in enumerate(graph._plans):
        known = places.get((plan.engine_id, frozenset((knob.name, value) for knob, value in plan.knobs.items())))
        graph._plans[at] = config(plan.engine_id, plan.knobs, cpp_index=known)  # None: the frontend adds it when it is needed
