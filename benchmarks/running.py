"""Host cost of running a loaded plan on a GPU: `execute` and `bind` beside the bare `graph.execute`, interleaved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import Figure, medians, per_call_us


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Microseconds of a call that launches a small matmul -> bias -> GELU, whose kernel is shorter than the call."""
    import cudnn
    import torch

    from plancache import PlanCache, graphs

    example = graphs.matmul_scale_bias_activation(batch=1, m=64, n=64, k=64, activation="gelu")
    with PlanCache(directory, strict=True) as cache:
        plan = cache.plan(example.graph)
        inputs = example.make_inputs()
        outputs = {
            operand.name: torch.empty_strided(operand.dim, operand.stride, dtype=torch.bfloat16, device="cuda")
            for operand in plan.operands
            if operand.is_output
        }
        operands = {example.tensors[name]: buffer for name, buffer in {**inputs, **outputs}.items()}
        workspace = torch.empty(max(16, plan.workspace_size), dtype=torch.uint8, device="cuda")
        by_uid = {uid: operands[example.tensors[operand.name]] for uid, operand in zip(plan.entry.operands, plan.operands, strict=True)}
        bare, handle = _bare(cudnn, plan.entry.blob)
        bound = plan.bind(operands, workspace)

        def batch(call: Any) -> float:
            torch.cuda.synchronize()
            return per_call_us(call)

        us = medians(
            rounds * 5,
            {
                "bare": lambda: batch(lambda: bare.execute(by_uid, workspace, handle=handle)),
                "execute": lambda: batch(lambda: plan.execute(operands, workspace)),
                "execute, own workspace": lambda: batch(lambda: plan.execute(operands)),
                "bind": lambda: batch(bound),
            },
        )
    note = f"{len(by_uid)} operands"
    return [
        Figure("execute / bare graph.execute", us["execute"] / us["bare"], "x", "<= 1.25", note),
        Figure("execute (own workspace) / bare graph.execute", us["execute, own workspace"] / us["bare"], "x", "<= 1.25", note),
        Figure("bind / bare graph.execute", us["bind"] / us["bare"], "x", "<= 1.05", note),
        *(Figure(f"call: {name}", value, "us") for name, value in us.items()),
    ]


def _bare(cudnn: Any, blob: bytes) -> tuple[Any, Any]:
    import torch

    handle = cudnn.create_handle()
    graph = cudnn.pygraph(handle=handle)
    graph.deserialize(handle, blob)
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    return graph, handle
