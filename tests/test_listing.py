"""Listings: an entry is shown as it was stored, without its plan; a row that cannot be read is corrupt and blocks no other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_entry as make

from plancache.encoding import encode
from plancache.entry import pack
from plancache.errors import CorruptEntryError
from plancache.key import PlanKey
from plancache.listing import Listed

SIGNATURE = encode(1) + encode([None] * 6) + encode([None] * 3)
SIGNATURE += encode([[None, (2, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]])
SIGNATURE += encode([["POINTWISE", None, {"mode": "relu"}, {"IN_0": 1}, {"OUT_0": 1}]])
TIMINGS = b'{"lower":0.25,"build":0.5}'
LISTED_KEY = PlanKey((SIGNATURE, b"{}", b'"NVIDIA H200"', b"13000", b'{"version":91900}', b'"1.32.0"', b"{}", b"{}"))


def test_a_listed_entry_is_the_entry_without_its_plan() -> None:
    """A listing shows key and facts as they were stored."""
    row = pack(make(key=LISTED_KEY))
    listed = Listed.of(row.preimage, row.facts, len(row.payload), 3, 2.0)
    assert listed.key == LISTED_KEY
    assert listed.to_dict() == {
        "key": LISTED_KEY.hex,
        "graph": "relu [2x3] ",
        "quality": "heuristic",
        "engine": "eng7_k24=21",
        "proof": "none",
        "time_us": None,
        "device": "NVIDIA H200",
        "cudnn_version": 91900,
        "frontend_version": "1.32.0",
        "workspace_bytes": 1024,
        "plan_bytes": 400,
        "stored_bytes": len(row.payload),
        "build_s": 0.75,
        "created_at": 1.0,
        "hits": 3,
        "last_used_at": 2.0,
    }


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["preimage", "facts"]), st.data())
def test_a_row_that_cannot_be_listed_is_corrupt(part: str, data: st.DataObject) -> None:
    """Changed bytes of a row are a CorruptEntryError, or a listing that can be shown: one bad row blocks no other."""
    row = pack(make(key=LISTED_KEY))
    whole: bytes = getattr(row, part)
    at = data.draw(st.integers(0, len(whole) - 1))
    new = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"1", b"null", b"[]", b"n:", b"i1:", b"l0:"])))
    row = row._replace(**{part: whole[:at] + new + whole[at + data.draw(st.integers(0, 4)) :]})
    try:
        listed = Listed.of(row.preimage, row.facts, 1, 0, None)
    except CorruptEntryError:
        return
    assert isinstance(listed.to_dict(), dict)


@pytest.mark.parametrize(
    "facts", [b"7", b"[]", b"{}", b"[" * 100_000, b"\xff", pack(make()).facts.replace(b'{"lower":0.25,"build":0.5}', b"[]")]
)
def test_facts_of_another_shape_cannot_be_listed(facts: bytes) -> None:
    """JSON that is no entry's is corrupt too."""
    with pytest.raises(CorruptEntryError):
        Listed.of(pack(make(key=LISTED_KEY)).preimage, facts, 1, 0, None)


def test_a_truncated_key_cannot_be_listed() -> None:
    """A preimage whose end is missing is corrupt, even where what is missing is not shown."""
    row = pack(make(key=LISTED_KEY))
    for end in range(len(row.preimage)):
        with pytest.raises(CorruptEntryError):
            Listed.of(row.preimage[:end], row.facts, 1, 0, None)
