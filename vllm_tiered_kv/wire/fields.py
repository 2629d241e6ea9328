"""Kinds of fields: what each looks like in a header and which values are valid.

A kind checks in both directions, so that no sender emits what a receiver would refuse. `width` is
the length of one key in the message the field belongs to (0 where it has none).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.limits import MAX_TEXT, MAX_TREE_DEPTH, MAX_UINT64


class Kind(Protocol):
    def describe(self) -> str:
        """The msgpack type and the valid values, for docs/protocol.md."""

    def encode(self, value: Any, width: int) -> Any:
        """What msgpack packs."""

    def decode(self, raw: Any, width: int) -> Any:
        """The value of the message's field."""


@dataclass(frozen=True)
class Spec:
    """One field of a message. `per` names the field that this one has an entry each for."""

    kind: Kind
    meaning: str
    per: str | None = None


def invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.BAD_MESSAGE, message)


def too_large(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.TOO_LARGE, message)


def _require(value: Any, expected: type, name: str) -> None:
    if type(value) is not expected:  # exact: True is not a number here
        raise invalid(f"expected {name}, got {type(value).__name__}")


def _require_count(count: int, most: int, noun: str) -> None:
    if count > most:
        raise too_large(f"{count} {noun}; at most {most} are allowed")


class _Same(ABC):
    """A kind whose value looks the same in a header as in a message."""

    @abstractmethod
    def check(self, value: Any) -> None: ...

    def encode(self, value: Any, width: int) -> Any:
        self.check(value)
        return value

    def decode(self, raw: Any, width: int) -> Any:
        self.check(raw)
        return raw


@dataclass(frozen=True)
class Uint(_Same):
    low: int = 0
    high: int = MAX_UINT64

    def describe(self) -> str:
        return f"uint, {_range(self.low, self.high)}"

    def check(self, value: Any) -> None:
        _require(value, int, "a whole number")
        if not self.low <= value <= self.high:
            raise invalid(f"expected {_range(self.low, self.high)}, got {value}")


@dataclass(frozen=True)
class Flag(_Same):
    def describe(self) -> str:
        return "bool"

    def check(self, value: Any) -> None:
        _require(value, bool, "true or false")


@dataclass(frozen=True)
class Text(_Same):
    most: int = MAX_TEXT

    def describe(self) -> str:
        return f"str, at most {self.most} characters"

    def check(self, value: Any) -> None:
        _require(value, str, "text")
        _require_count(len(value), self.most, "characters")


@dataclass(frozen=True)
class CutText(Text):
    """Text for people. The sender cuts it to size: how much there is to say must not matter."""

    def encode(self, value: Any, width: int) -> Any:
        _require(value, str, "text")
        return value[: self.most].encode(errors="replace").decode()


@dataclass(frozen=True)
class Bin(_Same):
    sizes: tuple[int, ...]

    def describe(self) -> str:
        return f"bin, {' or '.join(map(str, self.sizes))} bytes"

    def check(self, value: Any) -> None:
        _require(value, bytes, "bytes")
        if len(value) not in self.sizes:
            expected = " or ".join(map(str, self.sizes))
            raise invalid(f"expected {expected} bytes, got {len(value)}")


@dataclass(frozen=True)
class Codes(_Same):
    """One byte for each key."""

    low: int
    high: int
    most: int

    def describe(self) -> str:
        return f"bin, a byte each, {self.low} to {self.high}"

    def check(self, value: Any) -> None:
        _require(value, bytes, "bytes")
        _require_count(len(value), self.most, "codes")
        if value and not self.low <= min(value) <= max(value) <= self.high:
            raise invalid(f"expected codes from {self.low} to {self.high}")


@dataclass(frozen=True)
class Choice:
    choices: type[enum.Enum]

    def describe(self) -> str:
        return "str: " + ", ".join(f"`{choice.value}`" for choice in self.choices)

    def encode(self, value: Any, width: int) -> Any:
        _require(value, self.choices, f"a {self.choices.__name__}")
        return value.value

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, str, "text")
        try:
            return self.choices(raw)
        except ValueError:
            raise invalid(f"{raw[:32]!r} is not one of {self.describe()[5:]}") from None


@dataclass(frozen=True)
class Uints:
    """Numbers, packed: an array of msgpack integers would cost both ends an object walk each."""

    most: int
    low: int = 0
    high: int = MAX_UINT64
    distinct: bool = False

    def describe(self) -> str:
        kind = "distinct numbers" if self.distinct else "numbers"
        return f"bin, u64le {kind}, {_range(self.low, self.high)}"

    def encode(self, value: Any, width: int) -> Any:
        try:
            packed = array("Q", value)
        except (TypeError, OverflowError) as error:
            raise invalid(f"expected whole numbers: {error}") from None
        self._check(packed)
        return _little_endian(packed).tobytes()

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, bytes, "packed numbers")
        if len(raw) % 8:
            raise invalid(f"{len(raw)} bytes are no whole number of u64le numbers")
        _require_count(len(raw) // 8, self.most, "numbers")
        packed = array("Q")
        packed.frombytes(raw)
        numbers = _little_endian(packed).tolist()
        self._check(numbers)
        return numbers

    def _check(self, numbers: Sequence[int]) -> None:
        _require_count(len(numbers), self.most, "numbers")
        if numbers and not self.low <= min(numbers) <= max(numbers) <= self.high:
            raise invalid(f"expected numbers, {_range(self.low, self.high)}")
        if self.distinct and len(set(numbers)) != len(numbers):
            raise invalid("a number is there twice")


@dataclass(frozen=True)
class PackedUints(_Same):
    """As `Uints`, but kept packed: for those who go on with them as an array."""

    most: int

    def describe(self) -> str:
        return f"bin, u64le numbers, {_range(0, MAX_UINT64)}"

    def check(self, value: Any) -> None:
        _require(value, bytes, "packed numbers")
        if len(value) % 8:
            raise invalid(f"{len(value)} bytes are no whole number of u64le numbers")
        _require_count(len(value) // 8, self.most, "numbers")


def pack_uints(numbers: Iterable[int]) -> bytes:
    return _little_endian(array("Q", numbers)).tobytes()


@dataclass(frozen=True)
class Keys:
    """Keys of one width, packed."""

    most: int

    def describe(self) -> str:
        return f"bin, n times `width` bytes, at most {self.most} keys"

    def encode(self, value: Any, width: int) -> Any:
        _require_count(len(value), self.most, "keys")
        try:
            packed = b"".join(value)
        except TypeError as error:
            raise invalid(f"expected keys of bytes: {error}") from None
        if set(map(len, value)) - {width}:
            raise invalid(f"a key is not {width} bytes long")
        return packed

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, bytes, "packed keys")
        if len(raw) % width:
            raise invalid(f"{len(raw)} bytes are no whole number of keys of {width} bytes")
        _require_count(len(raw) // width, self.most, "keys")
        return [key for (key,) in struct.iter_unpack(f"{width}s", raw)]


@dataclass(frozen=True)
class Parents(Keys):
    """Keys of which some may be missing: all zeros stand for none."""

    def describe(self) -> str:
        return f"{super().describe()}; zeros: none"

    def encode(self, value: Any, width: int) -> Any:
        none = bytes(width)
        if none in value:
            raise invalid("a key of zeros cannot be a parent")
        return super().encode([none if key is None else key for key in value], width)

    def decode(self, raw: Any, width: int) -> Any:
        none = bytes(width)
        return [None if key == none else key for key in super().decode(raw, width)]


@dataclass(frozen=True)
class Suffixes(_Same):
    most: int
    longest: int

    def describe(self) -> str:
        return (
            f"array of at most {self.most} distinct bins, all of one length from 1 to "
            f"{self.longest} bytes"
        )

    def check(self, value: Any) -> None:
        _require(value, list, "an array")
        _require_count(len(value), self.most, "suffixes")
        for suffix in value:
            _require(suffix, bytes, "bytes")
        lengths = set(map(len, value))
        if len(lengths) > 1 or any(not 1 <= length <= self.longest for length in lengths):
            raise invalid(f"suffixes must have one length, from 1 to {self.longest} bytes")
        if len(set(value)) != len(value):
            raise invalid("a suffix is there twice")


@dataclass(frozen=True)
class Texts(_Same):
    most: int

    def describe(self) -> str:
        return f"array of at most {self.most} str, each at most {MAX_TEXT} characters"

    def check(self, value: Any) -> None:
        _require(value, list, "an array")
        _require_count(len(value), self.most, "texts")
        for text in value:
            Text().check(text)


@dataclass(frozen=True)
class Record:
    """A map that is always the same: a dataclass of numbers."""

    record: type[Any]

    def describe(self) -> str:
        names = ", ".join(f"`{name}`" for name in self._names())
        return f"map of {names}, each a uint"

    def encode(self, value: Any, width: int) -> Any:
        _require(value, self.record, f"a {self.record.__name__}")
        return {name: Uint().encode(getattr(value, name), 0) for name in self._names()}

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, dict, "a map")
        if set(raw) != set(self._names()):
            raise invalid(f"expected the fields {', '.join(self._names())}")
        return self.record(**{name: Uint().decode(raw[name], 0) for name in self._names()})

    def _names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.record)]


@dataclass(frozen=True)
class Tree(_Same):
    """Facts for people and monitors, whose names are no part of the protocol."""

    def describe(self) -> str:
        return (
            "map of str to int, float, bool, str, array or map, "
            f"nested at most {MAX_TREE_DEPTH} levels"
        )

    def check(self, value: Any) -> None:
        _require(value, dict, "a map")
        _check_tree(value, MAX_TREE_DEPTH)


def _check_tree(value: Any, depth: int) -> None:
    if isinstance(value, (dict, list)) and depth == 0:
        raise invalid(f"nested deeper than {MAX_TREE_DEPTH} levels")
    if type(value) is dict:
        for name, inner in value.items():
            Text().check(name)
            _check_tree(inner, depth - 1)
    elif type(value) is list:
        for inner in value:
            _check_tree(inner, depth - 1)
    elif type(value) is str:
        Text().check(value)
    elif type(value) is float:
        if not math.isfinite(value):
            raise invalid("a number must be finite")
    elif type(value) is int:
        if not -(1 << 63) <= value <= MAX_UINT64:
            raise invalid("a number does not fit in 64 bits")
    elif type(value) is not bool:
        raise invalid(f"a {type(value).__name__} cannot be sent")


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _range(low: int, high: int) -> str:
    top = "2^64 - 1" if high == MAX_UINT64 else str(high)
    return top if low == high else f"{low} to {top}"
