"""Programs that plan graphs with the frontend alone, by every road that there is; what they see is printed.

`python roads.py CACHE [CASE...]`: as it is where CACHE is empty, else under `plancache.install`; every road, or these cases of the
zoo. Without a GPU: the graphs bring a device's properties, and nothing is executed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from plancache import Device
from plancache.compiler import provide_driver

DEVICE = Device.from_file("h200")


class Graphs:
    """Graphs that are described anew each time."""

    def __init__(self) -> None:
        import cudnn

        self.cudnn = cudnn
        self.properties = cudnn.create_device_properties(DEVICE.properties_json)

    def empty(self, **options: Any) -> Any:
        kinds = self.cudnn.data_type
        types = {"io_data_type": kinds.HALF, "intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}
        return self.cudnn.pygraph(**types, device_property=self.properties, sm_version=90, **options)

    def convolution(self, uids: tuple[int, ...] = (), **options: Any) -> tuple[Any, Any]:
        """A convolution, bias and ReLU that cuDNN has kernels for: nothing is compiled."""
        graph = self.empty(**options)
        x = graph.tensor([8, 64, 28, 28], [64 * 784, 1, 28 * 64, 64], name="x")
        w = graph.tensor([128, 64, 3, 3], [64 * 9, 1, 3 * 64, 64], name="w")
        b = graph.tensor([1, 128, 1, 1], [128, 1, 128, 128], name="b")
        y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y = graph.relu(graph.bias(y, b))
        y.set_output(True).set_name("y")
        for tensor, uid in zip((x, w, b, y), uids, strict=False):
            tensor.set_uid(uid)
        return graph, y

    def attention(self) -> tuple[Any, Any]:
        graph, shape, stride = self.empty(), [2, 4, 128, 64], [128 * 256, 64, 256, 1]
        q, k, v = (graph.tensor(shape, stride, name=name) for name in "qkv")
        o, _ = graph.sdpa(q=q, k=k, v=v, is_inference=True, attn_scale=0.125, use_causal_mask=True)
        o.set_output(True).set_dim(shape).set_stride(stride)
        return graph, o

    def norm(self) -> tuple[Any, Any]:
        graph, single = self.empty(), self.cudnn.data_type.FLOAT
        x = graph.tensor([512, 256, 1, 1], [256, 1, 256, 256])
        scale, bias = (graph.tensor([1, 256, 1, 1], [256, 1, 256, 256], data_type=single) for _ in range(2))
        epsilon = graph.tensor([1, 1, 1, 1], [1, 1, 1, 1], is_pass_by_value=True, data_type=single)
        phase = self.cudnn.norm_forward_phase.TRAINING
        y, mean, variance = graph.layernorm(norm_forward_phase=phase, input=x, scale=scale, bias=bias, epsilon=epsilon)
        y.set_output(True)
        for statistic in (mean, variance):
            statistic.set_output(True).set_data_type(single)
        return graph, mean


def planned(graph: Any) -> list[Any]:
    count = graph.get_execution_plan_count()
    names = [graph.get_plan_name_at_index(index) for index in range(count)]
    engines = [graph.get_engine_and_knobs_at_index(index) for index in range(count)]
    return [count, names, [(engine, sorted((knob.name, value) for knob, value in knobs.items())) for engine, knobs in engines]]


def shape(tensor: Any) -> list[Any]:
    return [list(tensor.get_dim()), list(tensor.get_stride()), str(tensor.get_data_type())]


def built(graph: Any, *tensors: Any) -> list[Any]:
    notes = [note.name for note in graph.get_behavior_notes()]
    return [graph.get_workspace_size(), notes, graph._variant_pack_uids(), graph._plan_index, *map(shape, tensors)]


Road = Callable[[Graphs], Any]
ROADS: dict[str, Road] = {}


def road(function: Road) -> Road:
    ROADS[function.__name__] = function
    return function


def _modes(graphs: Graphs, *names: str) -> list[Any]:
    return [graphs.cudnn.heur_mode.__members__[name] for name in names]


def _steps(graphs: Graphs, graph: Any, *names: str) -> Any:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(_modes(graphs, *(names or ("A", "FALLBACK"))))
    return graph


@road
def five_steps(graphs: Graphs) -> Iterator[Any]:
    for graph, tensor in (graphs.convolution(), graphs.attention(), graphs.norm()):
        graph.validate()
        yield shape(tensor)
        graph.build_operation_graph()
        yield shape(tensor)
        graph.create_execution_plans(_modes(graphs, "A", "FALLBACK"))
        yield planned(graph)
        graph.check_support()
        graph.build_plans()
        yield built(graph, tensor)


@road
def one_step(graphs: Graphs) -> Iterator[Any]:
    for graph, tensor in (graphs.convolution(), graphs.attention()):
        graph.build(_modes(graphs, "A", "FALLBACK"))
        yield built(graph, tensor), planned(graph)


@road
def other_modes(graphs: Graphs) -> Iterator[Any]:
    for names in (("A",), ("B",), ("B", "A"), ("FALLBACK",)):
        graph, tensor = graphs.convolution()
        graph.build(_modes(graphs, *names))
        yield built(graph, tensor), planned(graph)
    graph, tensor = graphs.convolution()
    graph.build()
    yield built(graph, tensor), planned(graph)


@road
def policies(graphs: Graphs) -> Iterator[Any]:
    for policy in (graphs.cudnn.build_plan_policy.HEURISTICS_CHOICE, graphs.cudnn.build_plan_policy.ALL):
        graph = _steps(graphs, graphs.norm()[0])
        graph.build_plans(policy)
        yield built(graph), [graph.get_workspace_size_plan_at_index(index) for index in range(graph.get_execution_plan_count())]


@road
def a_plan_that_was_not_built(graphs: Graphs) -> Iterator[Any]:
    graph = _steps(graphs, graphs.convolution()[0])
    graph.build_plans()
    yield graph.get_workspace_size_plan_at_index(0)
    yield graph.get_workspace_size_plan_at_index(1)


@road
def by_index(graphs: Graphs) -> Iterator[Any]:
    count = 3
    for index in range(count):
        graph = _steps(graphs, graphs.convolution()[0])
        graph.build_plan_at_index(index)
        yield built(graph), graph.get_workspace_size_plan_at_index(index), planned(graph)
        graph.build_plan_at_index((index + 1) % count)
        yield built(graph)


@road
def selected(graphs: Graphs) -> Iterator[Any]:
    for index in (0, 1):
        graph = _steps(graphs, graphs.convolution()[0])
        graph.select_plan(index)
        graph.build_plans()
        yield built(graph)


@road
def filters(graphs: Graphs) -> Iterator[Any]:
    notes = graphs.cudnn.behavior_note
    for when in ("described", "validated", "planned", "built"):
        for set_filter in (
            lambda graph: graph.deselect_engines(["eng7"]),
            lambda graph: graph.deselect_workspace_greater_than(0),
            lambda graph: graph.deselect_behavior_notes([notes.RUNTIME_COMPILATION]),
            lambda graph: graph.select_behavior_notes([notes.SUPPORTS_CUDA_GRAPH_NATIVE_API]),
            lambda graph: graph.deselect_numeric_notes([graphs.cudnn.numerical_note.NONDETERMINISTIC]),
        ):
            graph = graphs.convolution()[0]
            for step in ("described", "validated", "planned", "built"):
                if step == "validated":
                    graph.validate()
                    graph.build_operation_graph()
                elif step == "planned":
                    graph.create_execution_plans(_modes(graphs, "A", "FALLBACK"))
                elif step == "built":
                    graph.check_support()
                    graph.build_plans()
                if step == when:
                    set_filter(graph)
            yield when, graph._is_built, graph._plan_index, planned(graph)


@road
def a_filter_that_leaves_nothing(graphs: Graphs) -> Iterator[Any]:
    graph = _steps(graphs, graphs.convolution()[0])
    graph.deselect_engines(["eng"])
    graph.build_plans()
    yield "not reached"


@road
def replayed(graphs: Graphs) -> Iterator[Any]:
    first = _steps(graphs, graphs.convolution()[0])
    engine, knobs = first.get_engine_and_knobs_at_index(1)
    graph = graphs.convolution()[0]
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plan(engine, knobs)
    graph.check_support()
    graph.build_plans()
    yield built(graph), planned(graph)
    first.create_execution_plan(engine, knobs)
    first.build_plan_at_index(first.get_execution_plan_count() - 1)
    yield built(first), planned(first)


@road
def engines(graphs: Graphs) -> Iterator[Any]:
    graph = graphs.convolution()[0]
    graph.validate()
    graph.build_operation_graph()
    count = graph.get_engine_count()
    yield count, [len(graph.get_knobs_for_engine(engine)) for engine in range(count)]
    graph.create_execution_plans(_modes(graphs, "A"))
    graph.build_plans()
    yield built(graph)


@road
def other_plans_notes(graphs: Graphs) -> Iterator[Any]:
    graph = _steps(graphs, graphs.convolution()[0])
    graph.build_plans()
    yield [sorted(note.name for note in graph.get_behavior_notes_for_plan_at_index(index)) for index in range(3)], built(graph)


@road
def serialized(graphs: Graphs) -> Iterator[Any]:
    graph = _steps(graphs, graphs.convolution(uids=(40, 30, 20, 10))[0])
    graph.build_plans()
    data = graph.serialize(as_bytes=True)
    other = graphs.cudnn.pygraph(device_property=graphs.properties)
    other.deserialize(data)
    yield built(graph), other.get_workspace_size(), other._variant_pack_uids(), built(graph)


@road
def keys_and_texts(graphs: Graphs) -> Iterator[Any]:
    graph, _ = graphs.convolution()
    graph.build()
    yield graph.key(), json.loads(repr(graph))["nodes"], built(graph), str(graph.get_cuda_graph_retention())
    graph = graphs.convolution()[0]
    graph.validate()
    yield graph.key()


@road
def attention_leaves(graphs: Graphs) -> Iterator[Any]:
    """A family that the frontend validates itself, and lowers late or never."""
    graph, o = graphs.attention()
    graph.validate()
    yield graph.get_execution_plan_count(), graph.key()
    graph, o = graphs.attention()
    graph.validate()
    graph.deselect_engines(["eng2"])
    graph.build()
    yield built(graph, o), planned(graph)
    graph, o = graphs.attention()
    graph.build()
    yield graph.build_plan_at_index(1) is graph, built(graph, o)
    data, other = graph.serialize(as_bytes=True), graphs.cudnn.pygraph(device_property=graphs.properties)
    other.deserialize(data)
    yield other.get_workspace_size(), other._variant_pack_uids()
    graph, o = graphs.attention()
    graph.validate()
    graph.create_execution_plan(1, {})
    graph.build_plans()
    yield built(graph, o), planned(graph)


@road
def own_uids(graphs: Graphs) -> Iterator[Any]:
    for uids in ((40, 30, 20, 10), (7, 3, 11, 5)):
        graph, tensor = graphs.convolution(uids)
        graph.build()
        yield built(graph, tensor)


@road
def again(graphs: Graphs) -> Iterator[Any]:
    graph = graphs.convolution()[0]
    graph.validate()
    graph.validate()
    graph.build()
    yield built(graph)
    graph.build()
    graph.check_support()
    yield built(graph)
    graph.create_execution_plans()
    yield "not reached"


@road
def frozen(graphs: Graphs) -> Iterator[Any]:
    graph, tensor = graphs.convolution()
    graph.build()
    tensor.set_dim([1, 2, 3, 4])
    yield "not reached"


@road
def mended(graphs: Graphs) -> Iterator[Any]:
    """Refused, changed, and planned after all; known ones too, before they are lowered."""
    graph = graphs.empty()
    a, b = graph.tensor([8, 16, 32]), graph.tensor([8, 33, 64])
    product = graph.matmul(a, b).set_output(True)
    try:
        graph.validate()
    except ValueError as error:
        yield str(error)
    b.set_dim([8, 32, 64]).set_stride([2048, 64, 1])
    graph.build()
    yield built(graph, product)


def _told(call: Callable[[], Any]) -> str:
    """What a call raises; nothing where it raises nothing."""
    try:
        call()
    except Exception as error:  # whatever the frontend raises is what is compared
        return f"{type(error).__name__}: {error}"
    return ""


@road
def uids_that_are_refused(graphs: Graphs) -> Iterator[Any]:
    """Of a tensor that is no operand, too."""
    graph, _ = graphs.convolution()
    graph.nodes[0].outputs["Y"].set_uid(-5)
    yield _told(graph.validate), _told(graph.build)


@road
def frozen_when_validated(graphs: Graphs) -> Iterator[Any]:
    """At once, or later where the family has a validator of its own."""
    for graph, tensor in (graphs.convolution(), graphs.norm(), graphs.attention()):
        graph.validate()
        yield graph._frozen, _told(lambda tensor=tensor: tensor.set_uid(77)), hasattr(graph, "get_engine_count")
        graph.build_operation_graph()
        yield graph._frozen, graph._cpp_bog_done
        graph.build()
        yield built(graph, tensor)


@road
def changed_and_no_longer_valid(graphs: Graphs) -> Iterator[Any]:
    graph, _ = graphs.attention()
    graph.validate()
    graph.find_tensor("q").set_stride([128 * 256, 64, 256, 2])
    yield _told(graph.validate), _told(graph.build_operation_graph), _told(graph.create_execution_plans)


@road
def changed_and_then_lowered(graphs: Graphs) -> Iterator[Any]:
    """The plans are those of the graph as it was lowered, not as it was validated before."""
    graph, o = graphs.attention()
    graph.validate()
    o.set_stride([128 * 256, 128 * 64, 64, 1])
    graph.check_support()
    yield graph._is_validated, graph._frozen
    graph.create_execution_plans()
    graph.build_plans()
    yield built(graph, o), planned(graph)


@road
def supported_under_filters(graphs: Graphs) -> Iterator[Any]:
    """A filter that leaves nothing is told by the step that told it; before, after, and once a plan is built."""
    for when in range(3):
        graph = graphs.convolution()[0]
        if when == 0:
            graph.deselect_engines(["eng"])
        _steps(graphs, graph)
        if when == 2:
            graph.build_plans()
        graph.deselect_engines(["eng"])
        yield _told(graph.check_support), _told(graph.build_plans), graph._is_built


@road
def a_limit_and_the_own_road(graphs: Graphs) -> Iterator[Any]:
    """A workspace limit is kept where the graph leaves after it was set; one that the frontend forgets is forgotten."""
    for early in (True, False):
        graph = graphs.convolution()[0]
        if early:
            graph.deselect_workspace_greater_than(-1)
        graph.validate()
        graph.build_operation_graph()
        if not early:
            graph.deselect_workspace_greater_than(-1)
            graph.get_engine_count()
        graph.create_execution_plans()
        yield _told(graph.check_support), _told(graph.build_plans), graph._is_built


@road
def barred_after_it_was_built(graphs: Graphs) -> Iterator[Any]:
    """What was built stays so when the graph leaves, and what was given up for another choice does not come back."""
    notes = list(graphs.cudnn.numerical_note.__members__.values())
    graph = _steps(graphs, graphs.convolution()[0])
    graph.build_plans()
    graph.deselect_numeric_notes(notes)
    graph.create_execution_plan(*graph.get_engine_and_knobs_at_index(1))
    yield built(graph), graph.get_execution_plan_count()
    graph = _steps(graphs, graphs.convolution()[0])
    graph.build_plans()
    graph.select_plan(0)
    graph.deselect_numeric_notes(notes)
    yield _told(graph.build_plans), graph._is_built
    graph = _steps(graphs, graphs.convolution()[0])
    graph.build_plans()
    graph.select_plan(1)
    graph.get_engine_count()
    yield graph._is_built, _told(graph.get_workspace_size)


@road
def options_and_limits_that_do_not_count(graphs: Graphs) -> Iterator[Any]:
    """Options are read when a graph is lowered; a limit that cannot be met is the frontend's to refuse."""
    graph = _steps(graphs, graphs.convolution()[0])
    graph._cpp_graph_kwargs["is_dynamic_shape_enabled"] = True
    graph.get_engine_count()
    graph.build_plans()
    yield built(graph), planned(graph)
    graph = _steps(graphs, graphs.convolution()[0])
    graph.deselect_workspace_greater_than(-1)
    yield _told(graph.check_support), _told(graph.build_plans)


@road
def backend_plans_first(graphs: Graphs) -> Iterator[Any]:
    """They are asked for once: what is planned with later does not count."""
    graph = graphs.convolution()[0]
    graph.validate()
    yield len(graph.backend_plan_entries())
    graph.create_execution_plans(_modes(graphs, "B"))
    graph.build_plans()
    yield built(graph), planned(graph)


@road
def extents_cannot_be_changed_after(graphs: Graphs) -> Iterator[Any]:
    """They are tuples once a graph is frozen, on whatever road."""
    for make in (graphs.convolution, graphs.norm):
        graph = make()[0]
        graph.validate()
        graph.build_operation_graph()
        graph.key()
        yield [(type(tensor.dim).__name__, type(tensor.stride).__name__) for tensor in graph._tensor_by_uid.values()]
        graph = _steps(graphs, make()[0])
        graph.get_engine_count()
        yield [(type(tensor.dim).__name__, type(tensor.stride).__name__) for tensor in graph._tensor_by_uid.values()]


@road
def changed_after_it_was_validated(graphs: Graphs) -> Iterator[Any]:
    graph, o = graphs.attention()
    graph.validate()
    o.set_stride([128 * 256, 128 * 64, 64, 1])
    graph.build()
    yield built(graph, o), planned(graph)


@road
def late_flag(graphs: Graphs) -> Iterator[Any]:
    graph, tensor = graphs.convolution()
    graph.validate()
    graph.is_cuda_graph_replay_expected = True
    graph.build()
    yield built(graph, tensor)


@road
def own_kernel_cache(graphs: Graphs) -> Iterator[Any]:
    cache = graphs.cudnn.create_kernel_cache()
    graph, tensor = graphs.convolution(kernel_cache=cache, is_dynamic_shape_enabled=True)
    graph.build()
    yield built(graph, tensor)


@road
def decorated(graphs: Graphs) -> Iterator[Any]:
    @graphs.cudnn.jit(heur_modes=[graphs.cudnn.heur_mode.A, graphs.cudnn.heur_mode.FALLBACK])
    @graphs.cudnn.graph_cache(key_fn=lambda: "convolution")
    def described() -> Any:
        graph, tensor = graphs.convolution()
        return graph, [tensor]

    graph, uids = described()
    yield built(graph), uids
    yield described()[0] is graph


@road
def refused_when_validated(graphs: Graphs) -> Iterator[Any]:
    graph = graphs.empty()
    x = graph.tensor([8, 64, 28, 28], [64 * 784, 1, 28 * 64, 64])
    w = graph.tensor([128, 63, 3, 3], [63 * 9, 1, 3 * 63, 63])
    graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    graph.validate()
    yield "validated"
    graph.build_operation_graph()
    yield "lowered"
    graph.create_execution_plans()
    yield "planned"
    graph.build_plans()
    yield "not reached"


@road
def dims_that_do_not_fit(graphs: Graphs) -> Iterator[Any]:
    graph = graphs.empty()
    graph.matmul(graph.tensor([8, 16, 32]), graph.tensor([8, 33, 64])).set_output(True)
    graph.validate()
    yield "validated"
    graph.build()
    yield "not reached"


@road
def nothing_to_plan(graphs: Graphs) -> Iterator[Any]:
    graphs.empty().build()
    yield "not reached"


@road
def looked_at_too_early(graphs: Graphs) -> Iterator[Any]:
    graph = graphs.convolution()[0]
    yield graph.get_execution_plan_count()
    graph.validate()
    yield graph.get_execution_plan_count(), hasattr(graph, "get_engine_count"), hasattr(graph, "no_such_thing")
    graph.create_execution_plans()
    yield graph.get_execution_plan_count()
    graph.get_workspace_size()
    yield "not reached"


def followed(graphs: Graphs, name: str) -> Any:
    """What a road shows, and the exception that it ends with."""
    seen: list[Any] = []
    try:
        for step in ROADS[name](graphs):
            seen.append(step)
    except Exception as error:  # whatever the frontend raises is what is compared
        seen.append(f"{type(error).__name__}: {error}")
    return seen


def of_the_zoo(name: str) -> Road:
    """A graph of the zoo, step by step, with every tensor as each step leaves it."""
    from zoo import ZOO

    def follow(graphs: Graphs) -> Iterator[Any]:
        graph = ZOO[name].make()
        graph._cpp_graph_kwargs |= {"device_property": graphs.properties, "sm_version": 90}
        tensors = list(graph._tensor_by_uid.values())
        graph.validate()
        yield [shape(tensor) for tensor in tensors]
        graph.build_operation_graph()
        yield [shape(tensor) for tensor in tensors]
        graph.create_execution_plans(_modes(graphs, "A", "FALLBACK"))
        yield planned(graph)
        graph.check_support()
        graph.build_plans()
        yield built(graph, *tensors)

    return follow


def main(cache_directory: str, *cases: str) -> None:
    provide_driver(DEVICE.driver_version, tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
    if cases:
        ROADS.clear()
        ROADS.update((name, of_the_zoo(name)) for name in cases)
    if not cache_directory:
        print(json.dumps({name: followed(Graphs(), name) for name in ROADS}))
        return
    import cudnn  # noqa: F401  # before it is installed: names that were imported are served too

    import plancache

    result, served = {}, {}
    with plancache.PlanCache(cache_directory, device=DEVICE, strict=True) as cache, plancache.installed(cache):
        graphs = Graphs()
        for name in ROADS:
            before = cache.statistics()
            result[name] = followed(graphs, name)
            after = cache.statistics()
            fell = after.fell_through - before.fell_through
            served[name] = {"hits": after.hits - before.hits, "builds": after.builds - before.builds, "fell": dict(fell)}
    print(json.dumps(result))
    print(json.dumps(served), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
