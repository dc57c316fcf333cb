"""Graph -> signature: the canonical, complete description of a described graph, and what is uncacheable and why.

Names, uids and the order in which tensors were made do not count; everything that a plan bakes in does. What
this module does not know, it refuses. It reads the frontend's objects by duck typing and imports no cudnn.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol

from plancache.encoding import UnknownTypeError, encode, encode_extents, encode_mapping, encode_text
from plancache.errors import GraphStateError

VERSION = 1
"""Goes into every signature: another encoding is another key."""

TENSOR_FIELDS = (
    "data_type",
    "dim",
    "stride",
    "dim_assigned",
    "stride_assigned",
    "is_virtual",
    "is_pass_by_value",
    "pass_by_value",
    "scalar_type",
    "reordering_type",
    "ragged_offset",
    "ragged_offset_multiplier",
    "alignment_value",
)
CONTEXT_FIELDS = ("io_data_type", "intermediate_data_type", "compute_data_type")
OPTION_FIELDS = (
    "sm_count",
    "sm_version",
    "is_dynamic_shape_enabled",
    "is_override_shape_enabled",
    "cuda_graph_retention",
    "is_cuda_graph_replay_expected",
)

_LABELS = {"name", "uid", "uid_assigned", "owner"}
_KNOWN_TENSOR = frozenset(TENSOR_FIELDS) | _LABELS
_KNOWN_NODE = frozenset(("name", "node_type", "compute_data_type", "inputs", "outputs", "params"))
_KNOWN_OPTIONS = frozenset(OPTION_FIELDS) | {"name", "kernel_cache", "device_property"}
_KNOWN_PARAMETERS = _KNOWN_OPTIONS | frozenset(CONTEXT_FIELDS) | {"self", "handle"}
# What a 1.32 pygraph holds besides its description: caches and the state of planning.
_KNOWN_STATE = frozenset(
    """
    _context _handle _cpp_graph_kwargs is_cuda_graph_replay_expected _nodes _tensors _tensor_by_uid _next_uid _node_count
    _lowered_graph _is_validated _is_built _data_bindings _plans _planning_done _frozen _plan_index _backend_heuristics
    _cpp_plans_created _compiled_plans _plan_kernel_entries _cpp_bog_done _cpp_tensors _reserved_uids _ambiguous_names
    _candidates _facts _backend_declined _backend_entries _backend_mode_spans _barred_names _workspace_limit _note_filters
    _plan_pinned _sorted_uids _declared_layout_native _slot_of_uid _ordered_binding_schema _ordered_binding_uids
    _selected_engine_cache _plancache
    """.split()
)
OWN = object()
"""What `_plancache` holds on graphs that plancache made: they are not intercepted."""


class Uncacheable(Exception):
    """The graph cannot be copied exactly; `args[0]` is the reason."""

    @property
    def reason(self) -> str:
        return str(self.args[0])


class Reading(NamedTuple):
    """What `read` found: the signature; and the caller's tensors in canonical order (canonical uid = index + 1)."""

    signature: bytes
    tensors: Sequence[Any]
    graph: Any


# ---- the caller's graph, left as it is ------------------------------------------------------------------------------


class Target(Protocol):
    """The device that a graph is read for: what names the same device in the graph itself says nothing new."""

    @property
    def sm_version(self) -> int: ...

    def is_described_by(self, device_property: Any) -> bool: ...


def read(
    graph: Any, target: Target, seen: MutableMapping[Any, tuple[bytes, bytes] | None] | None = None, *, filtered: bool = False
) -> Reading:
    """Signature of a described graph that nobody planned yet; a graph that names the target has the key of one that does not.

    `filtered`: whether it may have plan filters set, which are no part of a signature.

    `seen`: remembers, by graph, what inference made of its description, so that reading a graph again costs a third.
    Raises `GraphStateError` for an empty or planned graph, `Uncacheable` for what cannot be copied exactly, and the
    frontend's own `ValueError` for dims that do not fit.
    """
    _check_state(graph)
    _check_known(graph, target)
    if not filtered and (graph._barred_names or graph._note_filters or graph._workspace_limit is not None):
        raise Uncacheable("plan filters are set on the graph; pass them as plancache.Constraints")
    options = _options(graph, target.sm_version)
    try:
        if seen is None or graph not in seen:
            if seen is not None:
                seen[graph] = None
            signature = _inferred_signature(graph, options)
            tensors = canonical_order(graph)
        else:
            tensors, known = canonical_order(graph), seen[graph]
            described = _encode(graph, options, tensors)
            signature = known[1] if known and known[0] == described else _inferred_signature(graph, options)
            seen[graph] = described, signature
    except UnknownTypeError as error:
        raise Uncacheable(str(error)) from None
    except (RecursionError, UnicodeEncodeError) as error:  # a list that holds itself, half a character
        raise Uncacheable(f"a parameter cannot be written down: {error}") from None
    return Reading(signature, tensors, graph)


def _inferred_signature(graph: Any, options: list[Any]) -> bytes:
    scratch = inferred(graph)
    return _encode(scratch, options, canonical_order(scratch))


def inferred(graph: Any) -> Any:
    """A scratch copy of a graph with types and dims inferred."""
    scratch, tensors = clone(graph)
    scratch._lowered_graph = _NOT_LOWERED  # validate() lowers, and imports engines, only where this attribute is None
    try:
        type(scratch).validate(scratch)
    finally:
        scratch._lowered_graph = None
    for tensor in tensors:
        if tensor.dim and not tensor.stride:  # the frontend does this only for tensors whose names are unique
            tensor.stride = row_major(tensor.dim)
    node = scratch._unlowerable_node()
    if node is not None:
        raise Uncacheable(f"{node.node_type.name.lower()} runs on a Python engine of the frontend only")
    return scratch


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides in elements of a dense tensor, last extent fastest."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def canonical_order(graph: Any) -> list[Any]:
    """The tensors of a graph by canonical uid, from 1: a walk over the ports, each tensor's ragged offset after it."""
    tensors: dict[int, Any] = {}

    def visit(tensor: Any) -> None:
        if id(tensor) not in tensors:
            tensors[id(tensor)] = tensor
            if tensor.ragged_offset is not None:
                visit(tensor.ragged_offset)

    for node in graph._nodes:
        for ports in (node.inputs, node.outputs):
            for port in sorted(ports):
                visit(ports[port])
    return list(tensors.values())


_NOT_LOWERED = object()


def _encode(graph: Any, options: list[Any], tensors: list[Any]) -> bytes:
    """The bytes of a graph as it stands, its tensors in canonical order: a signature, where inference has been."""
    frontend = _frontend()
    if not {type(node) for node in graph._nodes} <= {frontend.Node} or not {type(tensor) for tensor in tensors} <= {frontend.Tensor}:
        raise Uncacheable("a node or tensor is of another class than the frontend's")
    numbers = {id(tensor): number for number, tensor in enumerate(tensors, 1)}
    context = graph._context
    return b"i%d:%bl3:%b%b%bl%d:%bl%d:%b" % (
        VERSION,
        encode(options),
        _data_type(context.io_data_type),
        _data_type(context.intermediate_data_type),
        _data_type(context.compute_data_type),
        len(tensors),
        b"".join([_tensor_bytes(tensor, numbers) for tensor in tensors]),
        len(graph._nodes),
        b"".join([_node_bytes(node, numbers) for node in graph._nodes]),
    )


def clone(graph: Any) -> tuple[Any, Iterable[Any]]:
    """A scratch graph with nodes and tensors of its own, as if just described; and those tensors."""
    scratch = object.__new__(type(graph))
    scratch.__dict__.update(graph.__dict__)
    clones: dict[int, Any] = {}

    def copied(tensor: Any) -> Any:
        mine = clones.get(id(tensor))
        if mine is None:
            mine = clones[id(tensor)] = object.__new__(type(tensor))
            attributes = mine.__dict__
            attributes.update(tensor.__dict__)
            attributes["owner"] = None
            if tensor.ragged_offset is not None:
                attributes["ragged_offset"] = copied(tensor.ragged_offset)
        return mine

    nodes = []
    for node in graph._nodes:
        mine = object.__new__(type(node))
        mine.__dict__.update(node.__dict__)
        mine.inputs = {port: tensor and copied(tensor) for port, tensor in node.inputs.items()}
        mine.outputs = {port: tensor and copied(tensor) for port, tensor in node.outputs.items()}
        mine.params = dict(node.params)
        nodes.append(mine)
    scratch._nodes = nodes
    scratch._tensors = {name: copied(tensor) for name, tensor in graph._tensors.items()}
    scratch._cpp_graph_kwargs = dict(graph._cpp_graph_kwargs)
    scratch._cpp_tensors, scratch._facts = {}, {}
    scratch._lowered_graph = scratch._candidates = scratch._backend_entries = None
    scratch._frozen = scratch._is_validated = scratch._cpp_bog_done = False
    scratch._plancache = OWN
    return scratch, clones.values()


def _check_state(graph: Any) -> None:
    if not hasattr(graph, "_nodes") or not hasattr(graph, "_cpp_graph_kwargs"):
        raise GraphStateError(
            f"expected a cudnn.pygraph, got {type(graph).__module__}.{type(graph).__qualname__}; "
            + ("pass its .graph" if hasattr(graph, "graph") else "describe the computation with cudnn.pygraph(...) and pass that")
        )
    if not graph._nodes:
        raise GraphStateError("the graph is empty; add at least one operation before planning it")
    if graph._planning_done or graph._is_built:
        raise GraphStateError(
            "the graph is already planned or built; hand plancache a graph that is only described "
            "(no create_execution_plans(), build() or execute() on it)"
        )


def _check_known(graph: Any, target: Target) -> None:
    for name in _unknown_parameters(type(graph).__init__):
        raise Uncacheable(f"this frontend's pygraph takes a parameter {name!r} that plancache does not know")
    if type(graph) is not _frontend().pygraph:  # its methods could do anything
        raise Uncacheable(f"the graph is of another class than cudnn.pygraph: {type(graph).__module__}.{type(graph).__qualname__}")
    for name in graph.__dict__.keys() - _KNOWN_STATE:
        if graph.__dict__[name]:
            raise Uncacheable(f"the graph has an attribute {name!r} that plancache does not know")
    if (surplus := _surplus(graph._context, CONTEXT_FIELDS)) is not None:
        raise Uncacheable(f"the graph's context has an attribute {surplus!r} that plancache does not know")
    if graph._cpp_bog_done:
        raise Uncacheable("build_operation_graph() already changed its tensors")
    for name in graph._cpp_graph_kwargs.keys() - _KNOWN_OPTIONS:
        raise Uncacheable(f"the graph has an option {name!r} that plancache does not know")
    if "kernel_cache" in graph._cpp_graph_kwargs:
        raise Uncacheable("the graph brings its own kernel cache")
    properties = graph._cpp_graph_kwargs.get("device_property")
    if properties is not None and not target.is_described_by(properties):
        raise Uncacheable("the graph brings the properties of another device than the cache plans for")


def _surplus(thing: Any, known: Container[str]) -> str | None:
    """An attribute that is not known and not at its default, which a dataclass keeps in its class."""
    for name, value in thing.__dict__.items():
        if name not in known and value is not getattr(type(thing), name, None):
            return str(name)
    return None


def _frontend() -> Any:
    return sys.modules["cudnn._pygraph"]


@lru_cache(maxsize=8)
def _unknown_parameters(constructor: Any) -> tuple[str, ...]:
    code = constructor.__code__
    return tuple(name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name not in _KNOWN_PARAMETERS)


def _options(graph: Any, sm_version: int) -> list[Any]:
    given = graph._cpp_graph_kwargs
    values = [given.get(name) for name in OPTION_FIELDS[:-1]]
    if values[1] == sm_version:
        values[1] = None
    return [*values, graph.is_cuda_graph_replay_expected]


def _node_bytes(node: Any, numbers: Mapping[int, int]) -> bytes:
    if not _KNOWN_NODE.issuperset(node.__dict__):
        raise Uncacheable(f"a node has an attribute {min(node.__dict__.keys() - _KNOWN_NODE)!r} that plancache does not know")
    kind, inputs = node.node_type.name, node.inputs
    ordered = sorted(inputs)
    if kind == "POINTWISE" and list(inputs) != ordered:
        raise Uncacheable("a pointwise node lists its inputs out of order")
    for name, value in node.params.items():
        if callable(value):
            raise Uncacheable(f"{kind.lower()} has a callable, {name}")
    parts = [b"l5:", encode_text(kind), _data_type(node.compute_data_type), encode_mapping(node.params)]
    for ports, names in ((inputs, ordered), (node.outputs, sorted(node.outputs))):
        parts.append(b"d%d:" % len(names))
        parts += [_port(name, numbers[id(ports[name])]) for name in names]
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _port(name: str, number: int) -> bytes:
    return encode_text(name) + b"i%d:" % number


# ---- tensors ------------------------------------------------------------------------------------------------------

_PLAIN_TENSOR = b"n:n:n:n:i1:i1:"  # no value, scalar type, reordering or ragged offset; multiplier and alignment 1


def _tensor_bytes(tensor: Any, numbers: Mapping[int, int]) -> bytes:
    field = tensor.__dict__
    if len(field) != len(_KNOWN_TENSOR) and (surplus := _surplus(tensor, _KNOWN_TENSOR)) is not None:
        raise Uncacheable(f"a tensor has an attribute {surplus!r} that plancache does not know")
    ragged = field["ragged_offset"]
    value, scalar_type, reordering = field["pass_by_value"], field["scalar_type"], field["reordering_type"]
    multiplier, alignment = field["ragged_offset_multiplier"], field["alignment_value"]
    return b"l13:%b%b%b%b%b%b%b%b" % (
        _data_type(field["data_type"]),
        encode_extents(field["dim"]),
        encode_extents(field["stride"]),
        b"y:" if field["dim_assigned"] else b"o:",
        b"y:" if field["stride_assigned"] else b"o:",
        b"y:" if field["is_virtual"] else b"o:",
        b"y:" if field["is_pass_by_value"] else b"o:",
        _PLAIN_TENSOR
        if value is scalar_type is reordering is ragged is None and multiplier == 1 == alignment
        else _tail(value, scalar_type, reordering, ragged and numbers[id(ragged)], multiplier, alignment),
    )


def _tail(value: Any, scalar_type: Any, reordering: Any, *rest: Any) -> bytes:
    if reordering is not None and reordering.name == "NONE":
        reordering = None
    return b"".join(map(encode, (value, scalar_type, reordering, *rest)))


def _data_type(value: Any) -> bytes:
    """A data type, which may be given as torch's."""
    known = _DATA_TYPES.get(id(value))
    if known is None:
        if type(value).__module__ == "torch":
            kind = sys.modules["cudnn.datatypes"]._torch_to_cudnn_data_type(value)
            if kind is None:
                raise UnknownTypeError(f"a data type is {value}, which cuDNN does not have")
            known = value, encode(kind)
        else:
            known = value, encode(value)
        _DATA_TYPES[id(value)] = known
    return known[1]


# By identity, with the object beside it so that no id is used again: hashing an enum runs Python code.
_DATA_TYPES: dict[int, tuple[Any, bytes]] = {}
