"""Defines the format of a block in shared stores: a header of 256 bytes, then the payload.

It is the content of a file of the shared directory and of a value in Redis, Mooncake or S3.

All integers are little-endian.

    offset  bytes
         0      8  magic "TKVBLOCK"
         8      2  version of this format
        10      2  length of the header, 256
        12      1  length of the key, 1..64
        13      1  length of the parent's key, 0..64; 0: the block is the head of a chain
        14      2  zero
        16      8  length of the payload
        24      8  XXH3-64 of the payload
        32     64  key, padded with zeros
        96     64  parent's key, padded with zeros
       160     88  zero
       248      8  XXH3-64 of the 248 bytes before it
       256         payload, up to the end

A block is valid if both checksums match, the key matches its name, and its length is exactly that
of header and payload; otherwise it is damaged. Blocks never change after they are published. The
header contains the key because a file may be copied or renamed by mistake, and the parent so that
a collector can distinguish the tail of a chain from its head.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from vllm_tiered_kv.core.store import MAX_KEY_BYTES, BlockFacts, StoreKey
from vllm_tiered_kv.native.cpu import xxh3_64

MAGIC = b"TKVBLOCK"
VERSION = 1
HEADER_BYTES = 256

_FIELDS = struct.Struct("<8sHHBB2xQQ64s64s88x")
_CHECKSUM = struct.Struct("<Q")
assert _FIELDS.size + _CHECKSUM.size == HEADER_BYTES
assert MAX_KEY_BYTES == 64


class BlockHeader(NamedTuple):
    """The decoded header of a block. A tuple, as one is made for every block that is moved."""

    key: StoreKey
    parent: StoreKey | None
    payload_bytes: int
    payload_checksum: int

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @property
    def facts(self) -> BlockFacts:
        return BlockFacts(self.payload_bytes, self.payload_checksum, self.parent)


def is_key(key: bytes) -> bool:
    """Whether these bytes are a valid key."""
    return 1 <= len(key) <= MAX_KEY_BYTES


def encode_header(header: BlockHeader) -> bytes:
    parent = header.parent or b""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        len(header.key),
        len(parent),
        header.payload_bytes,
        header.payload_checksum,
        header.key,
        parent,
    )
    return fields + _CHECKSUM.pack(xxh3_64(fields))


def decode_header(data: bytes | bytearray, wanted: StoreKey) -> BlockHeader | None:
    """Returns the header, or None if the bytes are not a valid header of this version, or that of
    another block than wanted."""
    if len(data) != HEADER_BYTES:
        return None
    fields = bytes(data[: _FIELDS.size])
    if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != xxh3_64(fields):
        return None
    magic, version, size, key_bytes, parent_bytes, length, checksum, key, parent = _FIELDS.unpack(
        fields
    )
    if magic != MAGIC or version != VERSION or size != HEADER_BYTES:
        return None
    if not 1 <= key_bytes <= MAX_KEY_BYTES or parent_bytes > MAX_KEY_BYTES:
        return None
    if key[:key_bytes] != wanted:
        return None
    return BlockHeader(
        wanted,
        StoreKey(parent[:parent_bytes]) if parent_bytes else None,
        length,
        checksum,
    )
