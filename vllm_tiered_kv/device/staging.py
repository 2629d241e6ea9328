"""Device memory through which blocks pass whose layers lie apart.

It is divided into stages: one is filled while another is emptied. Where a block is one run of
device memory none is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from vllm_tiered_kv.core.arena_geometry import SLOT_ALIGNMENT
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.option_values import format_size

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STAGES = 2
STAGING_BYTES = 64 << 20
"""In each direction. A stage is half a millisecond of PCIe 5, long beside the start of a copy."""


def stage_bytes(nbytes: int, stages: int) -> int:
    """What each of several stages gets of this memory; it begins where a slot may."""
    return nbytes // stages // SLOT_ALIGNMENT * SLOT_ALIGNMENT


def affordable_staging(free: int) -> int:
    """In each direction, at most a quarter of what is free: vLLM still captures CUDA graphs."""
    return min(STAGING_BYTES, free // 4)


def as_much_as_fits(allocate: Callable[[int], _T], most: int, least: int) -> _T:
    """Device memory of `most` bytes, or a half of that, and so on, down to `least`.

    An engine must not fail to start for want of it: what was free a moment ago may be in use by
    others.
    """
    nbytes = most
    while True:
        try:
            return allocate(nbytes)
        except CudaError as error:
            if nbytes <= least:
                raise
            nbytes = max(least, nbytes // 2)
            logger.warning(
                "staging memory: %s; trying %s, stores take longer with less. Lower "
                "gpu_memory_utilization to leave more GPU memory free",
                error,
                format_size(nbytes),
            )
