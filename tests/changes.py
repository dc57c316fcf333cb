"""Every single change of a described graph that a plan would notice, found by walking its objects.

Field lists are the frontend's own (`__dict__`, the constructor's signature), not plancache's: a field that a later
frontend adds is walked too.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum as PythonEnum
from typing import Any, NamedTuple

from hypothesis import strategies as st

LABELS = {"name", "uid", "uid_assigned", "owner"}
PLACES = {"self", "kwargs", "name", "handle", "kernel_cache", "device_property", "is_cuda_graph_replay_expected"}
CONTEXT = {"io_data_type", "intermediate_data_type", "compute_data_type"}
OPTIONS = {
    "sm_count": [100, 101],
    "sm_version": [80, 100],
    "is_dynamic_shape_enabled": [True],
    "is_override_shape_enabled": [True],
}
UNSET = object()


class Change(NamedTuple):
    """`field` is what was changed (`tensor.dim`), `at` where, `kept` and `values` from what to what."""

    field: str
    at: str
    kept: dict[str, Any]
    values: dict[str, Any]


def changes(graph: Any) -> Iterator[Change]:
    """Makes one change after the other in place, each undone before the next."""
    yield from _graph_changes(graph)
    for index, node in enumerate(graph._nodes):
        yield from _node_changes(graph, node, f"node {index}")
    uses = _uses(graph)
    for index, tensor in enumerate(tensors_of(graph)):
        yield from _tensor_changes(graph, tensor, uses, f"tensor {index}")


def tensors_of(graph: Any) -> list[Any]:
    """All tensors that a plan sees: those on ports, and the ragged offsets of these."""
    found: dict[int, Any] = {}
    pending = [tensor for node in graph._nodes for ports in (node.inputs, node.outputs) for tensor in ports.values()]
    while pending:
        tensor = pending.pop(0)
        found.setdefault(id(tensor), tensor)
        if tensor.ragged_offset is not None:
            pending.append(tensor.ragged_offset)
    return list(found.values())


def twin(tensor: Any) -> Any:
    """Another tensor with the same description."""
    other = object.__new__(type(tensor))
    other.__dict__.update(tensor.__dict__, owner=None)
    return other


def set_fields(holder: dict[str, Any], **values: Any) -> None:
    for name, value in values.items():
        if value is UNSET:
            holder.pop(name, None)
        else:
            holder[name] = value


def _vary(holder: dict[str, Any], field: str, at: str, variants: list[dict[str, Any]]) -> Iterator[Change]:
    for values in variants:
        kept = {name: holder.get(name, UNSET) for name in values}
        set_fields(holder, **values)
        yield Change(field, at, kept, values)
        set_fields(holder, **kept)


def snapshot(thing: Any, seen: dict[int, Any] | None = None) -> Any:
    """A picture of an object and all that hangs from it, by value and identity; comparing it holds the objects alive."""
    seen = {} if seen is None else seen
    if isinstance(thing, PythonEnum) or type(thing) in (int, float, str, bool, type(None)) or callable(thing):
        return type(thing), repr(thing)
    if id(thing) in seen:
        return id(thing)
    seen[id(thing)] = thing
    if isinstance(thing, Mapping):
        return id(thing), type(thing), [(key, snapshot(value, seen)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | set):
        return id(thing), type(thing), [snapshot(part, seen) for part in thing]
    return id(thing), type(thing), snapshot(thing.__dict__, seen) if hasattr(thing, "__dict__") else repr(thing)


# ---- graph ----------------------------------------------------------------------------------------------------------


def _graph_changes(graph: Any) -> Iterator[Change]:
    for name, value in list(vars(graph._context).items()):
        yield from _vary(vars(graph._context), f"graph.{name}", "graph", [{name: other} for other in data_types_but(value)])
    given = graph._cpp_graph_kwargs
    for name in inspect.signature(type(graph)).parameters.keys() - PLACES - CONTEXT:
        others = [value for value in option_values(name) if value != given.get(name)]
        if name in given:
            others.append(UNSET)
        yield from _vary(given, f"graph.{name}", "graph", [{name: other} for other in others])
    replay = "is_cuda_graph_replay_expected"
    yield from _vary(vars(graph), f"graph.{replay}", "graph", [{replay: not getattr(graph, replay)}])
    nodes = graph._nodes
    orders = [nodes[::-1], nodes[:-1], nodes[1:]] if len(nodes) > 1 else []
    yield from _vary(vars(graph), "graph.nodes", "graph", [{"_nodes": order} for order in [*orders, [*nodes, nodes[-1]]]])


def option_values(name: str) -> list[Any]:
    if name == "cuda_graph_retention":
        import cudnn

        return list(cudnn.cuda_graph_retention.__members__.values())
    return OPTIONS[name]


# ---- node -----------------------------------------------------------------------------------------------------------


def _node_changes(graph: Any, node: Any, at: str) -> Iterator[Change]:
    for field in vars(node).keys() - {"name", "params", "inputs", "outputs"}:
        value = getattr(node, field)
        others = data_types_but(value) if field == "compute_data_type" else others_than(value)
        yield from _vary(vars(node), f"node.{field}", at, [{field: other} for other in others])
    for name, value in list(node.params.items()):
        others = [] if callable(value) else others_than(value)
        yield from _vary(node.params, "node.params", at, [{name: other} for other in [*others, UNSET]])
    yield from _vary(node.params, "node.params", at, [{"surplus": 1}])
    for field in ("inputs", "outputs"):
        yield from _vary(vars(node), f"node.{field}", at, [{field: ports} for ports in _other_ports(graph, getattr(node, field))])


def _other_ports(graph: Any, ports: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A port less, one more, one renamed, two exchanged, and a twin in the place of a tensor that is used elsewhere too."""
    uses = _uses(graph)
    for name, tensor in ports.items():
        yield {port: t for port, t in ports.items() if port != name}
        yield {port if port != name else f"{name}_": t for port, t in ports.items()}
        if uses[id(tensor)] > 1:
            yield ports | {name: twin(tensor)}
        for other, theirs in ports.items():
            if name < other and _description(tensor) != _description(theirs):
                yield ports | {name: theirs, other: tensor}
    yield ports | {"Z": graph.tensor([1, 1, 1])}


def _uses(graph: Any) -> Counter[int]:
    on_ports = [id(tensor) for node in graph._nodes for ports in (node.inputs, node.outputs) for tensor in ports.values()]
    return Counter(on_ports + [id(tensor.ragged_offset) for tensor in tensors_of(graph)])


def _description(tensor: Any) -> dict[str, Any]:
    """What tells two tensors apart; where it is inferred later it says nothing."""
    described = {name: repr(value) for name, value in vars(tensor).items() if name not in LABELS | {"ragged_offset"}}
    return described | {"ragged_offset": tensor.ragged_offset and _description(tensor.ragged_offset)}


# ---- tensor ---------------------------------------------------------------------------------------------------------


def _tensor_changes(graph: Any, tensor: Any, uses: Mapping[int, int], at: str) -> Iterator[Change]:
    for field, value in list(vars(tensor).items()):
        if field in LABELS:
            continue
        if field in ("dim", "stride"):
            variants = [{field: other, f"{field}_assigned": True} for other in _other_extents(value)] if tensor.dim else []
        elif field == "ragged_offset":
            variants = [{field: other} for other in _other_offsets(graph, value, uses)]
        else:
            variants = [{field: other} for other in _other_field(field, value)]
        yield from _vary(vars(tensor), f"tensor.{field}", at, variants)


def _other_extents(value: Any) -> list[list[int]]:
    if not value:
        return [[7, 7, 7]]
    grown = [[*value[:i], extent * 2 + 1, *value[i + 1 :]] for i, extent in enumerate(value)]
    return [*grown, [*value, 1]]


def _other_offsets(graph: Any, value: Any, uses: Mapping[int, int]) -> list[Any]:
    import cudnn

    if value is None:
        return [graph.tensor([3, 1, 1, 1], data_type=cudnn.data_type.INT32)]
    return [None] + [twin(value)] * (uses[id(value)] > 1)


def _other_field(field: str, value: Any) -> list[Any]:
    import cudnn

    if field == "data_type":
        return data_types_but(value)
    if field == "pass_by_value":
        return [2.0] if value is None else [*others_than(value), None]
    if field in ("scalar_type", "reordering_type"):
        kind = cudnn._pybind_module.scalar_type if field == "scalar_type" else cudnn.tensor_reordering
        others = [member for name, member in kind.__members__.items() if name != "NONE" and member != value][:1]
        return others if value is None else [*others, None]
    return [not value] if type(value) is bool else others_than(value)[:1]  # a flag as 1 or True is one flag


# ---- values ---------------------------------------------------------------------------------------------------------


def data_types_but(value: Any) -> list[Any]:
    """A data type that no graph of the zoo infers from its context, and that is not this one."""
    import cudnn

    kinds = cudnn.data_type
    return [kinds.DOUBLE if value != kinds.DOUBLE else kinds.INT64]


def others_than(value: Any) -> list[Any]:
    """Values near this one that are not it, its puns in other types among them."""
    if value is None:
        return [True]
    if type(value) is bool:
        return [not value, int(value)]
    if type(value) is int:
        return [value + 1, float(value)] + [bool(value)] * (value in (0, 1))
    if type(value) is float:
        return _other_floats(value)
    if type(value) is str:
        return [f"{value}_", ""]
    if type(value) in (list, tuple):
        return _other_sequences(value)
    if type(value) is slice:
        parts = (value.start, value.stop, value.step)
        return [slice(*[(part or 0) + 1 if i == at else part for i, part in enumerate(parts)]) for at in range(3)]
    members = type(value) if isinstance(value, PythonEnum) else type(value).__members__.values()
    return [member for member in members if member != value][:3]


def _other_floats(value: float) -> list[Any]:
    if math.isnan(value):
        return [0.0, math.inf]
    near = [math.nextafter(value, -math.copysign(math.inf, value)), -value, math.nan]
    return near + ([int(value)] if value.is_integer() else []) + ([bool(value)] if value in (0.0, 1.0) else [])


def _other_sequences(value: Any) -> list[Any]:
    kind = type(value)
    others = [kind([*value[:i], other, *value[i + 1 :]]) for i, part in enumerate(value) for other in others_than(part)]
    return [*others, kind([*value, *value[-1:], 1]), kind(value[:-1]) if value else kind([1]), (tuple if kind is list else list)(value)]


scalars = st.one_of(st.integers(-2, 2), st.integers(), st.floats(), st.sampled_from([0.0, -0.0, 1.0]), st.booleans())


def nested() -> st.SearchStrategy[Any]:
    """Values that a parameter can have: scalars, texts, enums and slices, in lists, tuples and mappings."""
    return st.recursive(
        st.one_of(st.none(), scalars, st.text(max_size=3), st.builds(slice, optional, optional, optional), st.deferred(members)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
        ),
        max_leaves=6,
    )


optional = st.one_of(st.none(), st.integers(-2, 2))


def members() -> st.SearchStrategy[Any]:
    import cudnn

    kinds = (cudnn.data_type, cudnn.reduction_mode, cudnn.norm_forward_phase)
    return st.sampled_from([member for kind in kinds for member in list(kind.__members__.values())[:3]])


def typed(value: Any) -> Any:
    """A value with the type of each of its parts, and floats by their bits: equal exactly where nothing differs."""
    if type(value) is float:
        return float, value.hex()
    if type(value) in (list, tuple):
        return type(value), [typed(part) for part in value]
    if type(value) is dict:
        return dict, {name: typed(part) for name, part in value.items()}
    if type(value) is slice:
        return slice, [typed(part) for part in (value.start, value.stop, value.step)]
    if hasattr(type(value), "__members__"):
        return type(value).__name__, value.name
    return type(value), value
