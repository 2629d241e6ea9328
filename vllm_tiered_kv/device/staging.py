"""Sizes and allocates staging memory on the device.

Blocks whose layers are not contiguous in device memory are copied through it. It is divided into
stages: one is filled while another is emptied. Layouts whose blocks are one run of device memory
need no staging.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from vllm_tiered_kv.core.arena_geometry import SLOT_ALIGNMENT, aligned
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native import cuda as native
from vllm_tiered_kv.options import format_size

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGES = 2
STAGING_BYTES = 64 << 20
"""Size for each direction. Copying one stage takes 0.5 ms on PCIe 5, much longer than starting a
copy."""


def stage_bytes(nbytes: int, stages: int) -> int:
    """Returns the size of one of several stages, a multiple of the slot alignment."""
    return nbytes // stages // SLOT_ALIGNMENT * SLOT_ALIGNMENT


def affordable_staging(free: int) -> int:
    """Returns the size for each direction: at most a quarter of the free memory, because vLLM still
    has to capture CUDA graphs."""
    return min(STAGING_BYTES, free // 4)


def allocate_up_to(allocate: Callable[[int], _T], max_bytes: int, min_bytes: int) -> _T:
    """Allocates `max_bytes` of device memory; halves the size on failure, down to `min_bytes`.

    Memory that was free a moment ago may be in use by another process, and an engine must not fail
    to start because of that.
    """
    nbytes = max_bytes
    while True:
        try:
            return allocate(nbytes)
        except CudaError as error:
            if nbytes <= min_bytes:
                raise
            nbytes = max(min_bytes, nbytes // 2)
            logger.warning(
                "could not allocate staging memory (%s); trying %s, which makes stores slower. "
                "Lower gpu_memory_utilization to leave more GPU memory free",
                error,
                format_size(nbytes),
            )


class StagingRing(ABC):
    """Copies blocks through staging memory: each stage is filled on the ring's own stream while
    the one before it is emptied on the caller's. `Staged` and `StagedOut` say how."""

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
        self._filling = native.Stream(device, low_priority=True)
        self._begin = native.Event(device)
        self._filled = [native.Event(device) for _ in range(STAGES)]
        self._emptied = [native.Event(device) for _ in range(STAGES)]
        self._next = 0

    @abstractmethod
    def _fill(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        """Enqueues copies of blocks to these offsets of the staging memory."""

    @abstractmethod
    def _empty(self, blocks: PinnedBlocks, staged: Int64Array, stream: native.Stream) -> None:
        """Enqueues copies of blocks from these offsets of the staging memory."""

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        pitch = aligned(self._block_bytes[blocks.group_id])
        per_stage = self._stage_bytes // pitch
        blocks.require_within(self._block_bytes[blocks.group_id])
        self._begin.record(stream.handle)
        self._filling.wait(self._begin)
        for start in range(0, len(blocks.block_ids), per_stage):
            part = blocks.part(start, start + per_stage)
            stage, self._next = self._next, (self._next + 1) % STAGES
            staged = np.arange(len(part.block_ids), dtype=np.int64) * pitch
            staged += stage * self._stage_bytes
            self._filling.wait(self._emptied[stage])
            self._fill(part, staged, self._filling)
            self._filled[stage].record(self._filling.handle)
            stream.wait(self._filled[stage])
            self._empty(part, staged, stream)
            self._emptied[stage].record(stream.handle)

    def synchronize(self) -> None:
        self._filling.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._filling.close()
        self._staging.close()
        for event in (self._begin, *self._filled, *self._emptied):
            event.close()
