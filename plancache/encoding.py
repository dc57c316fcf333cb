"""Values <-> bytes, canonically: every value carries its type, every sequence its length, a float all its bits.

1, 1.0 and True differ, so do ("ab", "c") and ("a", "bc"). What is not listed here is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple


class UnknownTypeError(TypeError):
    """A value has a type that has no encoding; `args[0]` names it."""


class Enum(NamedTuple):
    """An enumeration member of the frontend, by name."""

    kind: str
    member: str


def encode_extents(values: Iterable[Any]) -> bytes:
    """Dims or strides in elements, as plain integers (builders take torch.Size and numpy integers too)."""
    try:
        return _extents(*map(operator.index, values))  # what is remembered must not be the caller's to change
    except TypeError:
        raise UnknownTypeError(f"a dim or stride among {values} is not a whole number") from None


@lru_cache(maxsize=4096)
def _extents(*values: int) -> bytes:
    return b"t%d:%b" % (len(values), b"".join(b"i%d:" % value for value in values))


def encode(value: Any) -> bytes:
    """The bytes of a value. Raises `UnknownTypeError` for a type that is not known."""
    kind = type(value)
    if kind is int:
        return b"i%d:" % value
    if value is None:
        return b"n:"
    if kind is str:
        return encode_text(value)
    if kind is bool:
        return b"y:" if value else b"o:"
    if kind is tuple or kind is list:
        return b"%c%d:%b" % (b"t" if kind is tuple else b"l", len(value), b"".join(map(encode, value)))
    if kind is float:
        text = value.hex().encode()
        return b"f%d:%b" % (len(text), text)
    if kind is dict:
        return encode_mapping(value)
    if kind is slice:
        return b"z:" + b"".join(map(encode, (value.start, value.stop, value.step)))
    return _enum(value)


@lru_cache(maxsize=1024)
def encode_text(value: str) -> bytes:
    text = value.encode()
    return b"s%d:%b" % (len(text), text)


def encode_mapping(value: dict[Any, Any]) -> bytes:
    if not all(type(name) is str for name in value):
        raise UnknownTypeError("a parameter is a mapping with keys that are not strings")
    return b"d%d:%b" % (len(value), b"".join(encode_text(name) + encode(value[name]) for name in sorted(value)))


def _enum(value: Any) -> bytes:
    kind = type(value)
    if kind is Enum:  # one that was read back
        return _name(".".join(value))
    if not hasattr(kind, "__members__") or not kind.__module__.startswith("cudnn"):
        raise UnknownTypeError(f"a parameter has the type {kind.__module__}.{kind.__qualname__}, which plancache does not know")
    return _member(value)


@lru_cache(maxsize=512, typed=True)
def _member(value: Any) -> bytes:
    return _name(f"{type(value).__name__}.{value.name}")


@lru_cache(maxsize=512)
def _name(text: str) -> bytes:
    data = text.encode()
    return b"e%d:%b" % (len(data), data)


class Reader:
    """Reads values back, one after the other. Raises `ValueError` for bytes that no value has."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def value(self) -> Any:
        try:
            return self._value()
        except (TypeError, OverflowError, RecursionError) as error:  # a list as a name, a float past all bounds, bottomless nesting
            raise ValueError(f"malformed signature: {error}") from None

    def _value(self) -> Any:
        end = self.data.index(b":", self.at)
        tag, number = self.data[self.at : self.at + 1], self.data[self.at + 1 : end]
        self.at = end + 1
        if tag == b"i":
            return int(number)
        if tag in b"lt":
            items = [self._value() for _ in range(int(number))]
            return items if tag == b"l" else tuple(items)
        if tag in b"nyo":
            return {b"n": None, b"y": True, b"o": False}[tag]
        if tag == b"z":
            return slice(self._value(), self._value(), self._value())
        if tag == b"d":
            return {self._value(): self._value() for _ in range(int(number))}
        return self._text(tag, int(number))

    def _text(self, tag: bytes, length: int) -> Any:
        text = self.data[self.at : self.at + length].decode()
        self.at += length
        if len(text.encode()) != length:
            raise ValueError("the signature is truncated")
        if tag == b"s":
            return text
        if tag == b"f":
            value = float.fromhex(text)
            if value.hex() != text:
                raise ValueError(f"{text!r} is not how a float is written")
            return value
        if tag == b"e":
            kind, _, member = text.partition(".")
            return Enum(kind, member)
        raise ValueError(f"unknown tag {tag!r} in a signature")
