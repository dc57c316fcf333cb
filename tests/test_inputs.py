"""Made-up inputs: for every graph of the zoo a buffer of the exact layout, with values that its role allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from zoo import ZOO, channels_last, enum, single, t

from plancache.description import Description, decode
from plancache.entry import Layout
from plancache.environment import Device
from plancache.errors import LibraryError
from plancache.inputs import TORCH_TYPES, empty, output_uids, partly_written, poison, synthesize
from plancache.signature import Uncacheable, read

torch = pytest.importorskip("torch")
pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")


class Made(NamedTuple):
    name: str
    description: Description
    layouts: dict[int, Layout]
    buffers: dict[int, Any]


def describe(graph: Any) -> Description:
    return decode(read(graph, DEVICE).signature)


def is_operand(tensor: dict[str, Any]) -> bool:
    """What a caller binds: cuDNN fills scalars whose value is known itself."""
    return not tensor["is_virtual"] and tensor["pass_by_value"] is None


def layouts_of(description: Description) -> dict[int, Layout]:
    return {
        uid: Layout(tuple(tensor["dim"]), tuple(tensor["stride"]), tensor["data_type"].member if tensor["data_type"] else "FLOAT")
        for uid, tensor in enumerate(description.tensors, 1)
        if is_operand(tensor)
    }


def make(name: str, description: Description) -> Made:
    layouts = layouts_of(description)
    return Made(name, description, layouts, synthesize(description, tuple(layouts), layouts, None))


def catalogue() -> list[Made]:
    found = []
    for name, case in ZOO.items():
        try:
            description = describe(case.make())
        except Uncacheable:
            continue
        if all(layout.data_type in TORCH_TYPES for layout in layouts_of(description).values()):
            found.append(make(name, description))
    return found


@pytest.fixture(scope="module")
def zoo() -> list[Made]:
    return catalogue()


def ports(zoo: list[Made], *names: str) -> Iterator[tuple[Made, dict[str, Any], str, Any]]:
    """Every buffer at a port of these names (a trailing * is a wildcard): its graph, node, port and values."""
    for made in zoo:
        for node in made.description.nodes:
            for port, uid in node["inputs"].items():
                if uid in made.buffers and any(port == name or (name[-1] == "*" and port.startswith(name[:-1])) for name in names):
                    yield made, node, port, made.buffers[uid]


def dims(made: Made, node: dict[str, Any], port: str) -> tuple[int, ...]:
    return tuple(made.description.tensors[node["inputs"][port] - 1]["dim"])


# ---- buffers --------------------------------------------------------------------------------------------------------


def test_every_input_gets_a_buffer_of_its_exact_layout(zoo: list[Made]) -> None:
    """Dims, strides and type are those of the tensor; outputs get none."""
    assert len(zoo) > 340
    for made in zoo:
        assert set(made.buffers) == set(made.layouts) - output_uids(made.description), made.name
        for uid, buffer in made.buffers.items():
            layout = made.layouts[uid]
            found = tuple(buffer.shape), buffer.stride(), buffer.dtype
            assert found == (layout.dim, layout.stride, getattr(torch, TORCH_TYPES[layout.data_type or ""])), made.name


def test_values_are_the_same_every_time(zoo: list[Made]) -> None:
    """Bit for bit, and whichever other operands there are."""
    for made in zoo:
        again = make(made.name, made.description).buffers
        one = max(made.buffers)
        alone = synthesize(made.description, (one,), made.layouts, None)
        for uid, buffer in [*again.items(), *alone.items()]:
            assert torch.equal(buffer.reshape(-1).view(torch.uint8), made.buffers[uid].reshape(-1).view(torch.uint8)), made.name


def test_values_are_finite_and_of_the_order_of_one(zoo: list[Made]) -> None:
    """No NaN, no infinity, nothing that overflows a small type; random values are not all alike."""
    for made in zoo:
        for uid, buffer in made.buffers.items():
            if buffer.dtype.is_floating_point:
                values = buffer.double()
                assert bool(values.isfinite().all()), (made.name, uid)
                assert float(values.abs().max()) < 50, (made.name, uid)


def test_data_tells_its_elements_apart(zoo: list[Made]) -> None:
    """A plan that leaves out an operand, or reads the wrong element of it, gives another result: whole-number operands too."""
    for made, node, port, buffer in ports(zoo, "A", "B", "image", "weight", "filter", "loss", "IN_*", "q", "k", "v", "dO"):
        if buffer.numel() > 1:
            assert len(buffer.double().unique()) > 1, (made.name, node["node_type"], port)


def test_a_scalar_factor_is_not_one(zoo: list[Made]) -> None:
    """A plan that leaves it out shows; FP8 scales are one all the same, lest results leave the type's range."""
    factors = {made.name: float(buffer) for made, _, port, buffer in ports(zoo, "IN_1") if port == "IN_1" and buffer.numel() == 1}
    assert factors["pointwise_mul_by_value"] != 1
    assert factors["pointwise_mul_by_value_int32"] not in (0, 1)
    assert factors["fused_fp8_matmul"] == 1


def test_types_that_torch_cannot_make_are_named() -> None:
    """FP4 has no torch type here: the error says so, and what to do."""
    description = describe(ZOO["block_scale_dequantize_fp4"].make())
    layouts = layouts_of(description)
    with pytest.raises(LibraryError, match=r"FP4_E2M1.*give inputs="):
        synthesize(description, tuple(layouts), layouts, None)
    with pytest.raises(LibraryError, match="None"):
        empty(torch, Layout((2,), (1,), None), None)


def test_broadcast_strides_are_filled() -> None:
    """A stride of zero is one element that is read many times."""
    description = describe(single("relu", "FLOAT", input=t(2, 16, 32, stride=[0, 32, 1])))
    (buffer,) = make("broadcast", description).buffers.values()
    assert buffer.stride() == (0, 32, 1)
    assert torch.equal(buffer[0], buffer[1])
    assert len(buffer.unique()) > 400


# ---- roles ----------------------------------------------------------------------------------------------------------


def test_sequence_lengths_are_full(zoo: list[Made]) -> None:
    """Each is the whole length, or as much of it as the graph's bounds on totals and pages leave to every member."""
    seen = set()
    for made, node, port, buffer in ports(zoo, "seq_len_q", "seq_len_kv"):
        keys = port.endswith("kv")
        whole = dims(made, node, "k" if keys else "q")[2]
        if keys and "paged_attention_k_table" in node["inputs"]:
            whole *= dims(made, node, "paged_attention_k_table")[2]
        total = node["params"].get("max_total_seq_len_kv" if keys else "max_total_seq_len_q", whole * buffer.numel())
        assert buffer.unique().tolist() == [min(whole, total // buffer.numel())], made.name
        assert int(buffer.sum()) <= total, made.name
        seen.add(made.name)
    assert {"sdpa_padding", "sdpa_paged", "sdpa_ragged_totals", "sdpa_backward_ragged", "sdpa_fp8_paged"} <= seen


def test_paged_lengths_keep_below_their_bound() -> None:
    """`paged_attention_max_seq_len_kv` may be less than the table's pages hold."""
    bounded = ZOO["sdpa_paged"].make
    graph = bounded()
    graph.nodes[0].params["paged_attention_max_seq_len_kv"] = 100
    made = make("bounded", describe(graph))
    (buffer,) = (values for _, _, _, values in ports([made], "seq_len_kv"))
    assert buffer.unique().tolist() == [100]


def test_cumulative_lengths_rise_by_full_lengths(zoo: list[Made]) -> None:
    """From 0 to the total, one sequence at a time."""
    found = [buffer.flatten().tolist() for _, _, _, buffer in ports(zoo, "cu_seq_len_q", "cu_seq_len_kv")]
    assert found == [[0, 128, 256]] * 2


def ragged(made: Made) -> Iterator[tuple[dict[str, Any], Any]]:
    for tensor in made.description.tensors:
        if tensor["ragged_offset"] in made.buffers:
            yield tensor, made.buffers[tensor["ragged_offset"]].flatten().tolist()


def test_ragged_offsets_count_elements_over_the_multiplier(zoo: list[Made]) -> None:
    """From 0, evenly, each at a whole token; the last is the end, and no sequence passes the end of the buffer."""
    seen = set()  # the frontend's own rule: offset * multiplier is the element offset of a sequence's first token
    for made in zoo:
        for tensor, offsets in ragged(made):
            dim, stride, multiplier = tensor["dim"], tensor["stride"], tensor["ragged_offset_multiplier"]
            elements = [offset * multiplier for offset in offsets]
            steps = {after - before for before, after in pairwise(elements)}
            lengths = [buffer for _, _, _, buffer in ports([made], "seq_len_q")]
            length = int(lengths[0].max()) if lengths else dim[2]
            assert elements[0] == 0
            packed = length < dim[2] and stride[2] >= stride[1]  # heads that lie apart leave no room to move together
            assert steps == {length * stride[2] if packed else stride[0]}, made.name
            assert all(element % stride[2] == 0 for element in elements), made.name
            assert elements[-1] <= math.prod(dim), made.name
            seen.add((made.name, multiplier))
    assert {("sdpa_ragged", 1), ("sdpa_ragged_multiplier", 64), ("sdpa_backward_ragged", 1), ("sdpa_ragged_totals", 1)} <= seen


def test_only_bounded_ragged_outputs_are_partly_written(zoo: list[Made]) -> None:
    """Full sequences fill their buffers; under a bound on the total the rest of the buffer is nobody's."""
    partly = {made.name for made in zoo if partly_written(made.description)}
    assert partly == {"sdpa_ragged_totals", "sdpa_backward_ragged"}


def test_page_tables_name_existing_pages(zoo: list[Made]) -> None:
    """0 <= page < pages of the container that the table is of, and different ones as long as there are enough."""
    tables = list(ports(zoo, "paged_attention_k_table", "paged_attention_v_table"))
    assert len(tables) == 6
    for made, node, port, buffer in tables:
        pages = dims(made, node, "k" if "_k_" in port else "v")[0]
        assert 0 <= int(buffer.min()) <= int(buffer.max()) < pages, made.name
        assert len(buffer.unique()) == min(pages, buffer.numel()), made.name


def test_page_tables_of_a_small_pool_wrap_around() -> None:
    """More table entries than pages: pages are read again, none beyond the pool."""
    graph = ZOO["sdpa_paged"].make()
    for port in ("k", "v"):
        graph.nodes[0].inputs[port].dim = [5, 4, 16, 64]
    made = make("small pool", describe(graph))
    for _, _, _, buffer in ports([made], "paged_attention_k_table", "paged_attention_v_table"):
        assert sorted(buffer.unique().tolist()) == [0, 1, 2, 3, 4]


def test_block_masks_are_all_ones(zoo: list[Made]) -> None:
    """Every block counts."""
    (mask,) = (buffer for _, _, _, buffer in ports(zoo, "block_mask"))
    assert mask.unique().tolist() == [255]


def test_seeds_and_offsets_of_dropout_are_one_number(zoo: list[Made]) -> None:
    """The same for seed and offset, in every graph; a mask is zeros and ones, its scale one."""
    whole, real = set(), set()
    for _, _, port, buffer in ports(zoo, "dropout_*"):
        if not buffer.dtype.is_floating_point:
            whole |= set(buffer.flatten().tolist())
        elif port == "dropout_0":
            assert buffer.unique().tolist() == [0, 1]
        else:
            real |= set(buffer.flatten().tolist())
    assert len(whole) == 1
    assert min(whole) > 0
    assert real == {1.0}


def test_variances_are_positive(zoo: list[Made]) -> None:
    """Inverse and running ones."""
    found = list(ports(zoo, "inv_variance", "in_running_var"))
    assert len(found) > 15
    for made, _, _, buffer in found:
        assert float(buffer.min()) > 0.5, made.name


def test_epsilon_and_momentum_are_small(zoo: list[Made]) -> None:
    """Of the size that people use, on the CPU where they are given by value."""
    assert {round(float(buffer), 7) for _, _, _, buffer in ports(zoo, "epsilon")} == {1e-5}
    assert {round(float(buffer), 7) for _, _, _, buffer in ports(zoo, "momentum")} == {0.1}


def test_peers_statistics_start_at_zero(zoo: list[Made]) -> None:
    """GPUs wait for each other on them: noise there could look like a peer that has come."""
    found = [buffer for _, _, _, buffer in ports(zoo, "peer_stats_*")]
    assert len(found) > 4
    assert all(not bool(buffer.any()) for buffer in found)


def test_attention_statistics_fit_the_scores(zoo: list[Made]) -> None:
    """exp(score - stats) is finite in HALF and its rows sum to about one, so that gradients are of the order of one."""
    seen = 0
    for made, node, _, stats in ports(zoo, "stats"):
        if node["node_type"] not in ("SDPA_BWD", "SDPA_FP8_BWD"):
            continue
        q, k = (made.buffers[node["inputs"][port]].float() for port in "qk")
        scale = node["params"].get("attn_scale", 1.0)
        if "attn_scale" in node["inputs"]:
            scale = float(made.buffers[node["inputs"]["attn_scale"]])
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scale
        weights = (scores - stats).exp()
        assert float(weights.max()) < 50, made.name
        assert 0.6 < float(weights.sum(-1).median()) < 1.5, made.name
        seen += 1
    assert seen >= 20


def test_scores_of_attention_are_of_the_order_of_one(zoo: list[Made]) -> None:
    """Whether the scale is given, a tensor or left out: softmax then mixes many keys, and a wrong one shows."""
    for made, node, _, q in ports(zoo, "q"):
        if not node["node_type"].startswith("SDPA") or "paged_attention_k_table" in node["inputs"] or "MXFP8" in node["node_type"]:
            continue
        k = made.buffers[node["inputs"]["k"]].float()
        scale = node["params"].get("attn_scale", 1.0)
        if "attn_scale" in node["inputs"]:
            scale = float(made.buffers[node["inputs"]["attn_scale"]])
        scores = q.float() @ k[:, :1].transpose(2, 3) * scale
        assert 0.8 < float(scores.std()) < 1.25, made.name


def test_fp8_scales_are_one(zoo: list[Made]) -> None:
    """Per tensor, per block, in any of the types that block scales have."""
    found = list(ports(zoo, "descale*", "scale_*"))
    assert len(found) > 100
    for made, node, port, buffer in found:
        if node["node_type"] != "BLOCK_SCALE_QUANTIZE":
            assert buffer.float().unique().tolist() == [1.0], (made.name, port)


def test_group_offsets_rise_within_bounds(zoo: list[Made]) -> None:
    """Every group gets rows, as many as the others, at the alignment that the tensor promises."""
    for made, node, port, buffer in ports(zoo, "first_token_offset", "group_offset"):
        offsets = buffer.flatten().tolist()
        rows = max(dims(made, node, "token" if "token" in node["inputs"] else "input")[:2])
        aligned = made.description.tensors[node["inputs"][port] - 1]["alignment_value"]
        assert offsets[0] == 0, made.name
        assert offsets == sorted(set(offsets)), made.name
        assert offsets[-1] < rows, made.name
        assert all(offset % aligned == 0 for offset in offsets), made.name


def test_one_more_offset_than_groups_is_the_end() -> None:
    """Explicit boundaries: the last is the number of rows."""
    token, weight, offsets = t(1, 66, 128), t(4, 128, 256, stride=[32768, 1, 128]), t(5, 1, 1, dt="INT32")
    made = make("explicit", describe(single("moe_grouped_matmul", token=token, weight=weight, first_token_offset=offsets)))
    (buffer,) = (values for _, _, _, values in ports([made], "first_token_offset"))
    assert buffer.flatten().tolist() == [0, 16, 32, 48, 66]


def test_token_indices_are_in_range_and_scatter_to_every_row_once(zoo: list[Made]) -> None:
    """Gathered rows exist; `token * top_k + k` is each row of the scattered output exactly once."""
    seen = {}
    for made, node, _, index in ports(zoo, "token_index"):
        mode, top_k = node["params"]["mode"].member, node["params"]["top_k"]
        slots = made.buffers[node["inputs"]["token_ks"]]
        tokens = dims(made, node, "token")[1]
        assert 0 <= int(index.min()) <= int(index.max()) < tokens
        assert 0 <= int(slots.min()) <= int(slots.max()) < top_k
        seen[mode] = sorted((index * top_k + slots).flatten().tolist())
    assert set(seen) == {"GATHER", "SCATTER", "COMBINE"}
    assert seen["SCATTER"] == seen["COMBINE"] == list(range(64))


def test_gathered_rows_exist_where_there_are_more_rows_than_tokens() -> None:
    """Each token is routed several times."""
    given = {"token": t(1, 32, 128), "weight": t(4, 128, 256, stride=[32768, 1, 128]), "first_token_offset": t(4, 1, 1, dt="INT32")}
    given |= {"token_index": t(1, 64, 1, dt="INT32"), "mode": enum("moe_grouped_matmul_mode", "GATHER"), "top_k": 2}
    made = make("gather", describe(single("moe_grouped_matmul", **given)))
    by_port = {port: buffer.flatten().tolist() for _, _, port, buffer in ports([made], "token_index", "first_token_offset")}
    assert set(by_port["token_index"]) == set(range(32))
    assert by_port["first_token_offset"] == [0, 16, 32, 48]


@pytest.mark.parametrize("mode", ["log", "sqrt", "rsqrt", "reciprocal", "pow", "div", "mod", "tan", "exp"])
def test_pointwise_operands_lie_within_the_domain(zoo: list[Made], mode: str) -> None:
    """Results are finite, and not near a pole where rounding is everything."""
    (made,) = (made for made in zoo if made.name == f"pointwise_{mode}")
    inputs = [made.buffers[uid].double() for _, uid in sorted(made.description.nodes[0]["inputs"].items())]
    functions = {"div": torch.div, "mod": torch.fmod, "pow": torch.pow}
    result = functions.get(mode, getattr(torch, mode, None))(*inputs)
    assert bool(result.isfinite().all())
    assert float(result.abs().max()) < 200


def test_comparisons_find_equal_and_unequal_elements(zoo: list[Made]) -> None:
    """`cmp_eq` of two random tensors would be false everywhere."""
    compared = [made for made in zoo if made.name.startswith("pointwise_cmp_")]
    assert len(compared) == 6
    for made in compared:
        a, b = made.buffers.values()
        assert 0.02 < float((a == b).float().mean()) < 0.9, made.name


@pytest.mark.parametrize("terms", [16, 1024])
def test_products_are_of_the_order_of_one(terms: int) -> None:
    """Whatever the length of a sum: matrix products and convolutions of long sums neither overflow nor vanish."""
    product = make("product", describe(single("matmul", A=t(1, 64, terms), B=t(1, terms, 64))))
    by_port = {port: buffer for _, _, port, buffer in ports([product], "A", "B")}
    assert 0.7 < float((by_port["A"].double() @ by_port["B"].double()).std()) < 1.4
    same = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    given = {"image": channels_last(2, terms, 8, 8), "weight": channels_last(64, terms, 3, 3)}
    convolution = make("convolution", describe(single("conv_fprop", **given, **same)))
    image, weight = (buffer.double() for _, _, _, buffer in ports([convolution], "image", "weight"))
    assert 0.7 < float(torch.nn.functional.conv2d(image, weight).std()) < 1.4


# ---- poison ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(TORCH_TYPES))
@pytest.mark.parametrize("byte", [0xFF, 0x5A])
def test_poison_fills_every_byte(kind: str, byte: int) -> None:
    """Of every type, through any strides, the gaps between elements included, and no byte beyond."""
    base = torch.zeros(4096, dtype=torch.uint8).view(getattr(torch, TORCH_TYPES[kind]))
    buffer = torch.as_strided(base, (3, 1, 5), (40, 7, 2))
    poison(torch, buffer, byte)
    raw = base.view(torch.uint8)
    poisoned = (2 * 40 + 4 * 2 + 1) * base.itemsize
    assert raw[:poisoned].unique().tolist() == [byte]
    assert not bool(raw[poisoned:].any())


def test_poison_of_nothing_is_nothing() -> None:
    """An empty buffer has no byte to fill."""
    poison(torch, torch.empty_strided((0, 4), (4, 1)), 0xFF)
