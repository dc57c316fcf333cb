"""Is this output right: honest computations agree, wrong ones do not, and what stayed unwritten is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import ZOO

from plancache import graphs
from plancache.description import Description, decode
from plancache.entry import Layout
from plancache.environment import Device
from plancache.inputs import TORCH_TYPES, poison, synthesize
from plancache.proof import disagreement, reduction_length, tolerance, unwritten
from plancache.signature import Uncacheable, read

torch = pytest.importorskip("torch")
pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")
POISONS = (0xFF, 0x5A)


# ---- the examples, computed twice -----------------------------------------------------------------------------------


def blocks(length: int, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, length, size)]


def in_tensor_cores(operand: Any) -> Any:
    """Float32 operands lose the bits that TF32 has not."""
    if operand.dtype != torch.float32:
        return operand.float()
    return (operand.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def split_product(a: Any, b: Any, size: int = 48) -> Any:
    """Float32 sums of parts of the inner extent, last part first."""
    a, b = in_tensor_cores(a), in_tensor_cores(b)
    return sum(a[..., part] @ b[..., part, :] for part in reversed(blocks(a.shape[-1], size)))


def split_convolution(x: Mapping[str, Any]) -> dict[str, Any]:
    image, weight = in_tensor_cores(x["input"]), in_tensor_cores(x["filter"])
    parts = blocks(image.shape[1], 16)
    total = sum(torch.nn.functional.conv2d(image[:, part], weight[:, part], padding=1) for part in reversed(parts))
    return {"output": (total + x["bias"].float()).relu()}


def split_matmul(x: Mapping[str, Any]) -> dict[str, Any]:
    return {"output": split_product(x["a"], x["b"])}


def split_epilogue(x: Mapping[str, Any]) -> dict[str, Any]:
    output = torch.nn.functional.gelu(split_product(x["a"], x["b"]) * x["scale"] + x["bias"].float())
    return {"output": output, "amax": output.to(x["a"].dtype).float().abs().amax().reshape(1, 1, 1)}


def split_fp8(x: Mapping[str, Any]) -> dict[str, Any]:
    result = (split_product(x["a"], x["b"]) * (x["descale_a"] * x["descale_b"])).relu()
    return {"output": result * x["scale"], "amax": result.abs().amax().reshape(1, 1, 1)}


def split_attention(x: Mapping[str, Any]) -> dict[str, Any]:
    """A softmax over blocks of keys whose weights go back into tensor cores in the type of v."""
    q, k, v = (x[role].float() for role in "qkv")
    k, v = (shared.repeat_interleave(q.shape[1] // shared.shape[1], 1) for shared in (k, v))
    length = k.shape[2]
    mask = torch.ones(q.shape[2], length).tril().bool()
    largest, total, output = torch.full((*q.shape[:3], 1), -math.inf), torch.zeros(*q.shape[:3], 1), torch.zeros_like(q)
    for part in blocks(length, 32):
        scores = (q @ k[:, :, part].transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask[:, part], -math.inf)
        above = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = (scores - above).exp(), (largest - above).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        output = output * kept + weights.to(x["v"].dtype).float() @ v[:, :, part]
        largest = above
    return {"o": output / total, "stats": largest + total.log()}


def split_norm(x: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and mean of squares in float32, in two parts."""
    rows = x["input"].float()
    parts = [rows[:, part] for part in blocks(rows.shape[1], rows.shape[1] // 2)]
    centred = "bias" in x
    mean = sum(part.sum(1, keepdim=True) for part in reversed(parts)) / rows.shape[1] if centred else torch.zeros(1)
    squares = sum(part.square().sum(1, keepdim=True) for part in reversed(parts)) / rows.shape[1]
    inverse = (squares - mean.square() + x["epsilon"].item()).rsqrt()
    output = (rows - mean) * inverse * x["scale"].float()
    return {"output": output + x["bias"].float() if centred else output, "mean": mean, "inv_variance": inverse}


SIZES: dict[str, Any] = {"batch": 3, "m": 96, "n": 80, "k": 256}
HEADS: dict[str, Any] = {"batch": 2, "heads": 4, "sequence_length": 192, "head_dim": 32, "training": True}
KINDS: dict[str, tuple[Callable[..., graphs.Example], dict[str, Any], Callable[[Mapping[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "conv": (graphs.conv_bias_relu, {"batch": 2, "in_channels": 64, "out_channels": 48, "height": 12, "width": 12}, split_convolution, ()),
    "matmul": (graphs.batched_matmul, SIZES, split_matmul, ()),
    "epilogue": (graphs.matmul_scale_bias_activation, SIZES | {"amax": True}, split_epilogue, ()),
    "attention": (graphs.sdpa, HEADS | {"kv_heads": 2}, split_attention, ("BFLOAT16", "HALF")),
    "layer_norm": (graphs.layer_norm, {"rows": 256, "features": 192, "training": True}, split_norm, ()),
    "rms_norm": (graphs.rms_norm, {"rows": 256, "features": 192, "training": True}, split_norm, ()),
}
CASES = [(kind, dtype) for kind, (_, _, _, types) in KINDS.items() for dtype in types or ("BFLOAT16", "HALF", "FLOAT")] + [("fp8", "")]
KINDS["fp8"] = (graphs.fp8_matmul, SIZES | {"k": 512}, split_fp8, ())


@dataclass(frozen=True, eq=False)
class Twice:
    """An example with the outputs of two honest computations, by canonical uid, and the bounds between them."""

    kind: str
    example: graphs.Example
    inputs: dict[str, Any]
    uids: dict[str, int]
    reference: dict[int, Any]
    other: dict[int, Any]
    bounds: dict[int, float]

    def stored(self, computed: Mapping[str, Any]) -> dict[int, Any]:
        """In the types in which the graph stores them."""
        types = {role: getattr(torch, TORCH_TYPES[self.example.tensors[role].data_type.name]) for role in self.example.outputs}
        return {self.uids[role]: computed[role].to(types[role]) for role in self.example.outputs}


@cache
def twice(kind: str, dtype: str) -> Twice:
    make, sizes, other, _ = KINDS[kind]
    example = make(**sizes, **({"data_type": dtype} if dtype else {}))
    reading = read(example.graph, DEVICE)
    description = decode(reading.signature)
    numbers = {id(tensor): uid for uid, tensor in enumerate(reading.tensors, 1)}
    uids = {role: numbers[id(example.tensors[role])] for role in example.outputs}
    inputs = example.make_inputs("cpu")
    bounds = {uid: tolerance(description, example.tensors[role].data_type.name) for role, uid in uids.items()}
    made = Twice(kind, example, inputs, uids, {}, {}, bounds)
    made.reference.update(made.stored(example.reference(inputs)))
    made.other.update(made.stored(other(inputs)))
    return made


@pytest.fixture(params=CASES, ids=lambda case: "-".join(filter(None, case)))
def case(request: pytest.FixtureRequest) -> Twice:
    return twice(*request.param)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_honest_computations_agree_on_other_inputs(case: Twice, seed: int) -> None:
    """No false alarm, whatever the numbers: rows that a bias brings near zero have the rounding of what it was added to."""
    inputs = case.example.make_inputs("cpu", seed)
    other = case.stored(KINDS[case.kind][2](inputs))
    assert disagreement(other, case.stored(case.example.reference(inputs)), case.bounds) is None


def changed(case: Twice, change: Callable[[Any], Any], role: str | None = None) -> dict[int, Any]:
    """The other computation's outputs with a change to its first one."""
    uid = case.uids[role or case.example.outputs[0]]
    return case.other | {uid: change(case.other[uid].clone(memory_format=torch.contiguous_format))}


def test_honest_computations_agree(case: Twice) -> None:
    """A float64 reference and float32 sums in another order and in parts, whatever the type, in both directions."""
    assert disagreement(case.other, case.reference, case.bounds) is None
    assert disagreement(case.reference, case.other, case.bounds) is None


def test_a_single_rounding_too_many_is_not_a_mistake(case: Twice) -> None:
    """Results that pass through their own type once more, as parts of a split sum do, still agree; FP8 has no such parts."""
    if case.kind == "fp8":
        pytest.skip("parts of a sum are never kept in FP8")
    half = {uid: (output.double() / 3).to(output.dtype) for uid, output in case.other.items()}
    rest = {uid: (output.double() - half[uid].double()).to(output.dtype) for uid, output in case.other.items()}
    again = {uid: half[uid] + rest[uid] for uid in case.other}
    assert disagreement(again, case.reference, case.bounds) is None


def wrong_element(output: Any) -> Any:
    """One element is off by one standard deviation."""
    flat = output.reshape(-1)
    at = int((flat.double().abs() - flat.double().std()).abs().argmin())  # of normal size itself
    flat[at] = (flat[at].double() + flat.double().std()).to(flat.dtype)
    return flat.reshape(output.shape)


def one(value: float) -> Callable[[Any], Any]:
    def change(output: Any) -> Any:
        output.reshape(-1)[output.numel() // 2] = value
        return output

    return change


def rows_of(output: Any) -> Any:
    return output.view(-1, output.shape[-1] if output.shape[-1] > 1 else output.shape[1])


def row_of_zeros(output: Any) -> Any:
    rows = rows_of(output)
    rows[len(rows) // 2 + 1] = 0
    return output


def last_row_of_zeros(output: Any) -> Any:
    rows_of(output)[-1] = 0
    return output


def swapped_rows(output: Any) -> Any:
    rows = rows_of(output)
    rows[[2, 3]] = rows[[3, 2]]
    return output


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda output: (output.double() * factor).to(output.dtype)


MISTAKES = {
    "wrong element": wrong_element,
    "row of zeros": row_of_zeros,
    "last row of zeros": last_row_of_zeros,
    "swapped rows": swapped_rows,
    "half": scaled(0.5),
    "opposite": scaled(-1),
    "shifted": lambda output: output.roll(1, 0) if output.shape[0] > 1 else output.roll(1, 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_results_differ(case: Twice, mistake: str) -> None:
    """One element of normal size, a row, its place, a factor: each is found in every type."""
    wrong = changed(case, MISTAKES[mistake])
    assert "differs by" in (disagreement(wrong, case.reference, case.bounds) or "")
    assert "differs by" in (disagreement(case.reference, wrong, case.bounds) or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_differs(case: Twice, value: float) -> None:
    """In either result; FP8_E4M3 has a NaN only."""
    wrong = changed(case, one(math.nan if case.kind == "fp8" else value))
    assert "not finite" in (disagreement(wrong, case.reference, case.bounds) or "")
    assert "not finite" in (disagreement(case.reference, wrong, case.bounds) or "")


@pytest.mark.parametrize(("kind", "dtype"), [case for case in CASES if case[0] != "fp8"])
def test_a_scale_off_by_two_percent_differs(kind: str, dtype: str) -> None:
    """Nearly three steps of BFLOAT16, dozens of HALF, thousands of FLOAT."""
    assert disagreement(changed(twice(kind, dtype), scaled(1.02)), twice(kind, dtype).reference, twice(kind, dtype).bounds)


def test_an_fp8_scale_off_by_a_quarter_differs() -> None:
    """Two steps of FP8_E4M3."""
    case = twice("fp8", "")
    assert disagreement(changed(case, scaled(1.25)), case.reference, case.bounds)


@pytest.mark.parametrize("role", ["stats", "mean", "inv_variance", "amax"])
def test_float_statistics_are_held_to_their_own_type(role: str) -> None:
    """Beside an output of 16 bits, half a percent off in a float32 statistic shows; an AMAX has the steps of what it is made of."""
    found = 0
    for kind, dtype in CASES:
        case = twice(kind, dtype)
        if role in case.uids and (role, dtype) not in (("amax", "BFLOAT16"), ("amax", "")):
            assert disagreement(changed(case, scaled(1.005), role), case.reference, case.bounds), (kind, dtype)
            found += 1
    assert found


@pytest.mark.parametrize("kind", ["conv", "epilogue", "layer_norm"])
@pytest.mark.parametrize("dtype", ["BFLOAT16", "HALF", "FLOAT"])
def test_a_missing_bias_differs(kind: str, dtype: str) -> None:
    """The same computation with a bias of zero."""
    case = twice(kind, dtype)
    without = case.stored(KINDS[kind][2](case.inputs | {"bias": torch.zeros_like(case.inputs["bias"])}))
    assert disagreement(without, case.reference, case.bounds)


def test_a_wrong_mask_on_the_last_key_differs() -> None:
    """Causal attention that hides one key too many from each query, where rows average over many keys."""
    case = twice("attention", "BFLOAT16")
    wrong = dict(case.inputs)
    wrong["k"] = wrong["k"].clone()
    wrong["k"][:, :, -1] = -100 * wrong["k"][:, :, -1].sign()
    assert disagreement(case.stored(split_attention(wrong)), case.reference, case.bounds)


def test_rows_of_very_different_sizes_are_each_held_to_their_own() -> None:
    """A small row that is wrong beside large ones: late queries of a long causal attention average their values to little."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(128, 64, generator=generator) * torch.linspace(0, -1.5, 128).mul(math.log(10)).exp()[:, None]
    right, wrong = rows.bfloat16(), rows.bfloat16()
    wrong[-1] = 0
    assert disagreement({1: right}, {1: wrong}, {1: 2**-7})
    assert disagreement({1: right}, {1: (rows * 1.001).bfloat16()}, {1: 2**-7}) is None


def test_a_single_element_that_cancelled_to_nothing_is_not_held_to_its_own_size() -> None:
    """A sum that is zero but for rounding, alone on its slice, has the rounding of what was summed."""
    right = torch.tensor([[1.0, 2.0, 1e-7, 3.0]])
    assert disagreement({1: right}, {1: torch.tensor([[1.0, 2.0, -1e-7, 3.0]])}, {1: 1e-6}) is None


def test_infinities_and_nans_in_the_same_places_agree() -> None:
    """The graph itself may overflow; an infinity of the other sign, or a NaN in its place, is a difference."""
    right = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    assert disagreement({1: right}, {1: right.clone()}, {1: 0.0}) is None
    for wrong in ([1.0, -math.inf, -math.inf, math.nan], [1.0, math.nan, -math.inf, math.nan], [1.0, math.inf, -math.inf, 0.0]):
        assert disagreement({1: right}, {1: torch.tensor(wrong)}, {1: 0.5})


def test_whole_numbers_are_exact() -> None:
    """A product of INT8 in INT32 has no rounding; large numbers keep their last digit."""
    description = described("matmul_int8")
    assert tolerance(description, "INT32") == 0
    right = torch.tensor([2**31 - 1, 5, -7], dtype=torch.int32)
    assert disagreement({1: right}, {1: right.clone()}, {1: 0.0}) is None
    assert disagreement({1: right}, {1: right - torch.tensor([1, 0, 0], dtype=torch.int32)}, {1: 0.0})
    flags = torch.tensor([True, False])
    assert disagreement({1: flags}, {1: ~flags}, {1: 0.01})


def test_block_scales_may_be_one_power_apart() -> None:
    """FP8_E8M0 has powers of two only: one step is honest, two are not."""
    scales = torch.tensor([1.0, 2.0, 0.5]).to(torch.float8_e8m0fnu)
    assert disagreement({1: scales}, {1: torch.tensor([2.0, 2.0, 0.5]).to(torch.float8_e8m0fnu)}, {1: 1e-6}) is None
    assert disagreement({1: scales}, {1: torch.tensor([4.0, 2.0, 0.5]).to(torch.float8_e8m0fnu)}, {1: 1e-6})


def test_empty_outputs_agree() -> None:
    """Nothing differs in nothing."""
    assert disagreement({1: torch.empty(0, 4)}, {1: torch.empty(0, 4)}, {1: 0.0}) is None


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.data())
@settings(deadline=None, max_examples=60)
def test_disagreement_is_symmetric_and_nothing_disagrees_with_itself(values: list[float], data: st.DataObject) -> None:
    """Whichever of two plans is asked first."""
    others = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=len(values), max_size=len(values)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2):
        a, b = torch.tensor(values).to(dtype), torch.tensor(others).to(dtype)
        assert disagreement({1: a}, {1: a.clone()}, {1: 0.0}) is None
        assert (disagreement({1: a}, {1: b}, {1: 0.01}) is None) == (disagreement({1: b}, {1: a}, {1: 0.01}) is None)


@given(st.lists(st.floats(-400, 400, width=32), min_size=1, max_size=40), st.floats(-1, 1))
@settings(deadline=None, max_examples=60)
def test_values_on_two_sides_of_a_rounding_boundary_agree(values: list[float], shift: float) -> None:
    """Values that are apart by the bound before they are stored agree after it, in every type, subnormals included."""
    exact = torch.tensor(values, dtype=torch.float64)
    near = exact + shift * 1e-5 * exact.abs().max()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        assert disagreement({1: exact.to(dtype)}, {1: near.to(dtype)}, {1: 2e-5}) is None


# ---- tolerance ------------------------------------------------------------------------------------------------------


def described(name: str) -> Description:
    return decode(read(ZOO[name].make(), DEVICE).signature)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("matmul_plain", 32),
        ("conv_fprop_plain", 32 * 9),
        ("conv_fprop_grouped", 8 * 9),
        ("conv_dgrad_plain", 64 * 9),
        ("conv_wgrad_plain", 4 * 16 * 16),
        ("sdpa_plain", 128),
        ("sdpa_cross", 256),
        ("sdpa_depth_512", 512),
        ("sdpa_paged", 128),
        ("sdpa_backward_grouped_query", 256),
        ("reduction_add", 256),
        ("reduction_max", 1),
        ("layernorm_training", 128),
        ("batchnorm_running", 256),
        ("moe_grouped_matmul_plain", 128),
        ("pointwise_add_broadcast", 1),
    ],
)
def test_reduction_lengths(name: str, length: int) -> None:
    """The number of terms of the longest sum that one element of a result is."""
    assert reduction_length(described(name)) == length


def test_tolerances_fit_the_types_that_values_pass_through() -> None:
    """Inputs are exact; TF32, FP8 weights, 16-bit intermediates and 16-bit sums are not."""
    of_float = ("conv_fprop_float_output", "matmul_float", "layernorm_training")
    of_half = ("conv_fprop_half", "conv_fprop_compute_half", "sdpa_fp8_half_output")
    bounds = {name: tolerance(described(name), "FLOAT") for name in of_float}
    bounds |= {name: tolerance(described(name), "HALF") for name in of_half}
    bounds |= {"matmul_plain": tolerance(described("matmul_plain"), "BFLOAT16")}
    bounds |= {"sdpa_fp8_plain": tolerance(described("sdpa_fp8_plain"), "FP8_E4M3")}
    assert bounds["conv_fprop_float_output"] < 1e-4 < 1e-3 < bounds["matmul_float"] < 1e-2
    assert bounds["layernorm_training"] < 1e-4
    assert bounds["conv_fprop_half"] < bounds["matmul_plain"] < 1e-2
    assert bounds["conv_fprop_half"] * 10 < bounds["conv_fprop_compute_half"]
    assert bounds["sdpa_fp8_half_output"] > 0.1
    assert bounds["sdpa_fp8_plain"] < 0.2


def test_an_output_of_another_type_does_not_loosen_a_bound() -> None:
    """Statistics of an attention in BFLOAT16 are held to float32 and what approximations leave of it."""
    assert tolerance(described("sdpa_stats"), "FLOAT") < tolerance(described("sdpa_stats"), "BFLOAT16") / 4


def test_longer_sums_allow_more() -> None:
    """Like the square root, then linearly where tensor cores truncate."""

    def bound(k: int) -> float:
        example = graphs.batched_matmul(batch=1, m=8, n=8, k=k, data_type="FLOAT")
        return tolerance(decode(read(example.graph, DEVICE).signature), "FLOAT") - 4 * 2**-10

    assert bound(4096) / bound(64) == pytest.approx(8)
    assert bound(2**20) / bound(2**16) == pytest.approx(16)


def test_every_graph_of_the_zoo_has_a_bound() -> None:
    """Below a third for every output: nothing is waved through."""
    for name, case in ZOO.items():
        try:
            description = decode(read(case.make(), DEVICE).signature)
        except Uncacheable:
            continue
        for node in description.nodes:
            for uid in node["outputs"].values():
                kind = description.tensors[uid - 1]["data_type"]
                assert 0 <= tolerance(description, kind.member) < 0.3, name


# ---- what stays unwritten -------------------------------------------------------------------------------------------

STRIDES = [
    ((6, 8), (8, 1)),
    ((6, 8), (1, 6)),
    ((2, 3, 4, 5), (60, 1, 15, 3)),
    ((6, 8), (24, 2)),
    ((6, 1), (1, 977)),
    ((1, 6, 1), (5, 3, 999)),
]


def runs(kind: str, shape: tuple[int, ...], stride: tuple[int, ...], write: Callable[[Any], None]) -> str | None:
    """What a plan that writes so leaves of outputs poisoned with one byte and the other."""
    made = []
    for byte in POISONS:
        buffer = torch.empty_strided(shape, stride, dtype=getattr(torch, TORCH_TYPES[kind]))
        poison(torch, buffer, byte)
        write(buffer)
        made.append({7: buffer})
    return unwritten(*made, POISONS)


@pytest.mark.parametrize("kind", sorted(TORCH_TYPES))
@pytest.mark.parametrize(("shape", "stride"), STRIDES)
def test_a_single_unwritten_element_is_found(kind: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """In every type and any strides; where all are written, nothing is said."""

    def all_but_one(buffer: Any) -> None:
        last = buffer[(-1,) * buffer.dim()].clone() if kind != "BOOLEAN" else buffer.view(torch.uint8)[(-1,) * buffer.dim()].clone()
        buffer.copy_(torch.ones(shape).to(buffer.dtype))
        (buffer.view(torch.uint8) if kind == "BOOLEAN" else buffer)[(-1,) * buffer.dim()] = last

    count = math.prod(shape)
    assert runs(kind, shape, stride, lambda buffer: buffer.copy_(torch.ones(shape).to(buffer.dtype))) is None
    assert runs(kind, shape, stride, all_but_one) == f"it leaves 1 of {count} elements of output 7 unwritten"
    assert runs(kind, shape, stride, lambda _: None) == f"it leaves {count} of {count} elements of output 7 unwritten"


@pytest.mark.parametrize("kind", ["FLOAT", "BFLOAT16", "HALF", "INT32", "INT64", "INT8", "UINT8", "FP8_E4M3"])
@pytest.mark.parametrize("byte", POISONS)
def test_a_right_value_that_looks_like_poison_is_written(kind: str, byte: int) -> None:
    """It can look like one of the two bytes, in every run: not like the other at the same time."""
    value = torch.full((1, 8), byte, dtype=torch.uint8).view(getattr(torch, TORCH_TYPES[kind]))[0, 0]
    assert runs(kind, (4, 4), (4, 1), lambda buffer: buffer.fill_(0).__setitem__((1, 1), value)) is None
    assert runs(kind, (4, 4), (4, 1), lambda buffer: buffer.copy_(value.expand(4, 4))) is None


def test_empty_outputs_are_written() -> None:
    """There is nothing to write."""
    assert unwritten({1: torch.empty(0, 3)}, {1: torch.empty(0, 3)}, POISONS) is None


def test_outputs_that_the_graph_leaves_in_part_are_found_when_nothing_is_written() -> None:
    """`partly` lets rows beyond a bounded total be, not a plan that writes none."""
    first, second = (torch.full((4, 4), byte, dtype=torch.uint8).view(torch.float32) for byte in POISONS)
    assert unwritten({1: first}, {1: second}, POISONS, partly={1}) is not None
    first[0], second[0] = 1, 1
    assert unwritten({1: first}, {1: second}, POISONS) is not None
    assert unwritten({1: first}, {1: second}, POISONS, partly={1}) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.permutations(range(4)), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=50)
def test_exactly_what_was_left_is_counted(shape: list[int], order: list[int], gap: int, data: st.DataObject) -> None:
    """Any dims, any order of strides, any gaps: the number is that of the elements left."""
    stride, step = [0] * len(shape), gap
    for axis in sorted(range(len(shape)), key=lambda axis: order[axis]):
        stride[axis], step = step, step * shape[axis]
    count = math.prod(shape)
    left = data.draw(st.sets(st.integers(0, count - 1)))
    mask = torch.tensor([at in left for at in range(count)]).reshape(shape)
    said = runs("FLOAT", tuple(shape), tuple(stride), lambda buffer: buffer.copy_(torch.where(mask, buffer, 3.0)))
    assert said == (f"it leaves {len(left)} of {count} elements of output 7 unwritten" if left else None)


def test_synthesized_inputs_and_bounds_meet() -> None:
    """The whole way for one graph: made-up inputs, two computations, the graph's own bound."""
    description = described("matmul_plain")
    layouts = {
        uid: Layout(tensor["dim"], tensor["stride"], tensor["data_type"].member) for uid, tensor in enumerate(description.tensors, 1)
    }
    made = synthesize(description, tuple(layouts), layouts, None)
    a, b = (made[description.nodes[0]["inputs"][port]] for port in "AB")
    exact, split = (a.double() @ b.double()).bfloat16(), split_product(a, b, 8).bfloat16()
    bounds = {1: tolerance(description, "BFLOAT16")}
    assert disagreement({1: split}, {1: exact}, bounds) is None
    assert disagreement({1: split_product(a, b.roll(1, 1)).bfloat16()}, {1: exact}, bounds)
