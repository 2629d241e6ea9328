"""Field kinds: how a field is encoded in a header and which values are valid.

A kind checks values in both directions, so that no sender emits what a receiver would refuse.
`width` is the length of one key in the message that has the field, or 0 if it has no keys.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.limits import MAX_TEXT, MAX_TREE_DEPTH, MAX_UINT64


class Kind(Protocol):
    """Encodes, decodes and validates the values of one type of field. Stateless and thread-safe.

    Kinds whose value is the same in the header and in the message have one `check` for both
    directions. Every request passes through here, so the checks are written to be cheap.
    """

    def encode(self, value: Any, width: int) -> Any:
        """Validates a value and converts it to what msgpack packs."""

    def decode(self, raw: Any, width: int) -> Any:
        """Validates what msgpack unpacked and converts it to the value of the field."""


@dataclass(frozen=True)
class Spec:
    """One field of a message. If `per` names another field, both must have equally many entries."""

    kind: Kind
    meaning: str
    per: str | None = None


def invalid(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.BAD_MESSAGE, message)


def too_large(message: str) -> ProtocolError:
    return ProtocolError(ErrorCode.TOO_LARGE, message)


def _require(value: Any, expected: type, name: str) -> None:
    if type(value) is not expected:  # exact type, because bool is a subclass of int
        raise invalid(f"expected {name}, got {type(value).__name__}")


def _require_count(count: int, max_count: int, noun: str) -> None:
    if count > max_count:
        raise too_large(f"{count} {noun}; at most {max_count} are allowed")


def _require_packed(value: Any, max_count: int) -> None:
    """Packed numbers are in the order of this host, which native code requires to be that of the
    protocol."""
    _require(value, bytes, "packed numbers")
    if len(value) % 8:
        raise invalid(f"{len(value)} bytes are not a multiple of 8, as u64le numbers need")
    _require_count(len(value) // 8, max_count, "numbers")


@dataclass(frozen=True)
class Uint:
    """A whole number within a range."""

    low: int = 0
    high: int = MAX_UINT64

    def check(self, value: Any, width: int = 0) -> Any:
        if type(value) is not int or not self.low <= value <= self.high:
            _require(value, int, "a whole number")
            raise invalid(f"expected {range_text(self.low, self.high)}, got {value}")
        return value

    encode = decode = check


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, bool, "true or false")
        return value

    encode = decode = check


@dataclass(frozen=True)
class Text:
    """Text of limited length."""

    max_chars: int = MAX_TEXT

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, str, "text")
        _require_count(len(value), self.max_chars, "characters")
        return value

    encode = decode = check


@dataclass(frozen=True)
class CutText(Text):
    """Text for people. The sender truncates it, so that a long message is never an error."""

    def encode(self, value: Any, width: int = 0) -> Any:
        _require(value, str, "text")
        return value[: self.max_chars].encode(errors="replace").decode()


@dataclass(frozen=True)
class Bin:
    """Bytes of one of a few lengths."""

    sizes: tuple[int, ...]

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, bytes, "bytes")
        if len(value) not in self.sizes:
            expected = " or ".join(map(str, self.sizes))
            raise invalid(f"expected {expected} bytes, got {len(value)}")
        return value

    encode = decode = check


@dataclass(frozen=True)
class Codes:
    """One byte per key."""

    low: int
    high: int
    max_count: int

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, bytes, "bytes")
        _require_count(len(value), self.max_count, "codes")
        if value and not self.low <= min(value) <= max(value) <= self.high:
            raise invalid(f"expected codes from {self.low} to {self.high}")
        return value

    encode = decode = check


@dataclass(frozen=True)
class Choice:
    """A member of an enumeration, sent as its value."""

    choices: type[enum.Enum]

    def encode(self, value: Any, width: int) -> Any:
        _require(value, self.choices, f"a {self.choices.__name__}")
        return value.value

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, str, "text")
        try:
            return self.choices(raw)
        except ValueError:
            known = ", ".join(f"`{choice.value}`" for choice in self.choices)
            raise invalid(f"{raw[:32]!r} is not one of {known}") from None


@dataclass(frozen=True)
class Uints:
    """Packed u64le numbers, which both sides process faster than a msgpack array of integers."""

    max_count: int
    low: int = 0
    high: int = MAX_UINT64
    distinct: bool = False

    def encode(self, value: Any, width: int) -> Any:
        try:
            packed = array("Q", value)
        except (TypeError, OverflowError) as error:
            raise invalid(f"expected whole numbers: {error}") from None
        if not self._is_valid(packed):
            raise self._fault(packed)
        return packed.tobytes()

    def decode(self, raw: Any, width: int) -> Any:
        _require_packed(raw, self.max_count)
        numbers = array("Q", raw).tolist()
        if not self._is_valid(numbers):
            raise self._fault(numbers)
        return numbers

    def _is_valid(self, numbers: Sequence[int]) -> bool:
        if len(numbers) == 1:
            return self.low <= numbers[0] <= self.high
        return not numbers or (
            len(numbers) <= self.max_count
            and self.low <= min(numbers)
            and max(numbers) <= self.high
            and (not self.distinct or len(set(numbers)) == len(numbers))
        )

    def _fault(self, numbers: Sequence[int]) -> ProtocolError:
        if len(numbers) > self.max_count:
            return too_large(f"{len(numbers)} numbers; at most {self.max_count} are allowed")
        if self.low <= min(numbers) and max(numbers) <= self.high:
            return invalid("the numbers are not distinct")
        return invalid(f"expected numbers, {range_text(self.low, self.high)}")


@dataclass(frozen=True)
class PackedUints:
    """Like `Uints`, but the value stays packed, for callers that use it as an array."""

    max_count: int

    def check(self, value: Any, width: int = 0) -> Any:
        _require_packed(value, self.max_count)
        return value

    encode = decode = check


def pack_uints(numbers: Iterable[int]) -> bytes:
    return array("Q", numbers).tobytes()


@dataclass(frozen=True)
class Keys:
    """Packed keys of equal length."""

    max_count: int

    def encode(self, value: Any, width: int) -> Any:
        _require_count(len(value), self.max_count, "keys")
        try:
            packed = b"".join(value)
        except TypeError as error:
            raise invalid(f"expected keys of bytes: {error}") from None
        if set(map(len, value)) - {width}:
            raise invalid(f"a key is not {width} bytes long")
        return packed

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, bytes, "packed keys")
        if len(raw) == width:
            return [raw]
        if len(raw) % width:
            raise invalid(f"{len(raw)} bytes are not a multiple of the key width of {width} bytes")
        _require_count(len(raw) // width, self.max_count, "keys")
        return [key for (key,) in struct.iter_unpack(f"{width}s", raw)]


@dataclass(frozen=True)
class Parents(Keys):
    """Packed keys, each of which may be absent. All zeros encode an absent key."""

    def encode(self, value: Any, width: int) -> Any:
        none = bytes(width)
        if none in value:
            raise invalid("a key of all zeros cannot be a parent: zeros encode no parent")
        return super().encode([none if key is None else key for key in value], width)

    def decode(self, raw: Any, width: int) -> Any:
        none = bytes(width)
        return [None if key == none else key for key in super().decode(raw, width)]


@dataclass(frozen=True)
class Suffixes:
    """Suffixes of equal length that complete each key of a request."""

    max_count: int
    max_bytes: int

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, list, "an array")
        _require_count(len(value), self.max_count, "suffixes")
        for suffix in value:
            _require(suffix, bytes, "bytes")
        lengths = set(map(len, value))
        if len(lengths) > 1 or any(not 1 <= length <= self.max_bytes for length in lengths):
            raise invalid(f"suffixes must have one length, from 1 to {self.max_bytes} bytes")
        if len(set(value)) != len(value):
            raise invalid("the suffixes are not distinct")
        return value

    encode = decode = check


@dataclass(frozen=True)
class Texts:
    """A list of texts."""

    max_count: int

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, list, "an array")
        _require_count(len(value), self.max_count, "texts")
        for text in value:
            Text().check(text)
        return value

    encode = decode = check


@dataclass(frozen=True)
class Record:
    """A map with fixed names, from and to a dataclass of numbers."""

    record: type[Any]

    def encode(self, value: Any, width: int) -> Any:
        _require(value, self.record, f"a {self.record.__name__}")
        return {name: Uint().encode(getattr(value, name), 0) for name in self.names}

    def decode(self, raw: Any, width: int) -> Any:
        _require(raw, dict, "a map")
        if set(raw) != set(self.names):
            raise invalid(f"expected the fields {', '.join(self.names)}")
        return self.record(**{name: Uint().decode(raw[name], 0) for name in self.names})

    @property
    def names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.record)]


@dataclass(frozen=True)
class Tree:
    """Free-form data for people and monitoring; its names are not part of the protocol."""

    def check(self, value: Any, width: int = 0) -> Any:
        _require(value, dict, "a map")
        _check_tree(value, MAX_TREE_DEPTH)
        return value

    encode = decode = check


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


def range_text(low: int, high: int) -> str:
    top = "2^64 - 1" if high == MAX_UINT64 else str(high)
    return top if low == high else f"{low} to {top}"
