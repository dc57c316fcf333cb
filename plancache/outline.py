"""What listings show of a signature, and filter by, read without decoding all of it.

Decoding takes 0.2 ms a signature, which is too much for thousands. Here a regular expression takes in the plain tensors at
once, and the operations, whose bytes are the same in graphs that differ in sizes only, are decoded once.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from plancache.encoding import Reader
from plancache.signature import TENSOR_FIELDS, VERSION

_RECORD = b"l%d:" % len(TENSOR_FIELDS)
_PLAIN = (  # a tensor without value, scalar type, reordering and ragged offset, in the order of TENSOR_FIELDS
    _RECORD.replace(b"%", b"%%") + rb"(?:n:|e\d+:data_type\.%b[A-Z0-9_]+))t\d+:%b(?:i-?\d+:)*)t\d+:(?:i-?\d+:)*"
    rb"[yo]:[yo]:%b[yo]):%b[yo]):n:n:n:n:i1:i1:"
)
_HEAD = re.compile(rb"i%d:.*?l(\d+):(?=%b)" % (VERSION, _RECORD), re.DOTALL)  # version, options, context; then so many tensors
_TENSOR = re.compile(_PLAIN % ((b"(",) * 4))
_TENSORS = re.compile(b"(?:%b)*" % (_PLAIN % ((b"(?:",) * 4)))

Tensor = tuple[bytes, bytes, bytes, bytes]
"""Data type (empty: none) and dims as they are encoded; then `y` or `o`: whether it is virtual, whether it is a value."""


class Outline(NamedTuple):
    """Operations and tensors of a graph. `inputs`: canonical uids that the first operation takes in."""

    tensors: list[Tensor]
    operations: tuple[str, ...]
    inputs: tuple[int, ...]

    @property
    def summary(self) -> str:
        """The same line as `Description.summary`."""
        taken = [self.tensors[uid - 1] for uid in self.inputs]
        shapes = ", ".join([_text(dim) for _, dim, _, is_value in taken if is_value == b"o"])
        return f"{'+'.join(self.operations)} [{shapes}] {'/'.join(sorted(self.data_types)).lower()}"

    @property
    def data_types(self) -> set[str]:
        """Those of what goes in and comes out, by the frontend's names."""
        return {data_type.decode() for data_type, _, is_virtual, _ in self.tensors if data_type and is_virtual == b"o"}

    @property
    def shapes(self) -> list[str]:
        """The dims of what goes in and comes out, such as `8x64x56x56`; values apart."""
        return [_text(dim) for _, dim, is_virtual, is_value in self.tensors if is_virtual == is_value == b"o"]


def outline(signature: bytes) -> Outline:
    """The outline of a signature. Raises one of `entry.MALFORMED` for bytes that are not one."""
    head = _HEAD.match(signature)
    if head is None:
        raise ValueError(f"not a signature of version {VERSION}")
    count, at = int(head[1]), head.end()
    tensors: list[Tensor] = []
    while True:
        plain = _TENSORS.match(signature, at)
        end = at if plain is None else plain.end()
        tensors += _TENSOR.findall(signature, at, end)
        if len(tensors) >= count:
            break
        tensor, at = _decoded(signature, end)
        tensors.append(tensor)
    if len(tensors) > count:
        raise ValueError("there are more tensors than it says")
    return Outline(tensors, *_operations(signature[end:]))


def _decoded(signature: bytes, at: int) -> tuple[Tensor, int]:
    """A tensor that is not plain."""
    reader = Reader(signature)
    reader.at = at
    record = dict(zip(TENSOR_FIELDS, reader.value(), strict=True))
    data_type, dim = record["data_type"], b"".join([b"i%d:" % extent for extent in record["dim"]])
    name = "" if data_type is None else str(getattr(data_type, "member", data_type))
    return (name.encode(), dim, *(b"y" if record[flag] else b"o" for flag in ("is_virtual", "is_pass_by_value"))), reader.at  # type: ignore[return-value]  # two flags


def _text(dim: bytes) -> str:
    return dim[1:-1].replace(b":i", b"x").decode()


@lru_cache(maxsize=256)
def _operations(nodes: bytes) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The operations, as `Description.operations` has them, and what the first one takes in."""
    reader = Reader(nodes)
    decoded: list[tuple[str, Any, dict[str, Any], dict[str, int], Any]] = reader.value()
    if reader.at != len(nodes):
        raise ValueError("there is more than a signature")
    operations = tuple(str(params.get("mode", "")) if kind == "POINTWISE" else kind.lower() for kind, _, params, _, _ in decoded)
    return operations, tuple(decoded[0][3].values())
