"""Small graphs and entries that several tests start from."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from plancache.entry import Candidate, Entry, Layout
from plancache.key import COMPONENTS, PlanKey


def matmul(**context: Any) -> Any:
    import cudnn

    kinds = cudnn.data_type
    types = {"io_data_type": kinds.HALF, "intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}
    graph = cudnn.pygraph(**types | context)
    a, b = graph.tensor([8, 64, 32], name="a"), graph.tensor([8, 32, 16], name="b")
    graph.matmul(a, b, padding=0.0).set_output(True)
    return graph


def scaled(value: Any, kind: str | None = "RUNTIME_PARAM") -> Any:
    """x * value, the value given by value."""
    import cudnn

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    scalar = graph.tensor_scalar(value, kind and getattr(cudnn.scalar_type, kind))
    graph.mul(graph.tensor([2, 3, 4]), scalar).set_output(True)
    return graph


def make_entry(**changes: Any) -> Entry:
    plain = Entry(
        blob=b"plan" * 100,
        workspace_size=1024,
        operands=(1, 2),
        layouts={1: Layout((2, 3), (3, 1), "HALF")},
        recipe=Candidate("eng7_k24=21", 7, {"TILE": 21}),
        candidates=(),
        behavior_notes=(),
        requirements={},
        timings_s={"lower": 0.25, "build": 0.5},
        key=PlanKey(tuple(name.encode() for name in COMPONENTS)),
        quality="heuristic",
        created_at=1.0,
        provenance={},
    )
    return replace(plain, **changes)


def state(entry: Entry) -> dict[str, Any]:
    """All that an entry holds, to compare two by: entries themselves are equal by identity."""
    return {field.name: getattr(entry, field.name) for field in fields(Entry)}
