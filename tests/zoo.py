"""A catalogue of described graphs that walks every node type of the installed cuDNN frontend.

`ZOO[name].make()` describes a fresh `cudnn.pygraph`: not validated, without handle and device. No two cases are
described alike, though a few come to the same plan (`1.0` and `True`, causal masks in both spellings).

`lowers` says whether cuDNN 9.19.0 builds the operation graph for an H200 (sm_90) without a GPU; not that it has an
engine for it. Where it does not, `reason` is "python-only" (cuDNN is never asked: `validate()` and
`build_operation_graph()` pass and do nothing) or what stands in the way. Where the CuTe DSL is installed the frontend
validates SDPA in Python and lowers it in `create_execution_plans()` only: there `lowers` is about that step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any

NO_BUILDER = frozenset({"COMPOSITE", "MATMUL_FP8"})  # enum members that no method of pygraph makes

LINEAR_FAMILIES = ("gdn", "kda", "gdn2", "gdp", "mamba2")
CONSTANT = "compile-time constants need cuDNN 9.22"
REDUCTION_MODE = "CUDNN_STATUS_NOT_SUPPORTED at the reduction descriptor, whatever the data types"
HALF_FROM_FP8 = "HALF and BFLOAT16 results of FP8 attention need Blackwell"
MXFP8 = "needs cuDNN 9.21 and Blackwell"
LINEAR_OPS = ("", "_BWD", "_SUMMARY", "_SUMMARY_BWD")
NOT_LOWERED_TYPES = {family.upper() + op: "python-only" for family in LINEAR_FAMILIES for op in LINEAR_OPS} | {
    "MOE_GROUPED_MATMUL_BWD": "needs cuDNN 9.22",
    "ROPE": "needs cuDNN 9.24",
    "ROPE_BWD": "needs cuDNN 9.24",
    "SDPA_MXFP8": MXFP8,
    "SDPA_MXFP8_BWD": MXFP8,
    "SLICE": "needs cuDNN 9.22",
    "TRANSPOSE": "needs cuDNN 9.22",
}
NOT_LOWERED = {
    "batchnorm_no_running": "TypeError: the binding wants in_running_mean, in_running_var and momentum, if only None",
    "block_scale_quantize_groups": "TypeError: the binding has no group_offset",
    "layernorm_epsilon_constant": CONSTANT,
    "matmul_override_shape": "shape overrides need cuDNN 9.21",
    "moe_grouped_matmul_combine": "COMBINE is left to the frontend's SM100 engine",
    "pointwise_mul_constant_float": CONSTANT,
    "pointwise_mul_constant_int": CONSTANT,
    "reduction_avg": REDUCTION_MODE,
    "reduction_groups": "group_offset needs cuDNN 9.24",
    "reduction_mul_no_zeros": REDUCTION_MODE,
    "reduction_norm1": REDUCTION_MODE,
    "reduction_norm2": REDUCTION_MODE,
    "reshape_logical": "LOGICAL needs cuDNN 9.22",
    "sdpa_backward_softmax_half": "python-only",
    "sdpa_cumulative": "cumulative lengths need cuDNN 9.24",
    "sdpa_fp8_backward_half_output": HALF_FROM_FP8,
    "sdpa_fp8_half_output": HALF_FROM_FP8,
    "sdpa_fp8_scaled_output": "python-only",
    "sdpa_key_mask": "python-only",
    "sdpa_mxfp8_scaled_output": "python-only",
    "sdpa_prefolded": "python-only",
    "sdpa_ragged_multiplier": "needs cuDNN 9.24",
    "sdpa_scale_int": "std::bad_cast: the binding wants a float",
    "sdpa_softmax_half": "python-only",
    "sdpa_unfuse_fma": "needs cuDNN 9.21",
}


@dataclass(frozen=True)
class Case:
    name: str
    node_type: str
    make: Callable[[], Any]
    lowers: bool
    reason: str


@dataclass(frozen=True)
class Later:
    """A tensor or an enum member, made when the graph exists: nothing imports cudnn before."""

    make: Callable[[Any], Any]


def enum(kind: str, member: str) -> Later:
    def make(_graph):
        import cudnn

        return getattr(getattr(cudnn._compiled_module, kind), member)

    return Later(make)


def dtype(name: str | None) -> Later | None:
    return name and enum("data_type", name)


def t(*dim: int, dt: str | None = None, **fields) -> Later:
    """A tensor with these dims, row-major unless `stride` is given; of the graph's io type unless `dt` is."""
    return Later(lambda graph: graph.tensor(list(dim), data_type=realize(graph, dtype(dt)), **realize(graph, fields)))


def scalar(value: Any, kind: str = "RUNTIME_PARAM") -> Later:
    return Later(lambda graph: graph.tensor_scalar(value, enum("scalar_type", kind).make(graph)))


def packed(dim: tuple, order: list[int]) -> list[int]:
    """Strides of a dense tensor whose axes lie in memory in this order, outermost first."""
    stride, step = [0] * len(dim), 1
    for axis in reversed(order):
        stride[axis], step = step, step * dim[axis]
    return stride


def channels_last(*dim: int, **fields) -> Later:
    return t(*dim, stride=packed(dim, [0, *range(2, len(dim)), 1]), **fields)


def realize(graph, value):
    if isinstance(value, Later):
        return value.make(graph)
    if isinstance(value, list | tuple):
        return type(value)(realize(graph, part) for part in value)
    if isinstance(value, dict):
        return {key: realize(graph, part) for key, part in value.items()}
    return value


def new_graph(io: str | None = "BFLOAT16", **context):
    import cudnn

    types = {"intermediate_data_type": dtype("FLOAT"), "compute_data_type": dtype("FLOAT")} if io else {}
    return cudnn.pygraph(io_data_type=realize(None, dtype(io)), **realize(None, types | context))


FLOAT_PORTS = "mean inv_var next_running_mean next_running_var DScale DBias SUM SQ_SUM Stats Amax_S Amax_O amax_dQ amax_dK amax_dV amax_dP"


def mark(graph, outputs: dict | None = None) -> None:
    """Make the results of the last operation outputs; `outputs` holds more to set, by port."""
    for port, tensor in graph.nodes[-1].outputs.items():
        fields = {"output": True} | ({"data_type": dtype("FLOAT")} if port in FLOAT_PORTS.split() else {})
        for field, value in (fields | (outputs or {}).get(port, {})).items():
            getattr(tensor, f"set_{field}")(realize(graph, value))


def single(op: str, io: str | None = "BFLOAT16", context: dict | None = None, outputs: dict | None = None, **given):
    """A graph of one operation: tensors, enums, lists and plain values as the builder takes them; None leaves out."""
    graph = new_graph(io, **(context or {}))
    getattr(graph, op)(**{key: value for key, value in realize(graph, given).items() if value is not None})
    mark(graph, outputs)
    return graph


PREVIOUS = object()


def chain(*steps: tuple, io: str | None = "BFLOAT16", outputs: dict | None = None):
    """A fused graph: (op, arguments) one after the other; `PREVIOUS` stands for the first result of the step before."""
    graph, previous = new_graph(io), None
    for op, arguments in steps:
        given = {key: previous if value is PREVIOUS else realize(graph, value) for key, value in arguments.items()}
        made = getattr(graph, op)(**given)
        previous = made[0] if isinstance(made, list) else made
    mark(graph, outputs)
    return graph


ZOO: dict[str, Case] = {}


def case(name: str, node_type: str, make: Callable[[], Any]) -> None:
    assert name not in ZOO, name
    reason = NOT_LOWERED.get(name) or NOT_LOWERED_TYPES.get(node_type, "")
    ZOO[name] = Case(name, node_type, make, not reason, reason)


def cases(op: str, node_type: str, base: dict, variants: dict[str, dict]) -> None:
    """One case per variant: the base's arguments with the variant's over them."""
    for variant, changes in variants.items():
        case(f"{op}_{variant}", node_type, partial(single, **({"op": op} | base | changes)))


# What follows are tables: several short variants share a line.
# fmt: off

# ---- convolution -----------------------------------------------------------------------------------------------------

X, W, Y = channels_last(4, 32, 16, 16), channels_last(64, 32, 3, 3), channels_last(4, 64, 16, 16)
X3, W3, Y3 = channels_last(2, 32, 8, 8, 8), channels_last(64, 32, 3, 3, 3), channels_last(2, 64, 8, 8, 8)
HALVED = channels_last(4, 64, 8, 8)
HALF, FLOAT = {"io": "HALF"}, {"io": "FLOAT"}
SAME = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
SAME3 = {"padding": [1, 1, 1], "stride": [1, 1, 1], "dilation": [1, 1, 1]}
ASYMMETRIC = {"padding": None, "pre_padding": [1, 1], "post_padding": [0, 2]}
DILATED, STRIDED = {"padding": [2, 2], "dilation": [2, 2]}, {"stride": [2, 2]}
FLIPPED = {"convolution_mode": enum("convolution_mode", "CONVOLUTION")}


def to(port: str, **fields) -> dict:
    """What to set on a result; `dt` is its data type."""
    dt = {"data_type": dtype(fields.pop("dt"))} if "dt" in fields else {}
    return {"outputs": {port: fields | dt}}


cases("conv_fprop", "CONV_FPROP", {"image": X, "weight": W} | SAME, {
    "plain": {}, "half": HALF, "float": FLOAT, "stride": STRIDED, "dilation": DILATED, "pre_post_padding": ASYMMETRIC,
    "unpadded": {"padding": [0, 0]},
    "filter_1x1": {"weight": channels_last(64, 32, 1, 1), "padding": [0, 0]},
    "tuples": {"padding": (2, 2), "stride": (1, 1), "dilation": (1, 1)},
    "row_major": {"image": t(4, 32, 16, 16), "weight": t(64, 32, 3, 3)},
    "grouped": {"weight": channels_last(64, 8, 3, 3)},
    "volume": {"image": X3, "weight": W3} | SAME3,
    "compute_half": HALF | {"compute_data_type": dtype("HALF")},
    "true_convolution": FLIPPED,
    "cross_correlation": {"convolution_mode": enum("convolution_mode", "CROSS_CORRELATION")},
    "float_output": to("Y", dt="FLOAT"),
    "output_layout": to("Y", dim=[4, 64, 16, 16], stride=[16384, 1, 1024, 64]),
})
cases("conv_dgrad", "CONV_DGRAD", {"loss": Y, "filter": W} | SAME, {
    "plain": {}, "dilation": DILATED, "true_convolution": FLIPPED,
    "strided": {"loss": HALVED, "out_dims": [4, 32, 16, 16]} | STRIDED,
    "strided_odd": {"loss": HALVED, "out_dims": [4, 32, 15, 15]} | STRIDED,
    "pre_post_padding": {"loss": channels_last(4, 64, 15, 17)} | ASYMMETRIC,
    "volume": {"loss": Y3, "filter": W3} | SAME3,
})
cases("conv_wgrad", "CONV_WGRAD", {"image": X, "loss": Y} | to("DW", dim=[64, 32, 3, 3]) | SAME, {
    "plain": {}, "dilation": DILATED, "true_convolution": FLIPPED,
    "strided": {"loss": HALVED} | STRIDED,
    "pre_post_padding": {"loss": channels_last(4, 64, 15, 17)} | ASYMMETRIC,
    "out_dims": {"out_dims": [64, 32, 5, 5], "outputs": None, "padding": [2, 2]},
    "float_output": to("DW", dim=[64, 32, 3, 3], dt="FLOAT"),
    "volume": {"image": X3, "loss": Y3} | to("DW", dim=[64, 32, 3, 3, 3]) | SAME3,
})

# ---- matmul, and what belongs to a graph or a tensor rather than to an operation -------------------------------------

A, B, B_TRANSPOSED = t(8, 64, 32), t(8, 32, 128), t(8, 32, 128, stride=[4096, 1, 32])

cases("matmul", "MATMUL", {"A": A, "B": B}, {
    "plain": {}, "float": FLOAT, "padding": {"padding": 1.0}, "padding_int": {"padding": 2},
    "broadcast_a": {"A": t(1, 64, 32)}, "broadcast_b": {"B": t(1, 32, 128)},
    "transposed_a": {"A": t(8, 64, 32, stride=[2048, 1, 64])}, "transposed_b": {"B": B_TRANSPOSED},
    "transposed_output": to("C", dim=[8, 64, 128], stride=[8192, 1, 64]),
    "heads": {"A": t(2, 4, 64, 32), "B": t(2, 4, 32, 128)},
    "half_compute": HALF | {"compute_data_type": dtype("HALF")},
    "int8": {"io": "INT8", "compute_data_type": dtype("INT32")} | to("C", dt="INT32"),
    "mixed_types": {"B": t(8, 32, 128, dt="INT8")},
    "float_output": to("C", dt="FLOAT"),
    "fp8": {"io": "FP8_E4M3", "B": B_TRANSPOSED} | to("C", dt="HALF"),
    "user_uid": {"A": t(8, 48, 32, uid=7)} | to("C", uid=1),
    "duplicate_names": {"A": t(8, 40, 32, name="t"), "B": t(8, 32, 128, name="t")} | to("C", name="t"),
    "no_types": {"io": None, "A": t(8, 64, 32, dt="HALF"), "B": t(8, 32, 128, dt="HALF")} | to("C", dt="HALF"),
    "intermediate_half": {"context": {"intermediate_data_type": dtype("HALF")}},
    "sm_count": {"context": {"sm_count": 100}},
    "dynamic_shape": {"context": {"is_dynamic_shape_enabled": True}},
    "override_shape": {"context": {"is_override_shape_enabled": True}},
    "retention": {"context": {"cuda_graph_retention": enum("cuda_graph_retention", "PER_GRAPH")}},
    "graph_replay": {"context": {"is_cuda_graph_replay_expected": True}},
})

# ---- pointwise -------------------------------------------------------------------------------------------------------

P, ROW_OF_P = t(2, 16, 32), t(1, 1, 32)
MODES = {
    ("input",): "abs ceil cos elu erf exp floor gelu gelu_approx_tanh identity log neg reciprocal relu rsqrt sigmoid"
    " sin softplus sqrt swish tan tanh",
    ("a", "b"): "add add_square div mul sub",
    ("input0", "input1"): "max min mod pow",
    ("input", "comparison"): "cmp_eq cmp_ge cmp_gt cmp_le cmp_lt cmp_neq",
    ("loss", "input"): "elu_backward gelu_approx_tanh_backward gelu_backward relu_backward sigmoid_backward"
    " softplus_backward swish_backward tanh_backward",
}
LOGICAL = {"io": "BOOLEAN", "compute_data_type": dtype("BOOLEAN")}


def pointwise(op: str, ports: tuple, variants: dict[str, dict]) -> None:
    """Cases of one mode; the variant "" is the mode's plain form."""
    for variant, changes in variants.items():
        arguments = {"op": op} | FLOAT | dict.fromkeys(ports, P) | changes
        case("_".join(filter(None, ("pointwise", op, variant))), "POINTWISE", partial(single, **arguments))


for ports, modes in MODES.items():
    for mode in modes.split():
        pointwise(mode, ports, {"": to("OUT_0", dt="BOOLEAN") if mode.startswith("cmp") else {}})

SLOPE, OTHER_SLOPE = {"negative_slope": 0.01}, {"negative_slope": 0.02}
pointwise("logical_and", ("a", "b"), {"": LOGICAL})
pointwise("logical_or", ("a", "b"), {"": LOGICAL})
pointwise("logical_not", ("input",), {"": LOGICAL})
pointwise("binary_select", ("input0", "input1"), {"": {"mask": t(2, 16, 32, dt="BOOLEAN")}})
pointwise("bias", ("input",), {"": {"bias": ROW_OF_P}})
pointwise("scale", ("input",), {"": {"scale": t(1, 16, 1)}})
pointwise("relu", ("input",), {
    "slope": SLOPE, "lower_clip": {"lower_clip": 0.5}, "clips": {"lower_clip": -1.0, "upper_clip": 1.0},
    "upper_clip": {"upper_clip": 6.0}, "upper_clip_int": {"upper_clip": 6},
})
pointwise("relu_backward", ("loss", "input"), {"slope": SLOPE, "clips": {"lower_clip": 0.0, "upper_clip": 6.0}})
pointwise("leaky_relu", ("input",), {"": SLOPE, "other": OTHER_SLOPE})
pointwise("leaky_relu_backward", ("loss", "input"), {"": SLOPE, "other": OTHER_SLOPE})
pointwise("swish", ("input",), {"beta": {"swish_beta": 1.5}})
pointwise("swish_backward", ("loss", "input"), {"beta": {"swish_beta": 1.5}})
pointwise("gen_index", ("input",), {
    "0": {"axis": 0}, "1": {"axis": 1}, "2": {"axis": 2}, "int32": {"axis": 1} | to("OUT_0", dt="INT32"),
})
pointwise("add", ("a", "b"), {
    "half": {"a": t(2, 16, 32, dt="HALF")} | to("OUT_0", dt="HALF"),
    "compute_half": HALF | {"compute_data_type": dtype("HALF")},
    "broadcast": {"b": t(1, 1, 1)}, "broadcast_first": {"a": ROW_OF_P},
    "strided": {"a": t(2, 16, 32, stride=[512, 1, 16])},
})


def by_value(**fields) -> dict:
    return {"b": t(1, 1, 1, is_pass_by_value=True, **fields)}


# pass-by-value operands: with a value of each Python type, without one, and with one that is never lowered
VALUES = {"float": 1.0, "int": 1, "bool": True, "double": 0.1, "negative_zero": -0.0, "infinite": -inf, "nan": nan}
VALUES |= {"int_max": 2**31 - 1, "long": 2**40}
pointwise("mul", ("a",), {f"scalar_{name}": {"b": scalar(value)} for name, value in VALUES.items()} | {
    "constant_float": {"b": scalar(1.0, "COMPILE_TIME_CONST")}, "constant_int": {"b": scalar(1, "COMPILE_TIME_CONST")},
    "by_value": by_value(), "by_value_half": by_value(dt="HALF"), "by_value_int32": by_value(dt="INT32"),
    "by_value_with_float": by_value(pass_by_value=2.5), "by_value_with_int": by_value(pass_by_value=2),
})


def one_tensor_twice(op: str):
    graph = new_graph("FLOAT")
    x = graph.tensor([4, 8, 8])
    getattr(graph, op)(x, x)
    mark(graph)
    return graph


case("twice_add", "POINTWISE", partial(one_tensor_twice, "add"))
case("twice_matmul", "MATMUL", partial(one_tensor_twice, "matmul"))

# ---- reduction -------------------------------------------------------------------------------------------------------


def reduce(mode: str, *dim: int, **fields) -> dict:
    return {"mode": enum("reduction_mode", mode)} | to("OUT_0", dim=list(dim), **fields)


REDUCTION_MODES = "ADD MUL MIN MAX AMAX AVG NORM1 NORM2 MUL_NO_ZEROS"
cases("reduction", "REDUCTION", FLOAT | {"input": channels_last(4, 32, 8, 8)}, {
    **{mode.lower(): reduce(mode, 1, 32, 1, 1) for mode in REDUCTION_MODES.split()},
    "all": reduce("ADD", 1, 1, 1, 1), "rows": reduce("ADD", 4, 32, 8, 1), "half": HALF | reduce("MAX", 1, 32, 1, 1),
    "float_of_half": HALF | reduce("ADD", 1, 32, 1, 1, dt="FLOAT"),
    "strided": reduce("ADD", 4, 1, 8, 8, stride=[64, 1, 8, 1]),
    "row_major": {"input": t(4, 32, 8, 8)} | reduce("ADD", 1, 32, 1, 1),
    "out_dims": reduce("ADD", 4, 1, 1, 8) | {"out_dims": [4, 1, 1, 8], "outputs": None},
    "groups": reduce("ADD", 4, 32, 1, 1) | {"group_offset": t(4, 1, 1, 1, dt="INT32")},
})

# ---- normalization ---------------------------------------------------------------------------------------------------


def f32(*dim: int, **fields) -> Later:
    return t(*dim, dt="FLOAT", **fields)


TRAINING, INFERENCE = ({"norm_forward_phase": enum("norm_forward_phase", phase)} for phase in ("TRAINING", "INFERENCE"))
EPSILON, EPSILON3 = f32(1, 1, 1, 1, is_pass_by_value=True), f32(1, 1, 1, is_pass_by_value=True)
ROWS, ROW, COLUMN = t(64, 128, 1, 1), f32(1, 128, 1, 1), f32(64, 1, 1, 1)
PIXELS, PER_CHANNEL = channels_last(4, 32, 8, 8), channels_last(1, 32, 1, 1, dt="FLOAT")
PER_IMAGE = channels_last(4, 32, 1, 1, dt="FLOAT")
SEQUENCE, PER_SEQUENCE, PER_TOKEN, PER_FEATURE = t(4, 16, 64), f32(4, 1, 64), f32(4, 16, 1), f32(1, 1, 64)
PLAIN_AND_HALF = {"plain": {}, "half": HALF}
PHASES = {
    "training": TRAINING, "inference": INFERENCE, "half": TRAINING | HALF,
    "epsilon_scalar": TRAINING | {"epsilon": scalar(1e-6)},
}


def affine(x: Later, parameter: Later, epsilon: Later = EPSILON) -> dict:
    return {"input": x, "scale": parameter, "bias": parameter, "epsilon": epsilon}


def gradient(x: Later, parameter: Later, statistic: Later) -> dict:
    return {"grad": x, "input": x, "scale": parameter, "mean": statistic, "inv_variance": statistic}


UNUSED, ONES = {"output": False}, {"dim": [64, 1, 1, 1], "stride": [1, 1, 1, 1]}
cases("layernorm", "LAYERNORM", affine(ROWS, ROW), PHASES | {
    "no_scale": TRAINING | {"scale": None, "bias": None},
    "epsilon_constant": TRAINING | {"epsilon": scalar(1e-5, "COMPILE_TIME_CONST")},
    "statistics_unused": TRAINING | {"outputs": {"mean": UNUSED, "inv_var": UNUSED}},
    "mean_dims": TRAINING | {"outputs": {"mean": ONES}},
    "rank3": TRAINING | affine(SEQUENCE, PER_FEATURE, EPSILON3),
})
cases("rmsnorm", "RMSNORM", affine(ROWS, ROW) | {"bias": None}, PHASES | {"bias": TRAINING | {"bias": ROW}})
cases("instancenorm", "INSTANCENORM", affine(PIXELS, PER_CHANNEL), PHASES)
cases("adalayernorm", "ADALAYERNORM", affine(SEQUENCE, PER_SEQUENCE, EPSILON3), PHASES)
NO_SCALE = {"no_scale": {"scale": None}}
cases("layernorm_backward", "LAYERNORM_BWD", gradient(ROWS, ROW, COLUMN), PLAIN_AND_HALF | NO_SCALE)
cases("rmsnorm_backward", "RMSNORM_BWD", gradient(ROWS, ROW, COLUMN) | {"mean": None}, {
    "dbias": {"has_dbias": True}, "no_dbias": {"has_dbias": False}, "no_scale": {"scale": None, "has_dbias": False},
})
cases("instancenorm_backward", "INSTANCENORM_BWD", gradient(PIXELS, PER_CHANNEL, PER_IMAGE), PLAIN_AND_HALF)
cases("adalayernorm_backward", "ADALAYERNORM_BWD", gradient(SEQUENCE, PER_SEQUENCE, PER_TOKEN), PLAIN_AND_HALF)

RUNNING = {"in_running_mean": PER_CHANNEL, "in_running_var": PER_CHANNEL, "momentum": EPSILON}
PEERS = [f32(2, 128, 1, 1), f32(2, 128, 1, 1)]
cases("batchnorm", "BATCHNORM", affine(PIXELS, PER_CHANNEL) | RUNNING, {
    "running": {}, "half": HALF, "peers": {"peer_stats": PEERS}, "one_peer": {"peer_stats": PEERS[:1]},
    "no_running": dict.fromkeys(RUNNING),
})
cases("batchnorm_backward", "BATCHNORM_BWD", gradient(PIXELS, PER_CHANNEL, PER_CHANNEL),
      PLAIN_AND_HALF | {"peers": {"peer_stats": PEERS}})
STATISTICS = {"mean": PER_CHANNEL, "inv_variance": PER_CHANNEL, "epsilon": None}
cases("batchnorm_inference", "BATCHNORM_INFERENCE", affine(PIXELS, PER_CHANNEL) | STATISTICS, PLAIN_AND_HALF)
cases("genstats", "GENSTATS", {"input": PIXELS}, PLAIN_AND_HALF)

# ---- attention -------------------------------------------------------------------------------------------------------


def heads(h: int = 4, s: int = 128, d: int = 64, **fields) -> Later:
    """A (batch, heads, sequence, depth) tensor whose memory holds (batch, sequence, heads, depth)."""
    return t(2, h, s, d, stride=packed((2, h, s, d), [0, 2, 1, 3]), **fields)


def i32(*dim: int) -> Later:
    return t(*dim, dt="INT32")


def dropout(*parts) -> dict:
    return {"dropout": parts}


def double_scores(graph, scores):
    """A `score_mod`: a callable has no key, so such a graph is refused."""
    return graph.add(a=scores, b=scores)


TOP_LEFT, BOTTOM_RIGHT = ({"diagonal_alignment": enum("diagonal_alignment", at)} for at in ("TOP_LEFT", "BOTTOM_RIGHT"))
COMPOSITE, UNIFIED = ({"implementation": enum("attention_implementation", kind)} for kind in ("COMPOSITE", "UNIFIED"))
INFER, STATS = {"generate_stats": False}, {"generate_stats": True}
CAUSAL, CAUSAL_BOTTOM_RIGHT = {"use_causal_mask": True}, {"use_causal_mask_bottom_right": True}
RIGHT_0, WINDOW = {"diagonal_band_right_bound": 0}, {"sliding_window_length": 32}
DETERMINISTIC = {"use_deterministic_algorithm": True}
SCALAR, SCALAR_BY_VALUE = f32(1, 1, 1, 1), f32(1, 1, 1, 1, is_pass_by_value=True)
SEED, SEED_BY_VALUE = t(1, 1, 1, 1, dt="INT64"), t(1, 1, 1, 1, dt="INT64", is_pass_by_value=True)
SCORES, MASK, DUMP = f32(2, 4, 128, 1), t(1, 1, 128, 128), {"rng_dump": f32(2, 4, 128, 128)}
SINK = {"sink_token": f32(1, 4, 1, 1)}
SINK_BACKWARD = SINK | {"dSink_token": f32(1, 4, 1, 1)}
DROPOUT = dropout(0.1, SEED, SEED)
BIAS, ALIBI = {"bias": t(1, 4, 128, 128)}, CAUSAL | {"use_alibi_mask": True}
SOFTMAX_HALF = {"softmax_precision": dtype("HALF")}
SCORE_STATISTICS = {"score_max": SCORES, "score_sum_exp": SCORES}
PADDING = {"use_padding_mask": True, "seq_len_q": i32(2, 1, 1, 1), "seq_len_kv": i32(2, 1, 1, 1)}
OFFSETS = {"ragged_offset": i32(3, 1, 1, 1)}
RAGGED_STATS = OFFSETS | {"dim": [2, 4, 128, 1], "stride": [512, 1, 4, 1]}
TOTALS = {"max_total_seq_len_q": 200, "max_total_seq_len_kv": 200}
RAGGED = dict.fromkeys("qkv", heads(**OFFSETS)) | PADDING | {"outputs": {"O": OFFSETS}}
CUMULATIVE = {"seq_len_q": None, "seq_len_kv": None, "cu_seq_len_q": i32(3, 1, 1, 1), "cu_seq_len_kv": i32(3, 1, 1, 1)}
PAGED = PADDING | {"k": t(16, 4, 16, 64), "v": t(16, 4, 16, 64), "paged_attention_max_seq_len_kv": 128}
PAGED |= {"paged_attention_k_table": i32(2, 1, 8, 1), "paged_attention_v_table": i32(2, 1, 8, 1)}
QKV, GRADIENTS = dict.fromkeys("qkv", heads()), ("dQ", "dK", "dV")

cases("sdpa", "SDPA", QKV | INFER, {
    "plain": {}, "half": HALF, "stats": STATS,
    "is_inference": {"generate_stats": None, "is_inference": True},
    "not_inference": {"generate_stats": None, "is_inference": False},
    "row_major": dict.fromkeys("qkv", t(2, 4, 128, 64)),
    "output_layout": to("O", dim=[2, 4, 128, 64], stride=packed((2, 4, 128, 64), [0, 2, 1, 3])),
    "causal": CAUSAL, "not_causal": {"use_causal_mask": False}, "causal_aligned": TOP_LEFT | RIGHT_0,
    "causal_bottom_right": CAUSAL_BOTTOM_RIGHT, "causal_bottom_right_aligned": BOTTOM_RIGHT | RIGHT_0,
    "window": CAUSAL | WINDOW, "window_band": CAUSAL | {"diagonal_band_left_bound": 32},
    "band": {"diagonal_band_left_bound": 16} | RIGHT_0,
    "scale": {"attn_scale": 0.125}, "scale_int": {"attn_scale": 1}, "scale_tensor": {"attn_scale": SCALAR},
    "scale_by_value": {"attn_scale": SCALAR_BY_VALUE},
    "grouped_query": {"k": heads(2), "v": heads(2)}, "multi_query": {"k": heads(1), "v": heads(1)},
    "cross": {"k": heads(s=256), "v": heads(s=256)}, "decode": {"q": heads(s=1)},
    "value_depth": {"v": heads(d=128)}, "depth_512": dict.fromkeys("qkv", heads(d=512)),
    "padding": PADDING, "padding_causal_stats": PADDING | CAUSAL | STATS,
    "ragged": RAGGED, "ragged_totals": RAGGED | TOTALS, "cumulative": RAGGED | CUMULATIVE,
    "ragged_stats": RAGGED | STATS | {"outputs": {"O": OFFSETS, "Stats": RAGGED_STATS}},
    "ragged_multiplier": RAGGED | {"q": heads(**OFFSETS, ragged_offset_multiplier=64)},
    "bias": BIAS, "bias_batch": {"bias": t(2, 1, 128, 128)}, "alibi": ALIBI,
    "dropout": DROPOUT, "dropout_other": dropout(0.2, SEED, SEED), "dropout_mask": dropout(MASK, SCALAR),
    "dropout_by_value": dropout(0.1, SEED_BY_VALUE, SEED_BY_VALUE), "dropout_dump": DROPOUT | DUMP | STATS,
    "paged": PAGED, "paged_decode": PAGED | {"q": heads(s=1)},
    "block_mask": {"block_mask": t(2, 4, 1, 1, dt="UINT8")} | UNIFIED, "composite": COMPOSITE, "unified": UNIFIED,
    "sink": SINK | STATS, "score_statistics": SCORE_STATISTICS, "unfuse_fma": {"unfuse_fma": True},
    "score_mod": {"score_mod": double_scores},
    "softmax_half": SOFTMAX_HALF, "prefolded": {"attn_scale_prefolded": True},
    "key_mask": {"kv_mask": t(2, 1, 1, 128, dt="BOOLEAN")},
})
cases("sdpa_backward", "SDPA_BWD", QKV | {"o": heads(), "dO": heads(), "stats": SCORES}, {
    "plain": {}, "half": HALF, "scale": {"attn_scale": 0.125}, "scale_tensor": {"attn_scale": SCALAR},
    "causal": CAUSAL, "causal_bottom_right": CAUSAL_BOTTOM_RIGHT, "causal_aligned": TOP_LEFT | RIGHT_0,
    "window": CAUSAL | WINDOW, "alibi": ALIBI, "bias": BIAS | {"dBias": t(1, 4, 128, 128)}, "sink": SINK_BACKWARD,
    "deterministic": DETERMINISTIC, "not_deterministic": {"use_deterministic_algorithm": False},
    "padding": PADDING, "grouped_query": {"k": heads(2), "v": heads(2)},
    "ragged": dict.fromkeys(("q", "k", "v", "o", "dO"), heads(**OFFSETS)) | PADDING | TOTALS
    | {"stats": f32(2, 4, 128, 1, stride=[512, 1, 4, 1], **OFFSETS), "outputs": dict.fromkeys(GRADIENTS, OFFSETS)},
    "dropout": DROPOUT, "dropout_mask": dropout(MASK, SCALAR, SCALAR), "dropout_dump": DROPOUT | DUMP,
    "softmax_half": SOFTMAX_HALF,
    "score_mod": {"score_mod": double_scores, "score_mod_bprop": double_scores},
})

FP8 = {"io": "FP8_E4M3"}
SCALES = "descale_q descale_k descale_v descale_s scale_s scale_o"
SCALES_BACKWARD = "descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP scale_s"
SCALES_BACKWARD += " scale_dQ scale_dK scale_dV scale_dP"
FORWARD = FP8 | QKV | STATS | dict.fromkeys(SCALES.split(), SCALAR)
BACKWARD = FP8 | {"stats": SCORES} | dict.fromkeys(SCALES_BACKWARD.split(), SCALAR)
BACKWARD |= dict.fromkeys(("q", "k", "v", "o", "dO"), heads(d=128))
TO_HALF = {"data_type": dtype("HALF")}
cases("sdpa_fp8", "SDPA_FP8", FORWARD, {
    "plain": {}, "e5m2": {"io": "FP8_E5M2"}, "inference": INFER, "causal": CAUSAL | {"attn_scale": 0.125},
    "padding": PADDING, "bounds": {"left_bound": 32, "right_bound": 0}, "window": CAUSAL | {"sliding_window": 32},
    "paged": PAGED, "sink": SINK, "dropout_dump": DROPOUT | DUMP, "score_statistics": INFER | SCORE_STATISTICS,
    "half_output": to("O", dt="HALF"), "scaled_output": {"sf_o": t(2, 4, 128, 4, dt="FP8_E8M0")},
})
cases("sdpa_fp8_backward", "SDPA_FP8_BWD", BACKWARD, {
    "plain": {}, "causal": CAUSAL | {"attn_scale": 0.125}, "padding": PADDING, "deterministic": DETERMINISTIC,
    "half_output": {"outputs": dict.fromkeys(GRADIENTS, TO_HALF)}, "sink": SINK_BACKWARD,
})

REORDERED = {"reordering_type": enum("tensor_reordering", "F8_128x4")}
BY_DEPTH, BY_SEQUENCE = (t(2, 4, *dim, dt="FP8_E8M0", **REORDERED) for dim in ((128, 4), (4, 128)))
SQUARE, SQUARE16 = t(2, 4, 128, 128), t(2, 4, 128, 128, dt="BFLOAT16")
MX = FP8 | dict.fromkeys("qkv", SQUARE) | {"descale_q": BY_DEPTH, "descale_k": BY_DEPTH, "descale_v": BY_SEQUENCE}
MX_BACKWARD = MX | {"descale_v": BY_DEPTH, "descale_dO": BY_DEPTH, "stats": SCORES}
MX_BACKWARD |= dict.fromkeys(("o_f16", "dO_f16"), SQUARE16)
MX_BACKWARD |= dict.fromkeys(("q_T", "k_T", "dO", "dO_T"), SQUARE)
MX_BACKWARD |= dict.fromkeys(("descale_q_T", "descale_k_T", "descale_dO_T"), BY_SEQUENCE)
DECLARED = {"data_type": dtype("BFLOAT16"), "dim": [2, 4, 128, 128], "stride": [65536, 16384, 128, 1]}
ONE = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
MX_BACKWARD["outputs"] = dict.fromkeys(GRADIENTS, DECLARED) | {f"amax_{port}": ONE for port in GRADIENTS}
cases("sdpa_mxfp8", "SDPA_MXFP8", MX | STATS | to("O", dt="BFLOAT16"), {
    "plain": {}, "causal": TOP_LEFT | RIGHT_0, "padding": PADDING, "inference": INFER, "sink": SINK,
    "scaled_output": {"sf_o": t(2, 4, 128, 8, dt="FP8_E4M3"), "scale_o": SCALAR} | to("O", dt="FP4_E2M1"),
})
cases("sdpa_mxfp8_backward", "SDPA_MXFP8_BWD", MX_BACKWARD, {
    "plain": {}, "deterministic": DETERMINISTIC, "sink": SINK_BACKWARD,
})

# ---- shapes, rope, block scales, experts -----------------------------------------------------------------------------

S, ALL = t(4, 8, 16, 32), slice(None)


def sliced(*slices: slice) -> dict:
    return {"slices": list(slices)}


def reshaped(mode: str) -> dict:
    return {"out_dims": [4, 128, 32], "reshape_mode": enum("reshape_mode", mode)}


cases("slice", "SLICE", {"input": S}, {
    "plain": sliced(slice(0, 2), slice(0, 8), slice(0, 16), slice(0, 32)),
    "offset": sliced(slice(1, 3), slice(0, 8), slice(4, 16), slice(0, 32)),
    "open": sliced(slice(1, None), ALL, slice(None, 8), ALL),
    "negative": sliced(slice(-2, None), ALL, slice(0, -4), ALL),
    "step": sliced(slice(0, 4), slice(0, 8), slice(0, 16), slice(0, 32, 2)),
    "step_one": sliced(slice(0, 4, 1), slice(0, 8, 1), slice(2, 16, 1), slice(0, 32, 1)),
})
cases("reshape", "RESHAPE", {"input": S}, {
    "set_dim": to("OUT_0", dim=[32, 16, 32]), "set_stride": to("OUT_0", dim=[4, 16, 8, 32], stride=[4096, 32, 512, 1]),
    "out_dims": {"out_dims": [4, 8, 512]}, "view": reshaped("VIEW_ONLY"), "logical": reshaped("LOGICAL"),
})
cases("transpose", "TRANSPOSE", {"input": S}, {
    "inner": {"permutation": [0, 1, 3, 2]}, "tuple": {"permutation": (0, 2, 1, 3)},
    "identity": {"permutation": [0, 1, 2, 3]},
})
TOGETHER = {"inputs": [S, t(4, 8, 16, 64)], "axis": 3} | to("OUT_0", dim=[4, 8, 16, 96], stride=[12288, 1536, 96, 1])
cases("concatenate", "CONCATENATE", TOGETHER, {
    "plain": {}, "in_place": {"in_place_index": 0}, "in_place_second": {"in_place_index": 1},
    "three": {"inputs": [S, S, S], "axis": 0} | to("OUT_0", dim=[12, 8, 16, 32], stride=[4096, 512, 32, 1]),
})
ROPE = {"plain": {}, "scaled": {"output_scale": 0.5}, "partial": {"rope_dim": 32}}
cases("rope", "ROPE", {"input": heads(), "freqs": f32(1, 1, 128, 64)}, ROPE)
cases("rope_backward", "ROPE_BWD", {"dY": heads(), "freqs": f32(1, 1, 128, 64)}, ROPE)

BLOCK_SCALES = {"data_type": dtype("FP8_E8M0")} | REORDERED
QUANTIZED = {"outputs": {"Y": {"data_type": dtype("FP8_E4M3")}, "scale": BLOCK_SCALES}}
BLOCKS = FLOAT | {"input": t(1, 128, 128), "block_size": 32, "axis": 2} | QUANTIZED
cases("block_scale_quantize", "BLOCK_SCALE_QUANTIZE", BLOCKS, {
    "plain": {}, "no_axis": {"axis": None}, "bfloat16": {"io": "BFLOAT16"}, "not_transposed": {"transpose": False},
    "transposed": {"transpose": True}, "groups": {"group_offset": i32(4, 1, 1)},
})
MX_SCALES, FP4_SCALES = t(1, 128, 4, dt="FP8_E8M0", **REORDERED), t(1, 128, 8, dt="FP8_E4M3", **REORDERED)
MX_BLOCKS = {"input": t(1, 128, 128, dt="FP8_E4M3"), "descale": MX_SCALES, "block_size": [1, 32]}
FP4_BLOCKS = {"input": t(1, 128, 128, dt="FP4_E2M1"), "descale": FP4_SCALES, "block_size": [1, 16]}
for name, blocks in {
    "plain": MX_BLOCKS, "fp4": FP4_BLOCKS,
    "negative": MX_BLOCKS | {"is_negative_scale": True}, "not_negative": MX_BLOCKS | {"is_negative_scale": False},
}.items():
    steps = ("block_scale_dequantize", blocks), ("relu", {"input": PREVIOUS})
    case(f"block_scale_dequantize_{name}", "BLOCK_SCALE_DEQUANTIZE", partial(chain, *steps))


def moe(mode: str, **more) -> dict:
    index = {"token_index": i32(1, 64, 1), "token_ks": i32(1, 64, 1), "top_k": 2} if mode != "NONE" else {}
    return {"mode": enum("moe_grouped_matmul_mode", mode)} | index | more


EXPERTS = {"token": t(1, 64, 128), "weight": t(4, 128, 256, stride=[32768, 1, 128]), "first_token_offset": i32(4, 1, 1)}
cases("moe_grouped_matmul", "MOE_GROUPED_MATMUL", EXPERTS, {
    "plain": {}, "half": HALF, "none": moe("NONE"), "gather": moe("GATHER"), "scatter": moe("SCATTER"),
    "combine": moe("COMBINE", top_k_scores=f32(1, 32, 2)),
    "aligned": {"first_token_offset": t(4, 1, 1, dt="INT32", alignment_value=16)},
})
EXPERTS_BACKWARD = EXPERTS | {"weight": None, "doutput": t(1, 64, 256)}
cases("moe_grouped_matmul_bwd", "MOE_GROUPED_MATMUL_BWD", EXPERTS_BACKWARD, PLAIN_AND_HALF)

# ---- linear attention: the frontend's own engines serve it, cuDNN has no node for it ---------------------------------

STATE, STREAM, GATE, GATES, PER_HEAD = f32(2, 4, 64, 64), t(256, 4, 64), f32(256, 4), f32(256, 4, 64), f32(4)
PORTS = {
    "gdn": {"g": GATE, "beta": GATE},
    "kda": {"g": GATES, "beta": GATE},
    "gdn2": {"g": GATES, "beta": GATES, "w": GATES},
    "gdp": {"g": GATE, "beta": f32(512, 4), "k": t(512, 4, 64), "v": t(512, 4, 64), "num_householder": 2},
    "mamba2": {"g": GATE, "a": PER_HEAD},
}
SAFE = {"safe_gate": True, "a_log": PER_HEAD, "dt_bias": PER_HEAD, "batch_invariant": True}
SAFE |= {"use_qk_l2norm": True, "use_beta_sigmoid": True, "allow_neg_eigval": False}
SOFTPLUS = {"dt_softplus": True, "dt_min": 0.001, "dt_max": 0.1, "dt_bias": PER_HEAD, "batch_invariant": True}
OPTIONS = {"gdn": SAFE, "gdp": SAFE, "kda": SAFE | {"gate_lower_bound": -5.0}, "mamba2": SOFTPLUS}
OPTIONS["gdn2"] = OPTIONS["kda"] | {"beta_guard": True}
CHECKPOINTS, OVERWRITE = {"checkpoint_every_n_tokens": 64}, {"initial_state": STATE, "overwrite_initial_state": True}
RESIDUAL = {"d": PER_HEAD, "z": STREAM}


def linear_attention(family: str) -> None:
    """The operations of a family: forward, backward, and the summary of a piece of the sequence with its backward."""
    name, mamba = family.upper(), family == "mamba2"
    ports = dict.fromkeys("qkv", STREAM) | {"cu_seqlens": i32(3)} | PORTS[family]
    every = {"plain": {}, "options": OPTIONS[family]} | ({} if mamba else {"linear_gate": {"gate_domain": "linear"}})
    scale = {} if mamba else {"scale": {"scale": 0.125}}
    cases(family, name, ports, every | scale | {
        "states": {"initial_state": STATE, "output_final_state": True} | CHECKPOINTS,
        "pool": OVERWRITE | {"state_indices": i32(2)},
    } | ({"pre_gate": RESIDUAL | {"output_pre_gate": True}} if mamba else {}))
    backward = ports | {"dO": STREAM, "state_checkpoints": t(6, 4, 64, 64)} | CHECKPOINTS
    cases(f"{family}_bwd", f"{name}_BWD", backward, every | scale | {
        "states": {"initial_state": STATE, "d_final_state": STATE}, "overwrite": OVERWRITE,
    } | ({"pre_gate": RESIDUAL | {"O_pre": STREAM}} if mamba else {}))
    every["transition"] = {"output_transition": True}
    cases(f"{family}_summary", f"{name}_SUMMARY", ports | {"q": None}, every | {"state": {"initial_state": STATE}})
    without = ports | {"v": None, "w": None, "dO": STREAM}
    cases(f"{family}_summary_bwd", f"{name}_SUMMARY_BWD", without, every | scale | {"state": {"d_final_state": STATE}})


for family in LINEAR_FAMILIES:
    linear_attention(family)

# ---- fused graphs ----------------------------------------------------------------------------------------------------


def fused(name: str, node_type: str, *steps: tuple, **more) -> None:
    case(f"fused_{name}", node_type, partial(chain, *steps, **more))


CONVOLVE, MULTIPLY = ("conv_fprop", {"image": X, "weight": W} | SAME), ("matmul", {"A": A, "B": B})
CHANNEL_BIAS = ("bias", {"input": PREVIOUS, "bias": channels_last(1, 64, 1, 1)})
ADD_BIAS = ("bias", {"input": PREVIOUS, "bias": t(1, 1, 128)})
RELU, GELU = ("relu", {"input": PREVIOUS}), ("gelu", {"input": PREVIOUS})
RESCALE = ("mul", {"a": PREVIOUS, "b": f32(1, 1, 1)})
AMAX = ("reduction", {"input": PREVIOUS, "mode": enum("reduction_mode", "AMAX")})
TO_SCALAR = to("OUT_0", dim=[1, 1, 1], dt="FLOAT")
fused("conv_bias_relu", "CONV_FPROP", CONVOLVE, CHANNEL_BIAS, RELU)
fused("conv_relu_bias", "CONV_FPROP", CONVOLVE, RELU, CHANNEL_BIAS)
fused("conv_genstats", "GENSTATS", CONVOLVE, ("genstats", {"input": PREVIOUS}), **HALF)
CONVOLVE_PREVIOUS = ("conv_fprop", CONVOLVE[1] | {"image": PREVIOUS})
fused("relu_conv", "CONV_FPROP", ("relu", {"input": X}), CONVOLVE_PREVIOUS, **HALF)
fused("relu_matmul", "MATMUL", ("relu", {"input": A}), ("matmul", {"A": PREVIOUS, "B": B}), **HALF)
fused("matmul_bias_gelu", "MATMUL", MULTIPLY, ADD_BIAS, GELU)
fused("matmul_bias_gelu_amax", "REDUCTION", MULTIPLY, ADD_BIAS, GELU, AMAX, **TO_SCALAR)
MULTIPLY_FP8 = ("matmul", {"A": A, "B": B_TRANSPOSED})
fused("fp8_matmul_amax", "MATMUL", MULTIPLY_FP8, RESCALE, RESCALE, AMAX, **FP8, **TO_SCALAR)
fused("layernorm_one_plus_scale", "LAYERNORM", ("add", {"a": ROW, "b": scalar(1.0)}),
      ("layernorm", affine(ROWS, ROW) | TRAINING | {"scale": PREVIOUS}))
# fmt: on


def fp8_matmul():
    """FP8 operands with descales; the rescaled FP8 result and its largest magnitude before that are both outputs."""
    graph = new_graph("FP8_E4M3")
    a, b, *scales = realize(graph, [A, B_TRANSPOSED, *[f32(1, 1, 1)] * 3])
    c = graph.mul(graph.mul(graph.matmul(a, b), scales[0]), scales[1])
    graph.mul(c, scales[2]).set_output(True)
    graph.reduction(c, mode=realize(graph, enum("reduction_mode", "AMAX")))
    mark(graph, **TO_SCALAR)
    return graph


def mxfp8_matmul():
    """Block-scaled operands through a matmul and back into block-scaled form."""
    graph = new_graph("HALF")
    scale_a = t(1, 128, 4, dt="FP8_E8M0", **REORDERED)
    scale_b = t(1, 4, 256, dt="FP8_E8M0", stride=[1024, 1, 4], **REORDERED)
    a, b = t(1, 128, 128, dt="FP8_E4M3"), t(1, 128, 256, dt="FP8_E4M3", stride=[32768, 1, 128])
    a = graph.block_scale_dequantize(*realize(graph, [a, scale_a]), block_size=[1, 32])
    b = graph.block_scale_dequantize(*realize(graph, [b, scale_b]), block_size=[32, 1])
    graph.block_scale_quantize(graph.matmul(a, b), block_size=32, axis=2, transpose=False)
    mark(graph, **QUANTIZED)
    return graph


def attention_by_hand():
    """Softmax attention from matmuls, pointwise operations and reductions; virtual tensors feed two operations each."""
    graph = new_graph("HALF")
    q, k, v, scale = realize(graph, [t(8, 64, 32), t(8, 32, 64), t(8, 64, 32), scalar(0.125)])
    greatest, add = realize(graph, [enum("reduction_mode", "MAX"), enum("reduction_mode", "ADD")])
    scores = graph.mul(graph.matmul(q, k), scale)
    weights = graph.exp(graph.sub(scores, graph.reduction(scores, mode=greatest, out_dims=[8, 64, 1])))
    total = graph.reduction(weights, mode=add, out_dims=[8, 64, 1])
    graph.matmul(graph.div(weights, total), v)
    mark(graph)
    return graph


case("fused_fp8_matmul", "MATMUL", fp8_matmul)
case("fused_mxfp8_matmul", "BLOCK_SCALE_QUANTIZE", mxfp8_matmul)
case("fused_attention_by_hand", "REDUCTION", attention_by_hand)
assert set(NOT_LOWERED) <= set(ZOO), set(NOT_LOWERED) - set(ZOO)


def node_types() -> set[str]:
    from cudnn.graph_types import NodeType

    return set(NodeType.__members__)


def uncovered() -> set[str]:
    """Node types of the installed frontend that no case is about and that a builder could make."""
    return node_types() - {case.node_type for case in ZOO.values()} - NO_BUILDER
