"""The write fence: which stores a step waits for before it writes GPU blocks."""

from __future__ import annotations

from vllm_tiered_kv.cache.write_fence import WriteFence
from vllm_tiered_kv.core.transfer import int64_array


def fence_with(**reads: list[int]) -> WriteFence:
    """Returns a fence with open jobs that read these blocks."""
    fence = WriteFence()
    for name, blocks in reads.items():
        fence.begin_read(int(name[1:]), int64_array(blocks))
    return fence


def test_take_without_reads_waits_for_nothing() -> None:
    fence = WriteFence()
    fence.hand_out([1, 2, 3])
    assert fence.take() is None


def test_take_returns_newest_store_reading_allocated_block() -> None:
    fence = fence_with(j1=[1, 2], j2=[3], j3=[4])
    fence.hand_out([2, 9])
    fence.hand_out([3])
    assert fence.newest == 2
    assert fence.take() == 2
    assert fence.take() is None  # the next step has allocated no block yet


def test_take_ignores_blocks_without_reader() -> None:
    fence = fence_with(j1=[1, 2])
    fence.hand_out([0, 3, 1_000_000])
    assert fence.take() is None


def test_take_after_store_ended_waits_for_nothing() -> None:
    fence = fence_with(j1=[1], j2=[2])
    fence.end_read(1)
    fence.hand_out([1])
    assert fence.take() is None
    fence.hand_out([1, 2])
    assert fence.take() == 2


def test_take_waits_if_newest_reader_ended_before_earlier_one() -> None:
    """With ranks that share an arena, the later of two reads of a block may end first."""
    fence = fence_with(j1=[1], j2=[1])
    fence.end_read(2)
    fence.hand_out([1])
    assert fence.take() == 2
    fence.end_read(1)
    fence.hand_out([1])
    assert fence.take() is None


def test_take_ignores_store_planned_after_allocation() -> None:
    """The store reads the block after the step's own forward pass has filled it."""
    fence = fence_with(j1=[5])
    fence.hand_out([1])
    fence.begin_read(2, int64_array([1]))
    assert fence.take() is None


def test_hand_out_says_whether_a_store_may_read_a_block() -> None:
    """Inside a MultiConnector, another connector may write there ahead of any wait of ours."""
    assert not WriteFence().hand_out([1])
    fence = fence_with(j1=[1], j2=[2])
    assert fence.hand_out([1])  # by the oldest of both
    assert not fence.hand_out([0])
    assert not fence.hand_out([1_000_000])
    assert not fence.hand_out([])


def test_read_of_no_block_is_waited_for_by_nothing() -> None:
    fence = fence_with(j1=[])
    assert not fence.hand_out([0, 1])
    fence.end_read(1)
