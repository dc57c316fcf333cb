"""Unchanged programs on a GPU: `benchmarks.program` plain, under `plancache run`, and with `deserialize` in place of planning.

What is timed is what the program itself times: each graph from its description to its first result.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, compute_cache, in_fresh_process

_PROGRAM = [sys.executable, "-m", "benchmarks.program"]
_CALLS = 300


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Start-up, overhead of interception, replay of captured plans, and four processes at once."""
    directory.mkdir(parents=True)
    return [*_start_up(directory, rounds), *_overhead(), *_ranks(directory)]


# ---- start-up


def _start_up(directory: Path, rounds: int) -> list[Figure]:
    plans = directory / "plans"
    plans.mkdir()
    with compute_cache(directory / "nv-prepare"):
        _run("prepare", str(plans))
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in ("plain", "run, empty cache", "run, full cache", "deserialize")}
    for number in range(rounds):
        with compute_cache(directory / f"nv-{number}"):
            if number < max(2, rounds // 3):
                samples["plain"].append(_run("plain"))
        with compute_cache(directory / f"nv-empty-{number}"):
            if number < max(2, rounds // 3):
                samples["run, empty cache"].append(_run("plain", cache=directory / f"cache-{number}"))
        for way, cached, arguments in (
            ("deserialize", None, ("deserialize", str(plans))),
            ("run, full cache", directory / "cache-0", ("plain",)),
        ):
            with compute_cache(directory / f"nv-{way[0]}-{number}"):
                samples[way].append(_run(*arguments, cache=cached))
    middle = {
        way: {part: statistics.median(run[part] for run in runs) for part in ("seconds", "compiled", "shipped")}
        for way, runs in samples.items()
    }
    digests = {run["digest"] for runs in samples.values() for run in runs}
    full = middle["run, full cache"]
    same = "the same" if len(digests) == 1 else "NOT THE SAME"
    note = f"{samples['plain'][0]['graphs']} graphs; {rounds} rounds; results are {same} bit for bit"
    figures = [
        Figure("program under run, full cache / deserialize", full["seconds"] / middle["deserialize"]["seconds"], "x", "<= 1.25", note),
        Figure("program plain / under run, full cache", middle["plain"]["seconds"] / full["seconds"], "x", ">= 10"),
    ]
    for part in ("compiled", "shipped"):
        figures.append(Figure(f"  of engines that are {part}", middle["plain"][part] / max(1e-9, full[part]), "x"))
    figures += [Figure(f"program: {way}", parts["seconds"] * 1e3, "ms") for way, parts in middle.items()]
    return figures


def _run(*arguments: str, cache: Path | None = None) -> dict[str, Any]:
    done = subprocess.run(_command(arguments, cache), stdout=subprocess.PIPE, text=True, check=True, env=_environment(cache))
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _command(arguments: tuple[str, ...], cache: Path | None) -> list[str]:
    program = [*_PROGRAM, *arguments]
    return program if cache is None else [sys.executable, "-m", "plancache", "run", "--", *program]


def _environment(cache: Path | None) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return others if cache is None else {**others, "PLANCACHE_DIR": str(cache), "PLANCACHE_STRICT": "1"}


# ---- overhead


def _overhead() -> list[Figure]:
    found = json.loads(in_fresh_process("benchmarks.serving", "overhead"))
    return [
        Figure("execute, intercepted and loaded / bare", found["served_us"] / found["bare_us"], "x", "<= 1.03"),
        Figure("execute of uids, intercepted and loaded / bare", found["served_ordered_us"] / found["bare_ordered_us"], "x", "<= 1.03"),
        Figure(
            "a miss beyond build and comparison", found["miss_ms"], "ms", "<= 1.5", f"median of {found['misses']} graphs, store included"
        ),
        Figure("execute: launch overhead that replay removes", found["served_us"] - found["replay_us"], "us", None, "a call"),
        Figure("execute, intercepted and loaded", found["served_us"], "us"),
        Figure("replay of a CUDA graph of it", found["replay_us"], "us"),
    ]


def _measure_overhead() -> None:
    import tempfile

    import torch

    import plancache
    from benchmarks import program

    case = program.convolution(1, 64, 64, 14)  # small: the host's part is what counts
    calls: dict[str, list[float]] = {name: [] for name in ("bare_us", "served_us", "bare_ordered_us", "served_ordered_us", "replay_us")}
    with tempfile.TemporaryDirectory() as directory, plancache.PlanCache(directory, strict=True) as cache:
        bare = program.described(case)
        bare[0].build(program.MODES)
        with plancache.installed(cache):
            program.described(case)[0].build(program.MODES)
            served = program.described(case)
            served[0].build(program.MODES)
        assert cache.statistics().hits == 1
        runs = {"bare": _runner(case, *bare), "served": _runner(case, *served)}
        captured = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        import cudnn

        cudnn.set_stream(program.HANDLE, stream.cuda_stream)
        with torch.cuda.graph(captured, stream=stream):
            runs["served"][0]()
        cudnn.set_stream(program.HANDLE, torch.cuda.current_stream().cuda_stream)
        for _ in range(15):
            for name, (by_uid, ordered) in runs.items():
                calls[f"{name}_us"].append(_per_call_us(by_uid))
                calls[f"{name}_ordered_us"].append(_per_call_us(ordered))
            calls["replay_us"].append(_per_call_us(captured.replay))
        misses = _misses(cache)
    print(
        json.dumps(
            {name: statistics.median(values) for name, values in calls.items()}
            | {"miss_ms": statistics.median(misses), "misses": len(misses)}
        )
    )


def _runner(case: Any, graph: Any, tensors: dict[str, Any], outputs: dict[str, Any]) -> tuple[Any, Any]:
    """A function that executes a graph with a mapping of uids, and one with a list."""
    import torch

    from benchmarks import program

    (output,) = outputs.values()
    result = torch.empty_strided(output.get_dim(), output.get_stride(), dtype=torch.float16, device="cuda")
    buffers = {tensors[name].get_uid(): value for name, value in case.inputs.items()} | {output.get_uid(): result}
    workspace = torch.empty(max(16, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    uids, values = list(buffers), list(buffers.values())
    return (
        lambda: graph.execute(buffers, workspace, handle=program.HANDLE),
        lambda: graph.execute(values, workspace, handle=program.HANDLE, tensor_uids=uids),
    )


def _per_call_us(call: Any) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return seconds / _CALLS * 1e6


def _misses(cache: Any) -> list[float]:
    """Milliseconds of each miss that are neither the build nor the comparison of the copy with the graph."""
    import plancache
    from benchmarks import program

    backend = cache._targets.current().backend
    compared: list[float] = []
    check_copy = backend.check_copy

    def timed(reading: Any) -> None:
        started = time.perf_counter()
        check_copy(reading)
        compared.append(time.perf_counter() - started)

    backend.check_copy = timed
    found = []
    with plancache.installed(cache):
        for index in range(20):
            graph = program.described(program.convolution(1 + index, 32, 32, 14))[0]
            before = cache.statistics()
            started = time.perf_counter()
            graph.build(program.MODES)
            seconds = time.perf_counter() - started
            after = cache.statistics()
            assert after.stored == before.stored + 1
            found.append((seconds - (after.build_s - before.build_s) - compared[-1]) * 1e3)
    backend.check_copy = check_copy
    return found[2:]  # what is imported for the first miss is not the others'


# ---- ranks


def _ranks(directory: Path, count: int = 4) -> list[Figure]:
    cache = directory / "ranks"
    seconds, results = {}, []
    for way, cached in (("plain", None), ("one cache", cache)):
        with compute_cache(directory / f"nv-ranks-{way}"):
            started = time.perf_counter()
            processes = [
                subprocess.Popen(_command(("plain",), cached), stdout=subprocess.PIPE, text=True, env=_environment(cached))
                for _ in range(count)
            ]
            results += [json.loads(process.communicate()[0].strip().splitlines()[-1]) for process in processes]
            seconds[way] = time.perf_counter() - started
    from plancache import PlanCache

    with PlanCache(cache) as opened:
        stored = len(opened.entries())
    same = len({result["digest"] for result in results}) == 1
    note = f"{stored} plans stored, {results[0]['graphs']} graphs; results are {'the same' if same else 'NOT THE SAME'} bit for bit"
    return [
        Figure(f"{count} processes at once, plain / one empty cache", seconds["plain"] / seconds["one cache"], "x", None, note),
        *(Figure(f"{count} processes at once: {way}", value * 1e3, "ms") for way, value in seconds.items()),
    ]


if __name__ == "__main__":
    _measure_overhead()
