"""The described graphs: what they declare, what they refuse, and that their references compute what they say."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import cudnn
import pytest

from plancache import graphs

OLDER_FRONTEND = "sdpa(q, k, v, is_inference: bool, attn_scale, use_causal_mask: bool = False) -> list"

SMALL: dict[str, Callable[[], graphs.Example]] = {
    "conv": lambda: graphs.conv_bias_relu(
        batch=2, in_channels=8, out_channels=16, height=9, width=7, filter_height=3, filter_width=5, padding=2, stride=2
    ),
    "matmul": lambda: graphs.batched_matmul(batch=2, m=24, n=16, k=32),
    "transposed": lambda: graphs.batched_matmul(batch=2, m=24, n=16, k=32, transpose_b=True, data_type="HALF"),
    "epilogue": lambda: graphs.matmul_scale_bias_activation(batch=2, m=24, n=16, k=32, amax=True),
    "fp8": lambda: graphs.fp8_matmul(batch=2, m=32, n=16, k=64),
    "sdpa": lambda: graphs.sdpa(batch=2, heads=4, kv_heads=2, sequence_length=24, head_dim=16, training=True),
    "sdpa_cross": lambda: graphs.sdpa(batch=2, heads=4, sequence_length=8, kv_sequence_length=24, head_dim=16, causal=False, layout="bhsd"),
    "layer_norm": lambda: graphs.layer_norm(rows=6, features=32, training=True),
    "rms_norm": lambda: graphs.rms_norm(rows=6, features=32, training=True, data_type="FLOAT"),
}


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> graphs.Example:
    return SMALL[request.param]()


def test_the_module_imports_where_neither_cudnn_nor_torch_can_be_imported() -> None:
    program = "import sys; sys.modules.update(cudnn=None, torch=None); import plancache.graphs"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_examples_cover_every_kind_of_graph() -> None:
    kinds = ("conv_bias_relu", "batched_matmul", "matmul_scale_bias", "fp8_matmul", "sdpa", "layer_norm", "rms_norm")
    names = [example.name for example in graphs.examples()]
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
    assert len(set(names)) == len(names)


def test_mixed_graphs_are_distinct_deterministic_and_of_every_kind_early() -> None:
    names = [example.name for example in graphs.mixed(48)]
    assert len(set(names)) == 48
    assert [example.name for example in graphs.mixed()] == names[:42]
    kinds = {name.split("-")[0].split("_")[0] for name in islice(names, 8)}
    assert kinds == {"conv", "matmul", "sdpa", "layer", "rms"}


@pytest.mark.parametrize("count", [0, 49])
def test_mixed_refuses_a_count_it_cannot_serve_and_names_the_range(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 48"):
        graphs.mixed(count)


def test_tensors_carry_their_roles_as_names_and_every_role_is_an_input_or_an_output(small: graphs.Example) -> None:
    assert {role: tensor.name for role, tensor in small.tensors.items()} == {role: role for role in small.tensors}
    assert set(small.tensors) == {*small.inputs, *small.outputs}
    assert not set(small.inputs) & set(small.outputs)


def test_graph_inputs_and_outputs_are_exactly_the_roles(small: graphs.Example) -> None:
    nodes = small.graph.nodes
    produced = {id(tensor) for node in nodes for tensor in node.outputs.values()}
    sources = {tensor.name for node in nodes for tensor in node.inputs.values() if id(tensor) not in produced}
    results = {tensor.name for node in nodes for tensor in node.outputs.values() if not tensor.is_virtual}
    assert (sources, results) == (set(small.inputs), set(small.outputs))


def test_a_described_graph_has_no_device_no_handle_and_no_plan(small: graphs.Example) -> None:
    graph = small.graph
    assert (graph._handle, graph._frozen, graph._is_validated, graph._lowered_graph) == (None, False, False, None)
    assert set(graph._cpp_graph_kwargs) == {"name"}


def test_an_example_cannot_be_reassigned() -> None:
    with pytest.raises(AttributeError):
        SMALL["matmul"]().name = "other"  # type: ignore[misc]


def test_convolution_operands_are_channels_last_under_nchw_dims() -> None:
    tensors = SMALL["conv"]().tensors
    assert (tensors["input"].dim, tensors["input"].stride) == ([2, 8, 9, 7], [504, 1, 56, 8])
    assert (tensors["filter"].dim, tensors["filter"].stride) == ([16, 8, 3, 5], [120, 1, 40, 8])
    assert (tensors["bias"].dim, tensors["bias"].stride) == ([1, 16, 1, 1], [16, 1, 16, 16])
    assert not tensors["output"].dim_assigned
    assert not tensors["output"].stride_assigned


def test_transpose_b_changes_the_strides_of_b_and_not_its_dims() -> None:
    plain, transposed = SMALL["matmul"]().tensors["b"], SMALL["transposed"]().tensors["b"]
    assert plain.dim == transposed.dim == [2, 32, 16]
    assert (plain.stride, transposed.stride) == ([512, 16, 1], [512, 1, 32])


def test_scalars_given_at_execution_carry_no_value_in_the_graph() -> None:
    for kind, role in (("epilogue", "scale"), ("layer_norm", "epsilon"), ("rms_norm", "epsilon")):
        scalar = SMALL[kind]().tensors[role]
        assert scalar.is_pass_by_value
        assert scalar.pass_by_value is None
        assert scalar.data_type == cudnn.data_type.FLOAT
    assert not SMALL["fp8"]().tensors["descale_a"].is_pass_by_value


def test_amax_is_a_float32_scalar_output() -> None:
    for kind in ("epilogue", "fp8"):
        amax = SMALL[kind]().tensors["amax"]
        assert (amax.dim, amax.stride, amax.data_type) == ([1, 1, 1], [1, 1, 1], cudnn.data_type.FLOAT)


@pytest.mark.parametrize(("layout", "stride"), [("bshd", [1536, 16, 64, 1]), ("bhsd", [1536, 384, 16, 1])])
def test_attention_layouts_store_the_same_dims_in_their_order(layout: str, stride: list[int]) -> None:
    tensors = graphs.sdpa(batch=2, heads=4, sequence_length=24, head_dim=16, layout=layout).tensors
    assert tuple(tensors) == ("q", "k", "v", "o")
    for tensor in tensors.values():
        assert (list(tensor.dim), list(tensor.stride)) == ([2, 4, 24, 16], stride)


def test_the_mask_is_spelled_as_the_newer_extension_lists_it() -> None:
    params = SMALL["sdpa"]().graph.nodes[0].params
    assert params["diagonal_alignment"] == cudnn.diagonal_alignment.TOP_LEFT
    assert (params["diagonal_band_right_bound"], params["generate_stats"]) == (0, True)
    assert not {"use_causal_mask", "is_inference"} & set(params)


def test_the_mask_is_spelled_as_an_older_extension_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_sdpa_documentation", lambda: OLDER_FRONTEND)
    params = SMALL["sdpa"]().graph.nodes[0].params
    assert (params["use_causal_mask"], params["is_inference"]) == (True, False)
    assert not {"diagonal_alignment", "diagonal_band_right_bound", "generate_stats"} & set(params)


def test_attention_without_a_mask_sets_none_in_either_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = SMALL["sdpa_cross"]().graph.nodes[0].params
    monkeypatch.setattr(graphs, "_sdpa_documentation", lambda: OLDER_FRONTEND)
    older = SMALL["sdpa_cross"]().graph.nodes[0].params
    assert (set(newer), set(older)) == ({"attn_scale", "generate_stats"}, {"attn_scale", "is_inference"})


def test_every_option_for_attention_is_one_that_the_installed_extension_lists() -> None:
    known = graphs._sdpa_documentation()
    assert all(f"{option}:" in known for option in graphs._sdpa_options(causal=True, training=True))


@pytest.mark.parametrize("data_type", [cudnn.data_type.HALF, "HALF"])
def test_a_data_type_is_taken_as_a_member_or_by_name(data_type: Any) -> None:
    example = graphs.batched_matmul(batch=1, m=8, n=8, k=8, data_type=data_type)
    assert {tensor.data_type for tensor in example.tensors.values()} == {cudnn.data_type.HALF}
    assert example.name.endswith("-half")


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: graphs.batched_matmul(batch=1, m=8, n=8, k=8, data_type="bf16"), "BFLOAT16, HALF, FLOAT"),
    (lambda: graphs.layer_norm(rows=1, features=8, data_type=cudnn.data_type.INT8), "BFLOAT16, HALF, FLOAT"),
    (lambda: graphs.sdpa(batch=1, heads=1, sequence_length=8, head_dim=8, data_type="FLOAT"), "BFLOAT16, HALF$"),
    (lambda: graphs.batched_matmul(batch=1, m=8, n=8, k=0), "k is 0: use a positive"),
    (lambda: graphs.fp8_matmul(batch=1, m=-8, n=8, k=8), "m is -8: use a positive"),
    (lambda: graphs.rms_norm(rows=0, features=8), "rows is 0: use a positive"),
    (lambda: graphs.sdpa(batch=1, heads=4, kv_heads=0, sequence_length=8, head_dim=8), "kv_heads is 0: use a positive"),
    (lambda: graphs.sdpa(batch=1, heads=6, kv_heads=4, sequence_length=8, head_dim=8), "use a kv_heads that does"),
    (lambda: graphs.sdpa(batch=1, heads=1, sequence_length=8, head_dim=8, layout="sbhd"), "bshd, bhsd"),
    (
        lambda: graphs.matmul_scale_bias_activation(batch=1, m=8, n=8, k=8, activation="silu"),
        ", ".join(graphs.ACTIVATIONS),
    ),
    (
        lambda: graphs.conv_bias_relu(batch=1, in_channels=8, out_channels=8, height=2, width=2, filter_width=7),
        "use padding >= 3",
    ),
    (
        lambda: graphs.conv_bias_relu(batch=1, in_channels=8, out_channels=8, height=8, width=8, padding=-1),
        "use padding >= 0",
    ),
]


@pytest.mark.parametrize(("describe", "cure"), REFUSED, ids=[cure for _, cure in REFUSED])
def test_a_bad_argument_is_refused_with_its_cure(describe: Callable[[], Any], cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        describe()


def test_the_padding_named_by_the_refusal_is_enough() -> None:
    assert graphs.conv_bias_relu(batch=1, in_channels=8, out_channels=8, height=2, width=2, filter_width=7, padding=3).graph.nodes


def test_a_tolerance_follows_the_output_type_and_the_reduction_length() -> None:
    short = graphs.batched_matmul(batch=1, m=8, n=8, k=16).tolerance("output")
    assert short == (2 * 2**-8 + 16 * 2**-24,) * 2
    assert graphs.batched_matmul(batch=1, m=8, n=8, k=4096).tolerance("output") > short
    assert graphs.batched_matmul(batch=1, m=8, n=8, k=16, data_type="HALF").tolerance("output") < short


def test_a_float32_output_is_not_trusted_beyond_the_values_that_it_is_made_from() -> None:
    epilogue, attention = SMALL["epilogue"](), SMALL["sdpa"]()
    assert epilogue.tolerance("amax") == epilogue.tolerance("output")
    assert attention.tolerance("stats") < attention.tolerance("o")
    tf32 = graphs.batched_matmul(batch=1, m=8, n=8, k=16, data_type="FLOAT").tolerance("output")
    assert tf32 > graphs.layer_norm(rows=1, features=16, data_type="FLOAT").tolerance("output")


def test_inputs_have_exactly_the_declared_dims_strides_and_types(small: graphs.Example) -> None:
    torch = pytest.importorskip("torch")
    types = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32}
    types["FP8_E4M3"] = torch.float8_e4m3fn
    inputs = small.make_inputs(device="cpu")
    assert tuple(inputs) == small.inputs
    for role, made in inputs.items():
        declared = small.tensors[role]
        assert (list(made.shape), list(made.stride())) == (list(declared.dim), list(declared.stride))
        assert made.dtype == types[declared.data_type.name]


def test_the_same_seed_gives_the_same_inputs_and_another_seed_others() -> None:
    torch = pytest.importorskip("torch")
    first, again, other = (SMALL["fp8"]().make_inputs(device="cpu", seed=seed)["a"] for seed in (1, 1, 2))
    assert torch.equal(first.float(), again.float())
    assert not torch.equal(first.float(), other.float())


RESULT_DIMS: dict[str, dict[str, tuple[int, ...]]] = {
    "conv": {"output": (2, 16, 6, 4)},
    "matmul": {"output": (2, 24, 16)},
    "transposed": {"output": (2, 24, 16)},
    "epilogue": {"output": (2, 24, 16), "amax": (1, 1, 1)},
    "fp8": {"output": (2, 32, 16), "amax": (1, 1, 1)},
    "sdpa": {"o": (2, 4, 24, 16), "stats": (2, 4, 24, 1)},
    "sdpa_cross": {"o": (2, 4, 8, 16)},
    "layer_norm": {"output": (6, 32, 1, 1), "mean": (6, 1, 1, 1), "inv_variance": (6, 1, 1, 1)},
    "rms_norm": {"output": (6, 32, 1, 1), "inv_variance": (6, 1, 1, 1)},
}


@pytest.mark.parametrize("kind", SMALL)
def test_references_return_float32_results_of_the_order_of_one_by_output_role(kind: str) -> None:
    torch = pytest.importorskip("torch")
    example = SMALL[kind]()
    results = example.reference(example.make_inputs(device="cpu"))
    assert {role: tuple(result.shape) for role, result in results.items()} == RESULT_DIMS[kind]
    assert tuple(results) == example.outputs
    for role, result in results.items():
        declared = example.tensors[role]
        assert declared.dim in ([], list(result.shape))  # those that only cuDNN infers are not there yet
        assert result.dtype == torch.float32
        assert 0.05 < result.abs().amax() < 64  # false for infinities and NaN too


@pytest.mark.parametrize("causal", [True, False])
def test_the_attention_reference_agrees_with_pytorch(causal: bool) -> None:
    torch = pytest.importorskip("torch")
    example = graphs.sdpa(batch=2, heads=4, kv_heads=2, sequence_length=8, kv_sequence_length=12, head_dim=16, causal=causal)
    q, k, v = (made.double() for made in example.make_inputs(device="cpu").values())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(example.reference({"q": q, "k": k, "v": v})["o"], expected.float())


def test_the_attention_statistics_normalize_the_scores() -> None:
    torch = pytest.importorskip("torch")
    example = graphs.sdpa(batch=1, heads=2, sequence_length=8, head_dim=16, training=True)
    inputs = {role: made.double() for role, made in example.make_inputs(device="cpu").items()}
    results = example.reference(inputs)
    weights = (inputs["q"] @ inputs["k"].mT / math.sqrt(16) - results["stats"]).exp().tril()
    torch.testing.assert_close((weights @ inputs["v"]).float(), results["o"])


@pytest.mark.parametrize(("kind", "function"), [("layer_norm", "layer_norm"), ("rms_norm", "rms_norm")], ids=["layer_norm", "rms_norm"])
def test_the_norm_references_agree_with_pytorch(kind: str, function: str) -> None:
    torch = pytest.importorskip("torch")
    inputs = {role: made.double() for role, made in SMALL[kind]().make_inputs(device="cpu").items()}
    flat = [inputs[role].flatten() for role in ("scale", "bias") if role in inputs]
    normalize = getattr(torch.nn.functional, function)
    expected = normalize(inputs["input"][..., 0, 0], (32,), *flat, eps=inputs["epsilon"].item())
    torch.testing.assert_close(SMALL[kind]().reference(inputs)["output"][..., 0, 0], expected.float())


ACTIVATION_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "identity": lambda _, x: x,
    "relu": lambda torch, x: torch.nn.functional.relu(x),
    "gelu": lambda torch, x: torch.nn.functional.gelu(x),
    "gelu_approx_tanh": lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"),
    "swish": lambda torch, x: torch.nn.functional.silu(x),
    "sigmoid": lambda torch, x: torch.sigmoid(x),
    "tanh": lambda torch, x: torch.tanh(x),
}


@pytest.mark.parametrize("activation", graphs.ACTIVATIONS)
def test_every_activation_agrees_with_pytorch_and_is_a_node_of_its_graph(activation: str) -> None:
    torch = pytest.importorskip("torch")
    example = graphs.matmul_scale_bias_activation(batch=2, m=8, n=16, k=32, activation=activation, amax=True)
    modes = [node.params.get("mode") for node in example.graph.nodes]
    assert activation == "identity" or activation in modes
    inputs = {role: made.double() for role, made in example.make_inputs(device="cpu").items()}
    linear = torch.baddbmm(inputs["bias"].expand(2, 8, 16), inputs["a"], inputs["b"], alpha=inputs["scale"].item())
    expected = ACTIVATION_FUNCTIONS[activation](torch, linear).float()
    results = example.reference(inputs)
    torch.testing.assert_close(results["output"], expected)
    assert results["amax"].item() == expected.abs().max().item()


def test_the_convolution_reference_agrees_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    example = SMALL["conv"]()
    inputs = {role: made.double() for role, made in example.make_inputs(device="cpu").items()}
    layer = torch.nn.Conv2d(8, 16, (3, 5), padding=2, stride=2, dtype=torch.float64)
    layer.weight, layer.bias = (torch.nn.Parameter(x) for x in (inputs["filter"], inputs["bias"].flatten()))
    torch.testing.assert_close(example.reference(inputs)["output"], layer(inputs["input"]).relu().float())


@pytest.mark.parametrize("relu", [True, False])
def test_the_fp8_amax_is_taken_after_the_descales_and_before_the_scale(relu: bool) -> None:
    torch = pytest.importorskip("torch")
    example = graphs.fp8_matmul(batch=1, m=32, n=16, k=64, relu=relu)
    inputs = example.make_inputs(device="cpu")
    results = example.reference(inputs)
    torch.testing.assert_close(results["amax"] * inputs["scale"], results["output"].abs().amax().reshape(1, 1, 1))
    assert results["output"].abs().amax() < torch.finfo(torch.float8_e4m3fn).max
    assert bool((results["output"] >= 0).all()) == relu
