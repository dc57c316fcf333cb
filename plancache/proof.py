"""Is this output right? Two plans of one graph, run on the same inputs and on poisoned outputs, are held against each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plancache.description import Description

# Half the distance from one to the next number of a type. FLOAT: what the GPU's approximate exp2 and rsqrt keep (CUDA
# programming guide). TF32 drops bits of operands instead of rounding them.
_UNIT_ROUNDOFF = {"BFLOAT16": 2**-8, "HALF": 2**-11, "FLOAT": 2**-22, "DOUBLE": 2**-53, "FP8_E4M3": 2**-4, "FP8_E5M2": 2**-3}
_TF32 = 2**-10
_APPROXIMATE = 2**-11  # tanh.approx (PTX ISA); polynomials stand in for exponentials too
# Of a sum. Hopper's tensor cores keep about 14 bits in one of FP8 products (DeepSeek-V3 report, section 3.3.2).
_ACCUMULATOR = {"BFLOAT16": 2**-8, "HALF": 2**-11, "DOUBLE": 2**-53}
_FLOAT_ACCUMULATOR, _FP8_ACCUMULATOR = 2**-24, 2**-14
_PARTS = ("BFLOAT16", "HALF")  # types in which a kernel may add the parts of a split sum (REDUCED_PRECISION_REDUCTION)
_SIGMOIDAL = ("tanh", "gelu", "sigmoid", "swish")
_TENSOR_CORE = ("MATMUL", "CONV_", "MOE_", "SDPA")
_EXTREMA = ("MAX", "MIN", "AMAX")

_FEW = 64  # elements whose largest is surely of their typical size: one of them alone may be zero by cancellation
_FLOOR = 1 / 4  # of the largest of all: an activation can clip a row to little that has the rounding of what went in


def tolerance(description: Description, data_type: str) -> float:
    """How far two right results of this type may be apart besides their own rounding, relative to the largest value near them:
    2 u + 8 sqrt(n) v, the most of any output of the type.

    u is the unit roundoff of the coarsest type that values pass through on the way to the output, v the accumulator's, n the
    length of the longest sum on the way; errors of a sum grow like the square root of its length, and four deviations hold
    for millions of elements (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8). Tensor cores round towards
    zero (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021): there errors may add up, one for each instruction,
    and for very long sums 2 n / k takes the place of 8 sqrt(n). Twice what one result may be off. Inputs are exact, so their
    types do not count, but what tensor cores make of them does.
    """
    written = [uid for node in description.nodes for uid in node["outputs"].values()]
    outputs = [uid for uid in written if not description.tensors[uid - 1]["is_virtual"]]
    mine = [uid for uid in outputs if _type(description, uid) == data_type] or outputs
    return max((_bound(description, uid, data_type) for uid in mine), default=0.0)


def _bound(description: Description, uid: int, data_type: str) -> float:
    nodes = list(_upstream(description, uid))
    passed = [u for node in nodes for u in _roundoffs(description, node, uid)]
    if data_type in (*_PARTS, "FLOAT", "DOUBLE"):
        passed.append(_UNIT_ROUNDOFF[data_type])
    if not passed and not any(_type(description, read) in _UNIT_ROUNDOFF for node in nodes for read in node["inputs"].values()):
        return 0.0  # whole numbers are exact
    return 2 * max(passed, default=0.0) + max((_sum_bound(description, node) for node in nodes), default=0.0)


def _sum_bound(description: Description, node: Mapping[str, Any]) -> float:
    terms, v = _terms(description, node), _accumulator(description, node)
    if not node["node_type"].startswith(_TENSOR_CORE):
        return 8 * math.sqrt(terms) * v
    return max(8 * math.sqrt(terms), 2 * terms / (32 if v == _FP8_ACCUMULATOR else 16)) * v


def _upstream(description: Description, uid: int) -> Iterator[Mapping[str, Any]]:
    """The nodes that a tensor is made by."""
    wanted = {uid}
    for node in reversed(description.nodes):  # the frontend lists them in the order of computation
        if wanted & set(node["outputs"].values()):
            wanted |= set(node["inputs"].values())
            yield node


def _type(description: Description, uid: int) -> str:
    kind = description.tensors[uid - 1]["data_type"]
    return str(kind.member) if kind is not None else "FLOAT"


def _roundoffs(description: Description, node: Mapping[str, Any], of: int) -> Iterator[float]:
    """The roundings that values go through in a node, but for the last one, when the output itself is stored."""
    for uid in node["outputs"].values():
        if uid != of and (description.tensors[uid - 1]["is_virtual"] or _is_read(description, uid)):
            yield _UNIT_ROUNDOFF.get(_type(description, uid), 0.0)
    kind = node["node_type"]
    if kind == "POINTWISE" and str(node["params"].get("mode", "")).startswith(_SIGMOIDAL):
        yield _APPROXIMATE
    if "SDPA" in kind:  # weights and their gradients go back into tensor cores; statistics see the exponential only
        yield _APPROXIMATE
        if _type(description, of) != "FLOAT" or kind.endswith("_BWD"):
            yield from _operand_roundoffs(description, node, ("q", "k", "v"), rounded=True)
    elif kind.startswith(_TENSOR_CORE):
        made = {uid for other in description.nodes for uid in other["outputs"].values()}
        read = [port for port, uid in node["inputs"].items() if _type(description, uid) in _UNIT_ROUNDOFF]
        yield from _operand_roundoffs(description, node, read, rounded=any(node["inputs"][port] in made for port in read))


def _is_read(description: Description, uid: int) -> bool:
    return any(uid in node["inputs"].values() for node in description.nodes)


def _operand_roundoffs(description: Description, node: Mapping[str, Any], ports: Sequence[str], *, rounded: bool) -> Iterator[float]:
    """What tensor cores make of their operands. `rounded`: one was computed, and is cast to the type of the other."""
    for port in ports:
        kind = _type(description, node["inputs"][port]) if port in node["inputs"] else ""
        if kind == "FLOAT":
            yield 2 * _TF32  # of both factors of a product
        elif rounded:
            yield _UNIT_ROUNDOFF.get(kind, 0.0)


def _accumulator(description: Description, node: Mapping[str, Any]) -> float:
    if any(_type(description, uid).startswith("FP8") for uid in node["inputs"].values()):
        return _FP8_ACCUMULATOR
    compute = node["compute_data_type"] or description.context["compute_data_type"]
    return _ACCUMULATOR.get(compute.member if compute is not None else "", _FLOAT_ACCUMULATOR)


def reduction_length(description: Description) -> int:
    """The longest sum in a graph."""
    return max((_terms(description, node) for node in description.nodes), default=1)


def _terms(description: Description, node: Mapping[str, Any]) -> int:
    """The longest sum in a node: of products, or of the most elements that it reads for one of a vector that it reads or writes."""
    kind = node["node_type"]
    dim: dict[str, tuple[int, ...]] = {port: description.tensors[uid - 1]["dim"] for port, uid in node["inputs"].items()}
    if kind == "MATMUL":
        return dim["A"][-1]
    if kind == "CONV_FPROP":
        return math.prod(dim["weight"][1:])
    if kind in ("CONV_DGRAD", "CONV_WGRAD"):
        summed = dim["filter" if kind == "CONV_DGRAD" else "loss"]
        return summed[0] * math.prod(summed[2:])
    if kind == "MOE_GROUPED_MATMUL":
        return dim["weight"][-2]
    if "SDPA" in kind:
        return _attended(dim, backward=kind.endswith("_BWD"))
    if kind == "REDUCTION" and getattr(node["params"].get("mode"), "member", "") in _EXTREMA:
        return 1
    if kind in ("POINTWISE", "RESHAPE", "SLICE", "TRANSPOSE", "CONCATENATE"):
        return 1
    read = [math.prod(extents) for extents in dim.values() if math.prod(extents) > 1]
    written = [math.prod(d) for uid in node["outputs"].values() if (d := description.tensors[uid - 1]["dim"])]
    return max(1, max(read, default=1) // max(1, min([*read, *written], default=1)))


def _attended(dim: Mapping[str, tuple[int, ...]], *, backward: bool) -> int:
    """Over keys and depth; backward over the queries of all heads that share a key too, and for what the batch shares."""
    keys = dim["k"][2] * (dim["paged_attention_k_table"][2] if "paged_attention_k_table" in dim else 1)
    queries = dim["q"][2] * max(1, dim["q"][1] // dim["k"][1], *((dim["q"][0],) if {"bias", "sink_token"} & dim.keys() else ()))
    return int(max(keys, dim["q"][3], queries if backward else 1))


# ---- what runs left behind ------------------------------------------------------------------------------------------


def unwritten(
    first: Mapping[int, Any], second: Mapping[int, Any], bytes_of: tuple[int, int], *, partly: Collection[int] = ()
) -> str | None:
    """Whether a plan left elements as they were. `first`, `second`: its outputs on buffers filled with one byte and another.

    `partly`: outputs of which the graph itself leaves a part to nobody (`inputs.partly_written`); some of it must be written.
    """
    for uid, one in first.items():
        kept = (_words(one) == _word(one, bytes_of[0])) & (_words(second[uid]) == _word(one, bytes_of[1]))
        count = int(kept.sum())
        if count and (uid not in partly or count == kept.numel()):
            return f"it leaves {count:,} of {kept.numel():,} elements of output {uid} unwritten"
    return None


def _words(buffer: Any) -> Any:
    """Elements as whole numbers of their size: comparing them touches no NaN, and copies nothing."""
    import torch

    return buffer.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[buffer.element_size()])


def _word(buffer: Any, byte: int) -> int:
    size = buffer.element_size()
    return int.from_bytes(bytes([byte] * size), "little", signed=size > 1)


def disagreement(mine: Mapping[int, Any], theirs: Mapping[int, Any], bounds: Mapping[int, float]) -> str | None:
    """In what two results differ by more than rounding, or None. `bounds`: by output, beside one step of the output's type.

    A bound is relative to the largest value near an element: of its row, its column and so on, and at least a quarter of
    the largest of all. Errors follow the size of a row; the largest value of a whole tensor would hide a row that is wrong.
    """
    import torch

    for uid, one in mine.items():
        if not one.numel():
            continue
        a, b = _exact(torch, one), _exact(torch, theirs[uid])
        finite = a.isfinite() & b.isfinite()
        if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
            return f"output {uid} is not finite where the other is, or the reverse"
        a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
        apart, sizes = (a - b).abs(), torch.maximum(a.abs(), b.abs())
        excess = apart - _step(torch, one.dtype, torch.minimum(a.abs(), b.abs()))
        if any(bool((excess > bounds[uid] * scale).any()) for scale in _scales(torch, sizes)):
            return f"output {uid} differs by {float(apart.max()):.3g} where the largest value is {float(sizes.max()):.3g}"
    return None


def _exact(torch: Any, buffer: Any) -> Any:
    return buffer.double() if buffer.dtype in (torch.float64, torch.int32, torch.int64) else buffer.float()


def _step(torch: Any, dtype: Any, size: Any) -> Any:
    """From a number to the next one of its type: where two exact results lie on two sides of a boundary, they are stored so."""
    if not dtype.is_floating_point:
        return 0.0
    limits = torch.finfo(dtype)
    return size * limits.eps + limits.tiny * limits.eps


def _scales(torch: Any, sizes: Any) -> Iterator[Any]:
    """The largest value of all, and of each slice along each axis where slices have enough elements."""
    largest = sizes.max()
    yield largest
    for axis, extent in enumerate(sizes.shape):
        if extent > 1 and sizes.numel() // extent >= _FEW:
            others = [other for other in range(sizes.dim()) if other != axis]
            yield torch.maximum(sizes.amax(dim=others, keepdim=True), largest * _FLOOR)
