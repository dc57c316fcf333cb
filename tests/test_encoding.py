"""The value encoding: what was written is read back, no two values share their bytes, and other bytes are a ValueError."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from changes import nested, typed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plancache.encoding import Enum, Reader, UnknownTypeError, encode, encode_extents

cudnn = pytest.importorskip("cudnn")


def decoded(data: bytes) -> Any:
    reader = Reader(data)
    value = reader.value()
    assert reader.at == len(data)
    return value


def as_decoded(value: Any) -> Any:
    """A value as it reads back: enums by their names."""
    if hasattr(type(value), "__members__"):
        return Enum(type(value).__name__, value.name)
    if type(value) in (list, tuple):
        return type(value)(as_decoded(part) for part in value)
    if type(value) is dict:
        return {name: as_decoded(part) for name, part in value.items()}
    return value


@settings(deadline=None, max_examples=300)
@given(nested())
def test_what_was_written_is_read_back(value: Any) -> None:
    """Round trip, with the type of every part and all bits of every float."""
    assert typed(decoded(encode(value))) == typed(as_decoded(value))


@settings(deadline=None, max_examples=300)
@given(nested(), nested())
@example(("ab", "c"), ("a", "bc"))
@example([["a"], "b"], [["a", "b"]])
@example({"a": 1, "b": 2}, {"b": 2, "a": 1})
@example("data_type.HALF", cudnn.data_type.HALF)
@example("i1:", 1)
def test_two_values_share_their_bytes_only_where_they_are_the_same(mine: Any, theirs: Any) -> None:
    """Injectivity; the order of a mapping is not part of it."""
    assert (encode(mine) == encode(theirs)) == (typed(mine) == typed(theirs))


def test_no_two_small_values_share_their_bytes() -> None:
    """Injectivity over every value of up to two parts, two deep: 1, 1.0, True, "1" and their lists are all apart."""
    atoms: list[Any] = [None, True, False, 0, 1, -1, 10, 0.0, -0.0, 1.0, "", "1", "i1:", "n:", cudnn.data_type.HALF, slice(1)]
    values = list(atoms)
    for _ in range(2):
        pairs = [*product(values[:60]), *product(values[:60], repeat=2)]
        values = [*atoms, *pairs, *map(list, pairs), *({"k": part} for part in values[:60]), (), [], {}]
    assert len({encode(value) for value in values}) == len(values) > 7_000


@settings(deadline=None, max_examples=200)
@given(st.lists(nested(), min_size=2, max_size=3), st.data())
def test_an_encoding_says_where_it_ends(values: list[Any], data: st.DataObject) -> None:
    """No encoding is the beginning of another: one after the other reads back, and a truncated one is refused."""
    parts = [encode(value) for value in values]
    reader = Reader(b"".join(parts))
    assert [typed(reader.value()) for _ in parts] == [typed(as_decoded(value)) for value in values]
    with pytest.raises(ValueError):
        Reader(parts[0][: data.draw(st.integers(0, len(parts[0]) - 1))]).value()


@settings(deadline=None, max_examples=500)
@given(st.one_of(st.binary(max_size=40), st.text("ildtsfenyoz0123456789:-xpé", max_size=40).map(str.encode)))
@example(b"l1:" * 5000)
@example(b"d1:" * 5000)
@example(b"d1:l0:n:")
@example(b"d1:z:n:n:n:n:")
@example(b"f9:0x1p99999")
@example(b"f3:abc")
@example(b"s-1:")
@example(b"s2:\xff\xff")
@example(b"i" + b"9" * 5000 + b":")
@example(b":")
@example(b"")
def test_bytes_that_no_value_has_are_a_value_error(data: bytes) -> None:
    """Random bytes raise ValueError or read as some value: never another error."""
    with suppress(ValueError):
        Reader(data).value()


@settings(deadline=None, max_examples=200)
@given(nested(), st.data())
def test_changed_bytes_are_a_value_error_or_another_value(value: Any, data: st.DataObject) -> None:
    """One changed byte of an encoding never reads as the same value, nor ends in another error than ValueError."""
    whole = encode(value)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :]
    with suppress(ValueError):
        reader = Reader(changed)
        found = reader.value()
        assert reader.at != len(changed) or typed(found) != typed(as_decoded(value))


@pytest.mark.parametrize("text", ["0X1.0p+0", "0x1.0P+0", "1", " nan", "NAN", "0x1.00p+0", "infinity"])
def test_a_float_is_read_only_as_it_is_written(text: str) -> None:
    """Other spellings of a float are not an encoding."""
    with pytest.raises(ValueError, match="not how a float is written"):
        Reader(b"f%d:%b" % (len(text), text.encode())).value()


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6))
def test_extents_are_encoded_as_the_tuple_that_they_are(extents: list[int]) -> None:
    """The fast path for dims and strides writes what `encode` would."""
    assert encode_extents(extents) == encode(tuple(extents))


def test_extents_take_other_whole_numbers_and_nothing_else() -> None:
    """numpy's integers are whole numbers; 8.0 is not, whatever was encoded before."""
    numpy = pytest.importorskip("numpy")
    assert encode_extents([numpy.int64(8), 1]) == encode_extents((8, 1))
    for broken in (8.0, "8", None):
        with pytest.raises(UnknownTypeError, match="whole number"):
            encode_extents([broken, 1])


class Kind(int):
    pass


@pytest.mark.parametrize("value", [b"", 1j, {1}, object(), Kind(1), range(2), {1: 2}, [{None: 1}], int, print])
def test_types_without_an_encoding_are_refused(value: Any) -> None:
    """What is not listed has no bytes; a subclass of a listed type is not listed."""
    with pytest.raises(UnknownTypeError):
        encode(value)
