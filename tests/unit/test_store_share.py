"""Which blocks of a store each of several ranks copies, and what it may say of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tiered_kv.connector.store_share import StoreShare
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob
from vllm_tiered_kv.device.copier import StoreDone
from vllm_tiered_kv.metrics.names import DropReason


def job(blocks: int) -> StoreJob:
    numbers = np.arange(blocks, dtype=np.int64)
    return StoreJob(5, GroupTransfer(1, numbers + 100, numbers))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9])
def test_together_they_copy_each_block_once(blocks: int, replicas: int) -> None:
    copied = []
    for replica in range(replicas):
        share = StoreShare(replica, replicas)
        mine = share.begin(job(blocks))
        assert mine.group_id == 1
        assert (mine.block_ids == mine.slots + 100).all()
        copied += mine.slots.tolist()
        assert share.end(StoreDone(5, len(mine))).stored == blocks
    assert sorted(copied) == list(range(blocks))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 5, 6, 7])
def test_what_all_say_is_what_arrived_without_a_gap(blocks: int, replicas: int) -> None:
    """Whatever each of them could copy, the least that is said is the number of first blocks."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        arrived = np.zeros(blocks, bool)
        said = []
        for replica in range(replicas):
            share = StoreShare(replica, replicas)
            mine = share.begin(job(blocks))
            stored = int(rng.integers(0, len(mine) + 1))
            arrived[mine.slots[:stored]] = True
            reason = DropReason.STAGING_FULL if stored < len(mine) else None
            report = share.end(StoreDone(5, stored, reason))
            assert report.reason is reason
            said.append(report.stored)
        gaps = np.flatnonzero(~arrived)
        assert min(said) == (gaps[0] if len(gaps) else blocks)
