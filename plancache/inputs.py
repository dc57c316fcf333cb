"""Inputs for a graph that nobody gave any: values by the role that a tensor has in it, the same every time.

Sequence lengths, offsets, page tables and seeds steer a kernel: random numbers there would make it read elsewhere. All
other values only have to keep results finite and of the order of one, so that a comparison means something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plancache.errors import LibraryError

if TYPE_CHECKING:
    from plancache.description import Description
    from plancache.entry import Layout

TORCH_TYPES = {
    "BFLOAT16": "bfloat16",
    "BOOLEAN": "bool",
    "DOUBLE": "float64",
    "FLOAT": "float32",
    "FP8_E4M3": "float8_e4m3fn",
    "FP8_E5M2": "float8_e5m2",
    "FP8_E8M0": "float8_e8m0fnu",
    "HALF": "float16",
    "INT32": "int32",
    "INT64": "int64",
    "INT8": "int8",
    "UINT8": "uint8",
}
_WHOLE = ("INT32", "INT64", "INT8", "UINT8", "BOOLEAN")
_SEED = 20_251


def torch_in_use() -> Any:
    """torch, which tuning needs for buffers, streams and clocks. Raises `LibraryError` where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise LibraryError(f"tuning needs torch for buffers and clocks ({error}); pip install 'plancache[torch]'") from error
    return torch


def output_uids(description: Description) -> frozenset[int]:
    """Canonical uids of what the graph writes."""
    return frozenset(uid for node in description.nodes for uid in node["outputs"].values())


def synthesize(description: Description, operands: tuple[int, ...], layouts: Mapping[int, Layout], device: int | None) -> dict[int, Any]:
    """A buffer for every operand that the graph reads, by canonical uid; by-value scalars on the CPU."""
    torch = torch_in_use()
    generator = torch.Generator("cpu" if device is None else f"cuda:{device}").manual_seed(_SEED)
    roles = _roles(description)
    written = output_uids(description)
    made = {}
    for uid in operands:
        if uid in written:
            continue
        tensor, layout = description.tensors[uid - 1], layouts[uid]
        values = _values(torch, generator, description, roles.get(uid, ("", {})), layout)
        buffer = empty(torch, layout, None if tensor["is_pass_by_value"] else device)
        made[uid] = buffer.copy_(values.to(buffer.dtype)) if buffer.dtype != torch.bool else buffer.fill_(True)
    return made


def empty(torch: Any, layout: Layout, device: int | None) -> Any:
    """An uninitialized buffer of a layout; on the CPU where there is no device."""
    dtype = getattr(torch, TORCH_TYPES.get(layout.data_type or "", ""), None)
    if dtype is None:
        raise LibraryError(f"tuning cannot make buffers of {layout.data_type} with torch {torch.__version__}; give inputs=, or do not tune")
    return torch.empty_strided(layout.dim, layout.stride, dtype=dtype, device="cpu" if device is None else f"cuda:{device}")


def _roles(description: Description) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """The first port that reads a tensor, and the node it belongs to; `ragged_offset` and the tensor it is of."""
    roles: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for node in description.nodes:
        for port, uid in node["inputs"].items():
            roles.setdefault(uid, (port.lower(), node))
    for tensor in description.tensors:
        if tensor["ragged_offset"] is not None:
            roles[tensor["ragged_offset"]] = ("ragged_offset", tensor)
    return roles


def _values(torch: Any, generator: Any, description: Description, role: tuple[str, Mapping[str, Any]], layout: Layout) -> Any:
    port, owner = role
    dim = tuple(layout.dim)
    if layout.data_type in _WHOLE:
        return _whole(torch, description, port, owner, dim)
    if layout.data_type == "FP8_E8M0":
        return torch.ones(dim)
    normal = torch.randn(dim, generator=generator, device=generator.device)
    if port in ("epsilon",):
        return torch.full(dim, 1e-5)
    if port in ("momentum",):
        return torch.full(dim, 0.1)
    if "var" in port:  # inverse and running variances are positive
        return normal.abs() * 0.25 + 0.75
    if port == "stats":  # logarithms of sums of exponentials, at least the largest score
        return normal.abs() * 0.1 + math.log(max(2, dim[-2])) + 4
    if math.prod(dim) == 1:  # scales
        return torch.full(dim, 0.5 if "attn" in port else 1.0)
    if port in ("b", "weight", "filter"):  # keeps sums of products of the order of one
        return normal * max(1, math.prod(dim[-2:]) if port == "b" else math.prod(dim[1:])) ** (-0.25 if port == "b" else -0.5)
    return normal


def _whole(torch: Any, description: Description, port: str, owner: Mapping[str, Any], dim: tuple[int, ...]) -> Any:
    """Lengths are full, offsets count up evenly, tables name pages in order, seeds are a number; else zero."""
    count = math.prod(dim)
    if port == "ragged_offset":
        whole = tuple(owner["dim"])
        step = math.prod(whole[1:]) // max(1, int(owner["ragged_offset_multiplier"] or 1))
        return (torch.arange(count) * step).reshape(dim)
    if port.startswith("seq_len"):
        return torch.full(dim, _length(description, owner, port.endswith("kv")))
    if port.startswith("cu_seq_len"):
        return (torch.arange(count) * _length(description, owner, port.endswith("kv"))).reshape(dim)
    if "table" in port:
        return torch.arange(count).reshape(dim)
    if "mask" in port:
        return torch.full(dim, 255)
    if port.startswith("dropout"):
        return torch.full(dim, 1234)
    if "offset" in port:  # of groups
        return torch.zeros(dim)
    return torch.zeros(dim)


def _length(description: Description, node: Mapping[str, Any], of_keys: bool) -> int:
    """The sequence length of an attention's queries, or of its keys, through their page table where they have one."""
    inputs = node["inputs"]
    name = "k" if of_keys else "q"
    if name not in inputs:
        return 1
    length = int(description.tensors[inputs[name] - 1]["dim"][2])
    table = inputs.get("paged_attention_k_table")
    if of_keys and table is not None:
        return length * int(description.tensors[table - 1]["dim"][2])
    return length


def poison(torch: Any, buffer: Any, byte: int) -> None:
    """Fills a buffer's whole storage with a byte: 0xFF is NaN in floating-point types, -1 in whole numbers."""
    storage = torch.as_strided(buffer, (_extent(buffer),), (1,))
    storage.view(torch.uint8).fill_(byte)


def _extent(buffer: Any) -> int:
    return int(1 + sum((size - 1) * step for size, step in zip(buffer.shape, buffer.stride(), strict=True)))
