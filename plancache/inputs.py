"""Inputs for a graph that nobody gave any: values by the role that a tensor has in it, the same every time.

Sequence lengths, offsets, page tables and seeds steer a kernel: random numbers there would make it read elsewhere. All
other values only have to keep results finite and of the order of one, so that a comparison means something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from plancache.errors import LibraryError
from plancache.operands import TORCH_TYPES as OPERAND_TYPES

if TYPE_CHECKING:
    from plancache.description import Description
    from plancache.entry import Layout

TORCH_TYPES = {kind: name for kind, name in OPERAND_TYPES.items() if kind != "FP4_E2M1"}  # those are packed two by two
_WHOLE = ("INT32", "INT64", "INT8", "UINT8", "BOOLEAN")
_ARITHMETIC = ("POINTWISE", "MATMUL", "CONV_", "REDUCTION", "RESHAPE", "SLICE", "TRANSPOSE", "CONCATENATE")
_POSITIVE = {"log": ("in_0",), "sqrt": ("in_0",), "rsqrt": ("in_0",), "reciprocal": ("in_0",), "pow": ("in_0",)}
_POSITIVE |= {"div": ("in_1",), "mod": ("in_1",)}
_KEYS = ("k", "v", "dk", "dv")
_SEED = 20_251


class _Use(NamedTuple):
    """Where a tensor is read: the port in lower case, and the node."""

    port: str
    node: Mapping[str, Any]


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


def partly_written(description: Description) -> frozenset[int]:
    """Ragged outputs whose total is bounded below what their dims say: nobody writes the rest of their buffers."""
    found = set()
    for node in description.nodes:
        for port, uid in node["outputs"].items():
            tensor = description.tensors[uid - 1]
            length = _length(description, node, port.lower() in _KEYS)
            if tensor["ragged_offset"] is not None and len(tensor["dim"]) == 4 and length < tensor["dim"][2]:
                found.add(uid)
    return frozenset(found)


def synthesize(description: Description, operands: tuple[int, ...], layouts: Mapping[int, Layout], device: int | None) -> dict[int, Any]:
    """A buffer for every operand that the graph reads, by canonical uid; by-value scalars on the CPU."""
    torch = torch_in_use()
    uses, steps, written = _uses(description), _ragged_steps(description), output_uids(description)
    made = {}
    for uid in operands:
        if uid in written:
            continue
        layout, dim = layouts[uid], tuple(layouts[uid].dim)
        buffer = empty(torch, layout, None if description.tensors[uid - 1]["is_pass_by_value"] else device)
        generator = torch.Generator("cpu" if device is None else f"cuda:{device}").manual_seed(_SEED + uid)
        if uid in steps:
            values = _counting(torch, dim) * steps[uid]
        elif layout.data_type in _WHOLE:
            values = _whole(torch, generator, description, uses.get(uid, _Use("", {})), layout)
        else:
            values = _real(torch, generator, description, uses.get(uid, _Use("", {})), layout)
        _fill(buffer, values.to(buffer.dtype))
        made[uid] = buffer
    return made


def empty(torch: Any, layout: Layout, device: int | None) -> Any:
    """An uninitialized buffer of a layout; on the CPU where there is no device."""
    dtype = getattr(torch, TORCH_TYPES.get(layout.data_type or "", ""), None)
    if dtype is None:
        raise LibraryError(f"tuning cannot make buffers of {layout.data_type} with torch {torch.__version__}; give inputs=, or do not tune")
    return torch.empty_strided(layout.dim, layout.stride, dtype=dtype, device="cpu" if device is None else f"cuda:{device}")


def _fill(buffer: Any, values: Any) -> None:
    for axis, step in enumerate(buffer.stride()):
        if step == 0 and buffer.shape[axis] > 1:  # torch refuses to write one element of memory several times
            buffer, values = buffer.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
    buffer.copy_(values)


def poison(torch: Any, buffer: Any, byte: int) -> None:
    """Fills a buffer's whole storage with a byte: 0xFF is NaN in floating-point types, -1 in whole numbers."""
    storage = torch.as_strided(buffer, (_extent(buffer),), (1,))
    storage.view(torch.uint8).fill_(byte)


def _extent(buffer: Any) -> int:
    if not buffer.numel():
        return 0
    return int(1 + sum((size - 1) * step for size, step in zip(buffer.shape, buffer.stride(), strict=True)))


# ---- roles ----------------------------------------------------------------------------------------------------------


def _uses(description: Description) -> dict[int, _Use]:
    """The first port that reads each tensor."""
    uses: dict[int, _Use] = {}
    for node in description.nodes:
        for port, uid in node["inputs"].items():
            uses.setdefault(uid, _Use(port.lower(), node))
    return uses


def _ragged_steps(description: Description) -> dict[int, int]:
    """From one sequence's offset to the next, by the offset's uid; the least where several tensors share it.

    An offset times the multiplier counts elements from the start of the buffer to a sequence's first token.
    """
    steps: dict[int, int] = {}
    for node in description.nodes:
        for port, uid in (*node["inputs"].items(), *node["outputs"].items()):
            tensor = description.tensors[uid - 1]
            offset = tensor["ragged_offset"]
            if offset is not None:
                step = _pitch(description, node, port.lower(), tensor) // max(1, int(tensor["ragged_offset_multiplier"] or 1))
                steps[offset] = min(step, steps.get(offset, step))
    return steps


def _pitch(description: Description, node: Mapping[str, Any], port: str, tensor: Mapping[str, Any]) -> int:
    """Elements from one sequence to the next: the batch stride, or packed where the graph bounds the total of tokens."""
    dim, stride = tensor["dim"], tensor["stride"]
    if len(dim) == 4 and (dim[1] == 1 or stride[2] >= stride[1]):  # whole tokens lie one after the other
        length = _length(description, node, port in _KEYS)
        if length < dim[2]:
            return min(int(stride[0]), length * int(stride[2]))
    return int(stride[0])


def _length(description: Description, node: Mapping[str, Any], of_keys: bool) -> int:
    """The longest sequence of an attention's queries, or of its keys, that every member of the batch may have at once."""
    inputs, params = node["inputs"], node["params"]
    name, side = ("k", "kv") if of_keys else ("q", "q")
    if name not in inputs:
        return 1
    dim = description.tensors[inputs[name] - 1]["dim"]
    length, batch = int(dim[2]), int(dim[0])
    table = inputs.get("paged_attention_k_table")
    if of_keys and table is not None:
        length *= int(description.tensors[table - 1]["dim"][2])
        return min(length, int(params.get("paged_attention_max_seq_len_kv") or length))
    total = params.get(f"max_total_seq_len_{side}")  # what workspaces are made for
    return length if total is None else min(length, max(1, int(total) // batch))


# ---- whole numbers --------------------------------------------------------------------------------------------------


def _counting(torch: Any, dim: tuple[int, ...]) -> Any:
    return torch.arange(math.prod(dim)).reshape(dim)


def _whole(torch: Any, generator: Any, description: Description, use: _Use, layout: Layout) -> Any:
    """Lengths are full, offsets rise evenly, tables and indices name what there is, seeds are a number; else small numbers."""
    port, node = use
    dim, counted = tuple(layout.dim), _counting(torch, tuple(layout.dim))
    if port.startswith("seq_len"):
        return torch.full(dim, _length(description, node, port.endswith("kv")))
    if port.startswith("cu_seq_len"):
        return counted * _length(description, node, port.endswith("kv"))
    if port.endswith("_table"):
        return counted % int(_extents(description, node, "v" if port.endswith("_v_table") else "k")[0])
    if port == "block_mask":
        return torch.full(dim, 255)
    if port.startswith("dropout"):
        return torch.full(dim, 1234)
    if port in ("first_token_offset", "group_offset"):
        return _group_offsets(description, node, counted, port)
    if port in ("token_index", "token_ks"):
        return _routing(description, node, counted, port)
    if not str(node.get("node_type", "")).startswith(_ARITHMETIC):
        return torch.zeros(dim) if layout.data_type != "BOOLEAN" else torch.ones(dim)
    if math.prod(dim) == 1:
        return torch.full(dim, 2)
    lowest, above = (0, 2) if layout.data_type == "BOOLEAN" else (0, 4) if layout.data_type == "UINT8" else (-3, 4)
    return torch.randint(lowest, above, dim, generator=generator, device=generator.device)


def _extents(description: Description, node: Mapping[str, Any], port: str) -> tuple[int, ...]:
    return tuple(description.tensors[node["inputs"][port] - 1]["dim"])


def _group_offsets(description: Description, node: Mapping[str, Any], counted: Any, port: str) -> Any:
    """The first row of each group, and the end of the last where there is one entry more than groups."""
    inputs = node["inputs"]
    gathers = getattr(node["params"].get("mode"), "member", "") == "GATHER" and "token_index" in inputs
    rows_of = _extents(description, node, "token_index" if gathers else "token" if "token" in inputs else "input")
    rows = next((extent for extent in rows_of if extent > 1), 1)
    groups = _extents(description, node, "weight")[0] if "weight" in inputs else counted.numel()
    aligned = max(1, int(description.tensors[inputs[port] - 1]["alignment_value"] or 1))
    size = rows // max(1, groups) // aligned * aligned or rows // max(1, groups)
    offsets = counted * size
    offsets[counted == groups] = rows
    return offsets


def _routing(description: Description, node: Mapping[str, Any], counted: Any, port: str) -> Any:
    """Rows come from every token in turn; where they are scattered, slot `token * top_k + k` takes exactly one."""
    top_k = max(1, int(node["params"].get("top_k") or 1))
    if port == "token_ks":
        return counted % top_k
    if getattr(node["params"].get("mode"), "member", "") == "GATHER":
        return counted % int(_extents(description, node, "token")[1])
    return counted // top_k


# ---- real numbers ---------------------------------------------------------------------------------------------------


def _real(torch: Any, generator: Any, description: Description, use: _Use, layout: Layout) -> Any:
    port, node = use
    dim, kind = tuple(layout.dim), str(node.get("node_type", ""))
    constant = _constant(description, use, layout)
    if constant is not None:
        return torch.full(dim, constant)
    normal = torch.randn(dim, generator=generator, device=generator.device)
    if "var" in port:  # inverse and running variances are positive
        return normal.abs() * 0.25 + 0.75
    if kind == "POINTWISE":
        return _within_domain(normal, str(node["params"].get("mode", "")), port)
    if kind.startswith("SDPA"):
        return _attended(torch, normal, description, use, layout)
    terms = _summed_terms(kind, port, dim)
    scale = terms**-0.5
    return normal * (max(scale, 2.0**-5) if layout.data_type == "FP8_E4M3" else scale)  # its normal numbers start at 2^-6


def _constant(description: Description, use: _Use, layout: Layout) -> float | None:
    """The value of a tensor whose elements are all alike."""
    port, node = use
    kind = str(node.get("node_type", ""))
    if layout.data_type == "FP8_E8M0" or (kind == "BLOCK_SCALE_DEQUANTIZE" and port == "descale"):
        return 1.0
    if port.startswith("peer_stats"):  # where GPUs wait for each other
        return 0.0
    if port == "epsilon":
        return 1e-5
    if port == "momentum":
        return 0.1
    if math.prod(layout.dim) > 1:
        return None
    if port == "attn_scale":
        return float(_extents(description, node, "q")[-1] ** -0.5)
    eights = any(tensor["data_type"] is not None and tensor["data_type"].member.startswith("FP8") for tensor in description.tensors)
    return 0.75 if kind == "POINTWISE" and not eights else 1.0  # a factor of one would hide that a plan leaves it out


def _within_domain(normal: Any, mode: str, port: str) -> Any:
    if port in _POSITIVE.get(mode, ()):
        return normal.abs() + 0.5
    if mode == "tan":
        return normal.tanh()  # no poles
    if mode.startswith("cmp_"):
        return (normal * 2).round() / 2  # some are equal
    return normal


def _attended(torch: Any, normal: Any, description: Description, use: _Use, layout: Layout) -> Any:
    """Queries whose scores have a deviation of one; statistics that belong to such scores; dropout masks of zeros and ones."""
    port, node = use
    if port == "dropout_0":
        return (normal > -1).to(torch.float32)
    if port == "q":
        return normal / (_attention_scale(description, node) * layout.dim[-1] ** 0.5)
    if port == "stats":  # the logarithm of a sum of n exponentials of such scores is about log(n) + 1/2
        return normal * 0.1 + math.log(_length(description, node, True)) + 0.5
    return normal


def _attention_scale(description: Description, node: Mapping[str, Any]) -> float:
    given = node["params"].get("attn_scale")
    if isinstance(given, int | float) and given:
        return abs(float(given))
    if "attn_scale" not in node["inputs"]:
        return 1.0
    value = description.tensors[node["inputs"]["attn_scale"] - 1]["pass_by_value"]
    return abs(float(value)) if value else float(_extents(description, node, "q")[-1] ** -0.5)


def _summed_terms(kind: str, port: str, dim: tuple[int, ...]) -> int:
    """How many products of this operand make one result: its values shrink so that results do not grow."""
    if (kind, port) in (("MATMUL", "b"), ("MOE_GROUPED_MATMUL", "weight"), ("MOE_GROUPED_MATMUL_BWD", "doutput")):
        return dim[-2]
    if (kind, port) == ("CONV_FPROP", "weight"):
        return math.prod(dim[1:])
    if (kind, port) in (("CONV_DGRAD", "filter"), ("CONV_WGRAD", "loss")):
        return dim[0] * math.prod(dim[2:])
    return 1
