"""Every execution checks what it is given, before cuDNN sees it."""

from __future__ import annotations

import threading

import pytest
from gpu.running import assert_agrees, outputs_of

from plancache import PlanCache, graphs
from plancache.errors import NotExecutableError, OperandError, WorkspaceError


@pytest.fixture(scope="module")
def prepared(stored):
    """A matmul -> scale -> bias -> GELU -> AMAX plan, its example and its operands by name."""
    example = graphs.examples()[2]
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        yield plan, example, example.make_inputs()


@pytest.fixture
def operands(prepared):
    plan, _, inputs = prepared
    return {**inputs, **outputs_of(plan)}


def test_operands_by_tensor_uid_and_name_are_the_same(prepared, operands):
    """The three ways to name an operand bind the same buffers."""
    import torch

    plan, example, inputs = prepared
    for names in (
        example.tensors,
        {name: tensor.uid for name, tensor in example.tensors.items()},
        {name: name for name in example.tensors},
    ):
        outputs = outputs_of(plan)
        plan.execute({names[name]: buffer for name, buffer in {**operands, **outputs}.items()})
        torch.cuda.synchronize()
        assert_agrees(example, inputs, outputs)


def test_a_number_is_taken_for_a_by_value_scalar(prepared, operands):
    """A Python number binds a pass-by-value operand as a CPU tensor of one element does."""
    import torch

    plan, example, inputs = prepared
    plan.execute({**operands, "scale": float(inputs["scale"])})
    torch.cuda.synchronize()
    assert_agrees(example, inputs, operands)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("a", lambda t: t.half(), "dtype is torch.float16; expected BFLOAT16"),
        ("a", lambda t: t.cpu(), "it is on cpu"),
        ("a", lambda t: t[:, :, :256], "expected shape"),
        ("a", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "strides"),
        ("a", lambda t: t.flatten(), "expected shape"),
        ("a", lambda t: t.data_ptr(), "an address cannot be checked"),
        ("a", lambda t: t.tolist(), "pass a torch tensor"),
        ("scale", lambda t: t.cuda(), "read on the host"),
        ("scale", lambda t: t.double(), "read on the host"),
        ("scale", lambda t: str(float(t)), "read on the host"),
    ],
)
def test_a_buffer_that_is_not_as_declared_is_refused(prepared, operands, name, change, says):
    """Wrong dtype, device, shape, strides, kind: each is an error that names the operand and the cure."""
    plan, _, _ = prepared
    for call in (plan.execute, plan.bind):
        with pytest.raises(OperandError, match=says) as caught:
            call({**operands, name: change(operands[name])})
        assert repr(name) in str(caught.value)


def test_a_misaligned_buffer_is_refused(prepared, operands):
    """An address that is no multiple of 16 bytes is an error: plans are built for aligned operands."""
    import torch

    plan, _, _ = prepared
    a = operands["a"]
    shifted = torch.empty(a.numel() + 1, dtype=a.dtype, device="cuda")[1:].view(a.shape)
    with pytest.raises(OperandError, match="not a multiple of 16"):
        plan.execute({**operands, "a": shifted})


def test_missing_foreign_double_and_renumbered_operands_are_refused(prepared, operands):
    """The set of operands must be exactly the graph's, and the graph's numbering that of planning."""
    plan, example, _ = prepared
    with pytest.raises(OperandError, match="missing operands: 'bias'"):
        plan.execute({name: buffer for name, buffer in operands.items() if name != "bias"})
    stranger = graphs.examples()[2].tensors["a"]
    with pytest.raises(OperandError, match="no operand of this plan"):
        plan.execute({**operands, stranger: operands["a"]})
    with pytest.raises(OperandError, match="no operand of this plan"):
        plan.execute({**operands, "nonsense": operands["a"]})
    with pytest.raises(OperandError, match="given twice"):
        plan.execute({**operands, example.tensors["a"]: operands["a"]})


def test_a_renumbered_tensor_is_refused(stored):
    """A uid that changed after planning could name another tensor's buffer: an error."""
    example = graphs.examples()[2]
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        operands = {example.tensors[name]: buffer for name, buffer in {**example.make_inputs(), **outputs_of(plan)}.items()}
        example.tensors["a"].set_uid(77)
        with pytest.raises(OperandError, match="plan the graph again"):
            plan.execute(operands)


def test_workspaces_are_checked_and_not_allocated_during_capture(stored):
    """Too small, on the host or of the wrong kind is refused; so is a capture that would allocate one."""
    import torch

    example = next(example for example in graphs.examples() if example.name.startswith("rms_norm"))
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        assert plan.workspace_size > 0
        operands = {**example.make_inputs(), **outputs_of(plan)}
        for bad in (
            torch.empty(plan.workspace_size - 1, dtype=torch.uint8, device="cuda"),
            torch.empty(plan.workspace_size, dtype=torch.uint8),
            b"bytes",
        ):
            with pytest.raises(WorkspaceError):
                plan.execute(operands, bad)
        recording = torch.cuda.CUDAGraph()
        space = torch.zeros(16, device="cuda")
        with torch.cuda.graph(recording):
            space.add_(1)
            with pytest.raises(WorkspaceError, match="capturing"):
                plan.execute(operands)
        recording.replay()
        torch.cuda.synchronize()
        assert space[0] == 1  # the capture survived the refusal


def test_a_bound_plan_belongs_to_its_thread_and_its_cache(stored):
    """A bound plan called in another thread, or any plan after close, is a clear error."""
    example = graphs.examples()[1]
    caught = []
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        operands = {**example.make_inputs(), **outputs_of(plan)}
        bound = plan.bind(operands)

        def elsewhere():
            with pytest.raises(NotExecutableError) as error:
                bound()
            caught.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert caught
    with pytest.raises(NotExecutableError, match="closed"):
        plan.execute(operands)
    with pytest.raises(NotExecutableError):
        bound()


def test_flat_buffers_bind_to_dims_of_one(stored):
    """Extents of 1 may be left out: a bias of shape (n,) binds to one declared (1, 1, n)."""
    import torch

    example = graphs.examples()[2]
    inputs = example.make_inputs()
    with PlanCache(stored, strict=True, build="forbid") as cache:
        plan = cache.plan(example.graph)
        outputs = outputs_of(plan)
        plan.execute({**inputs, **outputs, "bias": inputs["bias"].flatten()})
        torch.cuda.synchronize()
        assert_agrees(example, inputs, outputs)
