"""The outline of a signature says what decoding it says, for every node type, and refuses what is no signature."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import ZOO

from plancache.description import decode
from plancache.encoding import Reader
from plancache.entry import MALFORMED
from plancache.environment import Device
from plancache.outline import outline
from plancache.signature import Uncacheable, read

pytest.importorskip("cudnn")


def _signatures() -> dict[str, bytes]:
    device, found = Device.from_file("h200"), {}
    for name, case in ZOO.items():
        with suppress(Uncacheable):
            found[name] = read(case.make(), device).signature
    return found


SIGNATURES = _signatures()


@pytest.mark.parametrize("name", SIGNATURES)
def test_an_outline_says_what_decoding_says(name: str) -> None:
    """Summary, operations, types and shapes are those of the description."""
    description, found = decode(SIGNATURES[name]), outline(SIGNATURES[name])
    assert found.summary == description.summary
    assert found.operations == description.operations
    assert len(found.tensors) == len(description.tensors)
    outer = [tensor for tensor in description.tensors if not tensor["is_virtual"]]
    assert found.data_types == {tensor["data_type"].member for tensor in outer if tensor["data_type"] is not None}
    assert found.shapes == ["x".join(map(str, tensor["dim"])) for tensor in outer if not tensor["is_pass_by_value"]]


def test_plain_tensors_are_not_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is there for: of a convolution only the operations are decoded, and those once for all sizes."""
    name = next(name for name in SIGNATURES if name.startswith("conv_fprop"))
    outline(SIGNATURES[name])
    monkeypatch.setattr(Reader, "value", lambda _: pytest.fail("it decodes"))
    assert outline(re.sub(rb"t4:i\d+:", b"t4:i77:", SIGNATURES[name])).shapes[0].startswith("77x")


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SIGNATURES)), st.data())
def test_changed_bytes_are_malformed_or_an_outline(name: str, data: Any) -> None:
    """A damaged row raises what listings expect, and nothing else."""
    whole = SIGNATURES[name]
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"l13:", b"n:", b"i1:", b"l0:", b"l9:", b"s1:"])))
    try:
        found = outline(whole[:at] + new + whole[at + data.draw(st.integers(0, 4)) :])
        assert isinstance(found.summary, str) and isinstance(found.shapes, list)
    except MALFORMED:
        pass


@pytest.mark.parametrize("name", ["conv_fprop", "sdpa", "matmul"])
def test_a_truncated_signature_has_no_outline(name: str) -> None:
    """Every end is missed."""
    whole = next(signature for case, signature in SIGNATURES.items() if case.startswith(name))
    for end in range(len(whole)):
        with pytest.raises(MALFORMED):
            outline(whole[:end])
    with pytest.raises(MALFORMED):
        outline(whole + b"i1:")


def test_more_tensors_than_are_said_are_malformed() -> None:
    """As decoding says, which would take the next one for the operations."""
    whole = SIGNATURES["matmul"] if "matmul" in SIGNATURES else next(iter(SIGNATURES.values()))
    count = re.search(rb"l(\d+):(?=l13:)", whole)
    assert count is not None
    fewer = whole[: count.start(1)] + b"%d" % (int(count[1]) - 1) + whole[count.end(1) :]
    for read_it in (outline, decode):
        with pytest.raises(MALFORMED):
            read_it(fewer)
