"""Is this output right? Two plans of one graph, run on the same inputs and on poisoned outputs, are held against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plancache.description import Description

# Half the distance from one to the next number of a type. FLOAT stands for what is left of it after TF32 operands.
_UNIT_ROUNDOFF = {"BFLOAT16": 2**-8, "HALF": 2**-11, "FLOAT": 2**-10, "DOUBLE": 2**-53, "FP8_E4M3": 2**-4, "FP8_E5M2": 2**-3}
_ACCUMULATOR_ROUNDOFF, _FP8_ACCUMULATOR_ROUNDOFF = 2**-24, 2**-14


def tolerance(description: Description, data_type: str) -> float:
    """How far two right results may be apart, relative to the largest of them: 4 u + 8 sqrt(reduction length) v.

    u is the unit roundoff of the coarsest type that results pass through, v the accumulator's; errors of a sum grow like the
    square root of its length (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8). Twice what one result
    may be off.
    """
    types = {t["data_type"].member for t in description.tensors if t["data_type"] is not None}
    floating = [kind for kind in (*types, data_type) if kind in _UNIT_ROUNDOFF]
    coarsest = max((_UNIT_ROUNDOFF[kind] for kind in floating), default=0.0)
    accumulator = _FP8_ACCUMULATOR_ROUNDOFF if any(kind.startswith("FP8") for kind in types) else _ACCUMULATOR_ROUNDOFF
    return 4 * coarsest + 8 * math.sqrt(reduction_length(description)) * accumulator


def reduction_length(description: Description) -> int:
    """The longest sum in a graph: the most elements that any operation reads for one that it writes, at least the head's."""
    longest = 1
    for node in description.nodes:
        read = [math.prod(description.tensors[uid - 1]["dim"]) for uid in node["inputs"].values() if description.tensors[uid - 1]["dim"]]
        written = [math.prod(d) for uid in node["outputs"].values() if (d := description.tensors[uid - 1]["dim"])]
        if read and written:
            longest = max(longest, max(read) // max(1, min(written)))
        if node["node_type"] in ("MATMUL",):
            longest = max(longest, int(description.tensors[node["inputs"]["A"] - 1]["dim"][-1]))
        if node["node_type"].startswith("CONV") or "SDPA" in node["node_type"]:
            longest = max([longest, *(math.prod(description.tensors[uid - 1]["dim"][1:]) for uid in list(node["inputs"].values())[:2])])
    return longest


def unwritten(first: Mapping[int, Any], second: Mapping[int, Any], bytes_of: tuple[int, int]) -> str | None:
    """Whether a plan left elements as they were. `first`, `second`: its outputs on buffers filled with one byte and another."""
    import torch

    for uid, one in first.items():
        other = second[uid]
        kept = (_bytes(torch, one) == bytes_of[0]).all(-1) & (_bytes(torch, other) == bytes_of[1]).all(-1)
        count = int(kept.sum())
        if count:
            return f"it leaves {count:,} of {kept.numel():,} elements of output {uid} unwritten"
    return None


def _bytes(torch: Any, buffer: Any) -> Any:
    """Elements in order, each as its bytes."""
    flat = torch.empty(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
    return flat.copy_(buffer.reshape(-1)).view(torch.uint8).reshape(buffer.numel(), -1)


def disagreement(mine: Mapping[int, Any], theirs: Mapping[int, Any], bounds: Mapping[int, float]) -> str | None:
    """In what two results differ by more than rounding, or None. `bounds`: relative to the largest value, by output."""
    import torch

    for uid, one in mine.items():
        a, b = one.double(), theirs[uid].double()
        finite = torch.isfinite(b)
        if not bool((torch.isfinite(a) == finite).all()):
            return f"output {uid} is not finite where the other is, or the reverse"
        a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
        largest = float(b.abs().max()) if b.numel() else 0.0
        apart = float((a - b).abs().max()) if b.numel() else 0.0
        if apart > bounds[uid] * max(largest, float(a.abs().max()) if a.numel() else 0.0):
            return f"output {uid} differs by {apart:.3g} where the largest value is {largest:.3g}"
    return None
