"""How tiers and model are measured, and how long a request waits for an answer."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from vllm_tiered_kv.cache.cost_model import Choice, Span
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import STATE_WINDOW, Group
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.load_policy import LoadDecider
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteAnswer, RemoteLookup, RemoteSpan
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.worker.load_times import LoadTimes
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Fetched
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

GROUP = Group(group_id=0, block_size=4, block_bytes=64, size_class=0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ClockedDecider(LoadDecider):
    def __init__(
        self, groups: tuple[Group, ...] = (GROUP,), num_ranks: int = 1, **options: object
    ) -> None:
        self.clock, self.recorder = Clock(), Recorder()
        self.index = BlockIndex(ArenaGeometry.for_blocks(64 * 1024, [64]), "lru", lambda *_: None)
        config = TieredKVConfig.load({"remote": "tcp://far:1", **options}, {})
        tier = CpuTier(groups, self.index, None, self.recorder)  # type: ignore[arg-type]
        super().__init__(config, tier, EngineFacts(num_ranks, 64), clock=self.clock)
        self.steps: list[tuple[int, float, float]] = []
        learn = self.costs.step_ended

        def step_ended(tokens: int, attended: float, seconds: float) -> None:
            self.steps.append((tokens, attended, seconds))
            learn(tokens, attended, seconds)

        self.costs.step_ended = step_ended


def state(tokens: int, computed: int = 0) -> RequestState:
    request = SimpleNamespace(request_id="r", num_tokens=tokens, num_computed_tokens=computed)
    keys = [BlockKey(n.to_bytes(16, "little") + b"\0") for n in range(1, tokens // 4 + 1)]
    return RequestState(request, SimpleNamespace(of_group=[keys]))


# ---- steps --------------------------------------------------------------------------------------


def test_prefill_step_is_timed_from_its_plan_to_its_output() -> None:
    decider = ClockedDecider()
    number = decider.step_planned({"a": 40}, {"a": state(100, 60)}, False)
    decider.clock.now += 0.25
    decider.output_received(number)
    assert decider.steps == [(40, 40 * 80, pytest.approx(0.25))]


def test_step_planned_ahead_begins_when_the_one_before_has_ended() -> None:
    decider = ClockedDecider()
    first = decider.step_planned({"a": 64}, {"a": state(200)}, False)
    second = decider.step_planned({"a": 64}, {"a": state(200, 64)}, False)
    decider.clock.now += 1.0
    decider.output_received(first)
    decider.clock.now += 0.5
    decider.output_received(second)
    assert sorted(seconds for *_, seconds in decider.steps) == pytest.approx([0.5, 1.0])


def test_steps_that_say_little_about_prefill_are_not_measured() -> None:
    decider = ClockedDecider()
    prompt, decode = state(100), state(50, 50)
    assert decider.step_planned({}, {}, False) is None
    assert decider.step_planned({"d": 1, "e": 1}, {"d": decode, "e": decode}, False) is None
    assert decider.step_planned({"p": 40}, {"p": prompt}, has_loads=True) is None
    assert decider.step_planned({"p": 4, "d": 1, "e": 1}, {"p": prompt}, False) is None
    assert decider.step_planned({"d": 5}, {"d": decode}, False) is None  # drafts
    assert decider.step_planned({"unknown": 40}, {}, False) is None
    assert decider.step_planned({"p": 40, "d": 1}, {"p": prompt, "d": decode}, False) is not None
    decider.output_received(None)
    decider.output_received(12345)
    assert decider.steps == []


def test_step_that_only_decodes_tells_now_and_then_what_a_step_costs() -> None:
    decider = ClockedDecider()
    decode = state(50, 50)
    measured = 0
    for _ in range(64):
        number = decider.step_planned({"d": 1}, {"d": decode}, False)
        decider.clock.now += 0.008
        decider.output_received(number)
        measured += number is not None
    assert measured == 3 + 4, "the first ones, and then one in 16"
    assert decider.steps == [(1, 0.0, pytest.approx(0.008))] * 7
    many = {f"d{n}": 1 for n in range(100)}
    assert all(decider.step_planned(many, {}, False) is None for _ in range(64)), (
        "these take longer"
    )


def test_numbers_that_never_come_back_are_forgotten() -> None:
    decider = ClockedDecider()
    for _ in range(1000):
        decider.step_planned({"a": 40}, {"a": state(100)}, False)
    assert len(decider._steps) <= 16


def test_policies_without_decisions_measure_nothing() -> None:
    decider = ClockedDecider(load_policy="always")
    assert decider.step_planned({"a": 40}, {"a": state(100)}, False) is None


# ---- loads --------------------------------------------------------------------------------------


def admitted(decider: ClockedDecider, tokens: int = 40, is_timed: bool = True) -> None:
    spans = (Span(Tier.REMOTE, tokens, {Tier.SSD: 1.0}),)
    decider.admitted("r", Choice(tokens, spans), tokens, is_timed)


def test_slowest_rank_is_learnt() -> None:
    decider = ClockedDecider()
    admitted(decider)
    decider.record_load_times({"r": {"remote": 0.1}, "other": {"remote": 9.0}})
    decider.record_load_times({"r": {"remote": 0.3}})
    decider.clock.now += 5  # a busy engine
    decider.load_ended("r", None)
    decider.load_ended("r", None)  # another connector's, or a second report
    costs = decider.costs
    assert costs.speeds[Tier.SSD].seconds(640) == pytest.approx(0.3)
    assert not costs.loads
    assert decider.recorder.total(names.LOAD_DECISIONS, "remote", "load") == 1
    decider.record()
    assert decider.recorder.total(names.LOAD_SPEED, "ssd") > 0


@pytest.mark.parametrize(("elapsed", "learnt"), [(0.01, 0), (4.9, 1)])
def test_timed_out_load_makes_the_tier_slow(elapsed: float, learnt: int) -> None:
    decider = ClockedDecider()
    admitted(decider)
    decider.clock.now += elapsed
    decider.load_ended("r", Tier.REMOTE)
    assert decider.costs.speeds[Tier.SSD].count == learnt


def test_probe_of_several_ranks_counts_the_slowest() -> None:
    decider = ClockedDecider(num_ranks=2)
    spans = (Span(Tier.REMOTE, 400, {Tier.SSD: 1.0}),)
    choice = Choice(0, spans, range(40), Tier.SSD)
    assert decider.admitted("r", choice, 0, True) == range(40)
    assert decider.recorder.total(names.LOAD_DECISIONS, "remote", "probe") == 1
    speed = decider.costs.speeds[Tier.SSD]
    decider.probes_ended({"r": [Fetched(640, 0.1)]})
    assert not speed.count
    decider.probes_ended({"r": [Fetched(320, 0.1)]})
    assert speed.seconds(320) == pytest.approx(0.1)
    decider.admitted("s", choice, 0, True)
    decider.probes_ended({"s": [Fetched(640, 0.1), Fetched()]})
    assert speed.count == 1, "of one rank it came to nothing"
    for _ in range(2):  # a request that starts over
        decider.admitted("t", choice, 0, True)
        decider.probes_ended({"t": [Fetched(640, 0.1), Fetched(640, 0.1)]})
    assert speed.count == 3


def test_recomputed_hits_are_logged_periodically(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_tiered_kv")
    decider = ClockedDecider()
    spans = (Span(Tier.CPU, 20), Span(Tier.REMOTE, 400, {Tier.SSD: 1.0}))
    choice = Choice(20, spans)
    for number in range(3):
        decider.admitted(f"r{number}", choice, 20, True)
    decider.clock.now += 61
    taught(decider, 0.001)
    for _ in range(3):
        decider.costs.speeds[Tier.SSD].observe(6400, 2.0)
    decider.admitted("r3", choice, 20, True)
    first, second = (record.getMessage() for record in caplog.records)
    assert "request r0 recomputes 400 cached tokens (ssd): the load speed" in first
    assert "request r3 recomputes 400 cached tokens (ssd): loading would take" in second
    assert "(3 such requests" in second
    caplog.clear()
    decider.admitted("r4", Choice(420, spans), 420, True)
    ClockedDecider(load_policy="never").admitted("r5", choice, 20, True)
    assert not caplog.records


def test_hit_that_measures_the_model_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_tiered_kv")
    decider = ClockedDecider()
    choice = decider.costs.choose(0, 0, [Span(Tier.REMOTE, 80, {Tier.MEMORY: 1.0})])
    decider.admitted("r0", choice, choice.tokens, True)
    (line,) = (record.getMessage() for record in caplog.records)
    assert "request r0 recomputes 16 cached tokens (memory): they measure" in line


def test_load_without_reported_end_is_not_awaited() -> None:
    decider = ClockedDecider()
    admitted(decider, is_timed=False)
    assert decider._loads == {}
    assert not decider.costs.loads


def test_spans_follow_the_chain() -> None:
    decider, asked = ClockedDecider(), state(81)
    keys = asked.keys.of_group[0]
    for n in (*range(4), *range(16, 20)):
        slot = decider.index.reserve(keys[n], keys[n - 1] if n else None, 0)
        decider.index.commit(slot)
    asked.remote.lookup = RemoteLookup(
        Future(),
        0.0,
        0.0,
        0.0,
        RemoteAnswer(
            (
                (
                    RemoteSpan(2, 8, "a", by_tier={Tier.MEMORY: 6}),
                    RemoteSpan(8, 16, "b", by_tier={Tier.MEMORY: 2, Tier.SSD: 6}),
                ),
            )
        ),
    )
    assert decider._spans(asked, 4, 76, [range(2, 16)]) == [
        Span(Tier.CPU, 12),
        Span(Tier.REMOTE, 16, {Tier.MEMORY: 1.0}),
        Span(Tier.REMOTE, 32, {Tier.MEMORY: 0.25, Tier.SSD: 0.75}),
        Span(Tier.CPU, 16),
    ]
    assert decider._spans(asked, 0, 16, [range(2, 16)]) == [Span(Tier.CPU, 16)]
    assert decider._spans(asked, 4, 12, None) == [Span(Tier.CPU, 12)]


def test_window_stands_for_all_tokens_before_it_and_costs_the_same_whatever_their_number() -> None:
    window = replace(GROUP, window=10)
    alone = ClockedDecider((window,))
    asked = state(81)
    parts = (RemoteSpan(16, 19, "a", by_tier={Tier.MEMORY: 1, Tier.SSD: 1}),)
    asked.remote.lookup = RemoteLookup(Future(), 0.0, 0.0, 0.0, RemoteAnswer((parts,)))
    assert alone._spans(asked, 0, 76, [range(16, 19)]) == [
        Span(Tier.REMOTE, 76, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    ]
    assert alone._spans(asked, 0, 76, [range(0)]) == [Span(Tier.CPU, 76)]
    full = replace(GROUP, group_id=1)
    assert ClockedDecider((window, full)).costs.bytes_per_token == 64 / 4
    assert ClockedDecider((window, full))._group is full


# ---- lookups ------------------------------------------------------------------------------------


def waiting(decider: ClockedDecider, tokens: int) -> RequestState:
    asked = state(tokens)
    asked.remote.lookup = RemoteLookup(Future(), decider.clock.now, decider.clock.now + 0.1, 1e9)
    return asked


def taught(decider: ClockedDecider, seconds_per_token: float) -> None:
    for _ in range(4):
        decider.costs.step_ended(64, 64 * 32, 64 * seconds_per_token)


def test_lookup_waits_as_long_as_it_may_save() -> None:
    decider = ClockedDecider()
    asked = waiting(decider, 400)
    decider.clock.now += 0.05
    assert decider.waits_for_daemons(asked, 0)  # the first load is the probe
    taught(decider, 0.0005)
    assert decider.waits_for_daemons(asked, 0)  # 200 ms to save
    decider._answers.extend([(100, 0)] * 60)
    assert not decider.waits_for_daemons(asked, 0)  # but daemons never have anything
    decider._answers.extend([(100, 100)] * 60)
    assert decider.waits_for_daemons(asked, 0)
    for _ in range(8):
        decider.costs.speeds[Tier.MEMORY].observe(64 * 100, 10.0)
    assert not decider.waits_for_daemons(asked, 0)  # or take longer than computing
    assert decider.waits_for_daemons(waiting(decider, 400), 0)  # a little patience is always there


def test_always_waits() -> None:
    decider = ClockedDecider(load_policy="always")
    asked = waiting(decider, 400)
    taught(decider, 0.0005)
    decider._answers.extend([(100, 0)] * 60)
    decider.clock.now += 0.09
    assert decider.waits_for_daemons(asked, 0)


# ---- a worker's clock ---------------------------------------------------------------------------


def test_load_that_waited_for_another_is_counted_from_its_end() -> None:
    clock = Clock()
    times = LoadTimes(clock)
    times.begin("a", Tier.REMOTE)
    times.begin("b", Tier.REMOTE)
    times.begin("b", Tier.CPU)
    clock.now += 5
    times.end("a", Tier.REMOTE, 101.0, True)
    times.end("b", Tier.REMOTE, 103.0, True)
    times.end("b", Tier.CPU, 100.5, True)
    taken = times.take()
    assert taken == {"a": {"remote": 1.0}, "b": {"remote": 2.0, "cpu": 0.5}}
    assert times.take() == {}


def test_failed_load_has_no_time_but_still_makes_others_wait() -> None:
    times = LoadTimes(clock := Clock())
    times.begin("a", Tier.REMOTE)
    times.begin("b", Tier.REMOTE)
    clock.now += 5
    times.end("a", Tier.REMOTE, 104.0, False)
    times.end("b", Tier.REMOTE, 105.0, True)
    times.end("b", Tier.REMOTE, 105.0, True)
    assert times.take() == {"b": {"remote": 1.0}}


@pytest.mark.parametrize(("asked_after", "is_told"), [(0.9, True), (0.1, False)])
def test_late_end_is_reported_only_if_it_is_nearly_exact(asked_after: float, is_told: bool) -> None:
    times = LoadTimes(clock := Clock())
    times.begin("a", Tier.CPU)
    clock.now += asked_after
    times.polled()
    clock.now = 101.0
    times.end("a", Tier.CPU, None, True)
    assert bool(times.take()) == is_told


def test_states_of_recurrent_layers_have_a_fixed_cost() -> None:
    state = replace(GROUP, group_id=1, window=STATE_WINDOW, is_recurrent=True)
    assert ClockedDecider((GROUP, state)).costs.bytes_per_token == 16
    assert ClockedDecider((replace(state, group_id=0),)).costs.bytes_per_token == 1
