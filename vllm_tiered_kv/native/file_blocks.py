"""Reads, writes and hashes blocks of a file with several native threads, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.native import _cpu


def read_blocks(
    fd: int, offsets: Sequence[int], into: Sequence[memoryview], threads: int = 0
) -> tuple[list[int], list[int]]:
    """Reads a block at each offset.

    Returns the bytes read, or a negative errno, and the XXH3 of each completely read block.
    """
    return _cpu.read_file_blocks(fd, np.asarray(offsets, np.int64), into, threads)


def write_blocks(
    fd: int,
    offsets: Sequence[int],
    sources: Sequence[memoryview],
    expected: Sequence[int | None],
    threads: int = 0,
) -> tuple[list[int], list[int]]:
    """Writes a block at each offset, unless its XXH3 differs from the expected one.

    Returns the bytes written, or a negative errno, and the XXH3 of each block. After a failure,
    blocks that were not started get ECANCELED.
    """
    return _cpu.write_file_blocks(fd, np.asarray(offsets, np.int64), sources, expected, threads)
