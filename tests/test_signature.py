"""The signature: everything that a plan bakes in is in it, labels are not, and reading leaves the graph as it was."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any

import pytest
from changes import CONTEXT, LABELS, PLACES, changes, nested, scalars, snapshot, tensors_of, typed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import matmul, scaled
from zoo import ZOO

from plancache.description import decode
from plancache.encoding import encode
from plancache.environment import Device
from plancache.signature import OPTION_FIELDS, TENSOR_FIELDS, Uncacheable, read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")
FLOAT, HALF = cudnn.data_type.FLOAT, cudnn.data_type.HALF


def signature(graph: Any) -> bytes:
    return read(graph, DEVICE).signature


def is_readable(name: str) -> bool:
    try:
        return bool(signature(ZOO[name].make()))
    except Uncacheable:
        return False


READABLE = [name for name in ZOO if is_readable(name)]


# ---- everything that a plan bakes in --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READABLE)
def test_every_single_change_of_a_graph_has_a_signature_of_its_own(name: str) -> None:
    """No field of a tensor, node or graph takes another value under the same signature, unless it is refused; nor are two
    changes taken for one another (those of ports apart, of which some come to the same graph)."""
    graph = ZOO[name].make()
    original = signature(graph)
    found: dict[bytes, Any] = {original: "unchanged"}
    for change, changed in read_changes(graph):
        assert changed != original, change
        if change.field not in ("node.inputs", "node.outputs"):
            assert found.setdefault(changed, change) is change
    assert signature(graph) == original


def test_the_walk_reaches_every_field_with_a_change_that_can_be_read() -> None:
    """The two tests above cannot pass because a field was never changed, or every change of it was refused."""
    reached = Counter(change.field for name in WALKED for change, _ in read_changes(ZOO[name].make()))
    tensor = vars(cudnn.Tensor()).keys() - LABELS
    options = cudnn.pygraph.__init__.__code__.co_varnames[: cudnn.pygraph.__init__.__code__.co_argcount]
    graph = {*options, *CONTEXT, "is_cuda_graph_replay_expected", "nodes"} - PLACES | {"is_cuda_graph_replay_expected"}
    node = {"compute_data_type", "params", "inputs", "outputs", "node_type"}
    assert tensor == set(TENSOR_FIELDS)
    assert graph - CONTEXT - {"nodes"} == set(OPTION_FIELDS)
    expected = {f"tensor.{field}" for field in tensor} | {f"graph.{field}" for field in graph} | {f"node.{field}" for field in node}
    assert set(reached) == expected
    assert min(reached.values()) > 2


WALKED = ("sdpa_ragged_multiplier", "fused_conv_bias_relu", "twice_add", "layernorm_training", "pointwise_mul_scalar_float")


def read_changes(graph: Any) -> Iterator[tuple[Any, bytes]]:
    """Each change of a graph that can still be read, and the signature under it."""
    for change in changes(graph):
        try:
            yield change, signature(graph)
        except (Uncacheable, ValueError):  # ValueError: the frontend's own inference refuses the changed graph
            continue


@pytest.mark.parametrize("node_type", sorted({ZOO[name].node_type for name in READABLE}))
def test_a_remembered_inference_is_the_one_that_would_be_made(node_type: str) -> None:
    """Reading with a memory of earlier inferences gives the same signature, or refusal, as reading without."""
    for name in READABLE:
        if ZOO[name].node_type == node_type:
            check_memory(name)


def check_memory(name: str) -> None:
    graph, seen = ZOO[name].make(), {}
    assert [read(graph, DEVICE, seen).signature for _ in range(3)] == [signature(graph)] * 3
    assert list(seen) == [graph]
    for _ in islice(changes(graph), 0, None, 17):
        try:
            expected = signature(graph)
        except (Uncacheable, ValueError) as error:
            with pytest.raises(type(error)):
                read(graph, DEVICE, seen)
        else:
            assert [read(graph, DEVICE, seen).signature for _ in range(2)] == [expected] * 2


@settings(deadline=None, max_examples=200)
@given(scalars, scalars)
@example(1, 1.0)
@example(1, True)
@example(0.0, -0.0)
@example(math.nan, -math.nan)
@example(0.1, math.nextafter(0.1, 1))
def test_a_value_counts_with_its_type_and_all_its_bits(mine: Any, theirs: Any) -> None:
    """A scalar given by value has the same signature exactly where type and bits are the same; NaN equals NaN."""
    assert (signature(scaled(mine)) == signature(scaled(theirs))) == (typed(mine) == typed(theirs))


@settings(deadline=None, max_examples=200)
@given(nested(), nested())
def test_a_parameter_counts_with_all_its_types(mine: Any, theirs: Any) -> None:
    """Parameters of an operation, however nested, have the same signature exactly where they are the same."""
    graphs = matmul(), matmul()
    for graph, value in zip(graphs, (mine, theirs), strict=True):
        graph.nodes[0].params["parameter"] = value
    assert (signature(graphs[0]) == signature(graphs[1])) == (typed(mine) == typed(theirs))


def test_a_compile_time_constant_is_not_a_run_time_parameter() -> None:
    """A constant's kind and value are both in the signature."""
    graphs = [scaled(1.0, "COMPILE_TIME_CONST"), scaled(1.0), scaled(2.0, "COMPILE_TIME_CONST"), scaled(1, "COMPILE_TIME_CONST")]
    assert len({*map(signature, graphs)}) == len(graphs)


def test_one_tensor_on_two_ports_is_not_two_equal_tensors() -> None:
    """x @ x is not x @ y, however alike the two are."""

    def product(*, shared: bool) -> Any:
        made = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT)
        x, y = made.tensor([2, 8, 8]), made.tensor([2, 8, 8])
        made.matmul(x, x if shared else y).set_output(True)
        return made

    assert signature(product(shared=True)) != signature(product(shared=False))


def test_which_ragged_offset_a_tensor_has_counts() -> None:
    """No offset, the one that another tensor has, an equal one, and either of two that an operation reads: all differ."""

    def product(first: int | None, second: int | None) -> bytes:
        made = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT)
        offsets = [made.tensor([3, 1, 1], data_type=cudnn.data_type.INT32) for _ in range(4)]
        made.add(offsets[0], offsets[1]).set_output(True)
        x, y = (made.tensor([2, 8, 8], ragged_offset=None if at is None else offsets[at]) for at in (first, second))
        made.matmul(x, y).set_output(True)
        return signature(made)

    pairs = [(None, None), (0, None), (1, None), (0, 0), (0, 1), (1, 0), (1, 1), (2, None), (2, 2), (2, 3), (2, 0), (2, 1)]
    assert len({product(*pair) for pair in pairs}) == len(pairs)


def test_the_order_of_operations_counts() -> None:
    """Bias before activation is not activation before bias."""
    assert signature(ZOO["fused_conv_bias_relu"].make()) != signature(ZOO["fused_conv_relu_bias"].make())


# ---- labels and spellings -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(READABLE), st.randoms(use_true_random=False))
def test_names_uids_and_orders_of_making_do_not_count(name: str, random: Random) -> None:
    """Relabelled, renumbered and with all its mappings in another order, a graph keeps its signature."""
    graph = ZOO[name].make()
    original = signature(graph)
    relabel(graph, random)
    assert signature(graph) == original


def test_one_name_for_all_tensors_does_not_count() -> None:
    """The frontend drops tensors of one name from its index, and infers less of them: the signature does not."""
    for name in READABLE:
        graph = ZOO[name].make()
        original = signature(graph)
        for tensor in tensors_of(graph):
            tensor.set_name("t")
        assert signature(graph) == original, name


def relabel(graph: Any, random: Random) -> None:
    def shuffled(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        return dict(random.sample(list(mapping.items()), len(mapping)))

    tensors = tensors_of(graph)
    for tensor, uid in zip(tensors, random.sample(range(1, 3 * len(tensors) + 8), len(tensors)), strict=True):
        tensor.set_name(random.choice(["a", "b", "tensor_0", f"t{uid}"]))
        holder = graph._tensor_by_uid.get(uid)
        if random.random() < 0.7 and not (holder is not None and holder.uid_assigned):
            tensor.set_uid(uid)
    graph.tensor([5, 6, 7], name="of no operation")
    for node in graph._nodes:
        node.name = random.choice(["n", "m"])
        node.params, node.outputs = shuffled(node.params), shuffled(node.outputs)
        if node.node_type.name != "POINTWISE":  # a pointwise operation's inputs are told apart by their order
            node.inputs = shuffled(node.inputs)
    graph._tensors, graph._tensor_by_uid = shuffled(graph._tensors), shuffled(graph._tensor_by_uid)
    graph._cpp_graph_kwargs = shuffled(graph._cpp_graph_kwargs | {"name": random.choice(["g", "h"])})


def test_the_order_of_arguments_does_not_count() -> None:
    """Tensors made in another order, arguments given in another order and by position: one signature."""

    def graph(*, turned: bool) -> Any:
        made = cudnn.pygraph(compute_data_type=FLOAT, io_data_type=HALF)
        sizes = {"image": [4, 8, 16, 16], "weight": [16, 8, 3, 3]}
        tensors = {name: made.tensor(sizes[name]) for name in sorted(sizes, reverse=turned)}
        more = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
        given = dict(sorted((tensors | more).items(), reverse=turned))
        (made.conv_fprop(*tensors.values(), **more) if not turned else made.conv_fprop(**given)).set_output(True)
        return made

    assert signature(graph(turned=False)) == signature(graph(turned=True))


def test_torch_and_cudnn_data_types_are_one() -> None:
    """A graph described with torch's data types has the signature of the one with cuDNN's."""
    pytest.importorskip("torch")
    from cudnn import datatypes

    datatypes.is_torch_available()
    torch_types = {kind: theirs for theirs, kind in datatypes._torch_to_cudnn_data_type_dict.items()}
    for name in READABLE:
        graph = ZOO[name].make()
        original = signature(graph)
        for holder in (*tensors_of(graph), *graph._nodes, graph._context):
            for field, value in vars(holder).items():
                if field.endswith("data_type"):
                    vars(holder)[field] = torch_types.get(value, value)
        assert signature(graph) == original, name


def test_naming_the_device_that_is_planned_for_does_not_count() -> None:
    """`sm_version` and properties of the target say nothing new; another `sm_version` does."""
    properties = cudnn.create_device_properties(DEVICE.properties_json)
    plain = signature(matmul())
    assert signature(matmul(sm_version=90)) == plain
    assert signature(matmul(sm_version=90, device_property=properties)) == plain
    assert signature(matmul(sm_version=100)) != plain


# ---- the caller's graph ---------------------------------------------------------------------------------------------


def test_reading_leaves_the_graph_as_it_was() -> None:
    """Every attribute of graph, nodes and tensors is the same object with the same content after reading, or refusing."""
    for name, case in ZOO.items():
        graph = case.make()
        before = snapshot(graph)
        try:
            read(graph, DEVICE)
        except Uncacheable:
            assert name not in READABLE
        assert snapshot(graph) == before, name


def test_validating_a_graph_does_not_change_its_signature() -> None:
    """What `validate()` fills in is what reading infers; a graph that says for which device is read the same after it."""
    assert sum(map(validates_unchanged, READABLE)) > 350


def validates_unchanged(name: str) -> bool:
    graph = ZOO[name].make()
    options = {"device_property": cudnn.create_device_properties(DEVICE.properties_json), "sm_version": 90}
    graph._cpp_graph_kwargs.update(options | graph._cpp_graph_kwargs)
    original = signature(graph)
    try:
        graph.validate()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, TypeError):  # cuDNN 9.19 has no such graph
        assert not ZOO[name].lowers
        return False
    before = snapshot(graph)
    assert signature(graph) == original, name
    assert snapshot(graph) == before
    return True


def test_a_parameter_changed_after_validating_counts() -> None:
    """The frontend lets parameters of a validated attention graph change, and plans what they are then."""
    graph = ZOO["sdpa_scale"].make()
    graph._cpp_graph_kwargs["device_property"] = cudnn.create_device_properties(DEVICE.properties_json)
    graph.validate()
    original = signature(graph)
    graph.nodes[0].params = {**graph.nodes[0].params, "attn_scale": 0.25}
    assert signature(graph) != original


# ---- and back -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(READABLE), st.data())
def test_bytes_that_are_no_signature_are_a_value_error(name: str, data: st.DataObject) -> None:
    """Decoding truncated or changed bytes raises ValueError, or gives a description: never another error."""
    whole = signature(ZOO[name].make())
    at = data.draw(st.integers(0, len(whole) - 1))
    for broken in (whole[:at], whole + whole[at:], b"i1:" + encode(data.draw(nested())) * 4):
        with pytest.raises(ValueError):
            decode(broken)
    changed = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]
    with suppress(ValueError):
        decode(changed)


def test_a_description_names_its_operations_and_shapes() -> None:
    """The one line that people see: operations, dims of what goes in, types."""
    description = decode(signature(ZOO["fused_matmul_bias_gelu"].make()))
    assert description.operations == ("matmul", "bias", "gelu")
    assert description.summary == "matmul+bias+gelu [8x64x32, 8x32x128] bfloat16"
