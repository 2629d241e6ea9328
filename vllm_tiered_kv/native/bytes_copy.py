"""Copies and checksums of byte buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.native import _cpu


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies bytes without holding the GIL, unlike the assignment of a memoryview."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def copy_and_hash(
    into: Sequence[memoryview], sources: Sequence[memoryview], threads: int = 1
) -> list[int]:
    """Copies each source to its target and returns the XXH3 (64 bits, seed 0) of each.

    The bytes are read once for both, which is as fast as copying alone, and the GIL is released
    once for all of them. Pairs of unequal length and targets that overlap their source raise
    NativeError. A target must not overlap other targets or sources either. `threads=0` chooses the
    number of threads; small copies stay on the calling thread.
    """
    return _cpu.copy_and_hash(into, sources, threads)


def hash_buffers(buffers: Sequence[memoryview], threads: int = 1) -> list[int]:
    """Returns the XXH3 of each buffer; `threads` as in `copy_and_hash`."""
    return _cpu.hash_buffers(buffers, threads)
