"""What plans compute: built, loaded, compiled elsewhere, captured, on any stream and in any thread."""

from __future__ import annotations

import threading

import pytest
from gpu.running import assert_agrees, outputs_of, poisoned, run, same_bits

from plancache import Constraints, Device, PlanCache, graphs

EXAMPLES = [example.name for example in graphs.examples()]


@pytest.fixture(params=EXAMPLES)
def example(request):
    return next(example for example in graphs.examples() if example.name == request.param)


def test_outputs_equal_pytorch_and_a_loaded_plan_equals_the_built_one_bit_for_bit(example, tmp_path):
    """A built plan agrees with PyTorch on poisoned outputs; the loaded one gives the same bits."""
    inputs = example.make_inputs()
    with PlanCache(tmp_path, strict=True) as cache:
        plan = cache.plan(example.graph)
        assert plan.origin == "built"
        built = run(plan, inputs)
    with PlanCache(tmp_path, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        assert plan.origin == "local"
        loaded = run(plan, inputs)
    assert_agrees(example, inputs, built)
    assert same_bits(built, loaded)


def test_a_plan_compiled_without_a_gpu_runs_here(example, tmp_path):
    """An entry built for the device file of this GPU has this GPU's key, loads and computes the right thing."""
    file = tmp_path / "device.json"
    file.write_text(Device.current().to_json())
    with PlanCache(tmp_path, device=Device.from_file(file), strict=True) as cache:
        assert cache.plan(example.graph).entry.quality == "compiled"
    inputs = example.make_inputs()
    with PlanCache(tmp_path, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        assert (plan.origin, plan.entry.quality) == ("local", "compiled")
        assert_agrees(example, inputs, run(plan, inputs))


def test_capture_and_replay_equal_eager(example, stored):
    """A loaded plan whose first execution is captured gives, replayed, the bits of an eager execution."""
    import torch

    inputs = example.make_inputs()
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        workspace = torch.empty(max(16, plan.workspace_size), dtype=torch.uint8, device="cuda")
        captured = outputs_of(plan)
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording):
            plan.execute({**inputs, **captured}, workspace)
        recording.replay()
        torch.cuda.synchronize()
        assert same_bits(captured, run(plan, inputs))


def test_bound_plans_can_be_captured_and_read_new_contents(stored):
    """A bound plan reads its buffers at every call, eagerly and replayed."""
    import torch

    example = graphs.examples()[5]
    inputs = example.make_inputs()
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        outputs = outputs_of(plan)
        run_bound = plan.bind({**inputs, **outputs})
        run_bound()
        torch.cuda.synchronize()
        assert_agrees(example, inputs, outputs)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run_bound()  # finds a workspace of that stream
        side.synchronize()
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, stream=side):
            run_bound()
        inputs["q"].mul_(0.5)
        recording.replay()
        torch.cuda.synchronize()
        assert_agrees(example, inputs, outputs)


def test_a_plan_runs_on_the_callers_stream(stored):
    """Work queued before an execution on a stream of the caller's is seen by it, with and without `stream=`."""
    import torch

    example = graphs.examples()[2]
    inputs = example.make_inputs()
    late = {**inputs, "a": torch.zeros_like(inputs["a"])}
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        for explicit in (False, True):
            late["a"].zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                late["a"].copy_(inputs["a"], non_blocking=True)
                outputs = outputs_of(plan)
                if not explicit:
                    plan.execute({**late, **outputs})
            if explicit:
                plan.execute({**late, **outputs}, stream=stream.cuda_stream)
            stream.synchronize()
            assert_agrees(example, inputs, outputs)


def test_threads_share_a_plan_each_with_its_own_executable(stored):
    """Eight threads run the same plans on streams of their own; every result is right."""
    import torch

    examples = graphs.examples()
    inputs = [example.make_inputs(seed=1) for example in examples]
    failures = []
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plans = [cache.plan(example.graph) for example in examples]
        expected = [run(plan, own) for plan, own in zip(plans, inputs, strict=True)]

        def work():
            try:
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for _ in range(5):
                        for plan, own, right in zip(plans, inputs, expected, strict=True):
                            outputs = outputs_of(plan)
                            plan.execute({**own, **outputs})
                            stream.synchronize()
                            assert same_bits(outputs, right)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_a_graph_with_a_callable_is_built_without_the_cache(tmp_path):
    """An uncacheable graph runs as its caller made it, is counted with its reason, and leaves nothing stored."""
    import cudnn
    import torch

    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    shape, stride = [2, 4, 256, 64], [65536, 16384, 64, 1]
    q, k, v = (graph.tensor(dim=shape, stride=stride, name=name) for name in "qkv")
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=0.125, is_inference=True, score_mod=lambda inner, score: inner.relu(input=score))
    o.set_output(True).set_dim(shape).set_stride(stride).set_name("o")
    with PlanCache(tmp_path, strict=True) as cache:
        plan = cache.plan(graph)
        assert plan.entry is None
        assert list(cache.statistics().uncacheable) == ["sdpa has a callable, score_mod"]
        inputs = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in "qkv"}
        outputs = run(plan, inputs)
        assert cache.entries() == []
    scores = (inputs["q"].float() @ inputs["k"].float().transpose(-1, -2) * 0.125).relu()
    expected = scores.softmax(-1) @ inputs["v"].float()
    torch.testing.assert_close(outputs["o"].float(), expected, rtol=2e-2, atol=2e-2)


def test_constraints_choose_the_engine(tmp_path):
    """A plan keeps the workspace limit, and required and barred notes; each set has an entry of its own."""
    example = graphs.matmul_scale_bias_activation(batch=4, m=256, n=256, k=256)
    inputs = example.make_inputs()
    with PlanCache(tmp_path, strict=True) as cache:
        free = cache.plan(example.graph)
        lean = cache.plan(example.graph, constraints=Constraints(workspace_limit_bytes=0))
        compiled = cache.plan(example.graph, constraints=Constraints(required_behavior_notes=("RUNTIME_COMPILATION",), deterministic=True))
        other = cache.plan(example.graph, constraints=Constraints(barred_engines=(free.entry.engine.partition("_")[0],)))
        assert lean.workspace_size == 0
        assert "RUNTIME_COMPILATION" in compiled.entry.behavior_notes
        assert other.entry.recipe.engine != free.entry.recipe.engine
        assert len({plan.entry.key.digest for plan in (free, lean, compiled, other)}) == 4
        for plan in (free, lean, compiled, other):
            assert_agrees(example, inputs, run(plan, inputs))


def test_lowered_strides_are_what_outputs_are_allocated_from(stored):
    """A convolution's output, whose strides only lowering knows, is channels-last in `Plan.operands`."""
    example = graphs.examples()[0]
    with PlanCache(stored, strict=True, build="forbid") as cache:
        output = next(operand for operand in cache.plan(example.graph).operands if operand.is_output)
    assert output.stride[1] == 1
    assert poisoned(output).shape == output.dim


def test_a_capture_survives_loads_in_another_thread(stored):
    """Plans loaded by a thread, handle included, while another captures in torch's default mode disturb neither."""
    import torch

    inputs = [example.make_inputs() for example in graphs.examples()]
    results = []

    def load():
        try:
            with PlanCache(stored, strict=True, build="forbid") as cache:
                for example, own in zip(graphs.examples(), inputs, strict=True):
                    results.append((cache.plan(example.graph).origin, own is not None))
        except BaseException as error:
            results.append(error)

    space = torch.zeros(16, device="cuda")
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording):
        space.add_(1)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        space.add_(1)
    recording.replay()
    torch.cuda.synchronize()
    assert space[0] == 2
    assert results == [("local", True)] * len(inputs)


def test_device_properties_of_the_driver_are_cudnns():
    """What a key holds of the device, read from the driver, is what cuDNN says of it."""
    mine, cudnns = Device.current(), Device.current().described()
    assert {name: cudnns.properties[name] for name in mine.properties} == mine.properties
    assert cudnns.is_file and not mine.is_file
