"""What a plan checks before cuDNN is called, on CPU tensors and an executable that only notes its calls."""

from __future__ import annotations

from typing import Any

import pytest

from plancache.capture import Releases
from plancache.entry import Layout
from plancache.errors import NotExecutableError, OperandError
from plancache.plan import Loaded, Plan

torch = pytest.importorskip("torch")

HOST = -1  # get_device() of a CPU tensor: it takes the GPU's place here


class Noting:
    """An executable that notes the addresses it is run with."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []

    def run(self, _: Any, addresses: list[int], *__: Any) -> None:
        self.runs.append(list(addresses))

    def runner(self, *bound: Any) -> Any:
        return lambda stream: self.run(*bound, stream)


class Case:
    """y = x * scale, the scale passed by value."""

    def __init__(self) -> None:
        import cudnn

        graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
        self.x = graph.tensor([2, 3, 8], name="x")
        self.scale = graph.tensor([1, 1, 1], name="scale", is_pass_by_value=True)
        self.y = graph.mul(self.x, self.scale).set_output(True).set_name("y")
        layouts = [Layout((2, 3, 8), (24, 8, 1), "FLOAT"), Layout((1, 1, 1), (1, 1, 1), "FLOAT"), Layout((2, 3, 8), (24, 8, 1), "FLOAT")]
        self.graph = graph
        self.noting = Noting()
        self.loaded = Loaded(lambda: self.noting, device=HOST, workspace_size=0, entry=None, releases=Releases())
        self.plan = Plan(self.loaded, [self.x, self.scale, self.y], layouts, graph, "built")
        self.buffers = {"x": torch.zeros(2, 3, 8), "scale": torch.ones(1, 1, 1), "y": torch.zeros(2, 3, 8)}


@pytest.fixture
def case() -> Case:
    return Case()


def test_operands_are_bound_by_tensor_uid_and_name_in_the_entrys_order(case):
    """All three ways to name operands, in any order, give the same addresses in the same order."""
    expected = [case.buffers[name].data_ptr() for name in ("x", "scale", "y")]
    by_tensor = {case.y: case.buffers["y"], case.x: case.buffers["x"], case.scale: case.buffers["scale"]}
    by_uid = {case.scale.uid: case.buffers["scale"], case.y.uid: case.buffers["y"], case.x.uid: case.buffers["x"]}
    for operands in (by_tensor, by_uid, case.buffers):
        case.plan.execute(operands)
        case.plan.bind(operands)()
    assert case.noting.runs == [expected] * 6


def test_operands_say_what_to_allocate(case):
    """`Plan.operands` has name, uid, dims, strides, type and role of everything that must be bound."""
    assert [(o.name, o.uid, o.dim, o.is_output, o.by_value) for o in case.plan.operands] == [
        ("x", case.x.uid, (2, 3, 8), False, False),
        ("scale", case.scale.uid, (1, 1, 1), False, True),
        ("y", case.y.uid, (2, 3, 8), True, False),
    ]


@pytest.mark.parametrize(
    ("name", "buffer", "says"),
    [
        ("x", torch.zeros(2, 3, 8, dtype=torch.float64), "dtype is torch.float64; expected FLOAT"),
        ("x", torch.zeros(2, 3, 4), "expected shape"),
        ("x", torch.zeros(8, 3, 2).permute(2, 1, 0), "strides"),
        ("x", torch.zeros(48), "expected shape"),
        ("x", torch.zeros(49)[1:].view(2, 3, 8), "not a multiple of 16"),
        ("x", torch.zeros(2, 3, 8, device="meta"), "no memory"),
        ("x", 4096, "an address cannot be checked"),
        ("x", [1.0], "pass a torch tensor"),
        ("x", None, "pass a torch tensor"),
        ("scale", torch.ones(2), "one FLOAT element"),
        ("scale", torch.ones(1, dtype=torch.int32), "one FLOAT element"),
        ("scale", "1.0", "one FLOAT element"),
    ],
)
def test_a_buffer_that_is_not_as_declared_is_refused(case, name, buffer, says):
    """Each wrong property is an error that names the operand, before anything runs."""
    for call in (case.plan.execute, case.plan.bind):
        with pytest.raises(OperandError, match=says) as caught:
            call({**case.buffers, name: buffer})
        assert repr(name) in str(caught.value)
    assert case.noting.runs == []


def test_extents_of_one_may_be_left_out(case):
    """Shapes are compared without extents of 1, whose strides mean nothing."""
    case.plan.execute({**case.buffers, "x": torch.zeros(2, 1, 3, 8), "scale": torch.tensor(1.0)})
    assert len(case.noting.runs) == 1


def test_numbers_stand_for_by_value_scalars(case):
    """A Python number is written as the declared type."""
    case.plan.execute({**case.buffers, "scale": 2})
    assert len(case.noting.runs) == 1
    with pytest.raises(OperandError, match="is no FLOAT"):
        case.plan.execute({**case.buffers, "scale": 1e300})


def test_missing_foreign_and_double_operands_are_refused(case):
    """Exactly the plan's operands must be given, each once."""
    with pytest.raises(OperandError, match="missing operands: 'y'"):
        case.plan.execute({name: case.buffers[name] for name in ("x", "scale")})
    with pytest.raises(OperandError, match="tensor 'x' is no operand of this plan"):
        case.plan.execute({**case.buffers, Case().x: case.buffers["x"]})
    with pytest.raises(OperandError, match="77 is no operand"):
        case.plan.execute({**case.buffers, 77: case.buffers["x"]})
    with pytest.raises(OperandError, match="given twice"):
        case.plan.execute({**case.buffers, case.x: case.buffers["x"]})


def test_names_and_uids_are_those_of_planning(case):
    """Renaming afterwards changes nothing; renumbering makes the plan refuse, since uids would name other tensors."""
    case.plan.execute(case.buffers)
    case.x.set_name("renamed")
    case.plan.execute(case.buffers)
    case.x.set_uid(40)
    with pytest.raises(OperandError, match="plan the graph again"):
        case.plan.execute(case.buffers)


def test_two_tensors_of_one_name_are_not_bound_by_it():
    """An ambiguous name is no key; tensors and uids still are."""
    case = Case()
    plan = Plan(case.loaded, [case.x, case.y], [Layout((8,), (1,), "FLOAT")] * 2, case.graph, "built")
    plan._frozen = [(case.x, case.x.uid, "same", False, None), (case.y, case.y.uid, "same", False, None)]
    with pytest.raises(OperandError, match="'same' is no operand"):
        plan.execute({"same": torch.zeros(8), case.y: torch.zeros(8)})
    plan.execute({case.x: torch.zeros(8), case.y.uid: torch.zeros(8)})


class _Array:
    """A buffer of another framework."""

    def __init__(self, **interface: Any) -> None:
        self.memory = torch.zeros(64)
        self.__cuda_array_interface__ = {"shape": (2, 3, 8), "typestr": "<f4", "data": (self.memory.data_ptr(), False), **interface}


def test_objects_with_the_cuda_array_interface_are_taken(case):
    """Dense and strided arrays of the declared type and shape are bound, others refused."""
    case.plan.execute({**case.buffers, "x": _Array(), "y": _Array(strides=(96, 32, 4))})
    assert len(case.noting.runs) == 1
    for wrong in (
        _Array(typestr="<f8"),
        _Array(shape=(2, 3, 4)),
        _Array(strides=(4, 8, 24)),
        _Array(strides=(97, 32, 4)),
        _Array(strides=(4,)),
    ):
        with pytest.raises(OperandError):
            case.plan.execute({**case.buffers, "x": wrong})
    with pytest.raises(OperandError, match="read-only"):
        case.plan.execute({**case.buffers, "y": _Array(data=(_Array().memory.data_ptr(), True))})


def test_a_bound_plan_keeps_its_buffers_alive(case):
    """`bind` holds what it was given: the caller may drop it."""
    import gc
    import weakref

    x = torch.zeros(2, 3, 8)
    gone = weakref.ref(x)
    run = case.plan.bind({**case.buffers, "x": x})
    del x
    gc.collect()
    assert gone() is not None
    run()


def test_a_closed_plan_does_not_run(case):
    """After its cache is closed a plan, bound or not, is a clear error."""
    run = case.plan.bind(case.buffers)
    case.loaded.close()
    for call in (run, lambda: case.plan.execute(case.buffers)):
        with pytest.raises(NotExecutableError):
            call()


def test_buffers_that_the_graph_was_described_with_are_bound(case):
    """A tensor given to a builder is used where the caller names no other, as the frontend does."""
    import cudnn

    x, other, y = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    out = graph.relu(graph.tensor([2, 3, 8], name="x"))
    (given,) = graph.nodes[0].inputs.values()
    graph._data_bindings[given.uid] = x
    plan = Plan(case.loaded, [given, out], [Layout((2, 3, 8), (24, 8, 1), "FLOAT")] * 2, graph, "built")
    plan.execute({out: y})
    plan.execute({out: y, given: other})
    assert case.noting.runs == [[x.data_ptr(), y.data_ptr()], [other.data_ptr(), y.data_ptr()]]


def test_what_was_planned_is_frozen(case):
    """Changing a tensor's role or layout after planning changes nothing that is checked."""
    case.x.set_is_pass_by_value(True)
    case.y.reordering_type = type("Reordering", (), {"name": "F8_128x4"})
    with pytest.raises(OperandError, match="pass a torch tensor"):
        case.plan.execute({**case.buffers, "x": 3.0})
    with pytest.raises(OperandError, match="expected shape"):
        case.plan.execute({**case.buffers, "y": torch.zeros(3, 2, 8)})


@pytest.mark.parametrize("value", [0.1, -0.1, 1.0, 3.14159, 1e-40, 65504.5, float("inf"), float("nan"), 1.00390625, 1.01171875])
def test_bfloat16_scalars_round_as_torch_does(value):
    """A number for a bfloat16 scalar has the bits that torch gives it."""
    from plancache.operands import _bfloat16

    expected = torch.tensor(value, dtype=torch.bfloat16)
    found = torch.frombuffer(bytearray(_bfloat16(value)), dtype=torch.bfloat16)[0]
    assert torch.equal(found, expected) or (value != value and bool(found.isnan()))


def test_operands_must_be_a_mapping(case):
    """A list of buffers is refused with what is wanted."""
    with pytest.raises(OperandError, match="must be a mapping"):
        case.plan.execute([case.buffers["x"]])
