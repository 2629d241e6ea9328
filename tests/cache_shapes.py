"""Shapes of KV caches as byte runs, and block copies in plain numpy to judge others by.

A shape is relative to the start of some memory; bytes before, between and after its runs are there
to show that nobody touches them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]

GUARD = 256


@dataclass(frozen=True)
class CacheShape:
    name: str
    num_blocks: int
    starts: tuple[int, ...]
    strides: tuple[int, ...]
    lengths: tuple[int, ...]
    slot_starts: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Memory to allocate, with a guard zone at the end (and one at the start)."""
        ends = (
            start + (self.num_blocks - 1) * stride + length
            for start, stride, length in zip(self.starts, self.strides, self.lengths, strict=True)
        )
        return max(ends) + GUARD

    def columns(self, address: int) -> tuple[NDArray[np.uint64], Ids, Ids, Ids]:
        """The arrays a native layout takes, for memory at `address`."""
        return (
            np.array([address + start for start in self.starts], dtype=np.uint64),
            np.array(self.strides, dtype=np.int64),
            np.array(self.lengths, dtype=np.int64),
            np.array(self.slot_starts, dtype=np.int64),
        )


def cache_shape(
    layout: str,
    layers: int,
    blocks: int,
    heads: int,
    row: int,
    pad: int = 0,
    shuffle: int | None = None,
    start: int = GUARD,
) -> CacheShape:
    """A cache whose dimensions lie in memory as `layout` spells them, outermost first.

    L layer, B block, H head; N and C, token and channel, are one row of `row` bytes. `pad` bytes
    follow each contiguous piece. `shuffle` seeds an order of the runs within the slot.
    """
    sizes = {"L": layers, "B": blocks, "H": heads}
    order = [dim for dim in layout if dim in sizes]
    # Dimensions inside all of the blocks' are contiguous with the row, and one run with it.
    inner = order[max(order.index("B"), order.index("L")) + 1 :]
    length = row * math.prod(sizes[dim] for dim in inner)
    outer = order[: len(order) - len(inner)]
    stride = length + pad
    strides: dict[str, int] = {}
    for dim in reversed(outer):
        strides[dim] = stride
        stride *= sizes[dim]
    starts = [start]
    for dim in outer:
        if dim != "B":
            starts = [at + i * strides[dim] for at in starts for i in range(sizes[dim])]
    ranks = np.arange(len(starts))
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(ranks)
    return CacheShape(
        name=f"{layout}-{layers}x{blocks}x{heads}x{row}+{pad}",
        num_blocks=blocks,
        starts=tuple(starts),
        strides=(strides["B"],) * len(starts),
        lengths=(length,) * len(starts),
        slot_starts=tuple(int(rank) * length for rank in ranks),
    )


def mixed_shape(lengths: tuple[int, ...], blocks: int, pads: tuple[int, ...]) -> CacheShape:
    """Runs of different lengths and strides, one region after the other."""
    starts, strides, slot_starts, at, slot = [], [], [], GUARD, 0
    for length, pad in zip(lengths, pads, strict=True):
        starts.append(at)
        strides.append(length + pad)
        slot_starts.append(slot)
        at += blocks * (length + pad)
        slot += length
    return CacheShape(
        f"mixed-{lengths}",
        blocks,
        tuple(starts),
        tuple(strides),
        lengths,
        tuple(slot_starts),
    )


# Layer-outermost, block-outermost and head-outermost caches, padded ones, lengths of every parity.
SHAPES = (
    cache_shape("LBHNC", layers=3, blocks=7, heads=2, row=64),
    cache_shape("LBNHC", layers=4, blocks=5, heads=1, row=4096),
    cache_shape("BLHNC", layers=5, blocks=6, heads=2, row=48),
    cache_shape("BLHNC", layers=2, blocks=9, heads=1, row=40_000, start=1024),
    cache_shape("LHBNC", layers=2, blocks=8, heads=3, row=80),
    cache_shape("LBHNC", layers=2, blocks=6, heads=2, row=24, pad=40, shuffle=1),
    cache_shape("BLHNC", layers=3, blocks=4, heads=1, row=36, pad=12, shuffle=2),
    cache_shape("LBHNC", layers=3, blocks=5, heads=1, row=1, start=GUARD + 1),
    cache_shape("LBHNC", layers=3, blocks=5, heads=1, row=3, pad=5),
    cache_shape("LHBNC", layers=2, blocks=6, heads=2, row=17, shuffle=3),
    cache_shape("LBHNC", layers=2, blocks=1, heads=2, row=32),
    mixed_shape((17, 64, 1, 3, 20_000), blocks=5, pads=(0, 64, 2, 1, 0)),
    mixed_shape((1024, 4096), blocks=6, pads=(0, 4096)),
)


def slot_pitch(shape: CacheShape) -> int:
    return -(-shape.block_bytes // 64) * 64


def random_bytes(size: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def random_pairs(shape: CacheShape, slots: int, seed: int) -> tuple[Ids, Ids]:
    """Distinct blocks, distinct slots, in no order."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, min(shape.num_blocks, slots) + 1))
    block_ids = rng.permutation(shape.num_blocks)[:count].astype(np.int64)
    slot_offsets = rng.permutation(slots)[:count].astype(np.int64) * slot_pitch(shape)
    return block_ids, slot_offsets


def gathered(
    shape: CacheShape, memory: Bytes, block_ids: Ids, slots: Bytes, slot_offsets: Ids
) -> Bytes:
    """The slots as they should be after a gather."""
    after = slots.copy()
    for block, offset in zip(block_ids.tolist(), slot_offsets.tolist(), strict=True):
        for r, length in enumerate(shape.lengths):
            at = shape.starts[r] + block * shape.strides[r]
            to = offset + shape.slot_starts[r]
            after[to : to + length] = memory[at : at + length]
    return after


def scattered(
    shape: CacheShape, memory: Bytes, block_ids: Ids, slots: Bytes, slot_offsets: Ids
) -> Bytes:
    """The memory as it should be after a scatter."""
    after = memory.copy()
    for block, offset in zip(block_ids.tolist(), slot_offsets.tolist(), strict=True):
        for r, length in enumerate(shape.lengths):
            at = shape.starts[r] + block * shape.strides[r]
            to = offset + shape.slot_starts[r]
            after[at : at + length] = slots[to : to + length]
    return after
