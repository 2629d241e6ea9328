"""The index on disk: a file of fixed-size records, appended to and occasionally rewritten.

Records have fixed positions and sequence numbers, so a damaged record does not affect those after
it. A new generation is written to another file, synced, and renamed over the old one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vllm_tiered_kv.stores.ssd.disk import OsDisk, read_all, write_all
from vllm_tiered_kv.stores.ssd.folder import JOURNAL, TEMPORARY
from vllm_tiered_kv.stores.ssd.record_format import (
    HEADER_COPIES,
    RECORD,
    RECORD_BYTES,
    JournalHeader,
    RecordArray,
    decode_headers,
    encode_headers,
    is_valid,
    seal,
)

Records: TypeAlias = Sequence[bytes] | RecordArray
"""Encoded records, as bytes or as one array, without sequence numbers and checksums."""

_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096


class Journal:
    """A journal open for appending. The committer calls it, from one thread at a time."""

    def __init__(self, disk: OsDisk, fd: int, header: JournalHeader, records: int) -> None:
        self._disk = disk
        self._fd = fd
        self._header = header
        self.records = records  # in the file, headers included

    @classmethod
    def create(
        cls, disk: OsDisk, folder: Path, store: bytes, generation: int, records: Records
    ) -> Journal:
        """Writes a new generation with these records durably, and replaces any older one."""
        header = JournalHeader(store, generation, int.from_bytes(os.urandom(8), "little"))
        body = _body(records)
        seal(body, HEADER_COPIES, header.salt)
        temporary = folder / (JOURNAL + TEMPORARY)
        fd = disk.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            headers = encode_headers(header)
            write_all(disk, fd, memoryview(headers), 0)
            for start in range(0, len(body), _CHUNK_BYTES):
                chunk = memoryview(body)[start : start + _CHUNK_BYTES]
                write_all(disk, fd, chunk, len(headers) + start)
            disk.sync(fd)
            disk.rename(temporary, folder / JOURNAL)
            disk.sync_folder(folder)
        except BaseException:
            disk.close(fd)
            raise
        return cls(disk, fd, header, HEADER_COPIES + len(records))

    @property
    def generation(self) -> int:
        return self._header.generation

    def append(self, records: Records) -> None:
        """Writes records, without a sync. After an error the file must not be appended to again."""
        body = _body(records)
        seal(body, self.records, self._header.salt)
        write_all(self._disk, self._fd, memoryview(body), self.records * RECORD_BYTES)
        self.records += len(records)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def is_linked(self) -> bool:
        return self._disk.is_linked(self._fd)

    def close(self) -> None:
        # Linux closes the descriptor even if close() fails, and all necessary data was synced. A
        # second close could hit a descriptor that was reused by then.
        with contextlib.suppress(OSError):
            self._disk.close(self._fd)


def _body(records: Records) -> bytearray:
    if isinstance(records, np.ndarray):
        return bytearray(np.ascontiguousarray(records).view(np.uint8))
    return bytearray(b"".join(records))


@dataclass(frozen=True)
class JournalContents:
    """The contents of a journal file, valid and damaged."""

    header: JournalHeader | None  # None: the journal is missing or has no valid header
    exists: bool
    records: RecordArray  # the valid records, in order
    damaged: int  # invalid records before the last valid one
    torn_bytes: int  # after the last valid record
    end: int  # number of records up to and including the last valid one

    @property
    def is_clean(self) -> bool:
        return self.header is not None and not self.damaged and not self.torn_bytes


def read_journal(disk: OsDisk, folder: Path, store: bytes) -> JournalContents:
    """Reads and checks the whole journal."""
    nothing = np.empty(0, RECORD)
    try:
        fd = disk.open(folder / JOURNAL, os.O_RDONLY)
    except FileNotFoundError:
        return JournalContents(None, False, nothing, 0, 0, 0)
    try:
        raw = _read_readable_pages(disk, fd)
    finally:
        disk.close(fd)
    whole = len(raw) // RECORD_BYTES
    array = np.frombuffer(raw, RECORD, count=whole)
    header = decode_headers(array, store)
    if header is None:
        return JournalContents(None, True, nothing, 0, len(raw), 0)
    valid = is_valid(array, 0, header.salt)
    valid[:HEADER_COPIES] = is_valid(array[:HEADER_COPIES], 0, 0)
    last = int(np.flatnonzero(valid)[-1])
    end = max(last + 1, HEADER_COPIES)
    damaged = int(np.count_nonzero(~valid[:end]))
    valid[:HEADER_COPIES] = False
    good = array[HEADER_COPIES:end]
    if not valid[HEADER_COPIES:end].all():  # rare, because it copies all records
        good = array[valid]
    return JournalContents(header, True, good, damaged, len(raw) - end * RECORD_BYTES, end)


def _read_readable_pages(disk: OsDisk, fd: int) -> bytearray:
    """Reads the file. Unreadable pages become zeros, which no checksum accepts."""
    raw = bytearray(disk.size(fd))
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = memoryview(raw)[start : start + _CHUNK_BYTES]
        try:
            read_all(disk, fd, chunk, start)
        except OSError:
            for page in range(0, len(chunk), _PAGE_BYTES):
                with contextlib.suppress(OSError):
                    disk.read(fd, chunk[page : page + _PAGE_BYTES], start + page)
    return raw


def open_journal(disk: OsDisk, folder: Path, contents: JournalContents) -> Journal:
    """Opens a clean journal to append to it."""
    assert contents.header is not None
    fd = disk.open(folder / JOURNAL, os.O_RDWR)
    return Journal(disk, fd, contents.header, contents.end)
