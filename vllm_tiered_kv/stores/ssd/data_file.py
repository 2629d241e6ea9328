"""The data file: whole blocks in slots, read and written with direct I/O where possible.

Direct I/O requires addresses and lengths that are multiples of 4096. Buffers that comply are passed
to the kernel, others are copied through a few aligned bounce buffers. The blocks of a batch are
transferred in parallel, and each is hashed by the thread that transfers it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.io_threads import IoThreads
from vllm_tiered_kv.stores.ssd.disk import OsDisk, check_read, check_written, read_all, write_all
from vllm_tiered_kv.stores.ssd.folder import DATA
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A block in memory and its offset in the file."""

    offset: int
    view: memoryview
    expected: int | None = None  # checksum of a block to be written


class Moved(NamedTuple):
    """The result of reading or writing one block."""

    checksum: int = 0
    error: OSError | None = None
    refused: bool = False  # its checksum is not the expected one, so it was not written


class BouncePool:
    """A fixed number of page-aligned buffers, which grow to the largest block. Thread-safe."""

    def __init__(self, buffers: int) -> None:
        self._free: queue.LifoQueue[mmap.mmap | None] = queue.LifoQueue()
        for _ in range(buffers):
            self._free.put(None)

    @contextmanager
    def acquire(self, nbytes: int) -> Iterator[memoryview]:
        """Yields a buffer of this size; waits while all are in use."""
        buffer = self._free.get()
        try:
            if buffer is None or len(buffer) < nbytes:
                buffer = None  # free the old one before allocating the new one
                buffer = mmap.mmap(-1, nbytes)
            with memoryview(buffer) as whole, whole[:nbytes] as view:
                yield view
        finally:
            self._free.put(buffer)


class DataFile:
    """The file of a store's blocks, with the threads that read and write it.

    `SsdStore` and recovery call it from any thread. Errors are OSErrors, including short reads and
    writes.
    """

    def __init__(self, disk: OsDisk, folder: Path, threads: int) -> None:
        self._disk = disk
        self._path = folder / DATA
        self._threads = IoThreads(threads, "ssd-io")
        self._bounce = BouncePool(threads)
        self.direct = True
        try:
            self._fd = disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = self._open_buffered()

    def _open_buffered(self) -> int:
        self.direct = False
        logger.warning("%s: this file system has no direct I/O; using buffered I/O", self._path)
        return self._disk.open(self._path, os.O_RDWR | os.O_CREAT)

    def size(self) -> int:
        return self._disk.size(self._fd)

    def resize(self, nbytes: int) -> None:
        """Sets the size of the file, and reserves disk space for it if the file system can."""
        if self._disk.size(self._fd) > nbytes:
            self._disk.truncate(self._fd, nbytes)
        try:
            self._disk.allocate(self._fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            logger.warning(
                "%s: this file system cannot reserve space; writes may fail later", self._path
            )
            self._disk.truncate(self._fd, nbytes)
        self._probe_direct()

    def _probe_direct(self) -> None:
        """Falls back to buffered I/O on file systems that accept O_DIRECT but reject the reads."""
        if not self.direct:
            return
        try:
            with self._bounce.acquire(ALIGNMENT) as page:
                self._disk.read(self._fd, page, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return  # a bad first page is not a reason to give up direct I/O
            self._disk.close(self._fd)
            self._fd = self._open_buffered()

    # ---- batches --------------------------------------------------------------------------------

    def read_blocks(self, places: Sequence[Place]) -> list[Moved]:
        """Reads every block into its view."""
        if not self._can_use_native(places):
            return self._threads.map(self._read_one, places)
        moved, checksums = cpu.read_blocks(
            self._fd,
            [place.offset for place in places],
            [place.view for place in places],
            self._threads.count,
        )
        return [
            Moved(checksum, _raised_by(check_read, count, place))
            for place, count, checksum in zip(places, moved, checksums, strict=True)
        ]

    def write_blocks(self, places: Sequence[Place]) -> list[Moved]:
        """Writes every block whose checksum is the expected one. After a failure, blocks that were
        not started are not written; their error is ECANCELED."""
        if not self._can_use_native(places):
            return self._write_until_failure(places)
        moved, checksums = cpu.write_blocks(
            self._fd,
            [place.offset for place in places],
            [place.view for place in places],
            [place.expected for place in places],
            self._threads.count,
        )
        return [
            Moved(checksum, refused=True)
            if place.expected not in (None, checksum)
            else Moved(checksum, _raised_by(check_written, count, place))
            for place, count, checksum in zip(places, moved, checksums, strict=True)
        ]

    def _can_use_native(self, places: Sequence[Place]) -> bool:
        """Whether native code can transfer all of them, without bounce buffers."""
        return self._disk.native and (
            not self.direct or all(_is_direct(place.view) for place in places)
        )

    def _read_one(self, place: Place) -> Moved:
        try:
            self.read(place.offset, place.view)
        except OSError as error:
            return Moved(error=error)
        return Moved(xxh3_64(place.view))

    def _write_until_failure(self, places: Sequence[Place]) -> list[Moved]:
        has_failed = threading.Event()

        def write(place: Place) -> Moved:
            checksum = xxh3_64(place.view)
            if place.expected not in (None, checksum):
                return Moved(checksum, refused=True)
            if has_failed.is_set():
                return Moved(checksum, _canceled())
            try:
                self.write(place.offset, place.view)
            except OSError as error:
                has_failed.set()
                return Moved(checksum, error)
            return Moved(checksum)

        return self._threads.map(write, places)

    # ---- one block ------------------------------------------------------------------------------

    def read(self, offset: int, into: memoryview) -> None:
        if not self.direct or _is_direct(into):
            read_all(self._disk, self._fd, into, offset)
            return
        with self._bounce.acquire(aligned(into.nbytes, ALIGNMENT)) as page:
            read_all(self._disk, self._fd, page, offset)
            into[:] = page[: into.nbytes]

    def write(self, offset: int, data: memoryview) -> None:
        if not self.direct or _is_direct(data):
            write_all(self._disk, self._fd, data, offset)
            return
        nbytes = data.nbytes
        with self._bounce.acquire(aligned(nbytes, ALIGNMENT)) as page:
            page[:nbytes] = data
            page[nbytes:] = bytes(page.nbytes - nbytes)  # not the bytes of an earlier block
            write_all(self._disk, self._fd, page, offset)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def is_linked(self) -> bool:
        return self._disk.is_linked(self._fd)

    def close(self) -> None:
        self._threads.close()
        self._disk.close(self._fd)


def _canceled() -> OSError:
    return OSError(errno.ECANCELED, "not written because another block of the batch failed")


def _raised_by(check: Callable[[int, int, int], None], moved: int, place: Place) -> OSError | None:
    """Returns the error of a native call, given the bytes it moved or a negative errno."""
    if moved < 0:
        return _canceled() if moved == -errno.ECANCELED else OSError(-moved, os.strerror(-moved))
    try:
        check(moved, place.view.nbytes, place.offset)
    except OSError as error:
        return error
    return None


def _is_direct(view: memoryview) -> bool:
    if view.nbytes % ALIGNMENT or not view.nbytes:
        return False
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT == 0
