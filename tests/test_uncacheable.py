"""What the signature cannot hold is refused with a reason, never ignored; what is no described graph is an error."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from samples import matmul, scaled
from zoo import ZOO

from plancache.environment import Device
from plancache.errors import GraphStateError
from plancache.signature import Uncacheable, read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")
FLOAT, HALF = cudnn.data_type.FLOAT, cudnn.data_type.HALF


def signature(graph: Any) -> bytes:
    return read(graph, DEVICE).signature


def described(change: Callable[[Any], Any]) -> Any:
    graph = matmul()
    change(graph)
    return graph


def lowered() -> Any:
    graph = matmul(sm_version=90, device_property=cudnn.create_device_properties(DEVICE.properties_json))
    graph.build_operation_graph()
    return graph


def elsewhere() -> Any:
    properties = DEVICE.properties_json.replace('"multiProcessorCount":132', '"multiProcessorCount":114')
    return matmul(device_property=cudnn.create_device_properties(properties))


class Later(cudnn.pygraph):  # type: ignore[misc]  # cudnn is untyped
    """A pygraph of a frontend to come."""

    def __init__(self, *, sparsity: Any = None) -> None:
        super().__init__()
        self._context.io_data_type = sparsity


def of_a_later_frontend() -> Any:
    graph = Later()
    graph.relu(graph.tensor([2, 3]))
    return graph


def turned_pointwise() -> Any:
    graph = scaled(1.0)
    node = graph.nodes[0]
    node.inputs = dict(reversed(node.inputs.items()))
    return graph


def first_tensor(graph: Any) -> Any:
    return graph.nodes[0].inputs["A"]


FOREIGN = (Fraction(1, 3), 1j, b"bytes", {1}, {1: "a name that is no text"}, object(), range(3), [Fraction(1, 3)], ([{"a": 1j}],))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"tensor attribute {value!r}": (lambda value=value: described(lambda g: setattr(first_tensor(g), "sparsity", value)), "sparsity")
        for value in (True, False, 1, 0, 2.5, "half")
    },
    "node attribute": (lambda: described(lambda g: setattr(g.nodes[0], "sparsity", True)), "sparsity"),
    "graph attribute": (lambda: described(lambda g: setattr(g, "sparsity", True)), "sparsity"),
    "context attribute": (lambda: described(lambda g: setattr(g.context, "sparsity", True)), "sparsity"),
    "option": (lambda: matmul(sparsity=2), "sparsity"),
    "constructor": (of_a_later_frontend, "sparsity"),
    **{
        f"parameter {value!r:.20}": (lambda value=value: described(lambda g: g.nodes[0].params.update(odd=value)), "parameter")
        for value in FOREIGN
    },
    **{f"value {value!r:.20}": (lambda value=value: scaled(value), "type") for value in FOREIGN[:4]},
    "array as a value": (lambda: scaled(pytest.importorskip("numpy").ones(2)), "numpy.ndarray"),
    "numpy's number": (lambda: scaled(pytest.importorskip("numpy").float32(1)), "numpy.float32"),
    "array without a scalar type": (lambda: scaled(pytest.importorskip("numpy").ones(2), None), "numpy.ndarray"),
    "callable": (lambda: described(lambda g: g.nodes[0].params.update(score_mod=print)), "callable, score_mod"),
    "callable of the zoo": (ZOO["sdpa_score_mod"].make, "callable, score_mod"),
    "kernel cache": (lambda: matmul(kernel_cache=cudnn.create_kernel_cache()), "kernel cache"),
    "other device": (elsewhere, "another device"),
    "no properties": (lambda: matmul(device_property="H200"), "another device"),
    "barred engines": (lambda: described(lambda g: g.deselect_engines(["eng7"])), "filters"),
    "workspace limit": (lambda: described(lambda g: g.deselect_workspace_greater_than(0)), "filters"),
    "barred note": (lambda: described(lambda g: g.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])), "filters"),
    "required note": (lambda: described(lambda g: g.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])), "filters"),
    "lowered": (lowered, "build_operation_graph"),
    "python-only": (ZOO["gdn_plain"].make, "Python engine"),
    "turned pointwise inputs": (turned_pointwise, "out of order"),
    "torch type": (lambda: matmul(io_data_type=pytest.importorskip("torch").complex64), "torch.complex64"),
    "broken extent": (lambda: described(lambda g: first_tensor(g).set_stride([2048.0, 32, 1])), "whole number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_signature_cannot_hold_is_refused_with_a_reason(what: str) -> None:
    """Unknown fields, options, types and devices, callables, filters and lowered graphs are uncacheable, never ignored."""
    make, reason = REFUSED[what]
    with pytest.raises(Uncacheable, match=reason) as caught:
        signature(make())
    assert reason in caught.value.reason


def test_an_extent_that_is_no_whole_number_is_refused_whatever_was_read_before() -> None:
    """A stride of 2048.0 does not take the bytes of the 2048 that is known already."""
    signature(described(lambda g: first_tensor(g).set_stride([2048, 32, 1])))
    with pytest.raises(Uncacheable, match="whole number"):
        signature(described(lambda g: first_tensor(g).set_stride([2048.0, 32, 1])))


def planned() -> Any:
    graph = ZOO["conv_fprop_plain"].make()
    properties = cudnn.create_device_properties(DEVICE.properties_json)
    graph._cpp_graph_kwargs.update(device_property=properties, sm_version=90)
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    return graph


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cudnn.pygraph(), "empty; add at least one operation"),
        (planned, "already planned or built; hand plancache a graph that is only described"),
        (lambda: described(lambda g: setattr(g, "_is_built", True)), "already planned or built"),
        (lambda: None, "expected a cudnn.pygraph, got builtins.NoneType"),
        (lambda: "graph", "expected a cudnn.pygraph, got builtins.str"),
        (lambda: cudnn.Tensor(), "expected a cudnn.pygraph, got cudnn.graph_types.Tensor"),
    ],
)
def test_what_is_no_described_graph_is_an_error_that_says_what_to_do(make: Callable[[], Any], message: str) -> None:
    """An empty or planned graph, and what is no graph, cannot be planned at all."""
    with pytest.raises(GraphStateError, match=message):
        signature(make())


def test_dims_that_do_not_fit_are_the_frontends_own_error() -> None:
    """Reading infers as the frontend does, and passes its refusal on."""
    graph = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT)
    graph.matmul(graph.tensor([2, 8, 8]), graph.tensor([2, 9, 8]))
    with pytest.raises(ValueError, match="Inner dimensions must match"):
        signature(graph)


def test_objects_of_other_classes_are_refused_although_they_look_alike() -> None:
    """A subclass could do anything when it is lowered: of a graph, a node or a tensor it is uncacheable."""

    class Graph(cudnn.pygraph):
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            return True

    class Node(cudnn.Node): ...

    class Tensor(cudnn.Tensor): ...

    graph = Graph(io_data_type=cudnn.data_type.HALF)
    graph.relu(graph.tensor([2, 3, 4]))
    with pytest.raises(Uncacheable, match="another class"):
        read(graph, DEVICE, {})
    for part, kind in (("nodes", Node), ("tensors", Tensor)):
        graph = matmul()
        target = graph.nodes[0] if part == "nodes" else graph.nodes[0].inputs["A"]
        target.__class__ = kind
        with pytest.raises(Uncacheable, match="another class"):
            read(graph, DEVICE)


def test_an_extent_that_its_caller_can_change_is_read_anew() -> None:
    """A dim given as an array of one element counts with the value it has when the graph is read."""
    torch = pytest.importorskip("torch")
    batch = torch.tensor(8)

    def described() -> bytes:
        graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF)
        graph.relu(graph.tensor([batch, 16, 64], [1024, 64, 1])).set_output(True)
        return read(graph, DEVICE).signature

    first = described()
    batch.fill_(32)
    assert described() != first
    batch.fill_(8)
    assert described() == first


def test_what_cannot_be_written_down_is_refused() -> None:
    """A list that holds itself, or half a character, is uncacheable and no crash."""
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, "\ud800"):
        graph = matmul()
        graph.nodes[0].params["extra"] = value
        with pytest.raises(Uncacheable, match="cannot be written down"):
            read(graph, DEVICE)
