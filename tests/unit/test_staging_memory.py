"""Staging memory on a device with little free memory."""

from __future__ import annotations

import pytest

from vllm_tiered_kv.core.arena_geometry import SLOT_ALIGNMENT
from vllm_tiered_kv.device.staging import (
    STAGING_BYTES,
    affordable_staging,
    allocate_up_to,
    stage_bytes,
)
from vllm_tiered_kv.errors import CudaError


def allocator(free: int, asked: list[int]):
    def allocate(nbytes: int) -> int:
        asked.append(nbytes)
        if nbytes > free:
            raise CudaError(f"cudaMalloc: requested {nbytes} bytes, {free} free")
        return nbytes

    return allocate


def test_affordable_staging_leaves_half_of_free_memory() -> None:
    """Each of the two directions takes at most a quarter."""
    assert affordable_staging(2 << 30) == STAGING_BYTES
    assert affordable_staging(100 << 20) == 25 << 20


@pytest.mark.parametrize("asked", [100_000_000, 150_000_000, 250_000_000, 256 << 20, 1, 127])
def test_stage_bytes_is_aligned(asked: int) -> None:
    stage = stage_bytes(asked, 2)
    assert stage % SLOT_ALIGNMENT == 0
    assert 0 <= asked - 2 * stage < 2 * SLOT_ALIGNMENT


def test_allocate_up_to_takes_maximum_if_free(caplog: pytest.LogCaptureFixture) -> None:
    assert allocate_up_to(allocator(100, []), 100, 10) == 100
    assert not caplog.text


def test_allocate_up_to_halves_until_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    assert allocate_up_to(allocator(30, asked), 100, 10) == 25
    assert asked == [100, 50, 25]
    assert "Lower gpu_memory_utilization" in caplog.text


@pytest.mark.parametrize("free", [10, 12])
def test_allocate_up_to_never_goes_below_minimum(free: int) -> None:
    assert allocate_up_to(allocator(free, []), 100, 10) in (10, 12)


def test_allocate_up_to_below_minimum_raises() -> None:
    asked: list[int] = []
    with pytest.raises(CudaError, match="requested 10 bytes, 9 free"):
        allocate_up_to(allocator(9, asked), 100, 10)
    assert asked == [100, 50, 25, 12, 10]
