"""Signature -> description: what a stored signature says, for copies, for other processes and for people.

Apart from `signature`, since a hit never decodes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plancache.encoding import Reader
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
        types = {t["data_type"].member for t in self.tensors if not t["is_virtual"] and t["data_type"] is not None}
        return f"{'+'.join(self.operations)} [{text}] {'/'.join(sorted(types)).lower()}"


def family(description: Description) -> bytes:
    """The signature without extents, as bytes to be hashed: operations, parameters and types as they are; of each tensor its
    rank, the order of its strides, which extents are 1, and by which power of two up to 16 the others can be divided."""
    tensors = []
    for tensor in description.tensors:
        shape = {name: value for name, value in tensor.items() if name not in ("dim", "stride")}
        tensors.append([shape, [_extent_class(extent) for extent in tensor["dim"]], _stride_order(tensor["stride"])])
    parts = [description.context, description.options, tensors, [{**node, "params": dict(node["params"])} for node in description.nodes]]
    return repr(parts).encode()


def _extent_class(extent: int) -> int:
    """0 for an extent of one, else the largest power of two up to 16 that divides it."""
    return 0 if extent == 1 else min(16, extent & -extent)


def _stride_order(stride: list[int]) -> list[int]:
    return sorted(range(len(stride)), key=lambda axis: (-stride[axis], axis))


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
