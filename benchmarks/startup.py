"""Start-up on a GPU, each way in a fresh process: bare loads, plancache's hit path, building.

What is timed, in each process: from the moment that torch is imported and the CUDA context exists until every plan is
ready: importing cudnn, describing the graphs, and then reading files whose names are known and calling `deserialize`
(bare), asking plancache, whose imports count, or building. A second figure runs every plan once as well.

The CUDA driver and NVRTC keep a compute cache of their own (~/.nv), which makes a second build of the same kernels
cheaper. So everything is measured twice: with that cache empty, as in a new container, and with it full, as at a restart
on the same machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, compute_cache, in_fresh_process

WAYS = ("bare", "plancache", "build")
GRAPHS = 42
RUNTIME_COMPILED = ("RUNTIME_COMPILATION",)
KINDS = {"first": ("first choices", 15), "compiled": ("runtime-compiled", 50)}


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Figures for the heuristic's first choices, and for engines that compile at run time."""
    figures = []
    for kind in KINDS:
        folder = directory / kind
        (folder / "nv").mkdir(parents=True)
        with compute_cache(folder / "nv"):
            count = int(in_fresh_process("benchmarks.startup", "prepare", kind, str(folder)))
        for full in (False, True):
            samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in WAYS if number < max(2, rounds // 3) else WAYS[:2]:
                    with compute_cache(folder / "nv" if full else None):
                        samples[way].append(json.loads(in_fresh_process("benchmarks.startup", way, kind, str(folder))))
            figures += _figures(kind, full, count, samples)
    return figures


def _figures(kind: str, full: bool, count: int, samples: dict[str, list[dict[str, float]]]) -> list[Figure]:
    ready = {way: statistics.median(sample["ready_ms"] for sample in samples[way]) for way in WAYS}
    ran = {way: statistics.median(sample["ran_ms"] for sample in samples[way]) for way in WAYS}
    name, least = KINDS[kind]
    name += ", compute cache full" if full else ", compute cache empty"
    note = f"{count} plans; processes: {', '.join(f'{len(samples[way])} {way}' for way in WAYS)}"
    return [
        Figure(f"{name}: hit path / bare load", ready["plancache"] / ready["bare"], "x", "<= 1.15", note),
        Figure(f"{name}: build / hit path", ready["build"] / ready["plancache"], "x", f">= {least}", note),
        Figure(f"{name}: hit path / bare load, each run once", ran["plancache"] / ran["bare"], "x"),
        *(Figure(f"{name}: {way}", ready[way], "ms", None, f"{ran[way]:.0f} ms with each plan run once") for way in WAYS),
    ]


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _main(way: str, kind: str, folder: Path) -> None:
    import torch

    torch.zeros(1, device="cuda")
    if way == "prepare":
        print(_prepare(kind, folder))
        return
    operands = {path.stem: _operands(path) for path in folder.glob("*.json")}
    torch.cuda.synchronize()
    started = time.perf_counter()
    from plancache import graphs

    described = [example for example in graphs.mixed(GRAPHS) if example.name in operands]
    runs = {"bare": _bare, "plancache": _plancache, "build": _build}[way](kind, folder, described, operands)
    ready_s = time.perf_counter() - started
    for run in runs:
        run()
    torch.cuda.synchronize()
    print(json.dumps({"ready_ms": ready_s * 1e3, "ran_ms": (time.perf_counter() - started) * 1e3}))


def _constraints(kind: str) -> Any:
    from plancache import Constraints

    return Constraints(required_behavior_notes=RUNTIME_COMPILED if kind == "compiled" else ())


def _prepare(kind: str, folder: Path) -> int:
    """Fills a cache directory and a folder of bare plans; returns the number of plans."""
    from plancache import PlanCache, graphs

    count = 0
    with PlanCache(folder / "cache", constraints=_constraints(kind), strict=True) as cache:
        for example in graphs.mixed(GRAPHS):
            try:
                plan = cache.plan(example.graph)
            except Exception as error:  # cuDNN has no plan for it under these constraints
                print(f"left out, {example.name}: {error}", file=sys.stderr)
                continue
            (folder / f"{example.name}.plan").write_bytes(plan.entry.blob)
            uids = plan.entry.operands
            facts = [[uid, *operand[2:5], operand.name, operand.by_value] for uid, operand in zip(uids, plan.operands, strict=True)]
            (folder / f"{example.name}.json").write_text(json.dumps([facts, plan.workspace_size]))
            count += 1
    return count


class _Operands:
    """Buffers for one plan by canonical uid and by name, and its workspace, made before the clock starts."""

    def __init__(self, by_uid: dict[int, Any], by_name: dict[str, Any], workspace: Any) -> None:
        self.by_uid, self.by_name, self.workspace = by_uid, by_name, workspace


def _operands(path: Path) -> _Operands:
    import torch

    types = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "FP8_E4M3": torch.float8_e4m3fn}
    facts, workspace_size = json.loads(path.read_text())
    by_uid = {
        uid: torch.empty_strided(dim, stride, dtype=types[kind], device="cpu" if by_value else "cuda")
        for uid, dim, stride, kind, _, by_value in facts
    }
    by_name = {fact[4]: by_uid[fact[0]] for fact in facts}
    return _Operands(by_uid, by_name, torch.empty(max(16, workspace_size), dtype=torch.uint8, device="cuda"))


def _bare(_: str, folder: Path, described: list[Any], operands: dict[str, _Operands]) -> list[Any]:
    import cudnn

    handle = cudnn.create_handle()
    graphs = []
    for example in described:
        graph = cudnn.pygraph(handle=handle)
        graph.deserialize(handle, (folder / f"{example.name}.plan").read_bytes())
        graphs.append(graph)
    owns = [operands[example.name] for example in described]
    return [partial(graph.execute, own.by_uid, own.workspace, handle=handle) for graph, own in zip(graphs, owns, strict=True)]


def _plancache(kind: str, folder: Path, described: list[Any], operands: dict[str, _Operands]) -> list[Any]:
    from plancache import PlanCache

    cache = PlanCache(folder / "cache", constraints=_constraints(kind), strict=True, build="forbid")
    plans = [cache.plan(example.graph) for example in described]
    owns = [operands[example.name] for example in described]
    return [partial(plan.execute, own.by_name, own.workspace) for plan, own in zip(plans, owns, strict=True)]


def _build(kind: str, _: Path, described: list[Any], operands: dict[str, _Operands]) -> list[Any]:
    import cudnn

    handle = cudnn.create_handle()
    for example in described:
        graph = example.graph
        graph._handle = handle
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        if kind == "compiled":
            graph.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
        graph.check_support()
        graph.build_plans()
    return [
        partial(
            example.graph.execute,
            {example.tensors[name]: buffer for name, buffer in own.by_name.items()},
            torch_workspace(example.graph),
            handle=handle,
        )
        for example, own in ((example, operands[example.name]) for example in described)
    ]


def torch_workspace(graph: Any) -> Any:
    """A workspace for a built graph."""
    import torch

    return torch.empty(max(16, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
