"""The entry: it comes back as it was packed, and nothing of a row that was changed is decompressed."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_entry as make
from samples import state

from plancache import entry as module
from plancache.entry import QUALITIES, Built, Candidate, Entry, Layout, Row, Trial, checksum, pack, unpack, usable
from plancache.errors import CorruptEntryError, StoreError
from plancache.key import COMPONENTS, PlanKey

texts = st.text(max_size=8)
counts = st.integers(0, 2**63 - 1)
uids = st.integers(1, 99)
extents = st.lists(st.integers(-(2**40), 2**40), max_size=4).map(tuple)
seconds = st.floats(0, 1e6)
candidates = st.builds(Candidate, texts, st.integers(-1, 999), st.dictionaries(texts, st.integers(-9, 9), max_size=3))
facts = st.recursive(st.one_of(st.none(), st.booleans(), counts, seconds, texts), lambda inner: st.dictionaries(texts, inner, max_size=2))
keys = st.lists(st.binary(max_size=12), min_size=len(COMPONENTS), max_size=len(COMPONENTS)).map(tuple).map(PlanKey)
entries = st.builds(
    Entry,
    blob=st.one_of(st.binary(max_size=40), st.binary(min_size=1, max_size=4).map(lambda part: part * 999)),
    workspace_size=counts,
    operands=st.lists(uids, max_size=3).map(tuple),
    layouts=st.dictionaries(uids, st.builds(Layout, extents, extents, st.one_of(st.none(), texts)), max_size=3),
    recipe=candidates,
    candidates=st.lists(candidates, max_size=2).map(tuple),
    behavior_notes=st.lists(texts, max_size=2).map(tuple),
    requirements=st.dictionaries(texts, texts, max_size=2),
    timings_s=st.dictionaries(texts, seconds, max_size=2),
    key=keys,
    quality=st.sampled_from(QUALITIES),
    created_at=seconds,
    provenance=st.dictionaries(texts, facts, max_size=2),
    proof=texts,
    tolerance=st.one_of(st.none(), seconds),
)


def resealed(row: Row, **changes: Any) -> Row:
    """A row with other parts and a checksum that is right for them."""
    changed = row._replace(**changes)
    return changed._replace(checksum=checksum(*changed[:4]))


@contextmanager
def nothing_is_decompressed() -> Iterator[None]:
    """Fails where zstandard is given anything to decompress, or JSON anything to decode."""
    untouched = AssertionError("it was read before it was checked")
    with (
        patch.object(zstandard, "ZstdDecompressor", side_effect=untouched),
        patch.object(zstandard, "get_frame_parameters", side_effect=untouched),
        patch.object(json, "loads", side_effect=untouched),
    ):
        yield


# ---- there and back -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(entries)
def test_an_entry_comes_back_as_it_was_packed(entry: Entry) -> None:
    """Every field, with its type, survives packing; with the key given or not."""
    row = pack(entry)
    for key in (entry.key, None):
        found = unpack(row, key)
        assert state(found) == state(entry)
        assert [type(value) for value in state(found).values()] == [type(value) for value in state(entry).values()]
    assert row.key == entry.key.digest


def test_no_infinity_is_lost() -> None:
    """Floats that JSON does not know come back too."""
    assert unpack(pack(make(tolerance=math.inf))).tolerance == math.inf
    assert math.isnan(unpack(pack(make(tolerance=math.nan))).tolerance or 0)


def test_a_large_plan_is_stored_small() -> None:
    """The payload is compressed."""
    assert len(pack(make(blob=bytes(1 << 20))).payload) < 1000


# ---- changed rows ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(entries, st.sampled_from(Row._fields), st.data())
def test_a_flipped_bit_is_found_before_anything_is_decompressed(entry: Entry, part: str, data: st.DataObject) -> None:
    """One bit of key, preimage, facts, payload or checksum: the row is corrupt, and was given to no decoder."""
    row = pack(entry)
    whole = bytearray(getattr(row, part))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with nothing_is_decompressed(), pytest.raises(CorruptEntryError, match="checksum"):
        unpack(row._replace(**{part: bytes(whole)}), entry.key)


@settings(deadline=None, max_examples=100)
@given(entries, st.sampled_from(Row._fields), st.data())
def test_a_truncated_or_longer_part_is_found_before_anything_is_decompressed(entry: Entry, part: str, data: st.DataObject) -> None:
    """Bytes that are missing, added, or moved to the neighbouring part."""
    row = pack(entry)
    whole: bytes = getattr(row, part)
    at = data.draw(st.integers(0, len(whole) - 1))
    following = Row._fields[(Row._fields.index(part) + 1) % 5]
    for changes in ({part: whole[:at]}, {part: whole + whole[at:]}, {part: whole[:at], following: whole[at:] + getattr(row, following)}):
        with nothing_is_decompressed(), pytest.raises(CorruptEntryError):
            unpack(row._replace(**changes), entry.key)


@pytest.mark.parametrize("part", Row._fields)
@pytest.mark.parametrize("value", [None, "text", 7, 1.5, memoryview(b"bytes")])
def test_a_part_that_is_no_bytes_is_corrupt(part: str, value: Any) -> None:
    """SQLite columns hold any type, whatever they were declared as."""
    with nothing_is_decompressed(), pytest.raises(CorruptEntryError):
        unpack(pack(make())._replace(**{part: value}))


@settings(deadline=None, max_examples=50)
@given(entries, entries, st.sets(st.sampled_from(Row._fields[1:4]), min_size=1, max_size=2))
def test_parts_of_two_entries_cannot_be_exchanged(mine: Entry, theirs: Entry, parts: set[str]) -> None:
    """The payload, facts or preimage of another entry under this one's key is corrupt."""
    row, other = pack(mine), pack(theirs)
    exchanged = row._replace(**{part: getattr(other, part) for part in parts})
    if exchanged != row:
        with nothing_is_decompressed(), pytest.raises(CorruptEntryError):
            unpack(exchanged, mine.key)


# ---- rows whose checksum is right, and that lie all the same --------------------------------------------------------


def frame(blob: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(blob)


def stating(size: int, payload: bytes) -> bytes:
    """A zstd frame that claims to hold `size` bytes (RFC 8878, 3.1.1.1: the size field's width is in the descriptor)."""
    assert payload[4] >> 6 == 1  # two bytes, which hold the size less 256
    return payload[:5] + struct.pack("<H", size - 256) + payload[7:]


@pytest.mark.parametrize("size", [256, 399, 401, 65_000])
def test_a_frame_that_lies_about_its_size_is_not_decompressed(size: int) -> None:
    """The size in the frame must be the one in the facts, whatever else is in the frame."""
    row = pack(make())
    with patch.object(zstandard, "ZstdDecompressor", side_effect=AssertionError), pytest.raises(CorruptEntryError, match="states"):
        unpack(resealed(row, payload=stating(size, row.payload)))


@pytest.mark.parametrize("size", [256, 399, 401, 65_000])
def test_a_lie_that_frame_and_facts_share_is_found(size: int) -> None:
    """A frame that holds more or less than both say is corrupt, and not some other library's error."""
    row = pack(make())
    facts = row.facts.replace(b'"blob_bytes":400', b'"blob_bytes":%d' % size)
    with pytest.raises(CorruptEntryError):
        unpack(resealed(row, payload=stating(size, row.payload), facts=facts))


def test_a_plan_beyond_all_bounds_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame and facts that agree on a size larger than any plan are refused before memory is asked for."""
    row = pack(make())
    monkeypatch.setattr(module, "MAX_BLOB_BYTES", 399)
    with patch.object(zstandard, "ZstdDecompressor", side_effect=AssertionError), pytest.raises(CorruptEntryError, match="states"):
        unpack(row)
    monkeypatch.setattr(module, "MAX_BLOB_BYTES", 400)
    assert state(unpack(row)) == state(make())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no frame",
        frame(b"plan" * 100)[:-3],
        frame(b"plan" * 100, write_content_size=False),
        frame(b"plan" * 101),
        frame(b"plan" * 100, write_checksum=True)[:-1] + b"?",
        bytes(range(64)),
    ],
)
def test_a_payload_that_is_no_such_frame_is_corrupt(payload: bytes) -> None:
    """Whatever zstandard says of a payload, the row is corrupt and not an error of its own."""
    with pytest.raises(CorruptEntryError):
        unpack(resealed(pack(make()), payload=payload))


def test_an_entry_of_another_key_is_corrupt() -> None:
    """A row whose checksum is right, but that is of another key than the one asked for, or than its own preimage."""
    mine, theirs = make(), make(key=PlanKey((b"other",) * len(COMPONENTS)))
    with pytest.raises(CorruptEntryError, match="another key"):
        unpack(pack(theirs), mine.key)
    with pytest.raises(CorruptEntryError, match="another key"):
        unpack(resealed(pack(theirs), key=mine.key.digest))
    for key in (mine.key, None):
        with pytest.raises(CorruptEntryError, match="another key"):
            unpack(resealed(pack(mine), preimage=pack(theirs).preimage), key)


@pytest.mark.parametrize("preimage", [b"", b"\x00", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00", bytes(4 * (len(COMPONENTS) + 1))])
def test_a_preimage_that_is_none_is_corrupt(preimage: bytes) -> None:
    """Lengths that go past the end, or another number of components."""
    with pytest.raises(CorruptEntryError):
        unpack(resealed(pack(make()), preimage=preimage))


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(
        st.binary(max_size=20),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
            lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["format", "recipe", "layouts"]), inner)),
        ).map(lambda value: json.dumps(value).encode()),
        st.sampled_from([b"[" * 100_000, b'{"format":2}', b'{"format":1}', b"\xff"]),
        st.tuples(st.sampled_from(sorted(json.loads(pack(make()).facts))), st.sampled_from([None, 7, "x", [1], {"a": [1, 2, 3]}])).map(
            lambda change: json.dumps(json.loads(pack(make()).facts) | dict([change])).encode()
        ),
    )
)
def test_facts_that_are_none_are_corrupt_or_an_entry(facts: bytes) -> None:
    """Facts of another shape never end in another error."""
    try:
        found = unpack(resealed(pack(make()), facts=facts))
    except CorruptEntryError:
        return
    assert isinstance(found, Entry)


def test_an_error_names_its_entry_and_what_is_wrong() -> None:
    """People can find the row."""
    row = pack(make())
    with pytest.raises(CorruptEntryError, match=f"entry {row.key.hex()[:16]} .*its format is not one that this version reads"):
        unpack(resealed(row, facts=row.facts.replace(b'"format":1', b'"format":2')))


# ---- may it run here? -----------------------------------------------------------------------------------------------

NEEDS = {"cublasLt": "aa11", "machine": "x86_64"}


@pytest.mark.parametrize(
    ("needs", "here", "reason"),
    [
        ({}, {}, None),
        (NEEDS, NEEDS, None),
        (NEEDS, NEEDS | {"more": "1"}, None),
        (NEEDS, {"machine": "x86_64"}, "it needs cublasLt aa11, which is not known to be here"),
        (NEEDS, NEEDS | {"cublasLt": None}, "it needs cublasLt aa11, which is not known to be here"),
        (NEEDS, NEEDS | {"machine": "aarch64"}, "it needs machine x86_64, here is aarch64"),
        ({"cublasLt": "unknown"}, {"cublasLt": "aa11"}, "it needs cublasLt unknown, here is aa11"),
    ],
)
def test_an_entry_is_usable_where_everything_it_needs_is_the_same(
    needs: Mapping[str, str], here: Mapping[str, str | None], reason: str | None
) -> None:
    """Absent is not unknown: nothing needed is usable anywhere, something needed only where it is known and equal."""
    assert usable(make(requirements=needs), here) == reason


def test_an_entry_of_a_build_has_all_that_the_build_brought() -> None:
    """`Entry.of` carries every field over, and build_s is the sum of all steps."""
    built = Built(**{field.name: getattr(make(), field.name) for field in fields(Built)})
    more = {"key": make().key, "quality": "heuristic", "created_at": 1.0, "provenance": {}}
    assert state(Entry.of(built, **more)) == state(make())
    assert Entry.of(built, **more).build_s == 0.75


def test_a_plan_that_could_not_be_read_back_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan over the bound that reading keeps is refused when it is packed."""
    monkeypatch.setattr("plancache.entry.MAX_BLOB_BYTES", 3)
    with pytest.raises(StoreError, match="3 are the most"):
        pack(make(blob=b"four"))


def test_what_was_learned_is_decoded_when_it_is_asked_for() -> None:
    """A hit does not read candidates and trials; they come back typed, and damage in them is told as such."""
    trial = Trial("eng4", 4, {"K": 1}, 0, 0.5, 64, 20.5, 20.1, 20.9, 260, "won", "")
    written = make(candidates=(Candidate("eng4", 4, {"K": 1}),), trials=(trial,), conditions={"quiet": True})
    row = pack(written)
    entry = unpack(row)
    assert not {"candidates", "trials", "conditions"} & vars(entry).keys()
    assert (entry.candidates, entry.trials, entry.conditions) == (written.candidates, (trial,), {"quiet": True})
    assert state(entry) == state(written)
    with pytest.raises(AttributeError):
        _ = entry.colour  # type: ignore[attr-defined]
    facts = json.dumps(json.loads(row.facts) | {"learned": '{"candidates": 7}'}).encode()
    damaged = unpack(row._replace(facts=facts, checksum=checksum(row.key, row.preimage, facts, row.payload)))
    with pytest.raises(CorruptEntryError, match="cannot be read"):
        _ = damaged.trials
