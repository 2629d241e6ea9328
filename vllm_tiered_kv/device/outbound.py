"""Strategies to copy blocks from a CUDA device to the pinned arena, reading the blocks in place.

- `WholeBlocks`: plain DMA without a kernel, if a block is one run of device memory (vLLM's
  block-outermost layouts).
- `StagedOut`: a kernel gathers the runs of a few blocks into one half of a small buffer while the
  other half is on the bus, and so on for all blocks.

Both start after the current work of the stream, and later work of the stream waits for them. A
kernel that writes to host memory directly would be simpler, but it slows concurrent matrix products
to less than half of their speed.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.dma_lanes import DmaLanes
from vllm_tiered_kv.device.inbound import Strategy, WholeBlocks
from vllm_tiered_kv.device.staging import STAGES, StagingRing, allocate_up_to
from vllm_tiered_kv.native import cuda as native

_GATHER_CTAS = 32  # many times faster than the bus, and a quarter of a large device


def open_outbound(
    device: int,
    runs: Mapping[int, BlockRuns],
    layouts: Mapping[int, native.CudaBlockLayout],
    staging_bytes: int,
) -> Strategy:
    """Returns the strategy for this layout; allocates `staging_bytes` only if it needs them."""
    if WholeBlocks.fits(runs):
        return WholeBlocks(device, runs, to_host=True)
    block_bytes = {group_id: group.block_bytes for group_id, group in runs.items()}
    least = STAGES * max(aligned(nbytes) for nbytes in block_bytes.values())
    staging = allocate_up_to(
        lambda nbytes: native.DeviceBuffer(device, nbytes), max(least, staging_bytes), least
    )
    return StagedOut(device, layouts, block_bytes, staging)


class StagedOut(StagingRing):
    """A kernel that gathers blocks into staging memory, followed by DMA of whole blocks."""

    def __init__(
        self,
        device: int,
        layouts: Mapping[int, native.CudaBlockLayout],
        block_bytes: Mapping[int, int],
        staging: native.DeviceBuffer,
    ) -> None:
        super().__init__(device, layouts, block_bytes, staging)
        self._lanes = DmaLanes(device)

    def _fill(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        native.gather(
            self._layouts[blocks.group_id],
            blocks.block_ids,
            self._staging.address,
            self._staging.nbytes,
            staged,
            stream.handle,
            ctas=_GATHER_CTAS,
        )

    def _empty(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        self._lanes.copy(
            native.copy_to_host,
            stream,
            self._staging.address,
            staged,
            blocks.region.address,
            blocks.offsets,
            self._block_bytes[blocks.group_id],
            blocks.region.piece_bytes,
        )

    def synchronize(self) -> None:
        super().synchronize()
        self._lanes.synchronize()

    def close(self) -> None:
        super().close()
        self._lanes.close()
