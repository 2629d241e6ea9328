"""Shared memory of a daemon: bounds of views, and generations."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.errors import ArenaError


def test_shared_arena_view_out_of_bounds_is_refused() -> None:
    arena = SharedArena.create(4 * PAGE)
    assert arena.view(3 * PAGE, PAGE).nbytes == PAGE
    assert arena.view(4 * PAGE, 0).nbytes == 0
    for offset, nbytes in ((3 * PAGE, PAGE + 1), (4 * PAGE, 1), (-PAGE, PAGE), (PAGE, -1)):
        with pytest.raises(ArenaError, match="outside the arena"):
            arena.view(offset, nbytes)
    arena.close()


def test_shared_arena_generations_detect_changed_slots() -> None:
    arena = SharedArena.create(4 * PAGE)
    offsets = int64_array([0, 2 * PAGE])
    before = np.array([arena.generation(int(offset)) for offset in offsets], np.uint64)
    arena.next_generation(PAGE)  # of a slot that is not checked
    assert arena.have_generations(offsets, before)
    arena.next_generation(2 * PAGE)
    assert not arena.have_generations(offsets, before)
    arena.close()
