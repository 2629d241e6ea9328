"""Bookkeeping of the store ring: units are taken at the front and given back at the back, in order.

One stream drains the ring, so stores end in the order they began and a plain counter is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from vllm_tiered_kv.core.arena_geometry import SLOT_ALIGNMENT, ArenaGeometry
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.option_values import format_size

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def split_staging(nbytes: int) -> tuple[int, int]:
    """How `staging_memory` is shared: what stores get, what loads get.

    Loads empty theirs as fast as the bus fills it; stores arrive in bursts.
    """
    return nbytes - nbytes // 4, nbytes // 4


def stage_bytes(nbytes: int, stages: int) -> int:
    """Of memory that is divided into stages, what each gets: it begins where a slot may."""
    return nbytes // stages // SLOT_ALIGNMENT * SLOT_ALIGNMENT


def affordable_staging(asked: int, free: int) -> int:
    """At most half of what is free: vLLM still has CUDA graphs to capture."""
    if asked <= free // 2:
        return asked
    logger.warning(
        "staging memory of %s instead of %s: the GPU has %s left. Stores that find no room in it "
        "wait for a later step: lower gpu_memory_utilization for more",
        *map(format_size, (free // 2, asked, free)),
    )
    return free // 2


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
                "staging memory: %s; trying %s. Stores that find no room in it wait for a later "
                "step: lower gpu_memory_utilization, or staging_memory",
                error,
                format_size(nbytes),
            )


def store_parts(count: int) -> list[slice]:
    """A large store in two: the bus begins when the first eighth has been gathered."""
    first = count // 8
    return [slice(0, first), slice(first, count)] if first >= 4 else [slice(0, count)]


class StagingRing:
    """Units are as large as the largest slot; at least one."""

    @staticmethod
    def units(nbytes: int, geometry: ArenaGeometry) -> int:
        return max(1, nbytes // max(geometry.slot_bytes))

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        self._used = 0

    @property
    def free(self) -> int:
        return self.capacity - self._used

    def take(self, count: int) -> Int64Array:
        """Indices of `count` units, which may wrap around."""
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} units asked of a ring with {self.free} free")
        units = (np.arange(count, dtype=np.int64) + self._next) % self.capacity
        self._next = (self._next + count) % self.capacity
        self._used += count
        return units

    def give_back(self, count: int) -> None:
        """The `count` oldest units in use are free again."""
        if not 0 <= count <= self._used:
            raise ValueError(f"{count} units given back, {self._used} in use")
        self._used -= count
