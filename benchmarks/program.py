"""A program that knows nothing of plancache: it builds 40 graphs by all the roads of the frontend, runs and checks each.

`python -m benchmarks.program plain` plans them; `prepare DIR` writes each plan there too; `deserialize DIR` loads those in place
of planning. The last line is JSON: seconds from the first description to the last first result, checks apart; by kind of
engine; and a digest of all results.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cudnn
import torch
from cudnn import pygraph

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
KINDS = {HALF: cudnn.data_type.HALF, BF16: cudnn.data_type.BFLOAT16, FLOAT: cudnn.data_type.FLOAT}
HANDLE = cudnn.create_handle()


class Case(NamedTuple):
    """A graph to be: `describe` adds its nodes and returns its outputs by name, from the tensors of `inputs`."""

    name: str
    inputs: dict[str, Any]
    describe: Callable[[Any, dict[str, Any]], dict[str, Any]]
    reference: Callable[[dict[str, Any]], dict[str, Any]]


def random(*shape: int, kind: Any = HALF) -> Any:
    return torch.randn(*shape, device="cuda", dtype=FLOAT).mul_(0.5).to(kind)


def convolution(n: int, c: int, k: int, size: int) -> Case:
    inputs = {
        "x": random(n, c, size, size).to(memory_format=torch.channels_last),
        "w": random(k, c, 3, 3).mul_(0.1).to(memory_format=torch.channels_last),
        "b": random(1, k, 1, 1),
    }

    def describe(graph: Any, x: dict[str, Any]) -> dict[str, Any]:
        y = graph.conv_fprop(image=x["x"], weight=x["w"], padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        return {"y": graph.relu(graph.bias(input=y, bias=x["b"]))}

    def reference(x: dict[str, Any]) -> dict[str, Any]:
        return {"y": torch.relu(torch.nn.functional.conv2d(x["x"].float(), x["w"].float(), padding=1) + x["b"].float())}

    return Case(f"conv {n}x{c}x{size} {k}", inputs, describe, reference)


def matmul(b: int, m: int, n: int, k: int, activation: str) -> Case:
    inputs = {"a": random(b, m, k, kind=BF16), "w": random(b, k, n, kind=BF16).mul_(0.1)}

    def describe(graph: Any, x: dict[str, Any]) -> dict[str, Any]:
        product = graph.matmul(x["a"], x["w"])
        return {"y": getattr(graph, activation)(product) if activation else product}

    def reference(x: dict[str, Any]) -> dict[str, Any]:
        product = x["a"].float() @ x["w"].float()
        return {"y": getattr(torch.nn.functional, activation)(product) if activation else product}

    return Case(f"matmul {b}x{m}x{n}x{k} {activation}", inputs, describe, reference)


def attention(b: int, h: int, s: int, d: int) -> Case:
    inputs = {name: random(b, s, h, d).transpose(1, 2) for name in "qkv"}

    def describe(graph: Any, x: dict[str, Any]) -> dict[str, Any]:
        o, _ = graph.sdpa(q=x["q"], k=x["k"], v=x["v"], is_inference=True, attn_scale=d**-0.5, use_causal_mask=True)
        o.set_dim(list(inputs["q"].shape)).set_stride(list(inputs["q"].stride()))
        return {"o": o}

    def reference(x: dict[str, Any]) -> dict[str, Any]:
        return {"o": torch.nn.functional.scaled_dot_product_attention(x["q"].float(), x["k"].float(), x["v"].float(), is_causal=True)}

    return Case(f"sdpa {b}x{h}x{s}x{d}", inputs, describe, reference)


def norm(rows: int, features: int) -> Case:
    inputs = {
        "x": random(rows, features, 1, 1, kind=BF16),
        "scale": random(1, features, 1, 1, kind=FLOAT),
        "bias": random(1, features, 1, 1, kind=FLOAT),
        "epsilon": torch.full((1, 1, 1, 1), 1e-5),
    }

    def describe(graph: Any, x: dict[str, Any]) -> dict[str, Any]:
        phase = cudnn.norm_forward_phase.INFERENCE
        y, _, _ = graph.layernorm(norm_forward_phase=phase, input=x["x"], scale=x["scale"], bias=x["bias"], epsilon=x["epsilon"])
        return {"y": y}

    def reference(x: dict[str, Any]) -> dict[str, Any]:
        flat = torch.nn.functional.layer_norm(x["x"].float().flatten(1), (features,), x["scale"].flatten(), x["bias"].flatten())
        return {"y": flat.view(rows, features, 1, 1)}

    return Case(f"layernorm {rows}x{features}", inputs, describe, reference)


def cases() -> Iterator[Case]:
    for index in range(10):
        yield convolution(8, 64, 64 + 32 * (index % 3), 14 + 2 * index)
        yield matmul(1 + index % 4, 128, 256, 64 * (1 + index), ("", "relu", "gelu")[index % 3])
        yield attention(2, 4, 128 * (1 + index), 64)
        yield norm(512 * (1 + index), 256)


# ---- roads ----------------------------------------------------------------------------------------------------------

MODES = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


def one_step(graph: Any) -> None:
    graph.build(MODES)


def five_steps(graph: Any) -> None:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.check_support()
    graph.build_plans()


def with_a_policy(graph: Any) -> None:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)


def when_executed(_: Any) -> None:
    """Built when it is executed, or by a `build()` that comes as late."""


def decorated(graph: Any) -> None:
    cudnn.jit(heur_modes=MODES)(lambda: (graph, []))()


def described(case: Case) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A graph, its inputs and its outputs by name."""
    types = {"io_data_type": KINDS[_type(case)], "intermediate_data_type": KINDS[FLOAT], "compute_data_type": KINDS[FLOAT]}
    graph = pygraph(name=case.name, handle=HANDLE, **types)
    tensors = {}
    for name, value in case.inputs.items():
        by_value = value.device.type == "cpu"
        tensors[name] = graph.tensor(
            list(value.shape), list(value.stride()), data_type=KINDS[value.dtype], is_pass_by_value=by_value, name=name
        )
    outputs = case.describe(graph, tensors)
    for name, output in outputs.items():
        output.set_output(True).set_name(name)
    return graph, tensors, outputs


def wrapped(case: Case) -> tuple[dict[str, Any], bool]:
    """By the frontend's own wrapper, which plans when its block ends and allocates the outputs."""
    types = {"io_data_type": KINDS[_type(case)], "intermediate_data_type": KINDS[FLOAT], "compute_data_type": KINDS[FLOAT]}
    wrapper = cudnn.Graph(handle=HANDLE, heuristics=MODES, inputs=list(case.inputs.values()), outputs=["out"], **types)
    with wrapper as graph:
        ((name, output),) = case.describe(graph, dict(case.inputs)).items()
        output.set_output(True).set_name("out")
    result = wrapper(*case.inputs.values(), handle=HANDLE)
    torch.cuda.synchronize()
    return {name: result}, _is_compiled(wrapper._Graph__graph)


ROADS = (one_step, five_steps, with_a_policy, when_executed, decorated, wrapped)


def run_one(index: int, case: Case, mode: str, folder: Path) -> tuple[dict[str, Any], bool]:
    """First results of one graph, and whether its engine was compiled at run time."""
    road = ROADS[(index // 4 + index) % len(ROADS)]
    if road is wrapped and mode == "plain" and all(value.is_cuda for value in case.inputs.values()):
        return wrapped(case)
    graph, tensors, outputs = described(case)
    uids = {name: tensor.get_uid() for name, tensor in {**tensors, **outputs}.items()}
    blob = folder / f"{index}.plan"
    facts = folder / f"{index}.json"
    if mode == "deserialize":
        ready = pygraph(handle=HANDLE)
        ready.deserialize(HANDLE, blob.read_bytes())
        layouts, workspace_size, compiled = json.loads(facts.read_text())
    else:
        (one_step if road is wrapped else road)(graph)
        if road is when_executed:
            graph.build(MODES)
        ready, workspace_size = graph, graph.get_workspace_size()
        layouts = {name: [list(output.get_dim()), list(output.get_stride())] for name, output in outputs.items()}
        compiled = _is_compiled(graph)
    results = {name: torch.empty_strided(*layouts[name], dtype=_type(case), device="cuda") for name in outputs}
    workspace = torch.empty(max(16, workspace_size), dtype=torch.uint8, device="cuda")
    ready.execute({uids[name]: value for name, value in (case.inputs | results).items()}, workspace, handle=HANDLE)
    torch.cuda.synchronize()
    if mode == "prepare":
        blob.write_bytes(graph.serialize(as_bytes=True))
        facts.write_text(json.dumps([layouts, workspace_size, compiled]))
    return results, compiled


def _is_compiled(graph: Any) -> bool:
    return cudnn.behavior_note.RUNTIME_COMPILATION in graph.get_behavior_notes()


def _type(case: Case) -> Any:
    return next(iter(case.inputs.values())).dtype


def main(mode: str, folder: Path) -> None:
    torch.manual_seed(0)
    made = list(cases())
    torch.cuda.synchronize()
    seconds = {"compiled": 0.0, "shipped": 0.0}
    digest = hashlib.sha256()
    for index, case in enumerate(made):
        started = time.perf_counter()
        results, compiled = run_one(index, case, mode, folder)
        seconds["compiled" if compiled else "shipped"] += time.perf_counter() - started
        for name, expected in case.reference(case.inputs).items():
            torch.testing.assert_close(
                results[name].float(), expected, rtol=2e-2, atol=2e-2, msg=lambda text, case=case: f"{case.name}: {text}"
            )
            digest.update(results[name].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    print(json.dumps({"graphs": len(made), "seconds": sum(seconds.values()), **seconds, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path())
