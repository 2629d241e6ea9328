"""Copies and checksums of plain bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.native import _cpu


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """A copy that leaves other threads running meanwhile, as assigning a memoryview does not."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def copy_and_hash(
    into: Sequence[memoryview], sources: Sequence[memoryview], threads: int = 1
) -> list[int]:
    """Copies each source into its place and says the XXH3 (64 bits, seed 0) of each.

    The bytes are read once for both, which costs no more than copying alone, and the GIL is let go
    once for all. Pairs of unequal length, and places that overlap their source, are a NativeError;
    a place must not overlap other places and sources either. `threads=0` chooses; few bytes stay on
    the calling thread.
    """
    return _cpu.copy_and_hash(into, sources, threads)


def hash_buffers(buffers: Sequence[memoryview], threads: int = 1) -> list[int]:
    """The XXH3 of each buffer; `threads` as in `copy_and_hash`."""
    return _cpu.hash_buffers(buffers, threads)
