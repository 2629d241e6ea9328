"""Sizes and allocates staging memory on the device.

Blocks whose layers are not contiguous in device memory are copied through it. It is divided into
stages: one is filled while another is emptied. Layouts whose blocks are one run of device memory
need no staging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from vllm_tiered_kv.core.arena_geometry import SLOT_ALIGNMENT
from vllm_tiered_kv.errors import CudaError
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
