"""Blocks of a file, read and written by native threads; every failure is reported for its block."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native.cpu import read_blocks, write_blocks, xxh3_64

NBYTES = 40_000
THREADS = pytest.mark.parametrize("threads", [1, 4])


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def contents(count: int, seed: int = 1) -> list[memoryview]:
    rng = random.Random(seed)
    return [memoryview(rng.randbytes(NBYTES)) for _ in range(count)]


def places(count: int) -> list[memoryview]:
    return [memoryview(bytearray(NBYTES)) for _ in range(count)]


def unexpected(count: int) -> list[None]:
    return [None] * count


@THREADS
def test_file_blocks_read_returns_written_bytes(fd: int, threads: int) -> None:
    blocks = contents(20)
    offsets = [NBYTES * n for n in random.Random(2).sample(range(50), 20)]
    checksums = [xxh3_64(block) for block in blocks]
    assert write_blocks(fd, offsets, blocks, checksums, threads) == ([NBYTES] * 20, checksums)
    into = places(20)
    assert read_blocks(fd, offsets, into, threads) == ([NBYTES] * 20, checksums)
    assert into == blocks
    for offset, block in zip(offsets, blocks, strict=True):
        assert os.pread(fd, NBYTES, offset) == block


@THREADS
def test_write_blocks_checksum_mismatch_is_not_written(fd: int, threads: int) -> None:
    blocks = contents(3)
    right = [xxh3_64(block) for block in blocks]
    os.pwrite(fd, bytes(3 * NBYTES), 0)
    expected = [right[0], right[1] ^ 1, None]
    offsets = [0, NBYTES, 2 * NBYTES]
    assert write_blocks(fd, offsets, blocks, expected, threads) == ([NBYTES, 0, NBYTES], right)
    assert os.pread(fd, NBYTES, NBYTES) == bytes(NBYTES)
    assert os.pread(fd, NBYTES, 2 * NBYTES) == blocks[2]


@THREADS
def test_read_blocks_short_file_returns_short_read(fd: int, threads: int) -> None:
    os.pwrite(fd, b"x" * (NBYTES + 10), 0)
    moved, checksums = read_blocks(fd, [0, NBYTES, 5 * NBYTES], places(3), threads)
    assert moved == [NBYTES, 10, 0]
    assert checksums == [xxh3_64(b"x" * NBYTES), 0, 0]


def test_read_blocks_tries_every_block_after_failure() -> None:
    moved, _ = read_blocks(-1, [0, NBYTES], places(2), 2)
    assert moved == [-errno.EBADF] * 2


def test_write_blocks_stops_after_failure() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        moved, checksums = write_blocks(full, [0, 0, 0], contents(3), unexpected(3), 1)
    finally:
        os.close(full)
    assert moved == [-errno.ENOSPC, -errno.ECANCELED, -errno.ECANCELED]
    assert checksums == [xxh3_64(block) for block in contents(3)]


def test_write_blocks_failure_with_many_threads_is_reported() -> None:
    moved, _ = write_blocks(-1, [0] * 40, contents(40), unexpected(40), 4)
    assert -errno.EBADF in moved
    assert set(moved) <= {-errno.EBADF, -errno.ECANCELED}


def test_file_blocks_empty_lists_return_nothing(fd: int) -> None:
    assert read_blocks(fd, [], []) == ([], [])
    assert write_blocks(fd, [], [], []) == ([], [])


def test_file_blocks_bad_arguments_are_refused(fd: int) -> None:
    with pytest.raises(NativeError, match="into: 1 buffers for 2 offsets"):
        read_blocks(fd, [0, 1], places(1))
    with pytest.raises(NativeError, match=r"offsets\[1\]: -5 is negative"):
        read_blocks(fd, [0, -5], places(2))
    with pytest.raises(NativeError, match=r"into\[0\]: not a contiguous writable buffer"):
        read_blocks(fd, [0], contents(1))
    with pytest.raises(NativeError, match=r"sources\[0\]: not a contiguous buffer"):
        write_blocks(fd, [0], [contents(1)[0][::2]], [None])
    with pytest.raises(NativeError, match="expected: 2 checksums for 1 blocks"):
        write_blocks(fd, [0], contents(1), unexpected(2))
    with pytest.raises(NativeError, match="threads: -1"):
        read_blocks(fd, [0], places(1), -1)
    assert os.fstat(fd).st_size == 0
