"""The account of a request, for answers that few engines give; tests/engine has the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv.cache.cost_model import Choice, Span
from vllm_tiered_kv.cache.ghosts import Ghosts
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import StoreReport, TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.scheduler.account import Account, Miss
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.miss_causes import MissCauses
from vllm_tiered_kv.connector.scheduler.request_state import Match, RequestState
from vllm_tiered_kv.connector.scheduler.store_planner import StorePlanner
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason, MissCause
from vllm_tiered_kv.metrics.recorder import Recorder

GROUP = Group(group_id=0, block_size=4, block_bytes=64, size_class=0)
KEYS = [BlockKey(bytes([n]) * 16 + b"\0") for n in range(10)]


class Bench:
    """The causes over an empty tier, for requests of 42 tokens."""

    def __init__(self) -> None:
        self.ghosts = Ghosts(10 * 64, 64)
        self.index = BlockIndex(ArenaGeometry(10 * 64, (64,)), "lru", ghosts=self.ghosts)
        self.recorder = Recorder()
        self.ledger = TransferLedger(self.index, self.recorder, 1, self.ghosts)
        tier = self.tier = CpuTier([GROUP], self.index, self.ledger, self.recorder)
        self.causes = MissCauses(
            tier, self.ghosts, KeyMaker(b"", (4,)), may_load=True, has_daemons=False
        )

    def admit(self, match: Match, loaded: int = 0, remote: int = 0) -> Account:
        request: Any = SimpleNamespace(
            request_id="r",
            num_tokens=42,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            cache_salt=None,
        )
        keys: Any = SimpleNamespace(of_group=[KEYS])
        state = RequestState(request, keys)
        self.causes.admitted(state, match, loaded, remote, may_query_daemons=False)
        assert state.account is not None
        assert state.account.gpu + sum(state.account.loaded.values()) + state.account.computed == 42
        return state.account


def match(loadable: int, held: int, chosen: int, shares: dict[Tier, float] | None = None) -> Match:
    spans = (Span(Tier.REMOTE if shares else Tier.CPU, held, shares or {}),)
    return Match(0, loadable, 40, choice=Choice(chosen, spans), reachable=40)


def by_cause(account: Account) -> dict[MissCause, int]:
    return {miss.cause: miss.tokens for miss in account.missed}


def test_causes_load_that_another_connector_takes_is_its_own() -> None:
    account = Bench().admit(match(loadable=24, held=24, chosen=24))
    assert by_cause(account) == {
        MissCause.OTHER_CONNECTOR: 24,
        MissCause.NEVER_STORED: 16,
        MissCause.PARTIAL_BLOCK: 2,
    }


def test_causes_load_that_is_not_tried_again_is_load_failed() -> None:
    account = Bench().admit(match(loadable=0, held=40, chosen=40))
    assert by_cause(account) == {MissCause.LOAD_FAILED: 40, MissCause.PARTIAL_BLOCK: 2}


def test_causes_shorter_load_is_policy_for_the_rest() -> None:
    account = Bench().admit(match(loadable=12, held=40, chosen=12), loaded=12)
    assert account.loaded == {Tier.CPU: 12}
    assert by_cause(account) == {MissCause.POLICY: 28, MissCause.PARTIAL_BLOCK: 2}


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({Tier.MEMORY: 1.0}, {Tier.MEMORY: 40}),
        ({Tier.MEMORY: 0.5, Tier.SSD: 0.5}, {Tier.MEMORY: 20, Tier.SSD: 20}),
        (
            {Tier.MEMORY: 0.25, Tier.SSD: 0.5, Tier.BACKING: 0.25},
            {Tier.MEMORY: 10, Tier.SSD: 20, Tier.BACKING: 10},
        ),
    ],
)
def test_causes_loads_are_split_by_the_tiers_of_the_daemon(
    shares: dict[Tier, float], expected: dict[Tier, int]
) -> None:
    found = match(loadable=40, held=40, chosen=40, shares=shares)
    assert Bench().admit(found, loaded=40, remote=40).loaded == expected


def test_causes_block_that_is_being_stored_is_pending() -> None:
    bench = Bench()
    bench.index.reserve(KEYS[0], None, 0)
    account = bench.admit(match(loadable=0, held=0, chosen=0))
    assert by_cause(account) == {MissCause.PENDING: 40, MissCause.PARTIAL_BLOCK: 2}


def test_causes_first_block_of_a_failed_store_is_dropped_with_its_reason() -> None:
    bench = Bench()
    plan = bench.index.reserve_missing(KEYS, 0, 10, 0)
    job = bench.ledger.open_store(plan.slots, int64_array(plan.slots), 64)
    bench.ledger.report_store(job, [StoreReport(4, DropReason.NOT_PINNED_YET)])
    account = bench.admit(match(loadable=16, held=16, chosen=16), loaded=16)
    (dropped, _) = account.missed
    assert (dropped.cause, dropped.tokens) == (MissCause.DROPPED, 24)
    assert dropped.reason is DropReason.NOT_PINNED_YET


def test_causes_dropped_block_behind_one_that_the_tier_holds_is_known() -> None:
    bench = Bench()
    for key in (KEYS[1], *(BlockKey(bytes([n]) * 17) for n in range(100, 108))):
        slot = bench.index.reserve(key, None, 0)
        assert slot is not None
        bench.index.commit(slot)
        bench.index.pin([key])  # one slot is left
    planner = StorePlanner(bench.tier, None, 4, has_daemons=False)
    keys: Any = SimpleNamespace(of_group=[KEYS])
    planner._store_blocks(RequestState(SimpleNamespace(), keys), GROUP, [1, 2, 3, 4])
    assert bench.index.are_missing(KEYS[:4]) == [False, False, True, True]
    found = [bench.ghosts.find(key) for key in KEYS[:4]]
    assert [ghost is not None for ghost in found] == [False, False, True, False]


def test_account_of_a_failed_load_computes_its_tokens() -> None:
    account = Account(42, 0, {Tier.CPU: 30, Tier.SSD: 10}, [Miss(MissCause.PARTIAL_BLOCK, 2)])
    assert account.load_failed() == 40
    assert account.load_failed() == 0
    assert by_cause(account) == {MissCause.LOAD_FAILED: 40, MissCause.PARTIAL_BLOCK: 2}
    assert account.computed == 42


def test_computed_tokens_are_counted_by_cause() -> None:
    bench = Bench()
    bench.admit(match(loadable=0, held=0, chosen=0))
    assert bench.recorder.samples(names.COMPUTED_TOKENS) == {
        ("never_stored",): 40,
        ("partial_block",): 2,
    }
