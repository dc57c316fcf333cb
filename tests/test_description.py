"""The family of a graph: what shapes of one kind have in common, and nothing that a process adds."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from zoo import ZOO, channels_last, enum, single, t

from plancache.backend import CudnnBackend
from plancache.description import decode, family
from plancache.environment import Device
from plancache.signature import Uncacheable, read

pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")


def of(graph: Any) -> bytes:
    return family(decode(read(graph, DEVICE).signature))


def readable() -> list[str]:
    """The cases of the zoo that have a signature."""
    names = []
    for name, case in ZOO.items():
        try:
            read(case.make(), DEVICE)
        except Uncacheable:
            continue
        names.append(name)
    return names


def product(m: int = 64, k: int = 32, n: int = 128, batch: int = 8, **more: Any) -> Any:
    return single("matmul", more.pop("io", "BFLOAT16"), A=more.pop("A", t(batch, m, k)), B=t(batch, k, n), **more)


def convolved(image: tuple[int, ...] = (4, 32, 16, 16), padding: int = 1, **more: Any) -> Any:
    window = {"padding": [padding] * 2, "stride": [1, 1], "dilation": [1, 1]}
    return single("conv_fprop", image=channels_last(*image), weight=channels_last(64, image[1], 3, 3), **window | more)


@pytest.mark.parametrize(
    "extents",
    [{"m": 128}, {"m": 48}, {"k": 4096}, {"n": 16}, {"batch": 24}, {"m": 1024, "k": 80, "n": 208, "batch": 40}],
)
def test_extents_of_one_class_are_one_family(extents: dict[str, int]) -> None:
    """Multiples of 16 are alike, and so are odd multiples of 8, however large."""
    assert of(product(**extents)) == of(product())


@pytest.mark.parametrize("few", [1, 2, 4, 8])
def test_the_class_of_an_extent_is_the_power_of_two_that_divides_it(few: int) -> None:
    """3 and 5 are alike, 6 and 10, 12 and 20, 24 and 40; each pair differs from the others, and from multiples of 16."""
    assert of(product(m=3 * few)) == of(product(m=5 * few))
    assert of(product(m=3 * few)) != of(product(m=6 * few))
    assert of(product(m=3 * few)) != of(product(m=64))


def test_sixteen_is_the_largest_class() -> None:
    """16, 32 and 48 are alike: vectorized loads ask for no more."""
    assert of(product(m=16)) == of(product(m=32)) == of(product(m=48))


DIFFERENT = {
    "an extent of one": partial(product, m=1),
    "another batch of one": partial(product, batch=1),
    "another divisibility": partial(product, k=36),
    "another rank": partial(single, "matmul", A=t(2, 4, 64, 32), B=t(2, 4, 32, 128)),
    "another order of strides": partial(product, A=t(8, 64, 32, stride=[2048, 1, 64])),
    "another type": partial(product, io="HALF"),
    "another output type": partial(product, outputs={"C": {"data_type": enum("data_type", "FLOAT")}}),
    "another compute type": partial(product, io="HALF", compute_data_type=enum("data_type", "HALF")),
    "another parameter": partial(product, padding=1.0),
    "another option": partial(product, context={"sm_count": 100}),
    "another alignment": partial(product, A=t(8, 64, 32, alignment_value=64)),
    "another broadcast": partial(product, A=t(1, 64, 32)),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_all_else_is_another_family(change: str) -> None:
    """Rank, order of strides, extents of one, types, parameters and options."""
    assert of(DIFFERENT[change]()) != of(product())


def test_every_change_makes_a_family_of_its_own() -> None:
    """No two of them are mixed up."""
    families = [of(make()) for make in (product, *DIFFERENT.values())]
    assert len(set(families)) == len(families)


def test_parameters_and_modes_are_told_apart() -> None:
    """Padding and the mode of an operation stay as they are; operands of an operation do not change places."""
    assert of(convolved()) == of(convolved((12, 64, 32, 32)))
    assert of(convolved()) != of(convolved(padding=2))
    assert of(convolved()) != of(convolved(convolution_mode=enum("convolution_mode", "CONVOLUTION")))
    shape = t(2, 16, 32)
    assert of(single("add", "FLOAT", a=shape, b=shape)) != of(single("sub", "FLOAT", a=shape, b=shape))
    assert of(single("add", "FLOAT", a=shape, b=t(1, 1, 32))) != of(single("add", "FLOAT", a=t(1, 1, 32), b=shape))
    assert of(single("relu", "FLOAT", input=shape)) != of(single("relu", "FLOAT", input=shape, lower_clip=0.5))


def test_parameters_that_are_extents_are_classes_too() -> None:
    """Dims of an output, and bounds on lengths, are given as parameters: their sizes do not count either."""

    def gradient(pixels: int, **more: Any) -> Any:
        out = [4, 32, 2 * pixels, 2 * pixels]
        window = {"padding": [1, 1], "stride": [2, 2], "dilation": [1, 1]}
        return single(
            "conv_dgrad", loss=channels_last(4, 64, pixels, pixels), filter=channels_last(64, 32, 3, 3), out_dims=out, **window | more
        )

    assert of(gradient(16)) == of(gradient(48))
    assert of(gradient(16)) != of(gradient(4))

    def bounded(total: int) -> Any:
        graph = ZOO["sdpa_ragged_totals"].make()
        graph.nodes[0].params |= {"max_total_seq_len_q": total, "max_total_seq_len_kv": total}
        return graph

    assert of(bounded(208)) == of(bounded(240))
    assert of(bounded(208)) != of(bounded(200))
    assert of(bounded(208)) != of(ZOO["sdpa_ragged"].make())


def test_strides_count_by_order_and_zero() -> None:
    """Gaps between rows do not count; an element that is read many times is not a dense row."""
    shape = (4, 16, 32)
    dense, padded = t(*shape, stride=[512, 32, 1]), t(*shape, stride=[1024, 64, 1])
    assert of(single("relu", "FLOAT", input=dense)) == of(single("relu", "FLOAT", input=padded))
    broadcast, by_row = t(*shape, stride=[32, 0, 1]), t(*shape, stride=[32, 1, 2])
    families = {of(single("relu", "FLOAT", input=x)) for x in (dense, broadcast, by_row)}
    assert len(families) == 3


def test_names_and_uids_do_not_count() -> None:
    """Nor the order in which tensors are made."""
    import cudnn

    def described(names: tuple[str, str], uids: tuple[int, int], *, reverse: bool) -> Any:
        types = {"io_data_type": cudnn.data_type.HALF, "compute_data_type": cudnn.data_type.FLOAT}
        graph = cudnn.pygraph(name=names[0], intermediate_data_type=cudnn.data_type.FLOAT, **types)
        made = {}
        for at in (1, 0) if reverse else (0, 1):
            made[at] = graph.tensor([[8, 64, 32], [8, 32, 16]][at], name=names[at], uid=uids[at])
        graph.matmul(made[0], made[1], name=names[1]).set_output(True).set_uid(uids[0] + uids[1])
        return graph

    assert of(described(("a", "b"), (1, 2), reverse=False)) == of(described(("weight", "x"), (77, 5), reverse=True))


def test_a_copy_is_of_the_same_family(backend: CudnnBackend) -> None:
    """For every graph that can be copied."""
    for name in readable():
        signature = read(ZOO[name].make(), DEVICE).signature
        assert of(backend.copy(decode(signature))) == family(decode(signature)), name


def test_graphs_of_the_zoo_have_families_without_addresses() -> None:
    """No memory address, no object's default text; another case is another family unless it differs in extents only."""
    families: dict[bytes, list[str]] = {}
    for name in readable():
        made = of(ZOO[name].make())
        assert not re.search(rb"0x[0-9a-f]{6,}| object at |<[a-z_.]+ ", made), name
        families.setdefault(made, []).append(name)
    alike = sorted(names for names in families.values() if len(names) > 1)
    assert alike == EXTENTS_ONLY


EXTENTS_ONLY = [["matmul_plain", "matmul_user_uid"], ["sdpa_plain", "sdpa_cross", "sdpa_value_depth", "sdpa_depth_512"]]
"""Cases of the zoo that differ in extents of one class only."""

IN_ANOTHER_PROCESS = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from test_description import of, readable
from zoo import ZOO
for name in sorted(readable()):
    print(name, hashlib.sha256(of(ZOO[name].make())).hexdigest())
"""


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_families_are_the_same_in_every_process(seed: str) -> None:
    """Whatever the seed of Python's string hashes: denials are stored by family."""
    tests = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONHASHSEED": seed}
    script = [sys.executable, "-c", IN_ANOTHER_PROCESS, tests]
    said = subprocess.run(script, capture_output=True, text=True, env=environment, check=True, cwd=Path(tests).parent).stdout
    mine = [f"{name} {hashlib.sha256(of(ZOO[name].make())).hexdigest()}" for name in sorted(readable())]
    assert said.splitlines() == mine


@pytest.mark.parametrize("signature", [b"", b"i1:", b"n:", b"i1:l0:l0:l0:l0:x"])
def test_bytes_that_are_no_signature_are_refused(signature: bytes) -> None:
    """Truncated, of another version, with something behind the end."""
    with pytest.raises(ValueError, match=r"signature|subsection"):
        decode(signature)


def test_a_description_sums_up_for_people() -> None:
    """Operations in order, dims of what goes in, types."""
    description = decode(read(ZOO["fused_matmul_bias_gelu"].make(), DEVICE).signature)
    assert description.operations == ("matmul", "bias", "gelu")
    assert description.summary == "matmul+bias+gelu [8x64x32, 8x32x128] bfloat16"
