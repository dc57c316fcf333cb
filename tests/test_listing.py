"""Listings: an entry is shown as it was stored, without its plan; a row that cannot be read is corrupt and blocks no other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_entry as make

from plancache.encoding import encode
from plancache.entry import Candidate, Trial, pack
from plancache.errors import CorruptEntryError
from plancache.key import PlanKey
from plancache.listing import Filter, Listed

SIGNATURE = encode(1) + encode([None] * 6) + encode([None] * 3)
SIGNATURE += encode([[None, (2, 3), (3, 1), True, False, False, False, None, None, None, None, 1, 1]])
SIGNATURE += encode([["POINTWISE", None, {"mode": "relu"}, {"IN_0": 1}, {"OUT_0": 1}]])
TIMINGS = b'{"lower":0.25,"build":0.5}'
LISTED_KEY = PlanKey((SIGNATURE, b"{}", b'"NVIDIA H200"', b"13000", b'{"version":91900}', b'"1.32.0"', b"{}", b"{}"))


def test_a_listed_entry_is_the_entry_without_its_plan() -> None:
    """A listing shows key and facts as they were stored."""
    row = pack(make(key=LISTED_KEY))
    listed = Listed.of(row.preimage, row.facts, len(row.payload), 3, 2.0, tags=("serve", "train"))
    assert listed.key == LISTED_KEY
    assert listed.to_dict() == {
        "key": LISTED_KEY.hex,
        "graph": "relu [2x3] ",
        "quality": "heuristic",
        "engine": "eng7_k24=21",
        "proof": "none",
        "time_us": None,
        "device": "NVIDIA H200",
        "driver_version": 13000,
        "cudnn_version": 91900,
        "frontend_version": "1.32.0",
        "workspace_bytes": 1024,
        "plan_bytes": 400,
        "stored_bytes": len(row.payload),
        "build_s": 0.75,
        "created_at": 1.0,
        "hits": 3,
        "last_used_at": 2.0,
        "tags": ["serve", "train"],
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


def listed(**more: Any) -> Listed:
    row = pack(make(**{"key": LISTED_KEY, "created_at": 1000.0} | more))
    return Listed.of(row.preimage, row.facts, 500, 3, None, tags=("serve",))


def test_an_entry_is_listed_under_the_key_that_it_is_stored_under() -> None:
    """That is the one to remove it by, whatever its row says."""
    row = pack(make(key=LISTED_KEY))
    assert Listed.of(row.preimage, row.facts, 1, 0, None, digest=b"\1\2").to_dict()["key"] == "0102"


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts,
        lambda facts: facts.replace(b',"learned":"', b',"later":{"a":1,"learned":"x"},"learned":"'),
        lambda facts: facts.replace(b'"learned":"', b'"learned": "'),
        lambda facts: facts.replace(b'"layouts":', b'"layouts": '),
    ],
)
def test_what_is_listed_does_not_depend_on_how_it_is_written(change: Any) -> None:
    """The short way past what is not listed is taken only where it leads to the same."""
    row = pack(make(key=LISTED_KEY, provenance={"note": ',"learned":"'}, conditions={"learned": "no"}))
    plain = Listed.of(row.preimage, row.facts, 1, 0, None).to_dict()
    assert Listed.of(row.preimage, change(row.facts), 1, 0, None).to_dict() == plain


def test_only_the_winners_time_is_listed() -> None:
    """Of a tuned entry what its own engine took; of others none."""
    found = [Trial(f"eng{number}", number, {}, number, 0.1, 0, 10.0 * number, 1.0, 2.0, 5, "won", "") for number in (1, 2)]
    tuned = listed(quality="tuned", trials=tuple(found), recipe=Candidate("eng2", 2, {}))
    assert tuned.to_dict()["time_us"] == 20.0
    assert listed(trials=tuple(found), recipe=Candidate("eng2", 2, {})).to_dict()["time_us"] is None


@pytest.mark.parametrize(
    ("wanted", "others"),
    [
        ({"operations": ("relu",)}, {"operations": ("relu", "matmul")}),
        ({"data_type": "half"}, {"data_type": "float"}),
        ({"shape": "2x3"}, {"shape": "2x4"}),
        ({"shape": "*x3"}, {"shape": "*x*x*"}),
        ({"shape": "*x*"}, {"shape": "2"}),
        ({"qualities": ("tuned", "heuristic")}, {"qualities": ("tuned",)}),
        ({"cudnn": "9.19"}, {"cudnn": "9.1"}),
        ({"cudnn": "9.19.0"}, {"cudnn": "9.19.0.1"}),
        ({"device": "h200"}, {"device": "H100"}),
        ({"tag": "serve"}, {"tag": "serv"}),
        ({"newer_than_s": 100.0}, {"newer_than_s": 99.0}),
        ({"older_than_s": 99.0}, {"older_than_s": 100.0}),
        ({"larger_than_bytes": 499}, {"larger_than_bytes": 500}),
        ({"min_hits": 3}, {"min_hits": 4}),
    ],
)
def test_a_filter_takes_what_it_names_and_nothing_else(wanted: dict[str, Any], others: dict[str, Any]) -> None:
    """Each by itself, and all of them must hold."""
    one = listed(key=PlanKey((SIGNATURE.replace(b"n:t2:i2:i3:", b"e14:data_type.HALFt2:i2:i3:"), *LISTED_KEY.preimages[1:])))
    assert Filter(**wanted)(one, 1100.0)
    assert not Filter(**others)(one, 1100.0)
    assert not Filter(**{"min_hits": 4} | {"tag": "serve"} | {name: value for name, value in wanted.items() if name != "min_hits"})(
        one, 1100.0
    )


def test_a_filter_without_wishes_takes_everything() -> None:
    """A clock that was set back makes nothing older than now."""
    assert Filter()(listed(), 1100.0)
    assert Filter(newer_than_s=0.0)(listed(), 5.0)
