"""Reads block files and verifies them."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.block_format import HEADER_BYTES, BlockHeader, decode_header
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, advance, is_absent
from vllm_tiered_kv.stores.shared_dir.removal import Remover
from vllm_tiered_kv.stores.shared_dir.tree import Identity, Tree

_READ_ATTEMPTS = 2  # a single error may come from the network, a repeated one from the disk


class _Verdict(enum.Enum):
    VALID = enum.auto()
    OTHER_LENGTH = enum.auto()  # a valid block that does not fit the reader's buffer
    DAMAGED = enum.auto()


@dataclass(frozen=True)
class ReadBlock:
    """A block whose file or header was read, and the identity of the file."""

    header: BlockHeader
    file: Identity

    @property
    def used_at_s(self) -> float:
        return self.file.mtime_ns / 1e9


class BlockReader:
    """Reads blocks for the store, its collector and `Recency`. A miss is None; a damaged file is
    counted and removed. Thread-safe."""

    def __init__(self, tree: Tree, ops: FileOps, counts: EventCounts, remover: Remover) -> None:
        self._tree = tree
        self._ops = ops
        self._counts = counts
        self._remover = remover

    def read(self, key: StoreKey, into: memoryview) -> ReadBlock | None:
        """Reads the payload of a block into the buffer and verifies it."""
        return self._examine(key, into)

    def peek(self, key: StoreKey) -> ReadBlock | None:
        """Reads the header only; checks the length of the payload, but not its bytes."""
        return self._examine(key, None)

    def verify(self, key: StoreKey) -> ReadBlock | None:
        """Like `read`, for a block of unknown length."""
        found = self.peek(key)
        if found is None:
            return None
        return self.read(key, memoryview(bytearray(found.header.payload_bytes)))

    def _examine(self, key: StoreKey, into: memoryview | None) -> ReadBlock | None:
        for attempt in range(_READ_ATTEMPTS):
            try:
                with self._opened(key) as fd:
                    return self._examine_open(key, fd, into, last=attempt + 1 == _READ_ATTEMPTS)
            except OSError as error:
                if is_absent(error):
                    return None
                self._counts.add(Event.READ_ERROR)
                if error.errno != errno.EIO:
                    return None
        return None

    def _examine_open(
        self, key: StoreKey, fd: int, into: memoryview | None, last: bool
    ) -> ReadBlock | None:
        # Opening made a network file system ask its server, so these attributes are current.
        status = self._ops.fstat(fd)
        header: BlockHeader | None = None
        try:
            header, verdict = self._check(key, fd, status.st_size, into)
        except OSError as error:
            if error.errno != errno.EIO or not last:
                raise
            self._counts.add(Event.READ_ERROR)
            verdict = _Verdict.DAMAGED  # a block that exists but cannot be read must not stay
        if verdict is _Verdict.DAMAGED:
            self._counts.add(Event.DAMAGED)
            # Remove it while it is open, so that its inode number cannot be reused meanwhile.
            self._remover.remove(key, Identity.of(status))
        if header is None or verdict is not _Verdict.VALID:
            return None
        return ReadBlock(header, Identity.of(status))

    def _check(
        self, key: StoreKey, fd: int, file_bytes: int, into: memoryview | None
    ) -> tuple[BlockHeader | None, _Verdict]:
        head = bytearray(HEADER_BYTES)
        parts = [memoryview(head)]
        fits = into is not None and file_bytes == HEADER_BYTES + len(into)
        if fits and into is not None:
            parts.append(into)
        if not self._fill(fd, parts):
            return None, _Verdict.DAMAGED
        header = decode_header(head)
        if header is None or header.key != key or header.file_bytes != file_bytes:
            return None, _Verdict.DAMAGED
        if into is None:
            return header, _Verdict.VALID
        if not fits:
            return header, _Verdict.OTHER_LENGTH
        if xxh3_64(into) != header.payload_checksum:
            return header, _Verdict.DAMAGED
        return header, _Verdict.VALID

    def _fill(self, fd: int, parts: list[memoryview]) -> bool:
        """Reads until all parts are full; returns False if the file ends before."""
        parts, offset = advance(parts, 0), 0
        while parts:
            count = self._ops.preadv(fd, parts, offset)
            if count == 0:
                return False
            parts, offset = advance(parts, count), offset + count
        return True

    @contextlib.contextmanager
    def _opened(self, key: StoreKey) -> Iterator[int]:
        fd = self._ops.open(self._tree.block_path(key), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(self._ops.fstat(fd).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            yield fd
        finally:
            self._ops.close(fd)
