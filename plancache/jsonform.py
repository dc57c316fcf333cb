"""A description as JSON and back, without loss: what it was decoded from has the same bytes again.

For people as much as for programs: data types by their bare names, enums by kind and name, and what most tensors have
left out. A number is an integer or a float as JSON writes it (a float with all its bits), and what JSON has no form for is
a mapping with one name, such as {"tuple": [1, 2]}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from plancache.description import Description
from plancache.encoding import Enum, encode
from plancache.signature import CONTEXT_FIELDS, OPTION_FIELDS, TENSOR_FIELDS

PARTS = ("context", "options", "tensors", "nodes")

_NODE_FIELDS = ("node_type", "compute_data_type", "params", "inputs", "outputs")
_DATA_TYPES = frozenset((*CONTEXT_FIELDS, "data_type", "compute_data_type"))
_EXTENTS = ("dim", "stride")
_MAPPINGS = ("params", "inputs", "outputs")

# What is left out where it is so.
_OPTION_DEFAULTS = {**dict.fromkeys(OPTION_FIELDS), "is_cuda_graph_replay_expected": False}
_TENSOR_DEFAULTS = {
    **dict.fromkeys(("pass_by_value", "scalar_type", "reordering_type", "ragged_offset")),
    **dict.fromkeys(("dim_assigned", "stride_assigned"), True),
    **dict.fromkeys(("is_virtual", "is_pass_by_value"), False),
    **dict.fromkeys(("ragged_offset_multiplier", "alignment_value"), 1),
}


# ---- writing


def written(description: Description) -> dict[str, Any]:
    """The parts of a description in JSON's types, tensors with their uids; no options where none are set."""
    parts: dict[str, Any] = {"context": _write_record(description.context, {})}
    options = _write_record(description.options, _OPTION_DEFAULTS)
    if options:
        parts["options"] = options
    parts["tensors"] = [{"uid": uid, **_write_record(tensor, _TENSOR_DEFAULTS)} for uid, tensor in enumerate(description.tensors, 1)]
    parts["nodes"] = [_write_record(node, {}) for node in description.nodes]
    return parts


def _write_record(record: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in record.items():
        if name not in defaults or encode(value) != encode(defaults[name]):  # 1, 1.0 and True differ
            kept[name] = _write_field(name, value)
    return kept


def _write_field(name: str, value: Any) -> Any:
    if name in _EXTENTS:
        return list(value)
    if name in _MAPPINGS:
        return {port: write(part) for port, part in value.items()}
    if name in _DATA_TYPES:
        if type(value) is Enum and value.kind == "data_type":
            return value.member
        return {"text": value} if type(value) is str else write(value)
    return write(value)


def write(value: Any) -> Any:
    """A decoded value in JSON's types."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": repr(value)}
    if kind is Enum:
        return {"enum": ".".join(value)}
    if kind is tuple:
        return {"tuple": [write(part) for part in value]}
    if kind is list:
        return [write(part) for part in value]
    if kind is dict:
        return {"mapping": {name: write(part) for name, part in value.items()}}
    if kind is slice:
        return {"slice": [write(part) for part in (value.start, value.stop, value.step)]}
    return value


# ---- reading


def description_of(parts: Mapping[str, Any]) -> Description:
    """The description that was written. Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` for what is none."""
    return Description(
        context=_read_record(parts["context"], CONTEXT_FIELDS, {}),
        options=_read_record(parts.get("options", {}), OPTION_FIELDS, _OPTION_DEFAULTS),
        tensors=tuple(_read_tensor(tensor, number) for number, tensor in enumerate(parts["tensors"], 1)),
        nodes=tuple(_read_record(node, _NODE_FIELDS, {}) for node in parts["nodes"]),
    )


def refuse_unknown(record: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises `ValueError` for a field that is not known."""
    for name in record:
        if name not in known:
            raise ValueError(f"it has a field {name!r}, which this version does not know")


def _read_tensor(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    if record["uid"] != number:
        raise ValueError(f"its tensor {number} has the uid {record['uid']!r}")
    return _read_record({name: value for name, value in record.items() if name != "uid"}, TENSOR_FIELDS, _TENSOR_DEFAULTS)


def _read_record(record: Mapping[str, Any], names: Collection[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unknown(record, names)
    found = {name: _READERS.get(name, read)(value) for name, value in record.items()}
    return {name: found[name] if name in found else defaults[name] for name in names}  # in the order of signatures


def _read_data_type(value: Any) -> Any:
    return Enum("data_type", value) if type(value) is str else read(value)


def _read_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read(part) for name, part in value.items()}


def read(value: Any) -> Any:
    """The decoded value that was written."""
    kind = type(value)
    if kind is list:
        return [read(part) for part in value]
    if kind is not dict:
        return value
    ((form, inner),) = value.items()
    return _FORMS[form](inner)


_FORMS: dict[str, Callable[[Any], Any]] = {
    "enum": lambda text: Enum(*text.split(".", 1)),
    "float": float,
    "mapping": _read_mapping,
    "slice": lambda inner: slice(*map(read, inner)),
    "text": str,
    "tuple": lambda inner: tuple(map(read, inner)),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_DATA_TYPES, _read_data_type),
    **dict.fromkeys(_EXTENTS, tuple),
    **dict.fromkeys(_MAPPINGS, _read_mapping),
}
