"""Tuning beside the exhaustive loop on a GPU: wall time, what each chose, and whether fresh processes choose alike.

The exhaustive loop: heuristic modes A, B and FALLBACK, every candidate built in turn, 3 warm-up and 15 timed runs each, the
least median wins. What both chose, and the heuristic's first choice, is then timed again side by side, interleaved, each
run with a cold L2. All with the driver's compute cache empty.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, compute_cache, in_fresh_process

TUNINGS = 5
WARM_UP, TIMED = 3, 15
MODES = ("A", "B", "FALLBACK")


def measure(directory: Path, rounds: int) -> list[Figure]:
    """All figures; `rounds` (at most five) is the number of tunings in fresh processes."""
    directory.mkdir(parents=True, exist_ok=True)
    loop = json.loads(_fresh("exhaustive", directory))
    tunings = [json.loads(_fresh("tune", directory / f"tuned-{number}")) for number in range(min(TUNINGS, rounds))]
    again = json.loads(_fresh("retime", directory))
    return [*_wall(loop, tunings), *_quality(again), *_agreement(tunings)]


def _fresh(way: str, directory: Path) -> str:
    with compute_cache(None):
        return in_fresh_process("benchmarks.tuning", way, str(directory))


def _wall(loop: dict[str, Any], tunings: list[dict[str, Any]]) -> list[Figure]:
    wall = statistics.median(tuning["wall_s"] for tuning in tunings)
    cpu = statistics.median(tuning["cpu_s"] for tuning in tunings)
    note = f"{len(loop['chosen'])} graphs, median of {len(tunings)} tunings"
    return [
        Figure("exhaustive loop / tuning, wall time", loop["wall_s"] / wall, "x", ">= 5", note),
        Figure("exhaustive loop: wall", loop["wall_s"], "s", None, f"CPU {loop['cpu_s']:.0f} s, {loop['candidates']} candidates"),
        Figure("tuning: wall", wall, "s", None, f"CPU {cpu:.0f} s, children included"),
    ]


def _quality(again: dict[str, Any]) -> list[Figure]:
    against = [case["tuned"][1] / case["exhaustive"][1] for case in again.values()]
    apart = {
        name: case
        for name, case in again.items()
        if case["tuned"][0] > case["exhaustive"][2] and case["tuned"][1] > 1.05 * case["exhaustive"][1]
    }
    gains = {name: case["heuristic"][1] / case["tuned"][1] for name, case in again.items()}
    best = sorted(gains, key=lambda name: -gains[name])[:3]
    return [
        Figure("tuned / exhaustive winner, geometric mean", _geometric_mean(against), "x", "<= 1.02", f"worst {max(against):.3f}"),
        Figure("tuned plans more than 5 % slower, intervals apart", float(len(apart)), "", "<= 0", ", ".join(apart)),
        Figure("heuristic's first choice / tuned, geometric mean", _geometric_mean(list(gains.values())), "x", None, "what tuning wins"),
        *(Figure(f"  largest gain: {name[:56]}", gains[name], "x") for name in best),
    ]


def _agreement(tunings: list[dict[str, Any]]) -> list[Figure]:
    names = tunings[0]["chosen"].keys()
    differ = [name for name in names if len({tuning["chosen"][name] for tuning in tunings}) > 1]
    return [
        Figure(
            "graphs with one recipe in all tunings",
            1 - len(differ) / len(names),
            "",
            ">= 0.95",
            f"{len(tunings)} tunings; {', '.join(differ)}",
        )
    ]


def _geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _exhaustive(directory: Path) -> dict[str, Any]:
    """The loop as people write it; the winner's and the first candidate's plans are kept for `retime`."""
    import torch

    from benchmarks.suite import cases

    described, started = list(cases()), time.perf_counter()
    chosen, candidates = {}, 0
    for number, case in enumerate(described):
        bench = _bench(case.graph, directory / "loop")
        options = bench.options()
        planned = bench._planned
        first = planned.build(options[0].candidate)
        bench._make_buffers(first)
        best = (math.inf, options[0].candidate)
        for option in options:
            try:
                best = min(best, (_timed(torch, bench, planned, option.candidate), option.candidate), key=lambda pair: pair[0])
            except Exception as error:  # one candidate's; the loop goes on
                print(f"{option.candidate.name}: {error}", file=sys.stderr)
            candidates += 1
        paused = time.perf_counter()
        _keep(directory / f"{number}.exhaustive", planned.build(best[1]))
        _keep(directory / f"{number}.heuristic", first)
        started += time.perf_counter() - paused
        chosen[case.name] = best[1].name
    return {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time(), "chosen": chosen, "candidates": candidates}


def _timed(torch: Any, bench: Any, planned: Any, candidate: Any) -> float:
    """Builds a candidate of a planned graph, and the median of its timed runs in milliseconds."""
    copy, index, handle = planned._copy, planned.places[candidate.name], bench._backend.handle()
    copy.build_plan_at_index(index)
    workspace = torch.empty(max(16, copy.get_workspace_size_plan_at_index(index)), dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UP):
        copy.execute_plan_at_index(bench._buffers, workspace, index, handle=handle)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
    for begin, end in marks:
        begin.record()
        copy.execute_plan_at_index(bench._buffers, workspace, index, handle=handle)
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in marks))


def _keep(path: Path, built: Any) -> None:
    from plancache.entry import encode_facts

    path.with_suffix(path.suffix + ".json").write_bytes(encode_facts(built))
    path.write_bytes(built.blob)


def _kept(path: Path) -> Any:
    from plancache.entry import Built, decode_facts

    facts, _ = decode_facts(path.with_suffix(path.suffix + ".json").read_bytes())
    return Built(blob=path.read_bytes(), **facts)


def _bench(graph: Any, directory: Path) -> Any:
    from plancache import Constraints, PlanCache, Tuning
    from plancache.environment import variables_of_this_process
    from plancache.signature import read
    from plancache.workbench import Workbench

    if directory not in _CACHES:
        _CACHES[directory] = PlanCache(directory, strict=True)
    target = _CACHES[directory]._targets.current()
    builders = target.builders(variables_of_this_process(), 0)
    return Workbench(target.backend, builders, read(graph, target.device).signature, Constraints(), Tuning(), {})


_CACHES: dict[Path, Any] = {}


def _tune(directory: Path) -> dict[str, Any]:
    """Every graph through `PlanCache.tune`, from an empty cache: planning by the heuristic counts."""
    from benchmarks.suite import cases
    from plancache import PlanCache

    described, started = list(cases()), time.perf_counter()
    with PlanCache(directory, strict=True) as cache:
        done = cache.tune([case.graph for case in described])
        wall = time.perf_counter() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    chosen = {case.name: (tuned.entry or tuned.before).recipe.name for case, tuned in zip(described, done, strict=True)}
    for case, tuned in zip(described, done, strict=True):
        if tuned.entry is None:
            print(f"{case.name}: {tuned.reason}", file=sys.stderr)
    return {"wall_s": wall, "cpu_s": time.process_time() + children.ru_utime + children.ru_stime, "chosen": chosen}


def _retime(directory: Path) -> dict[str, Any]:
    """Low end, median and high end in microseconds of each graph's three plans, timed side by side."""
    from benchmarks.suite import cases
    from plancache import PlanCache
    from plancache.jury import Contestant

    result: dict[str, Any] = {}
    with PlanCache(directory / "tuned-0", strict=True, build="forbid") as cache:
        for number, case in enumerate(cases()):
            bench = _bench(case.graph, directory / "tuned-0")
            plans = {
                "tuned": cache.plan(case.graph).entry,
                "exhaustive": _kept(directory / f"{number}.exhaustive"),
                "heuristic": _kept(directory / f"{number}.heuristic"),
            }
            distinct = {plan.recipe.name: bench.load(plan) for plan in plans.values()}
            bench.time_us(list(distinct.values()), 8)
            times = dict(zip(distinct, bench.time_us(list(distinct.values()), 100), strict=True))
            result[case.name] = {}
            for way, plan in plans.items():
                timed = Contestant(None, 0, times_us=times[plan.recipe.name])  # type: ignore[arg-type]  # only its times are asked
                low, high = timed.interval_us()
                result[case.name][way] = [low, timed.median_us, high, plan.recipe.name]
    return result


if __name__ == "__main__":
    import torch

    torch.zeros(1, device="cuda")
    print(json.dumps({"exhaustive": _exhaustive, "tune": _tune, "retime": _retime}[sys.argv[1]](Path(sys.argv[2]))))
    for opened in _CACHES.values():
        opened.close()
