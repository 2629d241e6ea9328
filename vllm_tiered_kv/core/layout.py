"""Derives where the bytes of a block lie in a layer's tensor from the tensor's shape and strides.

A layer's cache is a strided view whose first dimension is the block (or several kernel blocks per
block). The other dimensions are collapsed into contiguous byte runs. A run of block `b` starts at
`address + b * block_stride`; in a slot it starts at `slot_offset`. The code assumes no particular
layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.core.transfer import Int64Array


@dataclass(frozen=True)
class StridedView:
    """A tensor's memory: address of its first element, shape, strides in elements, item size."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def shard(self, number: int, count: int) -> StridedView:
        """Returns one of `count` equal ranges of the second dimension, the heads."""
        heads = self.shape[1] // count
        return StridedView(
            self.name,
            self.address + number * heads * self.strides[1] * self.itemsize,
            (self.shape[0], heads, *self.shape[2:]),
            self.strides,
            self.itemsize,
        )


def shard_layout(group_id: int, shard: int) -> int:
    """Returns the number of the layout of one of several shards of a group's blocks. It is no group
    id, because those have one byte."""
    return (shard + 1) << 8 | group_id


@dataclass(frozen=True)
class Run:
    """A contiguous range of bytes that every block has at the same place."""

    address: int
    block_stride: int
    nbytes: int
    slot_offset: int


@dataclass(frozen=True)
class BlockRuns:
    """All runs of a block of one KV-cache group. Together they fill a slot without gaps."""

    runs: tuple[Run, ...]
    num_blocks: int
    layer_ends: tuple[tuple[str, int], ...] = ()
    """Where each layer's bytes end in a slot; layers that share memory end at the same place. With
    several shards a layer has one entry per shard."""

    @property
    def block_bytes(self) -> int:
        return sum(run.nbytes for run in self.runs)

    def arrays(self) -> tuple[np.ndarray, Int64Array, Int64Array, Int64Array]:
        """Returns the columns the native layouts expect: address, stride, length, slot offset."""
        return (
            np.array([run.address for run in self.runs], dtype=np.uint64),
            np.array([run.block_stride for run in self.runs], dtype=np.int64),
            np.array([run.nbytes for run in self.runs], dtype=np.int64),
            np.array([run.slot_offset for run in self.runs], dtype=np.int64),
        )


def block_runs(views: Iterable[StridedView], num_blocks: int) -> BlockRuns:
    """Returns the runs of a block over all layers of a group; shared memory counts once. Views of
    several shards follow each other, each with all layers."""
    runs: list[Run] = []
    offset = 0
    ends: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    layer_ends: list[tuple[str, int]] = []
    for view in views:
        identity = (view.address, view.shape, view.strides)
        if identity not in ends:  # else layers that share one cache (cross-layer sharing)
            for address, block_stride, nbytes in _runs_of_view(view, num_blocks):
                runs.append(Run(address, block_stride, nbytes, offset))
                offset += nbytes
            ends[identity] = offset
        layer_ends.append((view.name, ends[identity]))
    if not runs:
        raise ValueError("a KV-cache group without layers has no block layout")
    return BlockRuns(_merge_adjacent(runs), num_blocks, tuple(layer_ends))


def _runs_of_view(view: StridedView, num_blocks: int) -> list[tuple[int, int, int]]:
    shape, strides = view.shape, [s * view.itemsize for s in view.strides]
    if not shape or shape[0] % num_blocks or shape[0] == 0:
        raise ValueError(
            f"layer {view.name}: first dimension of shape {shape} is not a multiple of "
            f"{num_blocks} blocks"
        )
    # Kernel blocks split a block evenly: they are just one more inner dimension.
    ratio = shape[0] // num_blocks
    block_stride = strides[0] * ratio
    inner = [(ratio, strides[0])] if ratio > 1 else []
    inner += [(n, s) for n, s in zip(shape[1:], strides[1:], strict=True) if n != 1]
    if any(n == 0 for n, _ in inner):
        raise ValueError(f"layer {view.name}: empty dimension in shape {shape}")
    if any(s <= 0 for _, s in inner):
        raise ValueError(f"layer {view.name}: strides {view.strides} must be positive")

    # Sort by memory order (largest stride first), then merge contiguous inner dimensions.
    inner.sort(key=lambda dim: -dim[1])
    nbytes = view.itemsize
    while inner and inner[-1][1] == nbytes:
        nbytes *= inner.pop()[0]
    if inner and inner[-1][1] < nbytes:
        raise ValueError(f"layer {view.name}: strides {view.strides} make elements overlap")
    return [(view.address + start, block_stride, nbytes) for start in _starts(inner)]


def _starts(dims: Sequence[tuple[int, int]]) -> list[int]:
    ranges = [range(0, count * stride, stride) for count, stride in dims]
    return [sum(point) for point in itertools.product(*ranges)]


def _merge_adjacent(runs: list[Run]) -> tuple[Run, ...]:
    """Joins runs that are adjacent in memory in every block, as in block-outermost layouts."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride == run.block_stride
            and last.address + last.nbytes == run.address
            and last.slot_offset + last.nbytes == run.slot_offset
            and last.nbytes + run.nbytes <= run.block_stride
        ):
            merged[-1] = Run(
                last.address, last.block_stride, last.nbytes + run.nbytes, last.slot_offset
            )
        else:
            merged.append(run)
    return tuple(merged)
