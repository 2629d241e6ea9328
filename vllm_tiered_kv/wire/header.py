"""Packs and unpacks headers, which are msgpack maps, and bounds the cost of decoding them.

A msgpack decoder allocates an array as soon as it reads the array's declared length, so a header of
a few bytes can request gigabytes. Nested empty containers take sixty times their encoded size.
`check_structure` scans the bytes before any object is created and limits both, so that decoding
needs at most a small multiple of the header's size. A short header has too few bytes to need much,
and the types of its fields rule out deep nesting, so it is not scanned.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import msgpack

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.limits import (
    MAX_ERROR_TEXT,
    MAX_HEADER_BYTES,
    MAX_HEADER_DEPTH,
    MAX_HEADER_VALUES,
    MAX_UINT64,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin, str: size of the length
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # and values per entry
_PEEK_BYTES = 32
_UNSCANNED_BYTES = 512  # must stay below MAX_HEADER_VALUES


def _scalar_bytes(tag: int) -> int | None:
    """Returns the size of a scalar if its tag determines it, otherwise None."""
    if tag <= 0x7F or tag >= 0xE0:  # fixint: the tag holds the value
        return 1
    if 0xA0 <= tag <= 0xBF:  # fixstr
        return 1 + (tag & 0x1F)
    return 1 + _FIXED[tag] if tag in _FIXED else None


_SCALARS = tuple(map(_scalar_bytes, range(256)))


class _Packer(threading.local):
    """A packer of each thread: `msgpack.packb` allocates a buffer of 256 KiB for every header."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(use_bin_type=True).pack


_PACKER = _Packer()


def pack_map(fields: dict[str, Any], is_flat: bool = False) -> bytes:
    """Packs a header. With `is_flat` no value is a container, so only the size needs a check."""
    try:
        header: bytes = _PACKER.pack(fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(
            ErrorCode.BAD_MESSAGE, f"the header cannot be encoded: {error}"
        ) from None
    if not is_flat or len(header) > MAX_HEADER_BYTES:
        check_structure(header)
    return header


def unpack_map(header: Buffer) -> dict[Any, Any]:
    """Unpacks a header. The names and values of the returned fields are not validated yet."""
    data = memoryview(header).cast("B")
    size = len(data)
    if size > _UNSCANNED_BYTES:
        check_structure(data)
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=4 * MAX_ERROR_TEXT,
            max_array_len=min(size, MAX_HEADER_VALUES),
            max_map_len=min(size, MAX_HEADER_VALUES),
            max_ext_len=0,
            object_pairs_hook=_without_duplicates,
        )
    except ValueError as error:  # covers all errors of msgpack, and text that is not UTF-8
        raise ProtocolError(
            ErrorCode.BAD_MESSAGE, f"the header cannot be decoded: {error}"
        ) from None
    if not isinstance(fields, dict):
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "the header must be a map")
    return fields


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate field")
    return found


def check_structure(data: bytes | memoryview) -> None:
    """Raises ProtocolError unless `data` is exactly one complete msgpack value within the limits
    on size, number of values and depth."""
    end = len(data)
    if end > MAX_HEADER_BYTES:
        raise ProtocolError(
            ErrorCode.TOO_LARGE,
            f"the header has {end} bytes; at most {MAX_HEADER_BYTES} are allowed",
        )
    position = 0
    values_left = MAX_HEADER_VALUES
    left = 1  # values still to read on this level; the first value is the header itself
    levels: list[int] = []  # values still to read on the enclosing levels
    while left or levels:
        if left == 0:
            left = levels.pop()
            continue
        left -= 1
        if position >= end:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, "the header is truncated")
        size = _SCALARS[data[position]]
        if size is not None:
            position += size
            continue
        position, children = _skip_value(data, position)
        if children is None:
            continue
        values_left -= children
        if values_left < 0:
            raise ProtocolError(
                ErrorCode.TOO_LARGE, f"the header has more than {MAX_HEADER_VALUES} values"
            )
        levels.append(left)
        if len(levels) > MAX_HEADER_DEPTH:
            raise ProtocolError(
                ErrorCode.BAD_MESSAGE,
                f"the header is nested deeper than {MAX_HEADER_DEPTH} levels",
            )
        left = children
    if position > end:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "the header is truncated")
    if position < end:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "the header's map is followed by extra bytes")


def _skip_value(data: bytes | memoryview, position: int) -> tuple[int, int | None]:
    """Skips a container's tag, or a whole str or bin.

    Returns the position of the next value and, for a container, how many values it holds.
    """
    tag = data[position]
    position += 1
    if 0x80 <= tag <= 0x8F:
        return position, 2 * (tag & 0x0F)
    if 0x90 <= tag <= 0x9F:
        return position, tag & 0x0F
    if tag in _SIZED:
        size = _SIZED[tag]
        return position + size + int.from_bytes(data[position : position + size], "big"), None
    if tag in _CONTAINERS:
        size, values = _CONTAINERS[tag]
        count = int.from_bytes(data[position : position + size], "big")
        return position + size, values * count
    raise ProtocolError(ErrorCode.BAD_MESSAGE, f"msgpack type 0x{tag:02x} is not allowed")


def peek_request_id(header: Buffer) -> int | None:
    """Returns the request id of a header that may be broken, or None.

    The id is found if it is the first field of the map, where our encoders write it.
    """
    unpacker = msgpack.Unpacker(
        raw=False, max_buffer_size=_PEEK_BYTES, max_array_len=0, max_ext_len=0, max_map_len=64
    )
    try:
        unpacker.feed(bytes(memoryview(header).cast("B")[:_PEEK_BYTES]))
        unpacker.read_map_header()
        value = unpacker.unpack() if unpacker.unpack() == "id" else None
    except (ValueError, msgpack.UnpackException):
        return None
    return value if type(value) is int and 0 < value <= MAX_UINT64 else None
