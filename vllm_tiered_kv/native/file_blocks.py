"""Blocks of a file, moved and hashed by several threads at a time without the GIL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.native import _cpu


def read_blocks(
    fd: int, offsets: Sequence[int], into: Sequence[memoryview], threads: int = 0
) -> tuple[list[int], list[int]]:
    """Reads a block at each offset. Of each: how many bytes came, or the negative errno; and its
    XXH3, where all of it came."""
    return _cpu.read_file_blocks(fd, np.asarray(offsets, np.int64), into, threads)


def write_blocks(
    fd: int,
    offsets: Sequence[int],
    sources: Sequence[memoryview],
    expected: Sequence[int | None],
    threads: int = 0,
) -> tuple[list[int], list[int]]:
    """Writes a block at each offset, unless its XXH3 is another than expected. Of each: how many
    bytes went, or the negative errno; and its XXH3. Once one has failed, those that were not begun
    are ECANCELED."""
    return _cpu.write_file_blocks(fd, np.asarray(offsets, np.int64), sources, expected, threads)
