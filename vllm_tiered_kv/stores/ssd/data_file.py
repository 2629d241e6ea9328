"""The data file: whole blocks in slots, read and written past the page cache where possible.

Direct I/O wants memory and lengths that are multiples of 4096. Buffers that are go straight to
the kernel, others through a few aligned bounce buffers. The blocks of a batch move at the same
time, and are hashed by the thread that moves them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.io_threads import IoThreads
from vllm_tiered_kv.stores.ssd.disk import Disk, check_read, check_written, read_all, write_all
from vllm_tiered_kv.stores.ssd.folder import DATA
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A block in memory, and where in the file it belongs."""

    offset: int
    view: memoryview
    expected: int | None = None  # checksum of a block to be written


class Moved(NamedTuple):
    """What came of one block."""

    checksum: int = 0
    error: OSError | None = None
    refused: bool = False  # it has another checksum than expected, and was not written


class BouncePool:
    """A bounded number of page-aligned buffers, which grow to the largest block."""

    def __init__(self, buffers: int) -> None:
        self._free: queue.LifoQueue[mmap.mmap | None] = queue.LifoQueue()
        for _ in range(buffers):
            self._free.put(None)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        buffer = self._free.get()
        try:
            if buffer is None or len(buffer) < nbytes:
                buffer = None  # the old one is given back before the new one is taken
                buffer = mmap.mmap(-1, nbytes)
            with memoryview(buffer) as whole, whole[:nbytes] as view:
                yield view
        finally:
            self._free.put(buffer)


class DataFile:
    """Thread-safe. Errors are OSErrors; a short read or write is one."""

    def __init__(self, disk: Disk, folder: Path, threads: int) -> None:
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
        logger.warning("%s: no direct I/O on this file system, using buffered I/O", self._path)
        return self._disk.open(self._path, os.O_RDWR | os.O_CREAT)

    def size(self) -> int:
        return self._disk.size(self._fd)

    def resize(self, nbytes: int) -> None:
        """Exactly so many bytes, backed by disk space where the file system can promise it."""
        if self._disk.size(self._fd) > nbytes:
            self._disk.truncate(self._fd, nbytes)
        try:
            self._disk.allocate(self._fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            logger.warning("%s: space cannot be reserved on this file system", self._path)
            self._disk.truncate(self._fd, nbytes)
        self._probe_direct()

    def _probe_direct(self) -> None:
        """Some file systems accept the flag and refuse the reads."""
        if not self.direct:
            return
        try:
            with self._bounce.lend(ALIGNMENT) as page:
                self._disk.read(self._fd, page, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return  # a bad first page is not a reason to give up direct I/O
            self._disk.close(self._fd)
            self._fd = self._open_buffered()

    # ---- batches --------------------------------------------------------------------------------

    def read_blocks(self, places: Sequence[Place]) -> list[Moved]:
        """Reads every block into its view."""
        if not self._is_straight(places):
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
        """Writes every block that has the checksum it came with. Once one has failed, those that
        were not begun are not tried: ECANCELED."""
        if not self._is_straight(places):
            return _WritesUntilFailure(self, self._threads).outcomes(places)
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

    def _is_straight(self, places: Sequence[Place]) -> bool:
        """Whether all of them go from memory to disk without a detour."""
        return self._disk.native and (
            not self.direct or all(_is_direct(place.view) for place in places)
        )

    def _read_one(self, place: Place) -> Moved:
        try:
            self.read(place.offset, place.view)
        except OSError as error:
            return Moved(error=error)
        return Moved(xxh3_64(place.view))

    # ---- one block ------------------------------------------------------------------------------

    def read(self, offset: int, into: memoryview) -> None:
        if not self.direct or _is_direct(into):
            read_all(self._disk, self._fd, into, offset)
            return
        with self._bounce.lend(aligned(into.nbytes, ALIGNMENT)) as page:
            read_all(self._disk, self._fd, page, offset)
            into[:] = page[: into.nbytes]

    def write(self, offset: int, data: memoryview) -> None:
        if not self.direct or _is_direct(data):
            write_all(self._disk, self._fd, data, offset)
            return
        nbytes = data.nbytes
        with self._bounce.lend(aligned(nbytes, ALIGNMENT)) as page:
            page[:nbytes] = data
            page[nbytes:] = bytes(page.nbytes - nbytes)  # not another block's bytes
            write_all(self._disk, self._fd, page, offset)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def is_linked(self) -> bool:
        return self._disk.is_linked(self._fd)

    def close(self) -> None:
        self._threads.close()
        self._disk.close(self._fd)


class _WritesUntilFailure:
    """One batch of writes, by threads of Python."""

    def __init__(self, file: DataFile, threads: IoThreads) -> None:
        self._file = file
        self._threads = threads
        self._failed = False

    def outcomes(self, places: Sequence[Place]) -> list[Moved]:
        return self._threads.map(self._write, places)

    def _write(self, place: Place) -> Moved:
        checksum = xxh3_64(place.view)
        if place.expected not in (None, checksum):
            return Moved(checksum, refused=True)
        if self._failed:
            return Moved(checksum, _canceled())
        try:
            self._file.write(place.offset, place.view)
        except OSError as error:
            self._failed = True
            return Moved(checksum, error)
        return Moved(checksum)


def _canceled() -> OSError:
    return OSError(errno.ECANCELED, "another block of the batch has just failed")


def _raised_by(check: Callable[[int, int, int], None], moved: int, place: Place) -> OSError | None:
    """What a call that moved so much, or failed with a negative errno, is worth."""
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
