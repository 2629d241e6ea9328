"""Block copies in host memory, checksums and block keys.

A *block* is a set of byte runs: run `r` of block `b` lies at `addresses[r] + b * block_strides[r]`,
is `run_bytes[r]` long and goes to byte `slot_offsets[r]` of a slot. The caller owns all memory and
keeps it alive for the length of a call. A bad argument is a `NativeError` that begins with its
name; no byte has moved then. Calls that move or hash bytes do so without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class FillPool:
    """All calls may be made from any thread."""

    def __init__(self) -> None:
        self._native = _cpu.FillPool()

    @property
    def descriptor(self) -> int:
        """Readable while there is something to collect. Closed with this pool."""
        return self._native.descriptor

    def start(
        self,
        ticket: int,
        into: Sequence[memoryview],
        sources: Sequence[memoryview],
        threads: int = 0,
    ) -> None:
        """As `copy_and_hash`, but returns at once: the buffers are held until the ticket was
        collected. Each ticket is larger than the one before."""
        self._native.start(ticket, into, sources, threads)

    def collect(self) -> list[tuple[int, list[int]]]:
        """The tickets that have ended since the last call, with the checksums of their blocks."""
        return self._native.collect()

    def wait(self) -> None:
        """Returns when all that was started before has ended and can be collected."""
        self._native.wait()


def follow(first: Any, last: Any, next: str, wanted: str, most: int) -> list[Any]:
    """The attribute `wanted` of `first` and those that follow it by the attribute `next`, at most
    so many and up to `last`, which does not count; without a step of the interpreter for each."""
    return _cpu.follow(first, last, next, wanted, most)


def send_frames(function: int, socket: int, buffers: Sequence[memoryview], flags: int) -> int:
    """Sends each with the function at this address, which is zmq_send_const: nothing is copied, and
    the memory must stay until zmq has sent it. 0, or the errno of the first that was refused."""
    return _cpu.send_frames(function, socket, buffers, flags)
