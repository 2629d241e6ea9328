"""The client validates offsets that a daemon sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.remote.shared_memory import SharedMemory
from vllm_tiered_kv.wire.messages import LendReply

CAPACITY = 4 * PAGE


def check(leases: list[int], offsets: list[int], lengths: list[int], expected: int) -> None:
    memory = cast(SharedMemory, SimpleNamespace(arena=SimpleNamespace(capacity_bytes=CAPACITY)))
    reply = LendReply(leases, offsets, lengths, [0] * len(leases))
    SharedMemory._check(memory, reply, lengths, expected)


@pytest.mark.parametrize(
    ("leases", "offsets", "lengths", "expected"),
    [
        ([1], [4 * PAGE], [1], 1),
        ([1], [3 * PAGE], [PAGE + 1], 1),
        ([1, 1], [0, 1 << 50], [PAGE, PAGE], 2),
        ([1], [100], [PAGE], 1),
        ([1], [0], [0], 1),
        ([1], [0], [PAGE], 2),
        ([1, 1], [0, 0], [PAGE, PAGE], 1),
    ],
)
def test_check_offset_outside_the_arena_raises(
    leases: list[int], offsets: list[int], lengths: list[int], expected: int
) -> None:
    with pytest.raises(ConnectionLost):
        check(leases, offsets, lengths, expected)


def test_check_valid_offsets_and_misses_pass() -> None:
    check([1, 0, 1], [3 * PAGE, 1 << 50, 0], [PAGE, PAGE, 4 * PAGE], 3)
