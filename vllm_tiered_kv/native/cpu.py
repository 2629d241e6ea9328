"""Block copies in host memory, checksums and block keys.

A *block* is a set of byte runs: run `r` of block `b` lies at `addresses[r] + b * block_strides[r]`,
is `run_bytes[r]` long and is copied to byte `slot_offsets[r]` of a slot. The caller owns all memory
and keeps it alive during a call. An invalid argument raises a `NativeError` whose text begins with
the argument's name, before any byte is moved. Calls that move or hash bytes release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.native import _cpu
from vllm_tiered_kv.native._cpu import BlockLayout, release_free_memory, sha256, xxh3_64

__all__ = [
    "BlockLayout",
    "HostRegion",
    "checksum",
    "extend_keys",
    "gather",
    "release_free_memory",
    "scatter",
    "sha256",
    "xxh3_64",
]


@dataclass(frozen=True, slots=True)
class HostRegion:
    """The address range of memory that holds slots."""

    address: int
    nbytes: int
    piece_bytes: int = 0
    """If not 0, the memory is registered with CUDA in pieces of this size, from `address` on."""


def gather(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    region: HostRegion,
    slot_offsets: NDArray[np.int64],
    threads: int = 0,
) -> None:
    """Copies block `block_ids[i]` to the slot at byte `slot_offsets[i]` of the region.

    Slot offsets must be multiples of 64 and slots disjoint. `threads=0` chooses the number of
    threads; a small batch stays on the calling thread.
    """
    _cpu.gather(layout, block_ids, region.address, region.nbytes, slot_offsets, threads)


def scatter(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    region: HostRegion,
    slot_offsets: NDArray[np.int64],
    threads: int = 0,
) -> None:
    """Copies the slot at byte `slot_offsets[i]` of the region to block `block_ids[i]`.

    Like `gather`, in the other direction. Block ids must be unique; slots may repeat.
    """
    _cpu.scatter(layout, block_ids, region.address, region.nbytes, slot_offsets, threads)


def checksum(
    region: HostRegion, offsets: NDArray[np.int64], nbytes: int, threads: int = 0
) -> NDArray[np.uint64]:
    """Returns the XXH3 (64 bits, seed 0) of `nbytes` bytes at each offset of the region."""
    return _cpu.checksum(region.address, region.nbytes, offsets, nbytes, threads)


def extend_keys(
    parent: bytes,
    tokens: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
    start: int,
    stop: int,
    block_size: int,
    extras: dict[int, bytes] | None,
    suffix: bytes,
) -> tuple[list[bytes], bytes]:
    """Returns the keys of the blocks of `tokens[start:stop]`, and the digest for the next call.

    `digest[i] = SHA-256(digest[i - 1] || u32le(len(extra)) || extra || tokens of block i, u32le)`
    with `parent` (32 bytes) before the first and `extra = extras.get(i, b"")`, where `i` counts the
    blocks of this call from 0. A key is the first 16 bytes of its digest, followed by `suffix`. A
    token outside `[0, 2**32)` raises NativeError, because a placeholder must never get a key.
    """
    return _cpu.extend_keys(parent, tokens, start, stop, block_size, extras, suffix)
