"""Ways to copy blocks within host memory, as multiples of which the wire is judged."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.seeds.shapes import Shape
from vllm_tiered_kv.core.layout import StridedView, block_runs
from vllm_tiered_kv.native import cpu

Memory = NDArray[np.uint8]
Tasks = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Batches of blocks: numbers in the source, numbers in the target."""


class Blocks:
    """Source and target of one shape, block after block, and batches of random blocks to copy."""

    def __init__(self, shape: Shape, batches: int, blocks: int) -> None:
        count = batches * blocks
        rng = np.random.default_rng(0)
        self.shape = shape
        self.source = _random_bytes(rng, count, shape.block_bytes)
        self.target = np.ones_like(self.source)  # touched, so that no page is missing
        self.tasks: Tasks = []
        # No block is a target twice: what arrived can be told by looking at it once.
        sources, targets = rng.permutation(count), rng.permutation(count)
        for start in range(0, count, blocks):
            self.tasks.append((sources[start : start + blocks], targets[start : start + blocks]))

    @property
    def count(self) -> int:
        return len(self.source)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of copying everything; that it was copied is checked outside of them."""
        return self._timed(work, self.source, self.target)

    def layer_by_layer(self) -> float:
        """Seconds of the same bytes as the engine has them: keys and values of each layer apart,
        which makes many small copies."""
        shape = (2 * self.shape.layers, self.count, self.shape.page_bytes)
        source, target = self.source.reshape(shape), self.target.reshape(shape)

        def copy() -> None:
            for sources, targets in self.tasks:
                pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
                for plane in range(shape[0]):
                    for one, other in pairs:
                        target[plane, other] = source[plane, one]

        return self._timed(copy, source.swapaxes(0, 1), target.swapaxes(0, 1))

    def _timed(self, work: Callable[[], object], source: Memory, target: Memory) -> float:
        """Blocks are the first dimension of `source` and `target`."""
        self.target[:, :: self.shape.page_bytes] = 0
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        for sources, targets in self.tasks:
            for edge in (slice(0, 64), slice(-64, None)):
                arrived = target[targets, ..., edge] == source[sources, ..., edge]
                assert arrived.all(), "a block did not arrive"
        return seconds


def _random_bytes(rng: np.random.Generator, count: int, nbytes: int) -> Memory:
    """Cheaply: the same bytes in all blocks but for the edges, which are looked at."""
    memory = np.empty((count, nbytes), np.uint8)
    memory[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    memory[:, :64] = rng.integers(0, 256, (count, 64), dtype=np.uint8)
    memory[:, -64:] = rng.integers(0, 256, (count, 64), dtype=np.uint8)
    return memory


def ways(blocks: Blocks) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "b2b naive": lambda: naive(blocks),
        "b2b fancy index": lambda: _fancy_index(blocks),
        "b2b native": lambda: _native(blocks, threads=1),
        "b2b native, all cores": lambda: _native(blocks, threads=0),
    }
    index_copy = _index_copy(blocks)
    if index_copy is not None:
        found["b2b index_copy_"] = index_copy
    return found


def naive(blocks: Blocks) -> None:
    for sources, targets in blocks.tasks:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            blocks.target[target] = blocks.source[source]


def _fancy_index(blocks: Blocks) -> None:
    for sources, targets in blocks.tasks:
        blocks.target[targets] = blocks.source[sources]


def _native(blocks: Blocks, threads: int) -> None:
    """The extension's block copy, whole blocks: what the CPU tier uses."""
    nbytes = blocks.shape.block_bytes
    view = StridedView("blocks", blocks.source.ctypes.data, blocks.source.shape, (nbytes, 1), 1)
    layout = cpu.BlockLayout(*block_runs([view], blocks.count).arrays(), blocks.count)
    region = cpu.HostRegion(blocks.target.ctypes.data, blocks.target.nbytes)
    for sources, targets in blocks.tasks:
        cpu.gather(layout, sources, region, targets * nbytes, threads)


def _index_copy(blocks: Blocks) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    source, target = torch.from_numpy(blocks.source), torch.from_numpy(blocks.target)
    tasks = [(torch.from_numpy(one), torch.from_numpy(other)) for one, other in blocks.tasks]

    def copy() -> None:
        for sources, targets in tasks:
            target.index_copy_(0, targets, source[sources])

    return copy
