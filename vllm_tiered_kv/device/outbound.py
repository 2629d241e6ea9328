"""Strategies to copy blocks from a CUDA device to the pinned arena, reading the blocks in place.

- `WholeBlocksOut`: plain DMA without a kernel, if a block is one run of device memory (vLLM's
  block-outermost layouts).
- `StagedOut`: a kernel gathers the runs of a few blocks into one half of a small buffer while the
  other half is on the bus, and so on for all blocks.

Both start after the current work of the stream, and later work of the stream waits for them. A
kernel that writes to host memory directly would be simpler, but it slows concurrent matrix products
to less than half of their speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.dma_lanes import DmaLanes
from vllm_tiered_kv.device.inbound import WholeBlocks, require_blocks, require_within
from vllm_tiered_kv.device.staging import STAGES, allocate_up_to, stage_bytes
from vllm_tiered_kv.native import cuda as native

_GATHER_CTAS = 32  # many times faster than the bus, and a quarter of a large device


class Outbound(Protocol):
    """One strategy to copy blocks from the device. The worker's main thread calls it."""

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None: ...

    def synchronize(self) -> None:
        """Waits for the work on the strategy's own streams."""

    def close(self) -> None: ...


def open_outbound(
    device: int,
    runs: Mapping[int, BlockRuns],
    layouts: Mapping[int, native.CudaBlockLayout],
    staging_bytes: int,
) -> Outbound:
    """Returns the strategy for this layout; allocates `staging_bytes` only if it needs them."""
    if WholeBlocks.fits(runs):
        return WholeBlocksOut(device, runs)
    block_bytes = {group_id: group.block_bytes for group_id, group in runs.items()}
    least = STAGES * max(aligned(nbytes) for nbytes in block_bytes.values())
    staging = allocate_up_to(
        lambda nbytes: native.DeviceBuffer(device, nbytes), max(least, staging_bytes), least
    )
    return StagedOut(device, layouts, block_bytes, staging)


class WholeBlocksOut:
    """Plain DMA of blocks that are one run of device memory."""

    def __init__(self, device: int, runs: Mapping[int, BlockRuns]) -> None:
        self._runs = {group_id: group.runs[0] for group_id, group in runs.items()}
        self._num_blocks = {group_id: group.num_blocks for group_id, group in runs.items()}
        self._lanes = DmaLanes(device)

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        run = self._runs[blocks.group_id]
        require_within(blocks, run.nbytes)
        require_blocks(blocks, self._num_blocks[blocks.group_id])
        sources = blocks.block_ids * run.block_stride
        self._lanes.to_host(stream, run.address, sources, blocks.region, blocks.offsets, run.nbytes)

    def synchronize(self) -> None:
        self._lanes.synchronize()

    def close(self) -> None:
        self._lanes.close()


class StagedOut:
    """A kernel that gathers blocks into staging memory, followed by DMA of whole blocks."""

    def __init__(
        self,
        device: int,
        layouts: Mapping[int, native.CudaBlockLayout],
        block_bytes: Mapping[int, int],
        staging: native.DeviceBuffer,
    ) -> None:
        """Takes ownership of the staging memory."""
        self._layouts = layouts
        self._block_bytes = block_bytes
        self._staging = staging
        self._stage_bytes = stage_bytes(staging.nbytes, STAGES)
        self._lanes = DmaLanes(device)
        self._gathers = native.Stream(device, low_priority=True)
        self._begin = native.Event(device)
        self._filled = [native.Event(device) for _ in range(STAGES)]
        self._emptied = [native.Event(device) for _ in range(STAGES)]
        self._next = 0

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        nbytes = self._block_bytes[blocks.group_id]
        require_within(blocks, nbytes)
        per_stage = self._stage_bytes // aligned(nbytes)
        self._begin.record(stream.handle)
        self._gathers.wait(self._begin)
        for start in range(0, len(blocks.block_ids), per_stage):
            part = slice(start, start + per_stage)
            stage, self._next = self._next, (self._next + 1) % STAGES
            count = len(blocks.block_ids[part])
            staged = np.arange(count, dtype=np.int64) * aligned(nbytes) + stage * self._stage_bytes
            self._gathers.wait(self._emptied[stage])
            native.gather(
                self._layouts[blocks.group_id],
                blocks.block_ids[part],
                self._staging.address,
                self._staging.nbytes,
                staged,
                self._gathers.handle,
                ctas=_GATHER_CTAS,
            )
            self._filled[stage].record(self._gathers.handle)
            stream.wait(self._filled[stage])
            self._lanes.to_host(
                stream, self._staging.address, staged, blocks.region, blocks.offsets[part], nbytes
            )
            self._emptied[stage].record(stream.handle)

    def synchronize(self) -> None:
        self._gathers.synchronize()
        self._lanes.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._gathers.close()
        self._lanes.close()
        self._staging.close()
        for event in (self._begin, *self._filled, *self._emptied):
            event.close()
