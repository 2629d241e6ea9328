"""Strategies to copy blocks from pinned memory to a CUDA device, with a common interface.

- `WholeBlocks`: plain DMA without a kernel, if a block is one run of device memory (vLLM's
  block-outermost layouts).
- `Staged`: DMA of whole blocks into a small ring of device memory. A kernel scatters the blocks
  that have arrived while the next ones are on the bus.
- `Direct`: a kernel of a few thread blocks reads the slots through their mapping. It has the least
  overhead, so it suits small loads, but it leaves about 5 % of the bus bandwidth unused.
- `Pages`: plain copies of every run of every block. Slow; the fallback if a kernel fails.

All of them start after the current work of the stream, and later work of the stream waits for them.
`inbound_choice` selects one by layout and size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.dma_lanes import DmaLanes
from vllm_tiered_kv.device.staging import STAGES, StagingRing, stage_bytes
from vllm_tiered_kv.native import cuda as native

_DIRECT_CTAS = 8  # enough to saturate PCIe; more would only take SMs from the model
_SCATTER_CTAS = 32  # many times faster than the bus, and a quarter of a large device


class Strategy(Protocol):
    """One way to copy blocks between pinned memory and the device, in one direction. The worker's
    main thread calls it."""

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None: ...

    def synchronize(self) -> None:
        """Waits for the work on the strategy's own streams; used after an error."""

    def close(self) -> None: ...


class WholeBlocks:
    """Plain DMA of blocks that are one run of device memory, in either direction."""

    def __init__(self, device: int, runs: Mapping[int, BlockRuns], to_host: bool = False) -> None:
        self._groups = runs
        self._to_host = to_host
        self._lanes = DmaLanes(device)

    @staticmethod
    def fits(runs: Mapping[int, BlockRuns]) -> bool:
        return all(len(group.runs) == 1 for group in runs.values())

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        group = self._groups[blocks.group_id]
        (run,) = group.runs
        blocks.require_within(run.nbytes)
        blocks.require_blocks(group.num_blocks)
        device_side = run.address, blocks.block_ids * run.block_stride
        host_side = blocks.region.address, blocks.offsets
        piece_bytes = blocks.region.piece_bytes
        if self._to_host:
            ends, direction = (*device_side, *host_side), native.copy_to_host
        else:
            ends, direction = (*host_side, *device_side), native.copy_to_device
        self._lanes.copy(direction, stream, *ends, run.nbytes, piece_bytes)

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
        blocks.require_within(group.block_bytes)
        blocks.require_blocks(group.num_blocks)
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
            ctas=_DIRECT_CTAS,
            part_begin=begin,
            part_end=end,
        )

    def synchronize(self) -> None:
        pass  # it uses only the caller's stream

    def close(self) -> None:
        pass


class Staged(StagingRing):
    """DMA of whole blocks into staging memory, followed by a kernel that scatters them."""

    @staticmethod
    def fits(staging_bytes: int, block_bytes: Mapping[int, int]) -> bool:
        return stage_bytes(staging_bytes, STAGES) >= max(aligned(n) for n in block_bytes.values())

    def _fill(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        native.copy_to_device(
            blocks.region.address,
            blocks.offsets,
            self._staging.address,
            staged,
            self._block_bytes[blocks.group_id],
            stream.handle,
            device=self._device,
            host_piece_bytes=blocks.region.piece_bytes,
        )

    def _empty(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        native.scatter(
            self._layouts[blocks.group_id],
            blocks.block_ids,
            self._staging.address,
            self._staging.nbytes,
            staged,
            stream.handle,
            ctas=_SCATTER_CTAS,
        )
