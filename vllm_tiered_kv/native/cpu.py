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
from vllm_tiered_kv.native._cpu import (
    MAX_REPLY_BLOCKS,
    BlockLayout,
    FillPool,
    extend_keys,
    follow,
    pack_get_reply,
    read_get,
    release_free_memory,
    send_frames,
    sha256,
    xxh3_64,
)

__all__ = ["BlockLayout", "FillPool", "HostRegion", "checksum", "extend_keys", "gather", "scatter"]
__all__ += ["follow", "release_free_memory", "send_frames", "sha256", "xxh3_64"]
# The headers of most reads: a `get` of a few blocks, and the reply with them. `wire/codec.py` has
# all forms of these messages, but takes longer than the rest of such a request in a busy daemon.
__all__ += ["MAX_REPLY_BLOCKS", "pack_get_reply", "read_get"]


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
