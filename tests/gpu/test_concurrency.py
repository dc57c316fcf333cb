"""Threads, streams, captures and many loads on a real GPU. The long forms run with `make stress`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpu.running import outputs_of, run, same_bits

from plancache import PlanCache, graphs
from plancache.errors import CaptureError, NotExecutableError

torch = pytest.importorskip("torch")


@pytest.fixture
def cache(stored: Path) -> Iterator[PlanCache]:
    with PlanCache(stored, strict=True, build="forbid") as opened:
        yield opened


@pytest.mark.stress
def test_threads_with_streams_of_their_own_run_the_same_plans(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    """8 threads over the same 20 plans: what each computes is bit for bit what one thread alone computed."""
    executions = scale(200, 10_000)
    examples = list(graphs.mixed(20))
    inputs = [example.make_inputs() for example in examples]
    with PlanCache(tmp_path, strict=True) as cache:
        plans = [cache.plan(example.graph) for example in examples]
        expected = [run(plan, given) for plan, given in zip(plans, inputs, strict=True)]

        def work(number: int) -> int:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                outputs = [outputs_of(plan) for plan in plans]
                for count in range(executions):
                    at = (count + number) % len(plans)
                    plans[at].execute({**inputs[at], **outputs[at]})
                    if count % max(1, executions // 20) == 0:
                        stream.synchronize()
                        assert same_bits(outputs[at], expected[at]), f"thread {number}, {examples[at].name}"
                        for buffer in outputs[at].values():
                            buffer.zero_()
                for at in range(len(plans)):
                    plans[at].execute({**inputs[at], **outputs[at]})
                stream.synchronize()
            return sum(same_bits(mine, theirs) for mine, theirs in zip(outputs, expected, strict=True))

        torch.cuda.synchronize()
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == [20] * 8


def test_a_capture_outlives_loads_builds_and_releases_in_another_thread(tmp_path: Path) -> None:
    """Torch's default mode captures in this thread while the other one loads, builds, drops and closes; the replay is right."""
    example, *others = graphs.mixed(8)
    given = example.make_inputs()
    with PlanCache(tmp_path / "warm", strict=True) as warm:
        for other in others[:4]:
            warm.plan(other.graph)
    with PlanCache(tmp_path / "own", strict=True) as cache:
        plan = cache.plan(example.graph)
        expected = run(plan, given)
        outputs, graph = outputs_of(plan), torch.cuda.CUDAGraph()
        call = plan.bind({**given, **outputs})
        done: list[str] = []

        def disturb() -> None:
            with PlanCache(tmp_path / "warm", strict=True, max_live_bytes=0) as other:
                loaded = [other.plan(each.graph).origin for each in others[:4]]
                built = [other.plan(each.graph).origin for each in others[4:]]
                gc.collect()
                other.plan(others[0].graph)  # frees what was let go of
            done.append(",".join([*loaded, *built]))

        with torch.cuda.graph(graph):
            call()
            thread = threading.Thread(target=disturb)
            thread.start()
            thread.join()
            call()
        graph.replay()
        torch.cuda.synchronize()
        assert done == [",".join(["local"] * 4 + ["built"] * 3)]
        assert same_bits(outputs, expected)


def test_what_is_not_ready_is_refused_while_the_stream_captures(cache: PlanCache, tmp_path: Path) -> None:
    """A load, a build and a thread's first execution raise; a plan that is ready runs; the capture goes on."""
    example, second, *_ = graphs.examples()
    given = example.make_inputs()
    plan = cache.plan(example.graph)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = run(plan, given)  # its workspace on this stream is there from now on
    outputs, captured = outputs_of(plan), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with PlanCache(tmp_path, strict=True) as empty, torch.cuda.graph(captured, stream=stream):
        for refused in (lambda: cache.plan(second.graph), lambda: empty.plan(example.graph)):
            with pytest.raises(CaptureError, match="captur"):
                refused()
        assert cache.plan(example.graph).origin == "memory"
        plan.execute({**given, **outputs})
    captured.replay()
    torch.cuda.synchronize()
    assert same_bits(outputs, expected)


@pytest.mark.stress
def test_memory_stays_where_plans_come_and_go(stored: Path, scale: Callable[[int, int], int]) -> None:
    """Plans are loaded, run and evicted again and again: after the first tenth neither memory grows by 1 percent."""
    cycles = scale(500, 10_000)
    examples = [example for example in graphs.examples() if "norm" not in example.name]
    inputs = [example.make_inputs() for example in examples]
    with PlanCache(stored, strict=True, build="forbid", max_live_bytes=0) as cache:
        buffers = [outputs_of(cache.plan(example.graph)) for example in examples]
        before = None
        for cycle in range(cycles):
            at = cycle % len(examples)
            cache._plans.clear()
            plan = cache.plan(examples[at].graph)
            assert plan.origin == "local"
            plan.execute({**inputs[at], **buffers[at]})
            del plan
            if cycle == cycles // 10:
                before = _memory()
        assert before is not None
        after = _memory()
    for name, bytes_before in before.items():
        assert after[name] <= bytes_before * 1.01, f"{name}: {bytes_before:,} -> {after[name]:,} bytes"


def _memory() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"device": total - free, "host": pages * os.sysconf("SC_PAGE_SIZE")}


def test_threads_that_end_give_their_handles_and_plans_back(cache: PlanCache) -> None:
    """Each of 30 short threads loads and runs a plan; what they held is freed at the next look-up."""
    example = next(iter(graphs.examples()))
    given = example.make_inputs()
    plan = cache.plan(example.graph)
    expected = run(plan, given)

    def work() -> None:
        assert same_bits(run(plan, given), expected)

    releases = cache._targets.current().backend.releases
    for _ in range(30):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert releases.drain() == 60
    assert same_bits(run(plan, given), expected)


def test_a_forked_child_is_told_and_leaves_the_parent_alone(cache: PlanCache) -> None:
    """CUDA does not outlive a fork: plan and execution raise in the child, which ends well; the parent goes on."""
    example = next(iter(graphs.examples()))
    given = example.make_inputs()
    plan = cache.plan(example.graph)
    expected = run(plan, given)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            plan.execute({})
        except NotExecutableError:
            try:
                cache.plan(example.graph)
            except Exception:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(run(plan, given), expected)
    assert cache.plan(example.graph).origin == "memory"


def test_a_plan_for_another_device_under_a_right_checksum_is_refused_and_replaced(tmp_path: Path) -> None:
    """cuDNN's own check is the last one: the row is quarantined, the plan built anew, and the next process hits."""
    from dataclasses import replace

    from plancache import Device
    from plancache.errors import PlancacheWarning

    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14)
    other = Device.current().described()
    other = Device({**other.properties, "maxThreadsPerSM": 1024}, other.cudnn_version)
    with PlanCache(tmp_path / "other", device=other, strict=True) as foreign:
        blob = foreign.plan(example.graph).entry.blob
    with PlanCache(tmp_path / "mine", strict=True) as cache:
        entry = cache.plan(example.graph).entry
        cache._levels.put(replace(entry, blob=blob, quality="tuned"), replace_equal=True)
    with PlanCache(tmp_path / "mine") as cache:
        with pytest.warns(PlancacheWarning, match="does not load"):
            assert cache.plan(example.graph).origin == "built"
        (verdict,) = cache._levels.verdicts(entry.key.digest)
        assert verdict.kind == "quarantined" and verdict.reason.startswith("load:")
    with PlanCache(tmp_path / "mine", strict=True) as cache:
        plan: Any = cache.plan(example.graph)
        assert plan.origin == "local"
        given = example.make_inputs()
        assert same_bits(run(plan, given), run(plan, given))
