"""Defines the on-disk format: superblock, journal header, journal record.

Writer, recovery and `verify` share this file; `docs/ssd-format.md` describes the format. Numbers
are little-endian. The checksum of a record is the XXH3 of the bytes before it, XORed with a salt
that is new for every journal file, so records of an older journal are never valid in a newer one.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.cache.durable_index import BlockRows
from vllm_tiered_kv.core.store import MAX_KEY_BYTES
from vllm_tiered_kv.native import cpu

FORMAT_NAME = "vllm_tiered_kv ssd tier"
FORMAT_VERSION = 1
ALIGNMENT = 4096  # of slots in the data file, and of direct I/O

PUT = 1  # the slot holds this block
DEL = 2  # the slot holds nothing
HEADER = 3

RECORD = np.dtype(
    [
        ("sequence", "<u8"),  # number of the record in its file
        ("kind", "u1"),
        ("key_bytes", "u1"),
        ("parent_bytes", "u1"),  # 0: the block has no predecessor
        ("reserved", "u1"),
        ("length", "<u4"),  # of the block
        ("slot", "<u8"),
        ("payload_checksum", "<u8"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("parent", f"V{MAX_KEY_BYTES}"),
        ("checksum", "<u8"),
    ]
)
RECORD_BYTES = RECORD.itemsize
_CHECKED_BYTES = RECORD_BYTES - 8
_BODY = struct.Struct(f"<QBBBxIQQ{MAX_KEY_BYTES}s{MAX_KEY_BYTES}sQ")

HEADER_COPIES = 2  # a flipped bit in one header must not invalidate the journal

RecordArray = NDArray[Any]


@dataclass(frozen=True)
class Record:
    """A decoded journal record."""

    kind: int
    key: bytes
    parent: bytes | None
    slot: int
    length: int
    payload_checksum: int


def encode_put(
    key: bytes, parent: bytes | None, slot: int, length: int, payload_checksum: int
) -> bytes:
    """Encodes a PUT record; `seal` adds its sequence number and checksum."""
    before = parent or b""
    return _BODY.pack(0, PUT, len(key), len(before), length, slot, payload_checksum, key, before, 0)


def encode_del(key: bytes, slot: int) -> bytes:
    """Encodes a DEL record; `seal` adds its sequence number and checksum."""
    return _BODY.pack(0, DEL, len(key), 0, 0, slot, 0, key, b"", 0)


def decode(record: bytes) -> Record:
    """Decodes a record that is valid."""
    _, kind, key_bytes, parent_bytes, length, slot, payload, key, parent, _ = _BODY.unpack(record)
    before = parent[:parent_bytes] if parent_bytes else None
    return Record(kind, key[:key_bytes], before, slot, length, payload)


def seal(records: bytearray, first_sequence: int, salt: int) -> None:
    """Sets the sequence numbers and checksums of the records, in place."""
    array = np.frombuffer(records, RECORD)
    array["sequence"] = np.arange(first_sequence, first_sequence + len(array), dtype=np.uint64)
    array["checksum"] = _checksums(array) ^ np.uint64(salt)


def is_valid(array: RecordArray, first_sequence: int, salt: int) -> NDArray[np.bool_]:
    """Returns which records were sealed at this position of the journal with this salt."""
    numbers = np.arange(first_sequence, first_sequence + len(array), dtype=np.uint64)
    sealed = array["checksum"] == (_checksums(array) ^ np.uint64(salt))
    valid: NDArray[np.bool_] = sealed & (array["sequence"] == numbers)
    return valid


def _checksums(array: RecordArray) -> NDArray[np.uint64]:
    return _hashes(array, 0, _CHECKED_BYTES)


def key_hashes(array: RecordArray) -> NDArray[np.uint64]:
    """Hashes the keys of the records. Different hashes mean different keys."""
    return _hashes(array, RECORD.fields["key"][1], MAX_KEY_BYTES)  # type: ignore[index]


def _hashes(array: RecordArray, start: int, nbytes: int) -> NDArray[np.uint64]:
    """Hashes `nbytes` bytes of each record, from `start`."""
    if not len(array):
        return np.empty(0, np.uint64)
    region = cpu.HostRegion(array.__array_interface__["data"][0], array.nbytes)
    offsets = np.arange(start, array.nbytes, RECORD_BYTES, dtype=np.int64)
    return cpu.checksum(region, offsets, nbytes, 1)


def put_records(rows: BlockRows) -> RecordArray:
    """Encodes many PUT records, like `encode_put`."""
    records = np.zeros(len(rows.slots), RECORD)
    records["kind"] = PUT
    for name in ("key_bytes", "parent_bytes"):
        records[name] = getattr(rows, name)
    records["slot"], records["length"] = rows.slots, rows.lengths
    records["payload_checksum"] = rows.checksums
    records["key"], records["parent"] = _opaque(rows.keys), _opaque(rows.parents)
    return records


def rows_of(puts: RecordArray) -> BlockRows:
    """Decodes PUT records; the inverse of `put_records`."""
    bytewise = puts.view(np.uint8).reshape(len(puts), RECORD_BYTES)

    def column(name: str) -> NDArray[np.uint8]:
        offset = RECORD.fields[name][1]  # type: ignore[index]
        return bytewise[:, offset : offset + MAX_KEY_BYTES]

    return BlockRows(
        column("key"),
        puts["key_bytes"],
        column("parent"),
        puts["parent_bytes"],
        puts["slot"].astype(np.int64),
        puts["length"],
        puts["payload_checksum"],
    )


def _opaque(keys: NDArray[np.uint8]) -> NDArray[Any]:
    return keys.view(f"V{MAX_KEY_BYTES}").reshape(len(keys))


# ---- journal header: the first records, equal except for their sequence numbers -----------------

_HEADER_KEY = struct.Struct("<16sIIQ8s")  # store, version, record bytes, generation, magic
_HEADER_MAGIC = b"TKVJRNL\0"


@dataclass(frozen=True)
class JournalHeader:
    """Identifies a journal file: its store, its generation, and the salt of its records."""

    store: bytes  # the superblock's uuid
    generation: int
    salt: int


def encode_headers(header: JournalHeader) -> bytes:
    key = _HEADER_KEY.pack(
        header.store, FORMAT_VERSION, RECORD_BYTES, header.generation, _HEADER_MAGIC
    )
    # A header stores the salt in the field of the payload checksum.
    one = _BODY.pack(0, HEADER, len(key), 0, 0, 0, header.salt, key, b"", 0)
    copies = bytearray(one * HEADER_COPIES)
    seal(copies, 0, 0)
    return bytes(copies)


def decode_headers(array: RecordArray, store: bytes) -> JournalHeader | None:
    """Returns the first valid header copy that belongs to this store, or None."""
    valid = is_valid(array[:HEADER_COPIES], 0, 0)
    for row in np.flatnonzero(valid):
        record = decode(array[row].tobytes())
        if record.kind != HEADER or len(record.key) != _HEADER_KEY.size:
            continue
        owner, version, record_bytes, generation, magic = _HEADER_KEY.unpack(record.key)
        known = (magic, version, record_bytes) == (_HEADER_MAGIC, FORMAT_VERSION, RECORD_BYTES)
        if known and owner == store:
            return JournalHeader(owner, generation, record.payload_checksum)
    return None


# ---- superblock: one line of readable JSON ------------------------------------------------------


@dataclass(frozen=True)
class Superblock:
    """The facts of a folder that never change."""

    store: bytes  # 16 random bytes
    slab_bytes: int

    def encode(self) -> bytes:
        facts = self._facts()
        facts["checksum"] = f"{_json_checksum(facts):016x}"
        return json.dumps(facts).encode() + b"\n"

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "store": self.store.hex(),
            "slab_bytes": self.slab_bytes,
            "alignment": ALIGNMENT,
        }

    @classmethod
    def decode(cls, data: bytes) -> Superblock:
        """Raises ValueError with a message for users."""
        try:
            facts = json.loads(data)
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or facts.get("format") != FORMAT_NAME:
            raise ValueError("its FORMAT file is damaged or not one of this cache")
        if facts.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"it has format version {facts.get('version')!r}, this release reads "
                f"{FORMAT_VERSION}"
            )
        stated = facts.pop("checksum", None)
        if stated != f"{_json_checksum(facts):016x}":
            raise ValueError("its FORMAT file is damaged (checksum)")
        try:
            found = cls(bytes.fromhex(facts["store"]), int(facts["slab_bytes"]))
        except (KeyError, TypeError, ValueError):
            raise ValueError("its FORMAT file lacks a field") from None
        if found._facts() != facts or found.slab_bytes <= 0 or found.slab_bytes % ALIGNMENT:
            raise ValueError("its FORMAT file has values this release cannot read")
        return found


def _json_checksum(facts: dict[str, Any]) -> int:
    return cpu.xxh3_64(json.dumps(facts, sort_keys=True).encode())
