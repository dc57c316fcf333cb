"""The fused graphs that people use most, described for cuDNN: shapes and types in, a graph and its tensors out.

A described graph has no device, no handle and no plan. Each comes with inputs to run it on, a float64 reference in
PyTorch and the tolerance at which a plan's results agree with it. cudnn and torch are imported when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from plancache.signature import row_major

Reference = Callable[[Mapping[str, Any]], dict[str, Any]]

TENSOR_CORE_TYPES = ("BFLOAT16", "HALF", "FLOAT")
ATTENTION_TYPES = ("BFLOAT16", "HALF")
ATTENTION_LAYOUTS = ("bshd", "bhsd")
ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "relu": lambda x: x.relu(),
    "gelu": lambda x: 0.5 * x * (1 + (x * math.sqrt(0.5)).erf()),
    "gelu_approx_tanh": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
    "swish": lambda x: x * x.sigmoid(),
    "sigmoid": lambda x: x.sigmoid(),
    "tanh": lambda x: x.tanh(),
}

_TORCH_TYPES = {"BFLOAT16": "bfloat16", "HALF": "float16", "FLOAT": "float32", "FP8_E4M3": "float8_e4m3fn"}
# Half the distance from one to the next number of a type. TF32 drops bits of its operands instead of rounding them
# (2^-10); FLOAT is what the GPU's approximate exp2 and rsqrt keep (CUDA programming guide, 2^-22).
_UNIT_ROUNDOFF = {"BFLOAT16": 2**-8, "HALF": 2**-11, "TF32": 2**-10, "FLOAT": 2**-22, "FP8_E4M3": 2**-4}
# Hopper's tensor cores keep about 14 bits in a sum of FP8 products (DeepSeek-V3 report, section 3.3.2).
_ACCUMULATOR_ROUNDOFF, _FP8_ACCUMULATOR_ROUNDOFF = 2**-24, 2**-14
# The middle of FP8_E4M3's range: 8 is far from its largest number (448) and from its smallest normal one (2^-6).
_FP8_DEVIATION = 8.0
_MIXED_STEPS = 6


@dataclass(frozen=True, eq=False)
class Example:
    """A described graph with what it takes to run it and to judge its results.

    `tensors` maps a role ("a", "bias", "output") to the graph's tensor of that name; `inputs` and `outputs` are its
    roles in order. `reference` takes torch tensors by input role and returns float32 ones by output role. `precision`
    names the type that limits each output's accuracy, `values` each input's mean and standard deviation.
    """

    name: str
    graph: Any
    tensors: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reference: Reference = field(repr=False)
    reduction_length: int
    precision: Mapping[str, str]
    values: Mapping[str, tuple[float, float]]

    def make_inputs(self, device: str = "cuda", seed: int = 0) -> dict[str, Any]:
        """Allocate every input with the dims, strides and type that its tensor declares.

        Values are normal, give results of the order of one and are the same for a seed on every device. Pass-by-value
        scalars stay on the CPU.
        """
        torch = import_module("torch")
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for role in self.inputs:
            tensor = self.tensors[role]
            mean, deviation = self.values[role]
            dtype = getattr(torch, _TORCH_TYPES[tensor.data_type.name])
            drawn = torch.randn(tensor.dim, generator=generator) * deviation + mean
            place = "cpu" if tensor.is_pass_by_value else device
            made[role] = torch.empty_strided(tensor.dim, tensor.stride, dtype=dtype, device=place)
            made[role].copy_(drawn.to(dtype))
        return made

    def tolerance(self, role: str) -> tuple[float, float]:
        """Return (rtol, atol) for an output: both are 2 u + 4 sqrt(reduction_length) v.

        u is the unit roundoff of the type that limits the output: its own, or that of the values it is made from (the
        AMAX of a BFLOAT16 output, TF32 operands). Twice: for the store, and for values rounded on the way, such as
        attention's probabilities. v is the accumulator's; errors of a sum grow like the square root of its length
        (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8), and four deviations hold for millions of
        elements. The absolute part equals the relative one because results are of the order of one.
        """
        from_fp8 = any(self.tensors[source].data_type.name == "FP8_E4M3" for source in self.inputs)
        accumulator = _FP8_ACCUMULATOR_ROUNDOFF if from_fp8 else _ACCUMULATOR_ROUNDOFF
        bound = 2 * _UNIT_ROUNDOFF[self.precision[role]] + 4 * math.sqrt(self.reduction_length) * accumulator
        return bound, bound


class _Draft:
    """An example under construction: names each tensor by its role and keeps the roles in order."""

    def __init__(self, name: str, data_type: Any) -> None:
        self.cudnn = import_module("cudnn")
        self.name = f"{name}-{data_type.name.lower()}"
        self.data_type, self.float = data_type, self.cudnn.data_type.FLOAT
        types = {"io_data_type": data_type, "intermediate_data_type": self.float, "compute_data_type": self.float}
        self.graph = self.cudnn.pygraph(name=self.name, **types)
        self.tensors: dict[str, Any] = {}
        self.values: dict[str, tuple[float, float]] = {}
        self.precision: dict[str, str] = {}

    def input(self, role: str, dim: Sequence[int], stride: Sequence[int], *, mean: float = 0.0, deviation: float = 1.0) -> Any:
        self.values[role] = (mean, deviation)
        self.tensors[role] = self.graph.tensor(dim=dim, stride=stride, data_type=self.data_type, name=role)
        return self.tensors[role]

    def scalar(self, role: str, value: float, *, rank: int = 3, by_value: bool = False) -> Any:
        tensor = self.input(role, [1] * rank, [1] * rank, mean=value, deviation=0.0)
        return tensor.set_data_type(self.float).set_is_pass_by_value(by_value)

    def output(self, role: str, tensor: Any, *, data_type: Any = None, precision: str | None = None) -> Any:
        data_type = data_type or self.data_type
        # cuDNN multiplies FLOAT operands in TF32.
        self.precision[role] = precision or ("TF32" if data_type == self.float else data_type.name)
        self.tensors[role] = tensor
        return tensor.set_name(role).set_output(True).set_data_type(data_type)

    def statistic(self, role: str, tensor: Any, *, precision: str = "FLOAT") -> Any:
        return self.output(role, tensor, data_type=self.float, precision=precision)

    def amax(self, source: Any, *, precision: str) -> None:
        largest = self.graph.reduction(source, mode=self.cudnn.reduction_mode.AMAX)
        self.statistic("amax", largest, precision=precision).set_dim([1, 1, 1]).set_stride([1, 1, 1])

    def example(self, reference: Reference, *, reduction_length: int) -> Example:
        described = (self.name, self.graph, self.tensors, tuple(self.values), tuple(self.precision))
        return Example(*described, reference, reduction_length, self.precision, self.values)


def conv_bias_relu(
    *,
    batch: int,
    in_channels: int,
    out_channels: int,
    height: int,
    width: int,
    filter_height: int = 3,
    filter_width: int = 3,
    padding: int = 1,
    stride: int = 1,
    dilation: int = 1,
    data_type: Any = "BFLOAT16",
) -> Example:
    """Describe a 2-D convolution, a bias per output channel and ReLU.

    input: batch x in_channels x height x width, channels-last (NHWC strides under NCHW dims); filter: out_channels x
    in_channels x filter_height x filter_width, KRSC strides; bias: 1 x out_channels x 1 x 1; output: channels-last, as
    cuDNN infers it. FLOAT runs in TF32. Raises ValueError for a type outside TENSOR_CORE_TYPES, a non-positive extent
    or a filter that is larger than the padded input.
    """
    image, kernel = (batch, in_channels, height, width), (out_channels, in_channels, filter_height, filter_width)
    _check_positive(batch=batch, in_channels=in_channels, out_channels=out_channels, height=height, width=width)
    _check_positive(filter_height=filter_height, filter_width=filter_width, stride=stride, dilation=dilation)
    _check_window(image[2:], kernel[2:], padding, dilation)
    extents = "-".join("x".join(map(str, dim)) for dim in (image, kernel))
    io = _data_type(data_type, TENSOR_CORE_TYPES)
    draft = _Draft(f"conv_bias_relu-{extents}-p{padding}s{stride}d{dilation}", io)
    per_channel, reduction_length = (1, out_channels, 1, 1), math.prod(kernel[1:])
    x = draft.input("input", image, _channels_last(image))
    w = draft.input("filter", kernel, _channels_last(kernel), deviation=reduction_length**-0.5)
    bias = draft.input("bias", per_channel, _channels_last(per_channel), deviation=0.5)
    window: dict[str, Any] = {"padding": [padding] * 2, "stride": [stride] * 2, "dilation": [dilation] * 2}
    convolved = draft.graph.conv_fprop(image=x, weight=w, **window)
    draft.output("output", draft.graph.relu(draft.graph.bias(convolved, bias)))
    return draft.example(partial(_conv_reference, **window), reduction_length=reduction_length)


def _conv_reference(inputs: Mapping[str, Any], **window: list[int]) -> dict[str, Any]:
    x, w, bias = _float64(inputs, "input", "filter", "bias")
    convolved = import_module("torch").nn.functional.conv2d(x, w, bias.flatten(), **window)
    return {"output": convolved.relu().float()}


def batched_matmul(*, batch: int, m: int, n: int, k: int, transpose_b: bool = False, data_type: Any = "BFLOAT16") -> Example:
    """Describe a batched matrix product.

    a: batch x m x k, row-major; b: batch x k x n, row-major, or stored as batch x n x k with `transpose_b` (a linear
    layer's weight); output: batch x m x n. FLOAT runs in TF32. Raises ValueError for a type outside TENSOR_CORE_TYPES
    or a non-positive extent.
    """
    io = _data_type(data_type, TENSOR_CORE_TYPES)
    draft, product = _product("batched_matmul", (batch, m, n, k), transpose_b, io)
    draft.output("output", product)
    return draft.example(lambda x: {"output": (x["a"].double() @ x["b"].double()).float()}, reduction_length=k)


def matmul_scale_bias_activation(
    *,
    batch: int,
    m: int,
    n: int,
    k: int,
    activation: str = "gelu",
    amax: bool = False,
    transpose_b: bool = False,
    data_type: Any = "BFLOAT16",
) -> Example:
    """Describe a batched matrix product, a scale, a bias per column and an activation.

    a: batch x m x k, row-major; b: batch x k x n, row-major, or stored as batch x n x k with `transpose_b`; scale:
    float32 1 x 1 x 1, passed by value at execution; bias: 1 x 1 x n; output: batch x m x n. `amax` adds the largest
    absolute value of the output, float32 1 x 1 x 1. FLOAT runs in TF32. Raises ValueError for a type outside
    TENSOR_CORE_TYPES, an activation outside ACTIVATIONS or a non-positive extent.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: use one of {', '.join(ACTIVATIONS)}")
    kind = f"matmul_scale_bias_{activation}" + "_amax" * amax
    draft, product = _product(kind, (batch, m, n, k), transpose_b, _data_type(data_type, TENSOR_CORE_TYPES))
    scale = draft.scalar("scale", 0.5, by_value=True)
    bias = draft.input("bias", (1, 1, n), (n, n, 1), deviation=0.5)
    result = draft.graph.bias(draft.graph.scale(product, scale), bias)
    if activation != "identity":
        result = getattr(draft.graph, activation)(result)
    draft.output("output", result)
    if amax:
        draft.amax(result, precision=draft.precision["output"])
    return draft.example(partial(_epilogue_reference, activation=activation, amax=amax), reduction_length=k)


def _epilogue_reference(inputs: Mapping[str, Any], *, activation: str, amax: bool) -> dict[str, Any]:
    a, b, bias = _float64(inputs, "a", "b", "bias")
    output = ACTIVATIONS[activation](a @ b * inputs["scale"].item() + bias)
    return {"output": output.float()} | ({"amax": _amax(output)} if amax else {})


def fp8_matmul(*, batch: int, m: int, n: int, k: int, relu: bool = True) -> Example:
    """Describe an FP8 matrix product with descales, ReLU, a scaled FP8 output and its AMAX.

    a: batch x m x k, row-major; b: batch x k x n, stored as batch x n x k, as Hopper's tensor cores take FP8;
    descale_a, descale_b, scale: float32 1 x 1 x 1 on the device; output: batch x m x n; a, b and output are FP8_E4M3.
    amax: the largest absolute value before the scale, float32 1 x 1 x 1. Raises ValueError for a non-positive extent.
    """
    io = _data_type("FP8_E4M3", ("FP8_E4M3",))
    draft, product = _product("fp8_matmul" + "_relu" * relu, (batch, m, n, k), transpose_b=True, data_type=io)
    draft.values |= {"a": (0.0, _FP8_DEVIATION), "b": (0.0, _FP8_DEVIATION)}
    descale_a = draft.scalar("descale_a", 1 / _FP8_DEVIATION)
    descale_b = draft.scalar("descale_b", k**-0.5 / _FP8_DEVIATION)
    scale = draft.scalar("scale", _FP8_DEVIATION)
    result = draft.graph.mul(draft.graph.mul(product, descale_a), descale_b)
    if relu:
        result = draft.graph.relu(result)
    draft.output("output", draft.graph.mul(result, scale))
    draft.amax(result, precision="FLOAT")
    return draft.example(partial(_fp8_reference, relu=relu), reduction_length=k)


def _fp8_reference(inputs: Mapping[str, Any], *, relu: bool) -> dict[str, Any]:
    a, b, descale_a, descale_b, scale = _float64(inputs, "a", "b", "descale_a", "descale_b", "scale")
    result = a @ b * descale_a * descale_b
    result = result.relu() if relu else result
    return {"output": (result * scale).float(), "amax": _amax(result)}


def sdpa(
    *,
    batch: int,
    heads: int,
    sequence_length: int,
    head_dim: int,
    kv_heads: int | None = None,
    kv_sequence_length: int | None = None,
    causal: bool = True,
    training: bool = False,
    layout: str = "bshd",
    data_type: Any = "BFLOAT16",
) -> Example:
    """Describe scaled dot-product attention, forward, with scores scaled by head_dim ** -0.5.

    q, o: batch x heads x sequence_length x head_dim; k, v: batch x kv_heads x kv_sequence_length x head_dim; stored in
    `layout` order ("bshd" or "bhsd") under these dims. Consecutive query heads share one of `kv_heads`. Query i sees
    keys 0 to i when causal. `training` adds stats, the natural logarithm of the sum of exponentials, float32 batch x
    heads x sequence_length x 1. Raises ValueError for a type outside ATTENTION_TYPES, an unknown layout, a non-positive
    extent or heads that kv_heads does not divide.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    kv_length = sequence_length if kv_sequence_length is None else kv_sequence_length
    _check_positive(batch=batch, heads=heads, sequence_length=sequence_length, head_dim=head_dim)
    _check_positive(kv_heads=kv_heads, kv_sequence_length=kv_length)
    _check_heads(heads, kv_heads, layout)
    kind = "sdpa" + "_causal" * causal + "_training" * training
    name = f"{kind}-b{batch}h{heads}kv{kv_heads}s{sequence_length}x{kv_length}d{head_dim}{layout}"
    draft = _Draft(name, _data_type(data_type, ATTENTION_TYPES))
    queries, keys = (batch, heads, sequence_length, head_dim), (batch, kv_heads, kv_length, head_dim)
    # Scores with a deviation of two keep attention on few keys, so that long rows do not average to zero.
    q = draft.input("q", queries, _attention_stride(queries, layout), deviation=2.0)
    k, v = (draft.input(role, keys, _attention_stride(keys, layout)) for role in ("k", "v"))
    o, stats = draft.graph.sdpa(q=q, k=k, v=v, attn_scale=head_dim**-0.5, **_sdpa_options(causal, training))
    draft.output("o", o).set_dim(queries).set_stride(_attention_stride(queries, layout))
    if training:
        rows = (batch, heads, sequence_length, 1)
        draft.statistic("stats", stats).set_dim(rows).set_stride(row_major(rows))
    reference = partial(_sdpa_reference, causal=causal, training=training)
    return draft.example(reference, reduction_length=max(kv_length, head_dim))


def _sdpa_reference(inputs: Mapping[str, Any], *, causal: bool, training: bool) -> dict[str, Any]:
    q, k, v = _float64(inputs, "q", "k", "v")
    k, v = (shared.repeat_interleave(q.shape[1] // shared.shape[1], dim=1) for shared in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[2:]).tril().bool(), -math.inf)
    outputs = {"o": (scores.softmax(-1) @ v).float()}
    return outputs | ({"stats": scores.logsumexp(-1, keepdim=True).float()} if training else {})


def _sdpa_options(causal: bool, training: bool) -> dict[str, Any]:
    """Spell mask and statistics as the installed extension does; the frontend takes any keyword until it lowers."""
    known = _sdpa_documentation()
    statistics = {"generate_stats": training} if "generate_stats" in known else {"is_inference": not training}
    if not causal:
        return statistics
    if "diagonal_band_right_bound" not in known:
        return statistics | {"use_causal_mask": True}
    top_left = import_module("cudnn").diagonal_alignment.TOP_LEFT
    return {**statistics, "diagonal_alignment": top_left, "diagonal_band_right_bound": 0}


def _sdpa_documentation() -> str:
    extension = import_module("cudnn")._compiled_module
    lowered = extension.backend_graph if hasattr(extension, "backend_graph") else extension.pygraph
    return lowered.sdpa.__doc__ or ""


def layer_norm(*, rows: int, features: int, training: bool = False, data_type: Any = "BFLOAT16") -> Example:
    """Describe a layer normalization over the features of each row.

    input, output: rows x features x 1 x 1, channels-last; scale, bias: 1 x features x 1 x 1; epsilon: float32
    1 x 1 x 1 x 1, passed by value at execution. `training` adds mean and inv_variance, 1 / sqrt(variance + epsilon),
    float32 rows x 1 x 1 x 1. Raises ValueError for a type outside TENSOR_CORE_TYPES or a non-positive extent.
    """
    return _norm("layer_norm", rows, features, training, data_type)


def rms_norm(*, rows: int, features: int, training: bool = False, data_type: Any = "BFLOAT16") -> Example:
    """Describe a root-mean-square normalization over the features of each row.

    input, output: rows x features x 1 x 1, channels-last; scale: 1 x features x 1 x 1; epsilon: float32 1 x 1 x 1 x 1,
    passed by value at execution. `training` adds inv_variance, 1 / sqrt(mean of squares + epsilon), float32
    rows x 1 x 1 x 1. Raises ValueError for a type outside TENSOR_CORE_TYPES or a non-positive extent.
    """
    return _norm("rms_norm", rows, features, training, data_type)


def _norm(kind: str, rows: int, features: int, training: bool, data_type: Any) -> Example:
    _check_positive(rows=rows, features=features)
    draft = _Draft(f"{kind}{'_training' * training}-{rows}x{features}", _data_type(data_type, TENSOR_CORE_TYPES))
    per_row, per_feature = (rows, features, 1, 1), (1, features, 1, 1)
    ports = {"input": draft.input("input", per_row, _channels_last(per_row), mean=0.5)}
    ports["scale"] = draft.input("scale", per_feature, _channels_last(per_feature), mean=1.0, deviation=0.25)
    if kind == "layer_norm":
        ports["bias"] = draft.input("bias", per_feature, _channels_last(per_feature), deviation=0.5)
    ports["epsilon"] = draft.scalar("epsilon", 1e-3, rank=4, by_value=True)
    normalize = draft.graph.layernorm if kind == "layer_norm" else draft.graph.rmsnorm
    phase = draft.cudnn.norm_forward_phase
    normalized, *statistics = normalize(norm_forward_phase=phase.TRAINING if training else phase.INFERENCE, **ports)
    draft.output("output", normalized, precision=draft.data_type.name)
    if training:
        for role, statistic in zip(("mean", "inv_variance")[-len(statistics) :], statistics, strict=True):
            draft.statistic(role, statistic)
    return draft.example(partial(_norm_reference, outputs=tuple(draft.precision)), reduction_length=features)


def _norm_reference(inputs: Mapping[str, Any], *, outputs: Sequence[str]) -> dict[str, Any]:
    x, scale = _float64(inputs, "input", "scale")
    centered = "bias" in inputs
    mean = x.mean(dim=1, keepdim=True) if centered else x.new_zeros(1)
    inv_variance = ((x - mean).square().mean(dim=1, keepdim=True) + inputs["epsilon"].item()).rsqrt()
    output = (x - mean) * inv_variance * scale
    if centered:
        output = output + inputs["bias"].double()
    computed = {"output": output, "mean": mean, "inv_variance": inv_variance}
    return {role: computed[role].float() for role in outputs}


def examples() -> list[Example]:
    """Describe one or two graphs of every kind, in sizes at which models use them."""
    product: dict[str, Any] = {"batch": 16, "m": 512, "n": 1024, "k": 512}
    return [
        conv_bias_relu(batch=32, in_channels=128, out_channels=128, height=56, width=56),
        batched_matmul(batch=8, m=256, n=512, k=256),
        matmul_scale_bias_activation(**product, activation="gelu", amax=True),
        matmul_scale_bias_activation(**product, activation="relu", transpose_b=True),
        fp8_matmul(**product),
        sdpa(batch=4, heads=16, sequence_length=1024, head_dim=64),
        sdpa(batch=2, heads=16, kv_heads=4, sequence_length=512, head_dim=128, training=True, layout="bhsd"),
        layer_norm(rows=8192, features=1024, training=True),
        rms_norm(rows=8192, features=1024),
    ]


def mixed(count: int = 42) -> Iterator[Example]:
    """Describe `count` distinct graphs (1 to 48, else ValueError), kinds in turn, growing, the same every time."""
    kinds: tuple[Callable[[int], Example], ...] = (
        lambda i: conv_bias_relu(batch=8, in_channels=64, out_channels=64 * i, height=28, width=28),
        lambda i: matmul_scale_bias_activation(batch=4, m=128 * i, n=512, k=256, amax=True),
        lambda i: sdpa(batch=2, heads=8, sequence_length=256 * i, head_dim=64),
        lambda i: layer_norm(rows=2048, features=512 * i),
        lambda i: conv_bias_relu(batch=8, in_channels=32 * i, out_channels=256, height=28, width=28, stride=2, data_type="HALF"),
        lambda i: matmul_scale_bias_activation(batch=1, m=512, n=256 * i, k=512, activation=list(ACTIVATIONS)[i], transpose_b=True),
        lambda i: sdpa(batch=1, heads=16, kv_heads=4, sequence_length=128 * i, head_dim=128, training=True),
        lambda i: rms_norm(rows=1024 * i, features=2048, training=True),
    )
    available = len(kinds) * _MIXED_STEPS
    if not 1 <= count <= available:
        raise ValueError(f"cannot describe {count} mixed graphs: use a count from 1 to {available}")
    return islice((kind(step) for step in range(1, _MIXED_STEPS + 1) for kind in kinds), count)


def _product(kind: str, extents: tuple[int, int, int, int], transpose_b: bool, data_type: Any) -> tuple[_Draft, Any]:
    _check_positive(**dict(zip(("batch", "m", "n", "k"), extents, strict=True)))
    batch, m, n, k = extents
    draft = _Draft(f"{kind}-b{batch}m{m}n{n}k{k}" + "t" * transpose_b, data_type)
    a = draft.input("a", (batch, m, k), (m * k, k, 1))
    b = draft.input("b", (batch, k, n), (n * k, 1, k) if transpose_b else (n * k, n, 1), deviation=k**-0.5)
    return draft, draft.graph.matmul(a, b)


def _channels_last(dim: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    _, channels, height, width = dim
    return height * width * channels, 1, width * channels, channels


def _attention_stride(dim: tuple[int, int, int, int], layout: str) -> tuple[int, ...]:
    _, heads, length, head_dim = dim
    return (length * heads * head_dim, head_dim, heads * head_dim, 1) if layout == "bshd" else tuple(row_major(dim))


def _float64(inputs: Mapping[str, Any], *roles: str) -> list[Any]:
    return [inputs[role].double() for role in roles]


def _amax(tensor: Any) -> Any:
    return tensor.abs().amax().float().reshape(1, 1, 1)


def _data_type(data_type: Any, allowed: Sequence[str]) -> Any:
    name = getattr(data_type, "name", data_type)
    if name not in allowed:
        raise ValueError(f"data type {name!r} does not serve this graph: use one of {', '.join(allowed)}")
    return import_module("cudnn").data_type.__members__[name]


def _check_positive(**extents: int) -> None:
    for name, extent in extents.items():
        if extent < 1:
            raise ValueError(f"{name} is {extent}: use a positive number")


def _check_window(image: Sequence[int], kernel: Sequence[int], padding: int, dilation: int) -> None:
    for extent, taps in zip(image, kernel, strict=True):
        missing = (taps - 1) * dilation + 1 - extent - 2 * padding
        if padding < 0 or missing > 0:
            enough = max(0, padding + math.ceil(missing / 2))
            raise ValueError(f"a filter of {taps} does not fit {extent} and padding {padding}: use padding >= {enough}")


def _check_heads(heads: int, kv_heads: int, layout: str) -> None:
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv_heads do not divide {heads} heads: use a kv_heads that does, such as {heads}")
    if layout not in ATTENTION_LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(ATTENTION_LAYOUTS)}")
