"""Strategies to copy blocks from pinned memory to a CUDA device, with a common interface.

- `WholeBlocks`: plain DMA without a kernel, if a block is one run of device memory (vLLM's
  block-outermost layouts).
- `Staged`: DMA of whole blocks into a small ring of device memory. A kernel scatters the blocks
  that have arrived while the next ones are on the bus.
- `Direct`: a kernel of a few thread blocks reads the slots through their mapping. It has the least
  overhead, so it suits small loads, but it leaves about 5 % of the bus bandwidth unused.
- `Pages`: plain copies of every run of every block. Slow; the fallback if a kernel fails.

All of them start after the current work of the stream, and later work of the stream waits for them.
`copy_tuning` measures which one is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.dma_lanes import DmaLanes
from vllm_tiered_kv.device.staging import STAGES, stage_bytes
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native import cuda as native

DIRECT_CTAS = 8  # enough to saturate PCIe; more would only take SMs from the model
_SCATTER_CTAS = 32  # many times faster than the bus, and a quarter of a large device


def require_within(blocks: PinnedBlocks, nbytes: int) -> None:
    """Checks slot offsets before a DMA, which accepts any address. Kernels check them already."""
    if not len(blocks.offsets):
        return
    if blocks.offsets.min() < 0 or blocks.offsets.max() + nbytes > blocks.region.nbytes:
        raise NativeError(f"slot_offsets: not all lie in a region of {blocks.region.nbytes} bytes")


class Inbound(Protocol):
    """One strategy to copy blocks to the device. The worker's main thread calls it."""

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None: ...

    def synchronize(self) -> None:
        """Waits for the work on the strategy's own streams; used after an error."""

    def close(self) -> None: ...


def require_blocks(blocks: PinnedBlocks, num_blocks: int) -> None:
    """Checks block ids before a DMA, which accepts any address."""
    ids = blocks.block_ids
    if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
        raise NativeError(f"block_ids: not all are in [0, {num_blocks})")


class WholeBlocks:
    """Plain DMA of blocks that are one run of device memory."""

    def __init__(self, device: int, runs: Mapping[int, BlockRuns]) -> None:
        self._runs = {group_id: group.runs[0] for group_id, group in runs.items()}
        self._num_blocks = {group_id: group.num_blocks for group_id, group in runs.items()}
        self._lanes = DmaLanes(device)

    @staticmethod
    def fits(runs: Mapping[int, BlockRuns]) -> bool:
        return all(len(group.runs) == 1 for group in runs.values())

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        run, num_blocks = self._runs[blocks.group_id], self._num_blocks[blocks.group_id]
        require_within(blocks, run.nbytes)
        require_blocks(blocks, num_blocks)
        targets = blocks.block_ids * run.block_stride
        self._lanes.to_device(
            stream, blocks.region, blocks.offsets, run.address, targets, run.nbytes
        )

    def synchronize(self) -> None:
        self._lanes.synchronize()

    def close(self) -> None:
        self._lanes.close()


class Pages:
    """Plain DMA of every run of every block; the fallback if a kernel fails."""

    def __init__(self, device: int, runs: Mapping[int, BlockRuns]) -> None:
        self._device = device
        self._runs = runs

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        group = self._runs[blocks.group_id]
        require_within(blocks, group.block_bytes)
        require_blocks(blocks, group.num_blocks)
        for run in group.runs:
            native.copy_to_device(
                blocks.region.address,
                blocks.offsets + run.slot_offset,
                run.address,
                blocks.block_ids * run.block_stride,
                run.nbytes,
                stream.handle,
                device=self._device,
                host_piece_bytes=blocks.region.piece_bytes,
            )

    def synchronize(self) -> None:
        pass  # it uses only the caller's stream

    def close(self) -> None:
        pass


class Direct:
    """A kernel that reads the slots in mapped host memory."""

    def __init__(self, layouts: Mapping[int, native.CudaBlockLayout]) -> None:
        self._layouts = layouts

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        self.enqueue_part(blocks, stream, 0, None)

    def enqueue_part(
        self, blocks: PinnedBlocks, stream: native.Stream, begin: int, end: int | None
    ) -> None:
        """Copies only these bytes of every slot, and possibly a few more after them."""
        native.scatter(
            self._layouts[blocks.group_id],
            blocks.block_ids,
            blocks.region.address,
            blocks.region.nbytes,
            blocks.offsets,
            stream.handle,
            ctas=DIRECT_CTAS,
            part_begin=begin,
            part_end=end,
        )

    def gather(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        """Copies in the other direction, from the device to the slots."""
        native.gather(
            self._layouts[blocks.group_id],
            blocks.block_ids,
            blocks.region.address,
            blocks.region.nbytes,
            blocks.offsets,
            stream.handle,
            ctas=DIRECT_CTAS,
        )

    def synchronize(self) -> None:
        pass  # it uses only the caller's stream

    def close(self) -> None:
        pass


class Staged:
    """DMA of whole blocks into staging memory, followed by a kernel that scatters them."""

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
        self._device = device
        self._bus = native.Stream(device, low_priority=True)
        self._begin = native.Event(device)
        self._filled = [native.Event(device) for _ in range(STAGES)]
        self._emptied = [native.Event(device) for _ in range(STAGES)]
        self._next = 0

    @staticmethod
    def fits(staging_bytes: int, block_bytes: Mapping[int, int]) -> bool:
        return stage_bytes(staging_bytes, STAGES) >= max(aligned(n) for n in block_bytes.values())

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        nbytes = self._block_bytes[blocks.group_id]
        require_within(blocks, nbytes)
        per_stage = self._stage_bytes // aligned(nbytes)
        self._begin.record(stream.handle)
        self._bus.wait(self._begin)
        for start in range(0, len(blocks.block_ids), per_stage):
            part = slice(start, start + per_stage)
            stage, self._next = self._next, (self._next + 1) % STAGES
            count = len(blocks.block_ids[part])
            staged = np.arange(count, dtype=np.int64) * aligned(nbytes) + stage * self._stage_bytes
            self._bus.wait(self._emptied[stage])
            native.copy_to_device(
                blocks.region.address,
                blocks.offsets[part],
                self._staging.address,
                staged,
                nbytes,
                self._bus.handle,
                device=self._device,
                host_piece_bytes=blocks.region.piece_bytes,
            )
            self._filled[stage].record(self._bus.handle)
            stream.wait(self._filled[stage])
            native.scatter(
                self._layouts[blocks.group_id],
                blocks.block_ids[part],
                self._staging.address,
                self._staging.nbytes,
                staged,
                stream.handle,
                ctas=_SCATTER_CTAS,
            )
            self._emptied[stage].record(stream.handle)

    def synchronize(self) -> None:
        self._bus.synchronize()

    def close(self) -> None:
        self._bus.synchronize()
        self._bus.close()
        self._staging.close()
        for event in (self._begin, *self._filled, *self._emptied):
            event.close()
