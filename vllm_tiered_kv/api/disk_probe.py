"""A short measurement of a folder's disk, with the direct I/O that the SSD tier uses.

It writes a temporary file for a few seconds and reads it back in random order. Nothing stays.
A longer run would be truer of writes, which slow down when the cache of the drive is full.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_BLOCK_BYTES = 2 << 20
_THREADS = 8
_FILE_BYTES = 1 << 30
_PHASE_S = 2.0


@dataclass(frozen=True)
class DiskSpeed:
    """What `measure` found."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def measure(
    folder: Path, file_bytes: int = _FILE_BYTES, phase_s: float = _PHASE_S
) -> DiskSpeed | None:
    """Speeds of writing, with a sync, and of reading; None if the file system has no direct I/O.
    Raises OSError if the folder cannot be written to or is full."""
    path = folder / f".tiered-kv-doctor-{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            path.unlink(missing_ok=True)  # Linux creates the file before it refuses
            return None
        raise
    try:
        path.unlink()  # whatever happens to this process, nothing stays
        blocks = max(1, file_bytes // _BLOCK_BYTES)
        try:
            written, write_s = _run(fd, list(range(blocks)), phase_s, is_write=True)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise
        order = list(range(written))
        random.Random(0).shuffle(order)
        read, read_s = _run(fd, order, phase_s, is_write=False)
    finally:
        os.close(fd)
    return DiskSpeed(written * _BLOCK_BYTES / write_s, read * _BLOCK_BYTES / read_s)


def _run(fd: int, order: list[int], phase_s: float, is_write: bool) -> tuple[int, float]:
    """Moves blocks in this order with several threads; returns how many, and the seconds. Blocks
    are taken in turn, so those that were moved are the first ones of the order."""
    started = time.monotonic()
    lock = threading.Lock()
    taken = iter(order)
    moved: list[int] = []
    errors: list[OSError] = []

    def work() -> None:
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer, contextlib.suppress(StopIteration):
            buffer.write(random.Random(threading.get_ident()).randbytes(_BLOCK_BYTES))
            while not errors and time.monotonic() - started < phase_s:
                with lock:
                    block = next(taken)
                at = block * _BLOCK_BYTES
                try:
                    done = os.pwrite(fd, buffer, at) if is_write else os.preadv(fd, [buffer], at)
                    if done != _BLOCK_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError as error:
                    errors.append(error)
                    return
                moved.append(block)

    threads = [threading.Thread(target=work, name="tiered-kv-disk") for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if is_write:
        os.fdatasync(fd)
    return len(moved), time.monotonic() - started
