"""Block copies in host memory, checksums and block keys.

A *block* is a set of byte runs: run `r` of block `b` lies at `addresses[r] + b * block_strides[r]`,
is `run_bytes[r]` long and goes to byte `slot_offsets[r]` of a slot. The caller owns all memory and
keeps it alive for the length of a call. A bad argument is a `NativeError` that begins with its
name; no byte has moved then. Calls that move or hash bytes do so without the GIL.
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
    """Memory that holds slots."""

    address: int
    nbytes: int
    piece_bytes: int = 0
    """Registered with a device in pieces of so many bytes, counted from the address; 0: in one."""


def gather(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    region: HostRegion,
    slot_offsets: NDArray[np.int64],
    threads: int = 0,
) -> None:
    """Copy block `block_ids[i]` to the slot at byte `slot_offsets[i]` of the region.

    Slot offsets are multiples of 64 and the slots disjoint. `threads=0` chooses; a small batch
    stays on the calling thread.
    """
    _cpu.gather(layout, block_ids, region.address, region.nbytes, slot_offsets, threads)


def scatter(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    region: HostRegion,
    slot_offsets: NDArray[np.int64],
    threads: int = 0,
) -> None:
    """Copy the slot at byte `slot_offsets[i]` of the region to block `block_ids[i]`.

    As `gather` in the other direction; the block ids are unique, slots may repeat.
    """
    _cpu.scatter(layout, block_ids, region.address, region.nbytes, slot_offsets, threads)


def checksum(
    region: HostRegion, offsets: NDArray[np.int64], nbytes: int, threads: int = 0
) -> NDArray[np.uint64]:
    """XXH3 (64 bits, seed 0) of `nbytes` bytes at each offset of the region."""
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
    """Keys of the blocks of `tokens[start:stop]`, and the digest that the next call continues.

    `digest[i] = SHA-256(digest[i - 1] || u32le(len(extra)) || extra || tokens of block i, u32le)`
    with `parent` (32 bytes) before the first and `extra = extras.get(i, b"")`, where `i` counts the
    blocks of this call from 0. A key is the first 16 bytes of its digest and `suffix`. A token
    outside `[0, 2**32)` is an error: a placeholder must never get a key.
    """
    return _cpu.extend_keys(parent, tokens, start, stop, block_size, extras, suffix)
