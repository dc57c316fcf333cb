"""Signature -> description: what a stored signature says, for copies, for other processes and for people.

Apart from `signature`, since a hit never decodes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plancache.encoding import Reader, UnknownTypeError, encode
from plancache.signature import CONTEXT_FIELDS, OPTION_FIELDS, TENSOR_FIELDS, VERSION


@dataclass(frozen=True)
class Description:
    """A decoded signature. Tensors are named by canonical uid, from 1; enums are `Enum` values."""

    context: dict[str, Any]
    options: dict[str, Any]
    tensors: tuple[dict[str, Any], ...]
    nodes: tuple[dict[str, Any], ...]

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations in order, in the frontend's terms: `("matmul", "bias", "gelu")`."""
        return tuple(
            str(node["params"].get("mode", "")) if node["node_type"] == "POINTWISE" else node["node_type"].lower() for node in self.nodes
        )

    @property
    def summary(self) -> str:
        """One line for people: operations, then type and dims of what goes in."""
        first = self.nodes[0]["inputs"]
        shapes = (self.tensors[uid - 1] for uid in first.values())
        text = ", ".join("x".join(map(str, t["dim"])) for t in shapes if not t["is_pass_by_value"])
        kinds = (t["data_type"] for t in self.tensors if not t["is_virtual"])
        types = {str(getattr(kind, "member", kind)) for kind in kinds if kind is not None}
        return f"{'+'.join(self.operations)} [{text}] {'/'.join(sorted(types)).lower()}"


_EXTENT_PARAMETERS = ("out_dims", "max_total_seq_len_q", "max_total_seq_len_kv", "paged_attention_max_seq_len_kv")


def family(description: Description) -> bytes:
    """The signature without extents, as bytes to be hashed: operations, parameters and types as they are; of each tensor its
    rank, the order of its strides, which extents are 1, and by which power of two up to 16 the others can be divided.
    Parameters that are extents themselves count by the same classes."""
    tensors = []
    for tensor in description.tensors:
        shape = {name: value for name, value in tensor.items() if name not in ("dim", "stride")}
        tensors.append([shape, _extent_classes(tensor["dim"]), _stride_order(tensor["stride"])])
    nodes = [{**node, "params": _without_extents(node["params"])} for node in description.nodes]
    return repr([description.context, description.options, tensors, nodes]).encode()


def _without_extents(params: dict[str, Any]) -> dict[str, Any]:
    return {name: _extent_classes(value) if name in _EXTENT_PARAMETERS else value for name, value in params.items()}


def _extent_classes(value: Any) -> Any:
    """Of an extent 0 where it is one, else the largest power of two up to 16 that divides it; of several each."""
    if isinstance(value, list | tuple):
        return [_extent_classes(extent) for extent in value]
    if type(value) is not int:
        return value
    return 0 if value == 1 else min(16, value & -value)


def _stride_order(stride: list[int]) -> list[int]:
    """Axes from the outermost to the innermost, complemented where the stride is zero."""
    ordered = sorted(range(len(stride)), key=lambda axis: (-stride[axis], axis))
    return [axis if stride[axis] else ~axis for axis in ordered]


def decode(signature: bytes) -> Description:
    """The description that a signature stands for. Raises `ValueError` for bytes that are not one."""
    reader = Reader(signature)
    version, options, context, tensors, nodes = (reader.value() for _ in range(5))
    if version != VERSION or reader.at != len(signature):
        raise ValueError(f"not a signature of version {VERSION}")
    names = ("node_type", "compute_data_type", "params", "inputs", "outputs")
    try:
        return Description(
            context=dict(zip(CONTEXT_FIELDS, context, strict=True)),
            options=dict(zip(OPTION_FIELDS, options, strict=True)),
            tensors=tuple(dict(zip(TENSOR_FIELDS, record, strict=True)) for record in tensors),
            nodes=tuple(dict(zip(names, record, strict=True)) for record in nodes),
        )
    except TypeError as error:
        raise ValueError(f"malformed signature: {error}") from None


def signature_of(description: Description) -> bytes:
    """The signature that a description was decoded from, byte by byte. Raises `ValueError` for values that none holds."""
    context, options = list(description.context.values()), list(description.options.values())
    tensors = [list(tensor.values()) for tensor in description.tensors]
    nodes = [list(node.values()) for node in description.nodes]
    try:
        return b"".join(map(encode, (VERSION, options, context, tensors, nodes)))
    except UnknownTypeError as error:
        raise ValueError(str(error)) from None
