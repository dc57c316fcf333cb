"""Unchanged code on a GPU: what it computes through the cache is what it computed without."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from gpu.running import assert_agrees, same_bits

import plancache
from plancache import PlanCache, graphs

EXAMPLES = [example.name for example in graphs.examples()]
TYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "FP8_E4M3": "float8_e4m3fn"}


def described(name: str) -> Any:
    return next(example for example in graphs.examples() if example.name == name)


@pytest.fixture(params=EXAMPLES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def handle():
    import cudnn

    made = cudnn.create_handle()
    yield made
    cudnn.destroy_handle(made)


def poisoned(tensor: Any) -> Any:
    """A buffer for an output as its graph's tensor describes it once it is built, every byte 0xFF."""
    import torch

    dim, stride = tensor.get_dim(), tensor.get_stride()
    buffer = torch.empty_strided(dim, stride, dtype=getattr(torch, TYPES[tensor.get_data_type().name]), device="cuda")
    extent = 1 + sum((size - 1) * step for size, step in zip(dim, stride, strict=True))
    torch.as_strided(buffer, (extent,), (1,)).view(torch.uint8).fill_(0xFF)
    return buffer


def executed(example: Any, inputs: dict[str, Any], handle: Any, *, by: str = "tensor", **more: Any) -> dict[str, Any]:
    """Builds where that was not done, executes once and returns the outputs."""
    import cudnn
    import torch

    graph, tensors = example.graph, example.tensors
    if not graph._is_built:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    outputs = {role: poisoned(tensors[role]) for role in example.precision}
    workspace = torch.empty(max(16, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    buffers = inputs | outputs
    if by == "order":
        graph.execute(list(buffers.values()), workspace, handle=handle, tensor_uids=[tensors[role].get_uid() for role in buffers], **more)
    else:
        names = {
            "tensor": lambda role: tensors[role],
            "uid": lambda role: tensors[role].get_uid(),
            "name": lambda role: tensors[role].get_name(),
        }
        graph.execute({names[by](role): buffer for role, buffer in buffers.items()}, workspace, handle=handle, **more)
    torch.cuda.synchronize()
    return outputs


def with_handle(example: Any, handle: Any) -> Any:
    example.graph._handle = handle
    return example


def with_uids_in_reverse(example: Any) -> Any:
    """The first tensors of the graph get the highest uids, so that operands change their order."""
    for index, tensor in enumerate(example.tensors.values()):
        tensor.set_uid(1000 - index)
    return example


@pytest.mark.parametrize("by", ["tensor", "uid", "name", "order"])
@pytest.mark.parametrize("reverse", [False, True])
def test_results_are_those_of_the_frontend_alone(name, by, reverse, handle, tmp_path):
    """Built and loaded, however buffers are named and uids are given: bit for bit, and right against PyTorch."""

    def fresh() -> Any:
        example = with_handle(described(name), handle)
        return with_uids_in_reverse(example) if reverse else example

    inputs = fresh().make_inputs()
    plain = executed(fresh(), inputs, handle, by=by)
    assert_agrees(described(name), inputs, plain)
    for builds in (1, 0):
        with PlanCache(tmp_path, strict=True) as cache, plancache.installed(cache):
            example = fresh()
            mine = executed(example, inputs, handle, by=by)
            assert (cache.statistics().builds, dict(cache.statistics().fell_through)) == (builds, {})
            assert same_bits(plain, mine)
            assert same_bits(plain, executed(example, inputs, handle, by=by))  # repeated


def test_a_graph_without_a_handle_runs_on_the_one_of_its_execution(name, handle, stored_as_asked):
    """Neither at its description nor, the second time, at its execution a handle is given."""
    inputs = described(name).make_inputs()
    plain = executed(described(name), inputs, handle)
    with PlanCache(stored_as_asked, strict=True, build="forbid") as cache, plancache.installed(cache):
        assert same_bits(plain, executed(described(name), inputs, handle))
        assert same_bits(plain, executed(described(name), inputs, None))


@pytest.fixture(scope="module")
def stored_as_asked(tmp_path_factory, handle):
    """A cache directory in which every example graph was built by unchanged code."""
    directory = tmp_path_factory.mktemp("asked")
    with PlanCache(directory, strict=True) as cache, plancache.installed(cache):
        for name in EXAMPLES:
            executed(with_handle(described(name), handle), described(name).make_inputs(), handle)
        assert cache.statistics().builds == len(EXAMPLES)
    return directory


def test_a_loaded_graph_can_be_captured(name, stored_as_asked):
    """Captured on a side stream by the handle's stream and replayed, it gives the bits of an eager execution."""
    import cudnn
    import torch

    stream, own = torch.cuda.Stream(), cudnn.create_handle()
    cudnn.set_stream(own, stream.cuda_stream)
    inputs = described(name).make_inputs()
    with PlanCache(stored_as_asked, strict=True, build="forbid") as cache, plancache.installed(cache):
        example = with_handle(described(name), own)
        with torch.cuda.stream(stream):
            eager = executed(example, inputs, own)
            outputs = {role: poisoned(example.tensors[role]) for role in example.precision}
            workspace = torch.empty(max(16, example.graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, stream=stream):
            example.graph.execute({example.tensors[role]: buffer for role, buffer in (inputs | outputs).items()}, workspace, handle=own)
        recording.replay()
        torch.cuda.synchronize()
        assert same_bits(outputs, eager)
    cudnn.destroy_handle(own)


def test_a_build_in_a_capture_is_refused_before_cudnn_is_called(stored_as_asked, tmp_path):
    """Loading and building both; the capture goes on and can be replayed."""
    import torch

    for directory in (stored_as_asked, tmp_path):
        x, y = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        recording = torch.cuda.CUDAGraph()
        with PlanCache(directory, strict=True) as cache, plancache.installed(cache):
            example = described(EXAMPLES[0])
            example.graph.validate()
            example.graph.build_operation_graph()
            example.graph.create_execution_plans()
            with torch.cuda.graph(recording):
                y.copy_(x)
                with pytest.raises(plancache.errors.CaptureError):
                    example.graph.build_plans()
                y.add_(x)
        recording.replay()
        torch.cuda.synchronize()
        assert y.tolist() == [2.0] * 8


def test_the_wrapper_of_the_frontend_is_served(tmp_path):
    """`cudnn.Graph` plans at the end of its block and allocates outputs from what lowering resolved."""
    import cudnn
    import torch

    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    w = torch.randn(32, 64, 3, 3, device="cuda", dtype=torch.float16).mul(0.1).to(memory_format=torch.channels_last)

    def run() -> Any:
        types = {"io_data_type": cudnn.data_type.HALF, "compute_data_type": cudnn.data_type.FLOAT}
        wrapper = cudnn.Graph(inputs=[x, w], outputs=["y"], handle="auto", **types)
        with wrapper as graph:
            y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
            y.set_output(True).set_name("y")
        return wrapper(x, w)

    plain = run()
    for builds in (1, 0):
        with PlanCache(tmp_path, strict=True) as cache, plancache.installed(cache):
            mine = run()
            assert cache.statistics().builds == builds
            assert mine.stride() == plain.stride()
            assert torch.equal(plain, mine)


def test_a_plan_that_is_picked_by_its_index_runs(handle, stored_as_asked):
    """Every plan of the list is built, sized and executed as the frontend does it; the stored one without a build."""
    import torch

    name = EXAMPLES[0]
    inputs = described(name).make_inputs()
    results = []
    for served in (False, True):
        example = with_handle(described(name), handle)
        graph, tensors = example.graph, example.tensors
        with PlanCache(stored_as_asked, strict=True) as cache, plancache.installed(cache if served else PlanCache(mode="off")):
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans()
            found = {}
            for index in range(min(4, graph.get_execution_plan_count())):
                graph.build_plan_at_index(index)
                size = graph.get_workspace_size_plan_at_index(index)
                outputs = {role: poisoned(tensors[role]) for role in example.precision}
                workspace = torch.empty(max(16, size), dtype=torch.uint8, device="cuda")
                graph.execute_plan_at_index({tensors[role]: b for role, b in (inputs | outputs).items()}, workspace, index, handle)
                torch.cuda.synchronize()
                found[graph.get_plan_name_at_index(index)] = (size, outputs)
        results.append(found)
    plain, mine = results
    assert list(plain) == list(mine)
    for plan, (size, outputs) in plain.items():
        assert size == mine[plan][0]
        assert same_bits(outputs, mine[plan][1])


def test_threads_load_their_own(stored_as_asked):
    """Eight threads with handles of their own run the same loaded graph of each; every result is right."""
    import cudnn

    wrong: list[BaseException] = []

    def work() -> None:
        try:
            own = cudnn.create_handle()
            for name in EXAMPLES:
                example = with_handle(described(name), own)
                inputs = example.make_inputs()
                assert_agrees(example, inputs, executed(example, inputs, own))
        except BaseException as error:
            wrong.append(error)

    with PlanCache(stored_as_asked, strict=True, build="forbid") as cache, plancache.installed(cache):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]


def test_a_program_that_knows_nothing_of_plancache(tmp_path):
    """The benchmark's program, plain and under `plancache run`, twice: the same results, and nothing built the second time."""
    root = Path(plancache.__file__).parents[1]
    program = [sys.executable, "-m", "benchmarks.program", "plain"]
    launched = [sys.executable, "-m", "plancache", "run", "--", *program]
    environment = {**os.environ, "PLANCACHE_DIR": str(tmp_path), "PLANCACHE_STRICT": "1", "PLANCACHE_LOG": "info"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    told = [subprocess.run(one, env=environment, cwd=root, capture_output=True, text=True) for one in (program, launched, launched)]
    assert [one.returncode for one in told] == [0, 0, 0], told[-1].stderr[-2000:]
    digests = {one.stdout.rpartition('"digest": ')[2] for one in told}
    assert len(digests) == 1
    assert "40 builds" in told[1].stderr
    assert "0 builds" in told[2].stderr


@pytest.mark.parametrize("name", ["conv_block", "transformer_block"])
def test_the_examples_start_from_the_cache(name, tmp_path):
    """Run twice: each checks itself against PyTorch, and the second builds nothing."""
    example = Path(plancache.__file__).parents[1] / "examples" / f"{name}.py"
    environment = {**os.environ, "PLANCACHE_DIR": str(tmp_path), "PLANCACHE_STRICT": "1"}
    told = [subprocess.run([sys.executable, str(example)], env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [one.returncode for one in told] == [0, 0], told[0].stderr[-2000:] + told[1].stderr[-2000:]
    assert " 0 plans loaded" in told[0].stdout
    assert " 0 built" in told[1].stdout
