"""Verification by several ranks: the worst verdict counts, and pins and slots are released once."""

from __future__ import annotations

import pytest

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import Comparison, TransferLedger
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.verification import Verification
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, int64_array
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

SLOTS = 32
EQUAL, CLOSE, NOT_COMPARED, DIFFERENT = map(BlockVerdict, Verdict)


class Bench:
    def __init__(self, ranks: int = 2) -> None:
        self.index = BlockIndex(ArenaGeometry(SLOTS * 64, (64,)), "lru")
        self.recorder = Recorder()
        self.ledger = TransferLedger(self.index, self.recorder, ranks)
        tier = CpuTier([], self.index, self.ledger, self.recorder)
        self.verification = Verification(1.0, tier, None)

    def store(self, key: bytes) -> BlockKey:
        slot = self.index.reserve(key, None, 0)
        assert slot is not None
        self.index.commit(slot)
        return BlockKey(key)

    def open(self, keys: list[BlockKey], tier: Tier = Tier.CPU) -> int:
        comparison = Comparison(tier, 0, keys, list(range(len(keys))))
        for key in keys:
            pinned, spare = self.ledger.pin(key), self.ledger.spare_slot(0)
            assert pinned is not None
            assert spare is not None
            comparison.pinned.append(pinned)
            comparison.spare.append(spare)
        return self.ledger.open_comparison(comparison)

    def held(self, keys: list[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if self.index.lookup(key) is Lookup.HIT]

    def total(self, metric: names.Metric) -> float:
        return self.recorder.total(metric)

    def assert_nothing_is_held(self) -> None:
        assert not self.index.pinned_slots()
        assert len(self.index.slots()) == len(self.index)
        self.ledger.fence.hand_out(range(8))
        assert self.ledger.fence.take() is None  # no read is open
        assert not self.ledger.has_open
        assert not self.ledger.has_open_comparisons
        self.index.check()


def test_verification_worst_verdict_of_all_ranks_counts() -> None:
    bench = Bench()
    keys = [bench.store(name) for name in (b"a", b"b", b"c", b"d")]
    job = bench.open(keys)
    bench.ledger.fence.hand_out([3])
    assert bench.ledger.fence.take() == job
    bench.verification.report(job, [[EQUAL, CLOSE, EQUAL, NOT_COMPARED]])
    assert bench.index.pinned_slots()
    assert bench.ledger.has_open
    assert bench.ledger.has_open_comparisons
    bench.verification.report(job, [[EQUAL, EQUAL, DIFFERENT, DIFFERENT]])
    assert bench.held(keys) == [b"a", b"b"]
    assert bench.total(names.VERIFIED_BLOCKS) == 4
    assert bench.total(names.INEXACT_BLOCKS) == 1
    assert bench.total(names.DIFFERING_BLOCKS) == 2
    assert bench.total(names.UNVERIFIED_BLOCKS) == 0
    bench.assert_nothing_is_held()


def test_verification_block_not_compared_by_one_rank_is_skipped() -> None:
    bench = Bench()
    job = bench.open([bench.store(b"a")])
    bench.verification.report(job, [[CLOSE], [NOT_COMPARED]])
    assert bench.total(names.VERIFIED_BLOCKS) == 0
    assert bench.total(names.UNVERIFIED_BLOCKS) == 1
    bench.assert_nothing_is_held()


def test_verification_void_comparison_releases_without_findings() -> None:
    bench = Bench(ranks=1)
    job = bench.open([bench.store(b"a")])
    bench.verification.void(())
    later = bench.open([bench.store(b"b")])
    bench.verification.report(job, [[DIFFERENT]])
    bench.verification.report(later, [[EQUAL]])
    assert bench.total(names.VERIFIED_BLOCKS) == 1
    assert bench.total(names.DIFFERING_BLOCKS) == 0
    assert bench.total(names.UNVERIFIED_BLOCKS) == 1
    bench.assert_nothing_is_held()


def test_verification_more_reports_than_ranks_is_error() -> None:
    bench = Bench(ranks=1)
    job = bench.open([bench.store(b"a")])
    with pytest.raises(InvariantError):
        bench.verification.report(job, [[EQUAL], [EQUAL]])


def test_verification_reports_given_up_are_counted_once() -> None:
    bench = Bench()
    job = bench.open([bench.store(b"a")])
    bench.verification.report(job, [[EQUAL]])
    assert bench.ledger.give_up_reports() == 1
    assert bench.ledger.give_up_reports() == 0
    assert not bench.ledger.has_open
    assert not bench.ledger.has_open_comparisons
    assert bench.index.pinned_slots()
    bench.verification.report(job, [[DIFFERENT]])
    assert bench.total(names.UNVERIFIED_BLOCKS) == 1
    assert bench.total(names.DIFFERING_BLOCKS) == 0
    bench.assert_nothing_is_held()


def test_verification_spare_slots_are_limited_and_released() -> None:
    bench = Bench(ranks=1)
    keys = [bench.store(bytes([n])) for n in range(SLOTS)]  # full: spare slots need evictions
    job = bench.open(keys[-4:])
    assert bench.ledger.spare_slot(0) is None
    bench.verification.report(job, [[EQUAL] * 4])
    bench.assert_nothing_is_held()
    slot = bench.ledger.spare_slot(0)
    assert slot is not None
    bench.index.abort(slot)


def test_verification_pin_of_evicted_block_returns_none() -> None:
    bench = Bench()
    key = bench.store(b"a")
    bench.index.remove(key)
    assert bench.ledger.pin(key) is None


def test_verification_spare_slots_survive_reset() -> None:
    bench = Bench(ranks=1)
    job = bench.open([bench.store(b"a")])
    bench.index.clear()
    bench.index.check()
    bench.verification.report(job, [[EQUAL]])
    bench.assert_nothing_is_held()
    assert bench.index.used_bytes == 0


def test_verify_job_needs_exactly_one_source() -> None:
    copy = GroupTransfer(0, int64_array([1]), int64_array([2]))
    key = (BlockKey(b"a"),)
    assert VerifyJob(1, copy, key, 64, int64_array([3])).tier is Tier.CPU
    assert VerifyJob(1, copy, key, 64, None, "tcp://h:1").tier is Tier.REMOTE
    with pytest.raises(ValueError, match="either held_slots or address"):
        VerifyJob(1, copy, key, 64)
    with pytest.raises(ValueError, match="either held_slots or address"):
        VerifyJob(1, copy, key, 64, int64_array([3]), "tcp://h:1")
    with pytest.raises(ValueError, match="copy and keys differ in length: 1 and 2"):
        VerifyJob(1, copy, key * 2, 64, int64_array([3]))
