"""The scheduler's side of the daemons: runs of positions, lookups with a deadline, bounded puts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from vllm_tiered_kv.cache.ghosts import Ghosts
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import StoreReport, TransferLedger
from vllm_tiered_kv.cache.planner import Group, loadable_tokens, plan_store
from vllm_tiered_kv.config import StepLoads, TieredKVConfig
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.scheduler import remote_lookups
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.load_planner import LoadPlanner
from vllm_tiered_kv.connector.scheduler.load_policy import LoadDecider
from vllm_tiered_kv.connector.scheduler.miss_causes import MissCauses
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.remote_puts import RemotePuts
from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.step_load_policy import StepLoadPolicy
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.placement import anchor_position, anchors_of, placed_runs
from vllm_tiered_kv.remote.store import RemoteMatch

GROUP = Group(group_id=0, block_size=4, block_bytes=64, size_class=0)


def chain(count: int) -> list[BlockKey]:
    return [BlockKey(n.to_bytes(16, "little") + b"\0") for n in range(1, count + 1)]


@dataclass
class Server:
    """A daemon reduced to what it answers."""

    address: str
    holds: set[bytes] = field(default_factory=set)
    answers: threading.Event = field(default_factory=threading.Event)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers.set()

    def match_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], pin_ms: int, deadline: float
    ) -> RemoteMatch | None:
        self.asked.append(len(keys))
        if not self.answers.wait(max(0, deadline - time.monotonic())):
            return None
        count = next((n for n, key in enumerate(keys) if key not in self.holds), len(keys))
        return RemoteMatch(count, {Tier.MEMORY: count})


class Servers:
    """Places anchors on servers as a test says."""

    is_up = True

    def __init__(self, by_anchor: dict[bytes, Server | None]) -> None:
        self.by_anchor = by_anchor
        self.stores = {server.address: server for server in by_anchor.values() if server}

    def server_for(self, anchor: bytes) -> Server | None:
        return self.by_anchor[anchor]


def placed(keys: list[BlockKey], *servers: Server | None) -> Servers:
    anchors = sorted({anchor_position(n) for n in range(len(keys))})
    return Servers({keys[a]: server for a, server in zip(anchors, servers, strict=True)})


def test_runs_of_one_server_are_one_query() -> None:
    keys = chain(160)
    a, b = Server("a"), Server("b")
    runs = [
        (start, stop, s.address) for start, stop, s in placed_runs(placed(keys, a, a, b), keys, 5)
    ]
    assert runs == [(5, 128, "a"), (128, 160, "b")]
    assert list(placed_runs(placed(keys, a, None, b), keys, 0)) == [(0, 64, a)]
    assert list(placed_runs(placed(keys, None, a, b), keys, 0)) == []
    assert list(placed_runs(placed(keys, a, a, b), keys, 160)) == []


def ask(servers: Servers, keys: list[BlockKey], first: int = 0, timeout: float = 30.0):
    recorder = Recorder()
    lookups = RemoteLookups(servers, [RankTag()], timeout, 1.0, recorder)  # type: ignore[arg-type]
    lookup = lookups.start([keys], [first])
    end = time.monotonic() + 60
    while lookup.is_pending and time.monotonic() < end:
        lookups.poll(lookup)
        time.sleep(0.001)
    return lookup, recorder, lookups


def test_lookup_goes_on_from_daemon_to_daemon_and_ends_at_the_first_gap() -> None:
    keys = chain(160)
    a, b = Server("a", set(keys)), Server("b", set(keys[:150]))
    lookup, recorder, lookups = ask(placed(keys, a, a, b), keys, first=10)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(10, 150)]
    assert [(s.start, s.stop, s.address) for s in lookup.answer.spans[0]] == [
        (10, 128, "a"),
        (128, 150, "b"),
    ]
    assert a.asked == [118]
    assert recorder.total(names.LOOKUPS, "remote", "hit") == 1
    lookups.close()


@pytest.mark.parametrize("gap", [0, 63, 64, 127, 128, 200, 255, 256, 299])
def test_lookup_asks_each_daemon_once_for_all_its_runs(gap: int) -> None:
    keys = chain(300)
    a, b = (Server(name, set(keys) - {keys[gap]}) for name in "ab")
    lookup, _, lookups = ask(placed(keys, a, b, a, b, a), keys)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(gap)]
    found = [n for s in lookup.answer.spans[0] for n in range(s.start, s.stop)]
    assert found == list(range(gap))
    assert a.asked == [64 + 64 + 44]
    assert b.asked == ([] if gap < 64 else [64 + 64])
    lookups.close()


def test_lookup_asks_several_daemons_at_the_same_time() -> None:
    keys = chain(64 * 6)
    servers = [Server(name, set(keys)) for name in "abcdef"]
    together = threading.Barrier(5)
    for server in servers[1:]:
        server.answers = SimpleNamespace(wait=lambda _: together.wait(30) >= 0)  # type: ignore[assignment]
    lookup, _, lookups = ask(placed(keys, *servers), keys)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(64 * 6)]
    assert [len(server.asked) for server in servers] == [1] * 6
    lookups.close()


def test_queries_of_a_long_chain_are_limited_and_count_their_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_lookups, "_MAX_KEYS_PER_QUERY", 100)
    a, b = Server("a"), Server("b")
    runs = [(5, 64, a), (64, 128, b), (128, 160, a), (160, 500, b)]
    queries, parts = remote_lookups._batch_queries(runs)  # type: ignore[arg-type]
    assert parts[:3] == [(0, 0, range(5, 64)), (1, 0, range(64, 128)), (0, 59, range(128, 160))]
    assert [n for *_, part in parts for n in part] == list(range(5, 500))
    for number, column, part in parts:
        server, of_query = queries[number]
        positions = [n for each in of_query for n in each]
        assert positions[column : column + len(part)] == list(part)
        assert len(positions) <= 100
        assert (server.address == "a") == (part.start in (5, 128))


def test_gap_on_the_first_daemon_sends_no_query_to_the_second() -> None:
    keys = chain(160)
    a, b = Server("a", set(keys) - {keys[100]}), Server("b", set(keys))
    lookup, _, lookups = ask(placed(keys, a, a, b), keys)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(100)]
    assert b.asked == []
    lookups.close()


def test_nothing_found_is_a_miss() -> None:
    keys = chain(20)
    lookup, recorder, lookups = ask(placed(keys, Server("a")), keys)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(0)]
    assert recorder.total(names.LOOKUPS, "remote", "miss") == 1
    lookups.close()


def test_lookup_without_any_answer_is_not_a_miss() -> None:
    keys = chain(20)
    servers = placed(keys, Server("a"))
    servers.is_up = False
    lookup, recorder, lookups = ask(servers, keys)
    assert lookup.answer is not None
    assert recorder.samples(names.LOOKUPS) == {("remote", "unavailable"): 1}
    lookups.close()


def test_past_its_deadline_a_lookup_is_a_miss_and_polling_never_waits() -> None:
    keys = chain(20)
    silent = Server("a", set(keys))
    silent.answers.clear()
    lookup, recorder, lookups = ask(placed(keys, silent), keys, timeout=0.05)
    assert lookup.given_up or (lookup.answer is not None and not any(lookup.answer.spans))
    assert recorder.total(names.LOOKUPS, "remote", "hit") == 0
    silent.answers.set()
    lookups.poll(lookup)  # an answer that comes later changes nothing
    assert lookup.answer is None or not any(lookup.answer.spans)
    lookups.close()


def test_lookup_that_waits_for_a_thread_keeps_its_deadline_too() -> None:
    keys = chain(4)
    silent = Server("a", set(keys))
    silent.answers.clear()
    servers = placed(keys, silent)
    lookups = RemoteLookups(servers, [RankTag()], 0.2, 1.0, Recorder(), threads=1)  # type: ignore[arg-type]
    started = [lookups.start([keys], [0]) for _ in range(5)]
    end = time.monotonic() + 30
    while any(lookup.is_pending for lookup in started) and time.monotonic() < end:
        for lookup in started:
            lookups.poll(lookup)
        time.sleep(0.001)
    assert not any(lookup.is_pending for lookup in started)
    silent.answers.set()
    lookups.close()


def test_lookup_that_raises_is_a_miss() -> None:
    """The answer is taken in the engine's own loop: nothing may be raised there."""
    keys = chain(4)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    server = Server("a", set(keys))
    server.match_all = broken  # type: ignore[method-assign]
    lookup, recorder, lookups = ask(placed(keys, server), keys)
    assert lookup.answer is not None
    assert lookup.answer.positions() == [range(0)]
    assert recorder.total(names.LOOKUPS, "remote", "miss") == 1
    lookups.close()


class Asked:
    """What a scheduler is told of one request whose blocks one server may have."""

    def __init__(self, fresh_s: float) -> None:
        self.keys = chain(4)
        self.server = Server("tcp://a:1")
        servers = placed(self.keys, self.server)
        self.index = BlockIndex(ArenaGeometry(4 * 64, (64,)), "lru")
        self.lookups = RemoteLookups(servers, [RankTag()], 30.0, fresh_s, Recorder())  # type: ignore[arg-type]
        self.cpu = CpuTier(
            [GROUP], self.index, TransferLedger(self.index, Recorder(), 1), Recorder()
        )
        self.tier = RemoteTier(servers, self.lookups, None, self.cpu, True)  # type: ignore[arg-type]
        keys = SimpleNamespace(of_group=[self.keys])
        self.state = RequestState(None, keys)  # type: ignore[arg-type]

    def keep(self, *positions: int) -> None:
        """The CPU tier has these blocks, and no others."""
        self.index.clear()
        for n in positions:
            slot = self.index.reserve(self.keys[n], self.keys[n - 1] if n else None, 0)
            assert slot is not None
            self.index.commit(slot)

    def positions(self, computed: int = 0) -> range:
        end = time.monotonic() + 60
        while (answer := self.tier.positions(self.state, computed, 16)) is None:
            assert time.monotonic() < end, "a request waits forever"
            time.sleep(0.001)
        return answer[0]

    def age(self) -> None:
        assert self.state.remote.lookup is not None
        self.state.remote.lookup.fresh_until = 0.0


def test_request_that_waited_in_line_is_looked_up_anew() -> None:
    """Its blocks may have come, or gone, since it arrived."""
    asked = Asked(fresh_s=60)
    asked.tier.begin(asked.state, 16)
    assert asked.positions() == range(0)
    asked.server.holds = set(asked.keys)
    assert asked.positions() == range(0)
    assert len(asked.server.asked) == 1, "a fresh answer is asked for again"
    asked.age()
    assert asked.positions() == range(4)
    asked.server.holds = set()
    asked.age()
    assert asked.positions() == range(0)
    asked.lookups.close()


def test_blocks_evicted_while_a_request_waits_are_looked_up_too() -> None:
    """When it arrived the CPU tier had its head, so the daemon was asked for the rest alone."""
    asked = Asked(fresh_s=60)
    asked.server.holds = set(asked.keys)
    asked.keep(0, 1)
    asked.tier.begin(asked.state, 16)
    assert asked.positions() == range(2, 4)
    asked.keep()
    assert asked.positions() == range(4)
    asked.keep(0)
    asked.keep()
    assert asked.positions() == range(4)
    assert len(asked.server.asked) == 2, "an answer for all blocks depends on no other tier"
    asked.lookups.close()


def test_blocks_that_the_gpu_evicts_meanwhile_are_looked_up_too() -> None:
    asked = Asked(fresh_s=60)
    asked.server.holds = set(asked.keys)
    assert asked.positions(computed=12) == range(3, 4)
    assert asked.positions(computed=4) == range(1, 4)
    assert asked.positions(computed=8) == range(1, 4)
    assert len(asked.server.asked) == 2
    for computed in (3, 2, 1, 0):  # the second repeat is the last
        assert asked.positions(computed) == range(4)
    assert len(asked.server.asked) == 3
    asked.lookups.close()


def test_answer_is_used_even_when_steps_take_longer_than_it_stays_fresh() -> None:
    asked = Asked(fresh_s=-1000)
    asked.server.holds = set(asked.keys)
    asked.tier.begin(asked.state, 16)
    for _ in range(3):
        assert asked.positions() == range(4)
    assert len(asked.server.asked) == 4
    asked.lookups.close()


def test_request_that_starts_over_keeps_its_blocks_again() -> None:
    """What a daemon had of it then, it need not have now."""
    asked = Asked(fresh_s=60)
    asked.tier.begin(asked.state, 16)
    asked.state.remote.copies = {0: range(5)}
    LoadPlanner(
        asked.cpu,
        StepLoadPolicy(StepLoads.NEVER, [GROUP], asked.cpu.ledger),
        LoadDecider(TieredKVConfig(), asked.cpu, EngineFacts()),
        asked.tier,
        verification=None,
        reuses_tails=False,
        engine=EngineFacts(),
        misses=MissCauses(
            asked.cpu, Ghosts(64, 64), KeyMaker(b"", (4,)), may_load=True, has_daemons=True
        ),
    ).preempted(asked.state)
    assert not asked.state.remote.copies
    assert asked.state.remote.lookup is None
    asked.lookups.close()


class Tiers:
    """An index with a ledger, and puts to one server."""

    def __init__(self, slots: int, queue_blocks: int, ranks: int = 1) -> None:
        self.recorder = Recorder()
        self.index = BlockIndex(ArenaGeometry(slots * 64, (64,)), "lru")
        self.ledger = TransferLedger(self.index, self.recorder, ranks)
        self.keys = chain(16)
        self.server = Server("tcp://a:1")
        self.servers = placed(self.keys, self.server)
        tier = CpuTier([GROUP], self.index, self.ledger, self.recorder)
        queue_bytes = queue_blocks * GROUP.block_bytes
        self.writes = RemotePuts(self.servers, tier, queue_bytes)  # type: ignore[arg-type]

    def store(self, start: int, stop: int) -> None:
        plan = plan_store(self.index, GROUP, self.keys, start, stop)
        anchors = anchors_of(self.keys, plan.positions)
        job = self.ledger.open_store(
            plan.slots, int64_array(plan.slots), GROUP.block_bytes, None, anchors
        )
        for _ in range(self.ledger._num_ranks):
            self.writes.offer(self.ledger.report_store(job, [StoreReport(len(plan.slots))]))

    def dropped(self, reason: DropReason) -> float:
        return self.recorder.total(names.DROPPED_BLOCKS, "remote", reason.value)


def test_block_on_its_way_is_pinned_until_every_rank_has_sent_it() -> None:
    tiers = Tiers(slots=8, queue_blocks=8, ranks=2)
    tiers.store(0, 3)
    (job,) = tiers.writes.take()
    assert tiers.writes.take() == []
    assert job.keys == tuple(tiers.keys[:3])
    assert job.parents == (None, *tiers.keys[:2])
    assert tiers.index.pinned_slots() == set(job.slots.tolist())
    tiers.ledger.report_put(job.job_id, [StoreReport(3)])
    assert tiers.index.pinned_slots()
    tiers.ledger.report_put(job.job_id, [StoreReport(2, DropReason.REFUSED)])
    assert not tiers.index.pinned_slots()
    assert not tiers.ledger.has_open_puts
    assert tiers.recorder.total(names.STORED_BLOCKS, "remote") == 2
    assert tiers.dropped(DropReason.REFUSED) == 1


def test_blocks_that_find_the_queue_full_are_sent_when_it_has_room() -> None:
    tiers = Tiers(slots=16, queue_blocks=4)
    tiers.store(0, 6)
    (job,) = tiers.writes.take()
    assert job.keys == tuple(tiers.keys[:4])
    tiers.store(6, 8)
    assert tiers.writes.take() == []
    assert not tiers.writes.has_next
    assert tiers.index.pinned_slots() == set(job.slots.tolist()), "waiting blocks are pinned"
    tiers.ledger.report_put(job.job_id, [StoreReport(4)])
    assert tiers.writes.has_next, "an idle engine would leave the rest unsent"
    (job,) = tiers.writes.take()
    assert job.keys == tuple(tiers.keys[4:8])
    assert job.parents == tuple(tiers.keys[3:7])
    tiers.ledger.report_put(job.job_id, [StoreReport(4)])
    assert not tiers.writes.has_next
    assert tiers.dropped(DropReason.QUEUE_FULL) == 0


def test_blocks_evicted_before_they_are_sent_are_counted() -> None:
    tiers = Tiers(slots=6, queue_blocks=2)
    tiers.store(0, 6)
    (job,) = tiers.writes.take()
    assert job.keys == tuple(tiers.keys[:2])
    tiers.store(8, 11)  # evicts three of those that wait
    sent = set(job.keys)
    while True:
        tiers.ledger.report_put(job.job_id, [StoreReport(len(job.keys))])
        jobs = tiers.writes.take()
        if not jobs:
            break
        (job,) = jobs
        sent |= set(job.keys)
    assert sent == {*tiers.keys[:3], *tiers.keys[8:11]}
    assert tiers.dropped(DropReason.QUEUE_FULL) == 3


def test_idle_engine_sends_as_much_as_the_queue_holds_and_rests() -> None:
    """A pause would otherwise take as long as sending the whole tier."""
    tiers = Tiers(slots=16, queue_blocks=2)
    tiers.store(0, 8)
    (job,) = tiers.writes.take()
    tiers.ledger.report_put(job.job_id, [StoreReport(2)])
    assert not tiers.writes.has_next
    tiers.store(8, 9)
    (job,) = tiers.writes.take()
    assert job.keys == tuple(tiers.keys[2:4])


def test_reset_forgets_what_waits() -> None:
    tiers = Tiers(slots=16, queue_blocks=2)
    tiers.store(0, 8)
    tiers.index.clear()
    tiers.writes.reset()
    (job,) = tiers.writes.take()
    tiers.ledger.report_put(job.job_id, [StoreReport(2)])
    assert tiers.writes.take() == []
    assert tiers.dropped(DropReason.RESET) == 6


def test_block_larger_than_the_queue_is_sent_alone() -> None:
    tiers = Tiers(slots=16, queue_blocks=0)
    tiers.store(0, 2)
    for key in tiers.keys[:2]:
        (job,) = tiers.writes.take()
        assert job.keys == (key,)
        assert tiers.writes.take() == []
        tiers.ledger.report_put(job.job_id, [StoreReport(1)])
    assert tiers.writes.take() == []


def test_block_stored_again_waits_once() -> None:
    tiers = Tiers(slots=4, queue_blocks=1)
    for _ in range(4):
        tiers.store(0, 4)
        tiers.store(8, 12)
    assert len(tiers.writes._waiting) <= 8


def test_evicted_blocks_do_not_wait_for_ever() -> None:
    tiers = Tiers(slots=4, queue_blocks=1)
    for start in range(0, 16, 2):
        tiers.store(start, start + 2)
    assert len(tiers.writes._waiting) <= 8
    assert tiers.dropped(DropReason.QUEUE_FULL) > 0


def test_without_a_daemon_nothing_is_pinned() -> None:
    tiers = Tiers(slots=8, queue_blocks=8)
    tiers.servers.by_anchor = dict.fromkeys(tiers.servers.by_anchor)
    tiers.store(0, 3)
    assert tiers.writes.take() == []
    assert not tiers.index.pinned_slots()
    assert tiers.dropped(DropReason.UNAVAILABLE) == 3


def test_blocks_waiting_for_a_daemon_that_dies_are_distinguished_from_refused_ones() -> None:
    tiers = Tiers(slots=8, queue_blocks=1)
    tiers.store(0, 3)
    (job,) = tiers.writes.take()
    tiers.servers.by_anchor = dict.fromkeys(tiers.servers.by_anchor)
    tiers.ledger.report_put(job.job_id, [StoreReport(0, DropReason.UNAVAILABLE)])
    assert tiers.writes.take() == []
    assert tiers.dropped(DropReason.UNAVAILABLE) == 3
    assert not tiers.index.pinned_slots()


def test_reset_while_blocks_are_sent_frees_them_afterwards() -> None:
    tiers = Tiers(slots=4, queue_blocks=4)
    tiers.store(0, 4)
    (job,) = tiers.writes.take()
    tiers.index.clear()
    assert tiers.index.reserve(tiers.keys[9], None, 0) is None, "a slot being sent was reused"
    tiers.ledger.report_put(job.job_id, [StoreReport(4)])
    assert tiers.index.used_bytes == 0
    tiers.index.check()


def test_hit_goes_from_tier_to_tier_without_a_gap() -> None:
    tiers = Tiers(slots=16, queue_blocks=0)
    tiers.store(0, 2)
    tiers.store(5, 7)

    def tokens(remote: range, computed: int = 0, limit: int = 40) -> int:
        return loadable_tokens(tiers.index, [GROUP], [tiers.keys], computed, limit, 4, [remote])

    assert tokens(range(0)) == 8
    assert tokens(range(2, 4)) == 16
    assert tokens(range(2, 5)) == 28  # the CPU tier goes on where the daemon ends
    assert tokens(range(3, 9)) == 8  # a gap at 2
    assert tokens(range(1, 10)) == 40
    assert tokens(range(1, 10), computed=24) == 16
    assert tokens(range(1, 10), limit=18) == 16
