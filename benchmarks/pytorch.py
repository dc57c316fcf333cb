"""Tuned plans beside PyTorch eager and torch.compile (max-autotune), which compute the same from the same kinds of inputs.

Timed like candidates: interleaved, each run with a cold L2, by events on the stream. Graphs that PyTorch has no one expression
for (FP8 with its descales and maximum) are left out.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, in_fresh_process
from benchmarks.suite import Case

RUNS = 60


def measure(directory: Path, _: int) -> list[Figure]:
    """How many times faster tuned plans are than each, over the suite, and where they are furthest apart."""
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = json.loads(in_fresh_process("benchmarks.pytorch", str(directory)))
    figures = []
    for way in ("eager", "compiled"):
        ratios = {name: times[way] / times["tuned"] for name, times in found.items() if way in times}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        far = sorted(ratios, key=lambda name: ratios[name])
        ends = f"from {ratios[far[0]]:.2f} ({far[0][:40]}) to {ratios[far[-1]]:.2f} ({far[-1][:40]}); {len(ratios)} graphs"
        figures.append(Figure(f"PyTorch {way} / tuned plan, geometric mean", mean, "x", None, ends))
    return figures


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _main(directory: Path) -> dict[str, dict[str, float]]:
    import torch

    from benchmarks.suite import cases
    from benchmarks.tuning import _CACHES, _bench
    from plancache.workbench import Runnable

    described = list(cases())
    found: dict[str, dict[str, float]] = {}
    _bench(described[0].graph, directory)  # opens the cache
    cache = _CACHES[directory]
    tuned = cache.tune([case.graph for case in described])
    for case, done in zip(described, tuned, strict=True):
        function = in_pytorch(torch, case)
        entry = done.entry or done.before
        if function is None or entry is None:
            continue
        bench = _bench(case.graph, directory)
        ways = {"tuned": bench.load(entry), "eager": Runnable(lambda _, f=function: f(), None, None)}
        torch._dynamo.reset()
        compiled = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
        try:
            compiled()
            ways["compiled"] = Runnable(lambda _, f=compiled: f(), None, None)
        except Exception as error:  # what it cannot compile is left out
            print(f"{case.name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        bench.time_us(list(ways.values()), 10)
        times = bench.time_us(list(ways.values()), RUNS)
        found[case.name] = {way: statistics.median(own) for way, own in zip(ways, times, strict=True)}
        print(case.name, {way: round(value, 1) for way, value in found[case.name].items()}, file=sys.stderr)
    cache.close()
    return found


def in_pytorch(torch: Any, case: Case) -> Callable[[], Any] | None:
    """What a graph computes as PyTorch says it, on inputs of its own; None where there is no such expression."""
    functional = torch.nn.functional
    if case.gradient:
        return _gradient(torch, *case.gradient)
    kind, x = case.name.partition("-")[0], case.example.make_inputs()
    if kind.startswith("fp8"):
        return None
    if kind == "conv_bias_relu":
        window = {name: case.graph._nodes[0].params[name] for name in ("stride", "dilation")}
        padding = case.graph._nodes[0].params.get("padding") or case.graph._nodes[0].params["pre_padding"]
        return lambda: functional.relu(functional.conv2d(x["input"], x["filter"], x["bias"].flatten(), padding=padding, **window))
    if kind == "batched_matmul":
        return lambda: x["a"] @ x["b"]
    if kind.startswith("matmul_scale_bias"):
        act = {"gelu": functional.gelu, "relu": functional.relu, "swish": functional.silu}.get(kind.split("_")[3], lambda y: y)
        scale = x["scale"].item()
        epilogue = (lambda y: (y, y.abs().amax())) if kind.endswith("amax") else lambda y: y
        return lambda: epilogue(act(x["a"] @ x["b"] * scale + x["bias"]))
    if kind.startswith("sdpa"):
        grouped = x["q"].shape[1] != x["k"].shape[1]
        causal = "causal" in case.name
        return lambda: functional.scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=causal, enable_gqa=grouped)
    rows, scale, eps = x["input"].flatten(1), x["scale"].flatten(), x["epsilon"].item()
    if kind.startswith("layer_norm"):
        return lambda: functional.layer_norm(rows, scale.shape, scale, x["bias"].flatten(), eps)
    return lambda: functional.rms_norm(rows, scale.shape, scale, eps)


def _gradient(torch: Any, kind: str, image: Any, filters: Any, response: Any, stride: int, padding: int) -> Callable[[], Any]:
    def made(shape: Any) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)

    x, w, dy = map(made, (image, filters, response))
    wanted = [kind == "dgrad", kind == "wgrad", False]
    backward = torch.ops.aten.convolution_backward.default
    return lambda: backward(dy, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted)


if __name__ == "__main__":
    import torch

    torch.zeros(1, device="cuda")
    print(json.dumps(_main(Path(sys.argv[1]))))
