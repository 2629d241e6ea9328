"""Which blocks of a store each of several ranks copies, and what it may say of the whole."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from vllm_tiered_kv.connector.worker.replica_striping import ReplicaStriping
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob
from vllm_tiered_kv.device.copier import StoreDone
from vllm_tiered_kv.metrics.names import DropReason


def job(blocks: int, job_id: int = 5) -> StoreJob:
    numbers = np.arange(blocks, dtype=np.int64)
    return StoreJob(job_id, GroupTransfer(1, numbers + 100, numbers))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9])
def test_replicas_together_copy_each_block_once(blocks: int, replicas: int) -> None:
    copied = []
    for replica in range(replicas):
        share = ReplicaStriping(replica, replicas)
        mine = share.begin(job(blocks), blocks)
        assert mine.group_id == 1
        assert (mine.block_ids == mine.slots + 100).all()
        copied += mine.slots.tolist()
        assert share.end(StoreDone(5, len(mine))).stored == blocks
    assert sorted(copied) == list(range(blocks))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 5, 6, 7])
def test_reports_of_replicas_count_blocks_without_a_gap(blocks: int, replicas: int) -> None:
    """Whatever each of them could copy, the least that is said is the number of first blocks."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        arrived = np.zeros(blocks, bool)
        reports = []
        for replica in range(replicas):
            share = ReplicaStriping(replica, replicas)
            mine = share.begin(job(blocks, seed), blocks)
            stored = int(rng.integers(0, len(mine) + 1))
            arrived[mine.slots[:stored]] = True
            reason = DropReason.COPY_FAILED if stored < len(mine) else None
            reports.append(share.end(StoreDone(seed, stored, reason)))
            assert reports[-1].reason is reason
        gaps = np.flatnonzero(~arrived)
        assert min(r.stored for r in reports) == (gaps[0] if len(gaps) else blocks)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8])
def test_many_small_jobs_are_shared_out_too(step: int) -> None:
    """Whichever numbers stores have: others are given to puts and loads."""
    copied: Counter[int] = Counter()
    shares = [ReplicaStriping(replica, 4) for replica in range(4)]
    for number in range(0, 400 * step, step):
        for replica, share in enumerate(shares):
            copied[replica] += len(share.begin(job(1, number), 1))
    assert copied.total() == 400
    assert min(copied.values()) > 60


@pytest.mark.parametrize("job_id", range(3))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_least_report_is_what_all_have_stored_and_pinned(replicas: int, job_id: int) -> None:
    blocks = 4
    for usable in product(range(blocks + 1), repeat=replicas):
        shares = [ReplicaStriping(replica, replicas) for replica in range(replicas)]
        mine = [s.begin(job(blocks, job_id), u) for s, u in zip(shares, usable, strict=True)]
        for stored in product(*(range(len(part) + 1) for part in mine)):
            arrived: set[int] = set()
            reports = []
            for share, part, count, limit in zip(shares, mine, stored, usable, strict=True):
                arrived.update(part.slots[:count].tolist())
                share.begin(job(blocks, job_id), limit)
                reason = DropReason.COPY_FAILED if count < len(part) else None
                reports.append(share.end(StoreDone(job_id, count, reason)))
            head = next((n for n in range(blocks) if n not in arrived), blocks)
            least = min(report.stored for report in reports)
            assert least == min(head, *usable)
            for report in reports:
                if report.stored == least < blocks:
                    assert report.reason is not None
                assert (report.stored == blocks) == (report.reason is None)


@pytest.mark.parametrize("usable", range(7))
@pytest.mark.parametrize("job_id", range(3))
def test_rank_reports_no_more_than_it_could_read(usable: int, job_id: int) -> None:
    """Another one has pinned more, and has copied all of its part."""
    limited, other = ReplicaStriping(0, 3), ReplicaStriping(1, 3)
    mine = limited.begin(job(6, job_id), usable)
    assert (mine.slots < usable).all()
    report = limited.end(StoreDone(job_id, len(mine)))
    assert report.stored == usable
    assert report.reason is (None if usable == 6 else DropReason.NOT_PINNED_YET)
    theirs = other.begin(job(6, job_id), 6)
    assert other.end(StoreDone(job_id, len(theirs))).stored == 6
    if len(mine):
        again = limited.begin(job(6, job_id), usable)
        report = limited.end(StoreDone(job_id, len(again) - 1, DropReason.COPY_FAILED))
        assert report.stored == again.slots[-1]
        assert report.reason is DropReason.COPY_FAILED
