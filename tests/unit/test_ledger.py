"""Plans and reports of transfers: which blocks are committed, aborted, counted and unpinned."""

from __future__ import annotations

import pytest

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import StoreReport, TransferLedger
from vllm_tiered_kv.cache.planner import Group, loadable_tokens, plan_store
from vllm_tiered_kv.core import tiers
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder

GROUP = Group(group_id=0, block_size=4, block_bytes=60, size_class=0)
KEYS = [BlockKey(bytes([n]) * 17) for n in range(10)]


class Tier:
    def __init__(self, slots: int, ranks: int = 1) -> None:
        self.ranks = ranks
        self.committed: list[int] = []
        self.index = BlockIndex(ArenaGeometry(slots * 64, (64,)), "lru")
        self.recorder = Recorder()
        self.ledger = TransferLedger(
            self.index, self.recorder, ranks, on_committed=[self.committed.extend]
        )

    def store(self, start: int, stop: int) -> int:
        plan = plan_store(self.index, GROUP, KEYS, start, stop)
        return self.ledger.open_store(plan.slots, int64_array(plan.slots), GROUP.block_bytes)

    def dropped(self, reason: DropReason) -> float:
        return self.recorder.total(names.DROPPED_BLOCKS, "cpu", reason.value)


def test_ledger_store_is_readable_after_all_ranks_report() -> None:
    tier = Tier(8, ranks=3)
    job = tier.store(0, 4)
    tier.ledger.report_store(job, [StoreReport(4), StoreReport(4)])
    assert tier.index.match_prefix(KEYS) == 0
    assert tier.ledger.has_open_stores
    tier.ledger.report_store(job, [StoreReport(4)])
    assert tier.index.match_prefix(KEYS) == 4
    assert not tier.ledger.has_open_stores
    assert tier.recorder.total(names.STORED_BLOCKS) == 4
    assert tier.recorder.total(names.STORED_BYTES) == 240
    tier.index.check()


def test_ledger_block_dropped_by_one_rank_is_aborted() -> None:
    tier = Tier(8, ranks=2)
    job = tier.store(0, 4)
    tier.ledger.report_store(job, [StoreReport(4), StoreReport(1, DropReason.COPY_FAILED)])
    assert tier.index.match_prefix(KEYS) == 1
    assert tier.dropped(DropReason.COPY_FAILED) == 3
    assert tier.index.used_bytes == 64
    tier.index.check()


def test_ledger_more_reports_than_ranks_is_error() -> None:
    tier = Tier(8)
    job = tier.store(0, 2)
    with pytest.raises(InvariantError):
        tier.ledger.report_store(job, [StoreReport(2), StoreReport(2)])


def test_ledger_fetch_makes_readable_what_all_ranks_have() -> None:
    tier = Tier(8, ranks=2)
    plan = plan_store(tier.index, GROUP, KEYS, 0, 4)
    job = tier.ledger.open_fetch(plan.slots)
    tier.ledger.report_fetch(job, [StoreReport(4)])
    assert tier.index.match_prefix(KEYS) == 0
    assert (tier.ledger.open_fetches, tier.ledger.has_open) == (1, True)
    tier.ledger.report_fetch(job, [StoreReport(3)])
    assert tier.index.match_prefix(KEYS) == 3
    assert tier.committed == plan.slots[:3]
    assert (tier.ledger.open_fetches, tier.ledger.has_open) == (0, False)
    assert tier.recorder.total(names.PREFETCHED_BLOCKS) == 3
    assert tier.recorder.total(names.STORED_BLOCKS) == 0
    assert tier.index.used_bytes == 3 * 64
    tier.index.check()


def test_ledger_fetch_that_a_reset_overtakes_is_not_readable() -> None:
    tier = Tier(8)
    job = tier.ledger.open_fetch(plan_store(tier.index, GROUP, KEYS, 0, 4).slots)
    tier.index.clear()
    tier.ledger.report_fetch(job, [StoreReport(4)])
    assert (tier.index.match_prefix(KEYS), tier.index.used_bytes) == (0, 0)
    assert tier.recorder.total(names.PREFETCHED_BLOCKS) == 0
    tier.index.check()


def test_ledger_fetch_whose_reports_are_given_up_is_readable_when_they_arrive() -> None:
    tier = Tier(8)
    job = tier.ledger.open_fetch(plan_store(tier.index, GROUP, KEYS, 0, 4).slots)
    assert tier.ledger.give_up_reports() == 1
    assert not tier.ledger.has_open
    tier.ledger.report_fetch(job, [StoreReport(4)])
    assert tier.index.match_prefix(KEYS) == 4
    tier.index.check()


def test_plan_store_sequence_longer_than_tier_keeps_head() -> None:
    tier = Tier(3)
    plan = plan_store(tier.index, GROUP, KEYS, 0, 10)
    assert plan.positions == [0, 1, 2]
    assert plan.dropped == 7


def test_plan_store_skips_present_blocks() -> None:
    tier = Tier(8)
    tier.ledger.report_store(tier.store(0, 2), [StoreReport(2)])
    pending = tier.store(2, 3)
    plan = plan_store(tier.index, GROUP, KEYS, 0, 5)
    assert plan.positions == [3, 4]
    tier.ledger.report_store(pending, [StoreReport(1)])


def test_ledger_load_pins_blocks_until_report() -> None:
    tier = Tier(2)
    tier.ledger.report_store(tier.store(0, 2), [StoreReport(2)])
    slots = tier.ledger.open_load("r", KEYS[:2], 120)
    assert tier.index.pinned_slots() == set(slots)
    assert plan_store(tier.index, GROUP, KEYS, 5, 6).dropped == 1
    assert tier.ledger.is_loading("r")
    with pytest.raises(InvariantError):
        tier.ledger.open_load("r", KEYS[:2], 120)
    tier.ledger.close_load("r")
    assert not tier.index.pinned_slots()
    assert tier.recorder.total(names.LOADED_BLOCKS, "cpu") == 2
    assert tier.recorder.total(names.LOADED_BYTES, "cpu") == 120


def test_ledger_failed_load_removes_blocks() -> None:
    tier = Tier(4)
    tier.ledger.report_store(tier.store(0, 3), [StoreReport(3)])
    tier.ledger.open_load("r", KEYS[:2], 120)
    tier.ledger.close_load("r", tiers.Tier.CPU)
    assert tier.index.lookup(KEYS[0]) is Lookup.MISS
    assert tier.index.lookup(KEYS[2]) is Lookup.HIT
    assert tier.recorder.total(names.LOAD_FAILURES) == 1
    assert tier.recorder.total(names.LOADED_BLOCKS) == 0
    tier.index.check()


def test_ledger_reset_during_store_counts_as_dropped() -> None:
    tier = Tier(4)
    job = tier.store(0, 3)
    tier.index.clear()
    tier.ledger.report_store(job, [StoreReport(3)])
    assert tier.index.used_bytes == 0
    assert tier.dropped(DropReason.RESET) == 3
    assert tier.recorder.total(names.STORED_BLOCKS) == 0
    tier.index.check()


@pytest.mark.parametrize(
    ("computed", "limit", "expected"),
    [(0, 40, 20), (0, 19, 16), (8, 40, 12), (20, 40, 0), (24, 40, 0), (0, 3, 0)],
)
def test_loadable_tokens_single_group(computed: int, limit: int, expected: int) -> None:
    tier = Tier(8)
    tier.ledger.report_store(tier.store(0, 5), [StoreReport(5)])
    assert loadable_tokens(tier.index, [GROUP], [KEYS], computed, limit, 4) == expected


def test_loadable_tokens_end_where_first_group_ends() -> None:
    wide = Group(group_id=1, block_size=8, block_bytes=60, size_class=0)
    wide_keys = [BlockKey(bytes([100 + n]) * 17) for n in range(5)]
    index = BlockIndex(ArenaGeometry(64 * 20, (64,)), "lru")
    for name in (*KEYS[:7], *wide_keys[:2]):
        index.commit(index.reserve(name, None, 0))
    assert loadable_tokens(index, [GROUP, wide], [KEYS, wide_keys], 0, 40, 8) == 16
    assert loadable_tokens(index, [wide, GROUP], [wide_keys, KEYS], 0, 40, 8) == 16
    index.remove(KEYS[3])  # the group of small blocks ends within a large block
    assert loadable_tokens(index, [GROUP, wide], [KEYS, wide_keys], 0, 40, 8) == 8
    assert loadable_tokens(index, [wide, GROUP], [wide_keys, KEYS], 0, 40, 8) == 8
    index.commit(index.reserve(KEYS[3], None, 0))
    index.remove(wide_keys[0])
    assert loadable_tokens(index, [GROUP, wide], [KEYS, wide_keys], 0, 40, 8) == 0
    assert loadable_tokens(index, [GROUP, wide], [KEYS, wide_keys], 8, 40, 8) == 8


def loading_ahead(tier: Tier, blocks: int) -> int:
    """Opens a load ahead of a step, for blocks that were stored before."""
    job = tier.store(0, blocks)
    tier.ledger.report_store(job, [StoreReport(blocks)] * tier.ranks)
    tier.ledger.open_load("r", KEYS[:blocks], 60 * blocks)
    return tier.ledger.to_step_load("r")


def test_ledger_load_ahead_pins_until_all_ranks_report() -> None:
    tier = Tier(4, ranks=2)
    job = loading_ahead(tier, 2)
    assert tier.ledger.report_step_load(job, [True]) is None
    assert len(tier.index.pinned_slots()) == 2
    assert tier.ledger._step_loads
    assert tier.ledger.report_step_load(job, [True]) is None
    assert not tier.index.pinned_slots()
    assert not tier.ledger._step_loads
    assert tier.index.match_prefix(KEYS) == 2
    tier.index.check()


def test_ledger_load_ahead_failed_on_one_rank_fails() -> None:
    tier = Tier(4, ranks=2)
    job = loading_ahead(tier, 2)
    assert tier.ledger.report_step_load(job, [True, False]) == "r"
    assert tier.index.match_prefix(KEYS) == 0
    assert not tier.index.pinned_slots()
    tier.index.check()


@pytest.mark.parametrize("failed", [None, tiers.Tier.CPU, tiers.Tier.REMOTE])
def test_ledger_on_end_is_called_however_load_ends(failed: tiers.Tier | None) -> None:
    tier = Tier(4)
    given_back: list[bool] = []
    tier.ledger.open_load("r", [], 0, 2, 120, on_end=lambda: given_back.append(True))
    assert not given_back
    tier.ledger.close_load("r", failed)
    assert given_back == [True]


def test_ledger_spoiled_stores_never_become_readable() -> None:
    tier = Tier(8)
    plan = plan_store(tier.index, GROUP, KEYS, 0, 2)
    before = tier.ledger.open_store(plan.slots, int64_array(plan.slots), GROUP.block_bytes)
    tier.ledger.report_store(before, [StoreReport(2)])
    plan = plan_store(tier.index, GROUP, KEYS, 2, 4)
    job = tier.ledger.open_store(plan.slots, int64_array(plan.slots), GROUP.block_bytes)
    tier.ledger.spoil_stores()
    again = plan_store(tier.index, GROUP, KEYS, 2, 4)  # recomputed meanwhile
    tier.ledger.report_store(job, [StoreReport(2)])
    assert [tier.index.lookup(key) for key in KEYS[:4]] == [
        Lookup.HIT,
        Lookup.HIT,
        Lookup.PENDING,
        Lookup.PENDING,
    ]
    tier.ledger.report_store(
        tier.ledger.open_store(again.slots, int64_array(again.slots), GROUP.block_bytes),
        [StoreReport(2)],
    )
    assert tier.index.match_prefix(KEYS) == 4
    tier.index.check()
