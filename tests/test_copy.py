"""The copy that plans are built from: it is the caller's graph, for every node type, or the graph is refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from changes import UNSET, set_fields, snapshot, tensors_of, twin
from zoo import NO_BUILDER, ZOO, node_types

from plancache.backend import CudnnBackend
from plancache.description import decode
from plancache.environment import Device
from plancache.signature import Reading, Uncacheable, read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")

EXPECTED = """
ADALAYERNORM 4 0 0, ADALAYERNORM_BWD 2 0 0, BATCHNORM 4 1 0, BATCHNORM_BWD 3 0 0, BATCHNORM_INFERENCE 2 0 0,
BLOCK_SCALE_DEQUANTIZE 4 0 0, BLOCK_SCALE_QUANTIZE 6 1 0, COMPOSITE 0 0 0, CONCATENATE 4 0 0, CONV_DGRAD 7 0 0,
CONV_FPROP 20 0 0, CONV_WGRAD 8 0 0, GDN 0 0 6, GDN2 0 0 6, GDN2_BWD 0 0 6, GDN2_SUMMARY 0 0 5, GDN2_SUMMARY_BWD 0 0 6,
GDN_BWD 0 0 6, GDN_SUMMARY 0 0 5, GDN_SUMMARY_BWD 0 0 6, GDP 0 0 6, GDP_BWD 0 0 6, GDP_SUMMARY 0 0 5,
GDP_SUMMARY_BWD 0 0 6, GENSTATS 3 0 0, INSTANCENORM 4 0 0, INSTANCENORM_BWD 2 0 0, KDA 0 0 6, KDA_BWD 0 0 6,
KDA_SUMMARY 0 0 5, KDA_SUMMARY_BWD 0 0 6, LAYERNORM 9 1 0, LAYERNORM_BWD 3 0 0, MAMBA2 0 0 5, MAMBA2_BWD 0 0 5,
MAMBA2_SUMMARY 0 0 4, MAMBA2_SUMMARY_BWD 0 0 4, MATMUL 28 1 0, MATMUL_FP8 0 0 0, MOE_GROUPED_MATMUL 6 1 0,
MOE_GROUPED_MATMUL_BWD 0 2 0, POINTWISE 88 2 0, REDUCTION 14 5 0, RESHAPE 4 1 0, RMSNORM 5 0 0, RMSNORM_BWD 3 0 0,
ROPE 0 3 0, ROPE_BWD 0 3 0, SDPA 44 4 4, SDPA_BWD 19 0 2, SDPA_FP8 11 1 1, SDPA_FP8_BWD 5 1 0, SDPA_MXFP8 0 5 1,
SDPA_MXFP8_BWD 0 3 0, SLICE 0 6 0, TRANSPOSE 0 3 0
"""
"""By node type: cases copied exactly, cases that cuDNN 9.19 itself does not lower for an H200, cases that are uncacheable."""


def reading_of(name: str, change: Callable[[Any], Any] = id) -> Reading:
    graph = ZOO[name].make()
    change(graph)
    return read(graph, DEVICE)


@cache
def refusal(name: str) -> str | None:
    """Why a case is uncacheable before cuDNN is asked, or None."""
    try:
        reading_of(name)
    except Uncacheable as error:
        return error.reason
    return None


READABLE = [name for name in ZOO if refusal(name) is None]
LOWERED = [name for name in READABLE if ZOO[name].lowers]


# ---- the zoo --------------------------------------------------------------------------------------------------------


def test_a_copy_has_the_signature_it_was_made_from(backend: CudnnBackend) -> None:
    """signature -> copy -> signature is the identity for every case that can be read."""
    for name in READABLE:
        signature = reading_of(name).signature
        copy = backend.copy(decode(signature))
        assert read(copy, DEVICE).signature == signature, name
        assert sorted(tensor.uid for tensor in tensors_of(copy)) == list(range(1, len(tensors_of(copy)) + 1))


@pytest.mark.parametrize("name", LOWERED)
def test_a_copy_lowers_to_what_the_callers_graph_lowers_to(name: str, backend: CudnnBackend) -> None:
    """Real cuDNN makes the same operation graph of both, for every case that it lowers and that can be read; and the
    caller's graph stays as it was."""
    graph = ZOO[name].make()
    before = snapshot(graph)
    backend.check_copy(read(graph, DEVICE))
    assert snapshot(graph) == before


def test_every_node_type_is_copied_exactly_or_refused(backend: CudnnBackend, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole table by node type: none is missing, and no number changes without being noticed."""
    counts = {node_type: [0, 0, 0] for node_type in node_types()}
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for name, case in ZOO.items():
        column, reason = outcome(name, backend)
        counts[case.node_type][column] += 1
        if reason:
            reasons[case.node_type][reason] += 1
    with capsys.disabled():
        print("\n" + "\n".join(table(counts, reasons)))
    assert counts == {row.split()[0]: [int(number) for number in row.split()[1:]] for row in EXPECTED.split(",")}
    assert {node_type for node_type, row in counts.items() if not any(row)} == NO_BUILDER


def outcome(name: str, backend: CudnnBackend) -> tuple[int, str]:
    if (reason := refusal(name)) is not None:
        return 2, f"uncacheable: {reason}"
    try:
        backend.check_copy(reading_of(name))
    except Uncacheable as error:
        return 2, f"uncacheable: {error.reason}"
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, TypeError):
        return 1, f"not lowered: {ZOO[name].reason}"
    return 0, ""


def table(counts: dict[str, list[int]], reasons: dict[str, Counter[str]]) -> Iterator[str]:
    yield f"{'node type':24}{'cases':>6}{'copied':>8}{'not lowered':>13}{'uncacheable':>13}  reasons"
    for node_type, row in sorted(counts.items()):
        why = "; ".join(f"{reason} ({count})" for reason, count in reasons[node_type].items())
        yield f"{node_type:24}{sum(row):6}{row[0]:8}{row[1]:13}{row[2]:13}  {why or ('no builder' if node_type in NO_BUILDER else '')}"
    yield f"{'all':24}{sum(map(sum, counts.values())):6}{''.join(f'{sum(column):13}' for column in zip(*counts.values(), strict=True))[5:]}"


# ---- a copy that is not exact is caught -----------------------------------------------------------------------------

DEFAULTS = {
    "is_virtual": False, "is_pass_by_value": False, "pass_by_value": None, "scalar_type": None, "reordering_type": None,
    "ragged_offset": None, "ragged_offset_multiplier": 1, "alignment_value": 1, "dim_assigned": False, "stride_assigned": False,
}  # fmt: skip


def losses(copy: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Everything that a copy could lose: attributes that are set, parameters, options, and that a tensor is shared."""
    for tensor in tensors_of(copy):
        for field, default in DEFAULTS.items():
            if getattr(tensor, field) != default:
                yield f"t{tensor.uid}.{field}", lambda tensor=tensor, change={field: default}: set_fields(vars(tensor), **change)
    for node in copy._nodes:
        for name in node.params:
            yield f"{node.name}.{name}", lambda node=node, change={name: UNSET}: set_fields(node.params, **change)
        for port, tensor in node.inputs.items():
            if list(node.inputs.values()).count(tensor) > 1:
                yield f"{node.name}.{port}", lambda node=node, port=port, tensor=tensor: node.inputs.update({port: twin(tensor)})
    for name in copy._cpp_graph_kwargs.keys() - {"name", "sm_version", "device_property"}:
        yield name, lambda change={name: UNSET}: set_fields(copy._cpp_graph_kwargs, **change)


@pytest.mark.parametrize("name", LOWERED)
def test_a_copy_that_loses_anything_is_caught(name: str, backend: CudnnBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a copy loses of what its signature says, it is refused before anything is built of it."""
    reading = reading_of(name)
    exact = backend.copy
    for index, (what, _) in enumerate(losses(exact(decode(reading.signature)))):

        def lossy(description: Any, index: int = index) -> Any:
            copy = exact(description)
            list(losses(copy))[index][1]()
            return copy

        monkeypatch.setattr(backend, "copy", lossy)
        with pytest.raises((Uncacheable, ValueError)):
            backend.check_copy(reading)
            pytest.fail(f"{what} was lost unnoticed")


def of_tensor(at: int, **values: Any) -> Callable[[Any], None]:
    return lambda graph: set_fields(vars(tensors_of(graph)[at]), **values)


def of_node(**values: Any) -> Callable[[Any], None]:
    return lambda graph: set_fields(graph._nodes[-1].params, **values)


def of_graph(**values: Any) -> Callable[[Any], None]:
    return lambda graph: set_fields(graph._cpp_graph_kwargs, **values)


def split(graph: Any) -> None:
    graph._nodes[0].inputs["IN_1"] = twin(graph._nodes[0].inputs["IN_0"])


FORGOTTEN: dict[str, Callable[[Any], None]] = {
    "conv_fprop_stride": of_node(stride=[1, 1]),
    "conv_fprop_dilation": of_node(dilation=[1, 1]),
    "conv_fprop_true_convolution": of_node(convolution_mode=UNSET),
    "conv_fprop_compute_half": lambda graph: vars(graph._nodes[0]).update(compute_data_type=cudnn.data_type.FLOAT),
    "conv_fprop_float_output": of_tensor(2, data_type=None),
    "matmul_transposed_a": of_tensor(0, stride=[2048, 32, 1]),
    "matmul_transposed_output": of_tensor(2, stride=[8192, 128, 1]),
    "matmul_mixed_types": of_tensor(1, data_type=None),
    "matmul_broadcast_b": of_tensor(1, dim=[8, 32, 128]),
    "matmul_padding": of_node(padding=UNSET),
    "matmul_sm_count": of_graph(sm_count=UNSET),
    "matmul_dynamic_shape": of_graph(is_dynamic_shape_enabled=UNSET),
    "pointwise_mul_scalar_int": of_tensor(1, pass_by_value=1.0),
    "pointwise_mul_scalar_double": of_tensor(1, pass_by_value=0.2),
    "pointwise_mul_scalar_negative_zero": of_tensor(1, pass_by_value=0.0),
    "pointwise_mul_by_value": of_tensor(1, is_pass_by_value=False),
    "pointwise_relu_slope": of_node(negative_slope=UNSET),
    "pointwise_gen_index_1": of_node(axis=0),
    "fused_conv_bias_relu": of_node(mode="gelu"),
    "fused_matmul_bias_gelu": of_tensor(2, is_virtual=False),
    "twice_add": split,
    "reduction_add": lambda graph: of_node(mode=cudnn.reduction_mode.MAX)(graph),
    "fused_mxfp8_matmul": of_tensor(1, reordering_type=None),
    "sdpa_ragged": of_tensor(0, ragged_offset=None),
    "sdpa_causal": of_node(use_causal_mask=False),
    "sdpa_scale": of_node(attn_scale=0.25),
    "sdpa_dropout": of_node(dropout_0=0.2),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_a_signature_forgot_is_caught_when_both_are_lowered(name: str, backend: CudnnBackend) -> None:
    """Were the encoder to forget something, so that copy and signature agree, cuDNN's own form of both would differ."""
    forgetful = reading_of(name, FORGOTTEN[name]).signature
    reading = reading_of(name)
    assert forgetful != reading.signature
    with pytest.raises(Uncacheable, match="lowers differently"):
        backend.check_copy(reading._replace(signature=forgetful))
