"""Load or recompute: decisions that neither flap nor lose time."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from tests.unit.simulated_engine import (
    BLOCK,
    BYTES_PER_TOKEN,
    STEP_TOKENS,
    Decider,
    Engine,
    Model,
    span,
)
from vllm_tiered_kv.cache.cost_model import Choice, Span
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision


def taught(rates: dict[Tier, float], **settings) -> Decider:
    """One that has seen prefills of all sizes and loads at these speeds."""
    known, model = Decider(**settings), Model()
    for computed, tokens in [(0, 8192), (8192, 8192), (0, 2048), (4096, 512), (0, 64)] * 2:
        attended = tokens * (computed + tokens / 2)
        known.costs.step_ended(tokens, attended, model.step(computed, tokens))
    for tier, rate in rates.items():
        for nbytes in (1e6, 1e7, 1e8, 5e8) * 2:
            known.speeds[tier].observe(nbytes, 0.001 + nbytes / rate)
    return known


def test_cpu_tier_is_loaded_and_a_slow_rest_is_computed() -> None:
    known = taught({Tier.CPU: 50e9, Tier.SSD: 1.6e9})
    known.probes._begun_at = 0.0
    chosen = known.choose(0, 0, [span(Tier.CPU, 5120), span(Tier.SSD, 5120)])
    assert chosen.tokens == 5120
    assert chosen.held == 10240
    assert chosen.decisions == {Tier.CPU: Decision.LOAD, Tier.REMOTE: Decision.RECOMPUTE}


def test_slow_piece_is_loaded_where_it_opens_the_way_to_a_fast_one() -> None:
    known = taught({Tier.CPU: 50e9, Tier.SSD: 1.6e9})
    spans = [span(Tier.SSD, 512), span(Tier.CPU, 9728)]
    assert known.choose(0, 0, spans).tokens == 10240
    assert known.choose(0, 0, spans[:1]).decisions[Tier.REMOTE] is not Decision.LOAD


def test_backlog_makes_a_tier_slower() -> None:
    known = taught({Tier.MEMORY: 8e9})
    spans = [span(Tier.MEMORY, 10240)]
    first = known.choose(0, 0, spans)
    assert first.tokens == 10240
    for n in range(3):
        known.settle(f"r{n}", 0.0, first)
    assert known.choose(0.0, 0, spans).tokens == 0
    for n in range(3):
        known.costs.ended(f"r{n}", 0.3, first, {Tier.REMOTE: 0.075})
    assert known.choose(0.4, 0, spans).tokens == 10240


def test_load_expected_to_time_out_is_not_begun() -> None:
    known = taught({Tier.MEMORY: 8e9}, longest_load_s=0.05)
    assert known.choose(0, 0, [span(Tier.MEMORY, 10240)]).tokens == 0
    assert known.choose(0, 0, [span(Tier.MEMORY, 2560)]).tokens == 2560


@pytest.mark.parametrize("place", [Tier.CPU, Tier.MEMORY])
def test_memory_of_this_host_is_loaded_from_at_any_speed(place: Tier) -> None:
    """A busy engine sees loads that waited for its steps; if it computed instead, it would be
    busier, and never see another one."""
    known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
    for _ in range(16):
        chosen = known.choose(0, 0, [span(place, 10240)])
        assert chosen.tokens == 10240
        assert set(chosen.decisions.values()) == {Decision.LOAD}
        known.settle("r", 0, chosen)
        known.costs.ended("r", 0, chosen, dict.fromkeys(chosen.decisions, 2.0))


def test_memory_that_is_mapped_is_trusted_like_the_cpu_tier() -> None:
    spans = [span(Tier.MEMORY, 10240)]
    mapped = Decider(trusted=(Tier.CPU, Tier.MEMORY))
    assert mapped.choose(0, 0, spans).tokens == 10240
    behind = [span(Tier.SSD, 10240)]
    assert mapped.choose(0, 0, behind).tokens == 8192, "the rest measures the model"
    assert not taught({}).choose(0, 0, spans).tokens


@pytest.mark.parametrize("announced", [None, 3e9])
@pytest.mark.parametrize("computes_on_cpu", [False, True])
def test_first_hits_after_start_are_loaded_and_their_ends_measure_the_model(
    announced: float | None, computes_on_cpu: bool
) -> None:
    """After a start neither the tier nor the model was measured."""
    engine = Engine(lambda n: 5e9, decider=Decider(computes_on_cpu=computes_on_cpu))
    if announced is not None:
        engine.decider.speeds[Tier.SSD].announce(announced)
    tokens = []
    for _ in range(6):
        tokens.append(engine.decider.choose(engine.now, 0, [span(Tier.SSD, 10240)]).tokens)
        engine.ask(10241, 10240)
        engine.decider.costs.step_ended(1, 10241, engine.model.step(10241, 1))
    if computes_on_cpu:
        assert tokens == [10240] * 6, "no CPU computes so fast that measuring pays"
    else:
        assert tokens == [8192] * 3 + [10240] * 3, "a quarter of a step is computed"
    assert engine.probed == 0, "loads measure the tier"
    slow = Decider(computes_on_cpu=computes_on_cpu)
    slow.speeds[Tier.SSD].announce(0.2e9)
    spans = [span(Tier.SSD, 10240)]
    assert not slow.choose(0, 0, spans).tokens, "2.9 s, against 2 s of the slowest model"


@pytest.mark.parametrize("lengths", [(1024, 10240), (20480, 1024)])
def test_hits_of_another_length_measure_the_model_again(lengths: tuple[int, int]) -> None:
    engine = Engine(lambda n: 5e9)
    for length in lengths:
        measured = []
        for _ in range(5):
            spans = [span(Tier.SSD, length)]
            measured.append(engine.decider.choose(engine.now, 0, spans).measured)
            engine.ask(length + 1, length)
            engine.decider.costs.step_ended(1, length, 0.008)
        assert measured[0] == min(length, STEP_TOKENS) // 4
        assert measured[3:] == [0, 0]


@pytest.mark.parametrize("has_misses", [False, True])
def test_hits_are_loaded_whole_if_no_step_is_large_enough_to_measure_the_model(
    has_misses: bool,
) -> None:
    """vLLM divides long prompts into small steps with `long_prefill_token_threshold`."""
    known = Decider()
    known.speeds[Tier.SSD].announce(5e9)
    for _ in range(3):
        known.costs.step_ended(1, 1, 0.008)
    measured = []
    for n in range(20):
        chosen = known.choose(n, 0, [span(Tier.SSD, 32768)])
        known.settle("r", n, chosen)
        known.costs.ended("r", n, chosen, {})
        measured.append(chosen.measured)
        for begin in range(chosen.tokens, chosen.held, 512):
            known.costs.step_ended(512, 512 * (begin + 256), 0.02)
        if has_misses:
            known.costs.step_ended(512, 512 * 256, 0.02)
        assert chosen.tokens + chosen.measured == 32768
    assert measured[0] == 2048
    assert not any(measured[6:])


def test_only_the_first_hit_after_a_start_is_loaded_although_computing_is_faster() -> None:
    engine = Engine(lambda n: 1.0e9)
    for _ in range(6):
        engine.ask(10241, 10240)
    assert engine.decisions[0] is Decision.SHORTEN
    assert {Decision.LOAD, Decision.SHORTEN}.isdisjoint(engine.decisions[1:])


def test_first_compilation_is_not_taken_for_the_prefill_speed() -> None:
    known = Decider()
    known.costs.step_ended(8192, 8192 * 4096, 60.0)
    known.speeds[Tier.SSD].announce(0.2e9)
    assert not known.choose(0, 0, [span(Tier.SSD, 10240)]).tokens, "3 s, against 2 s at most"


def test_measurement_of_the_model_computes_at_most_half_of_a_hit_and_none_of_the_memory() -> None:
    def measured(*spans: Span, **settings) -> int:
        known = Decider(trusted=(Tier.CPU, Tier.MEMORY), **settings)
        known.speeds[Tier.SSD].announce(5e9)
        chosen = known.choose(0, 0, list(spans))
        assert chosen.tokens + chosen.measured == chosen.held
        return chosen.measured

    assert measured(span(Tier.SSD, 102400)) == 2048, "of 8192 tokens a step"
    assert measured(span(Tier.SSD, 1024)) == 256
    assert measured(span(Tier.SSD, 102400), alignment=1600) == 3200
    assert measured(span(Tier.SSD, 6400), alignment=1600) == 1600
    assert measured(span(Tier.SSD, 1600), alignment=1600) == 0, "all of it"
    assert measured(span(Tier.SSD, 128)) == 0, "a step of so few tokens measures nothing"
    assert measured(span(Tier.MEMORY, 5120), span(Tier.SSD, 5120)) == 2048
    assert measured(span(Tier.CPU, 9216), span(Tier.SSD, 1024)) == 0
    assert measured(span(Tier.SSD, 5120), span(Tier.CPU, 5120)) == 0
    assert measured(span(Tier.CPU, 10240)) == 0


def test_announced_speed_counts_until_a_load_was_seen() -> None:
    known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
    spans = [span(Tier.SSD, 10240)]
    assert not known.choose(0, 0, spans).tokens, "nobody has said anything"
    known.speeds[Tier.SSD].announce(8e9)
    first = known.choose(0, 0, spans)
    assert first.tokens == 10240
    known.settle("r", 0, first)
    known.costs.ended("r", 1, first, {Tier.REMOTE: 1.0})
    known.speeds[Tier.SSD].announce(8e9)
    assert not known.choose(1, 0, spans).tokens, "it was not true"


def test_first_load_after_known_prefills_uses_the_announced_speed() -> None:
    for rate, loads in ((8e9, True), (1.6e9, False)):
        known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
        known.speeds[Tier.SSD].announce(rate)
        assert bool(known.choose(0, 0, [span(Tier.SSD, 10240)]).tokens) == loads


@pytest.mark.parametrize("policy", [LoadPolicy.ALWAYS, LoadPolicy.NEVER])
def test_either_can_be_forced(policy: LoadPolicy) -> None:
    forced = Decider(policy)
    spans = [span(Tier.CPU, 64), span(Tier.SSD, 10240)]
    chosen = forced.choose(0, 0, spans)
    loads = policy is LoadPolicy.ALWAYS
    assert chosen.tokens == (10304 if loads else 0)
    assert set(chosen.decisions.values()) == {Decision.LOAD if loads else Decision.RECOMPUTE}
    forced.settle("r", 0, chosen)
    assert not chosen.probed
    assert not forced.costs.loads


def test_should_prefills_never_be_seen_loads_go_on_all_the_same() -> None:
    blind = Decider()
    for _ in range(8):
        blind.speeds[Tier.SSD].observe(1e8, 0.1)
    tokens = []
    for n in range(6):
        chosen = blind.choose(n, 0, [span(Tier.SSD, 10240)])
        blind.settle(f"r{n}", n, chosen)
        blind.costs.ended(f"r{n}", n, chosen, {Tier.REMOTE: 0.1})
        tokens.append(chosen.tokens)
    assert tokens == [8192] * 3 + [10240] * 3


def test_load_from_several_tiers_measures_the_unknown_one() -> None:
    known = taught({Tier.MEMORY: 10e9})
    mixed = Span(Tier.REMOTE, 10240, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    for n in range(12):
        chosen = known.choose(n, 0, [mixed])
        known.settle(str(n), n, chosen)
        nbytes = (chosen.tokens + len(chosen.probed)) * BYTES_PER_TOKEN
        taken = 0.002 + nbytes / 2 / 10e9 + nbytes / 2 / 6e9
        known.costs.ended(str(n), n, chosen, {Tier.REMOTE: taken})
        probe(known, n, chosen, taken)
    assert chosen.tokens == 10240
    assert known.speeds[Tier.SSD].seconds(3e8) == pytest.approx(3e8 / 6e9, rel=0.5)
    assert known.costs.load_seconds(n, 10240, [mixed]) == pytest.approx(taken, rel=0.1)


def test_load_from_mapped_memory_and_a_disk_is_timed_as_one_from_the_disk() -> None:
    known = Decider(trusted=(Tier.CPU, Tier.MEMORY))
    mixed = Span(Tier.REMOTE, 10240, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    known.settle("r", 0, Choice(10240, (mixed,)))
    known.costs.ended("r", 1, Choice(10240, (mixed,)), {Tier.REMOTE: 0.5})
    assert known.speeds[Tier.SSD].recent_bytes_per_s == 5120 * BYTES_PER_TOKEN / 0.5
    assert known.speeds[Tier.MEMORY].recent_bytes_per_s is None


def probe(known: Decider, number: int, chosen: Choice, taken: float) -> None:
    """As if what the n-th request, at that time, lets workers probe had come."""
    known.probes.end(str(number), number, len(chosen.probed) * BYTES_PER_TOKEN, taken)


lengths = st.integers(1, 4000).map(lambda blocks: blocks * BLOCK)


@given(
    st.floats(1e8, 1e11),
    st.floats(1e8, 1e11),
    st.integers(0, 500).map(lambda blocks: blocks * BLOCK),
    st.lists(st.tuples(st.sampled_from([Tier.CPU, Tier.SSD]), lengths), min_size=1, max_size=3),
    st.sampled_from([1, 3]),
)
def test_load_expected_to_be_slower_is_computed(
    cpu: float, ssd: float, computed: int, runs: list[tuple[Tier, int]], blocks: int
) -> None:
    alignment = blocks * BLOCK
    runs[-1] = (runs[-1][0], runs[-1][1] + -(computed + sum(n for _, n in runs)) % alignment)
    known = taught({Tier.CPU: cpu, Tier.SSD: ssd}, alignment=alignment)
    spans = [span(tier, tokens) for tier, tokens in runs]
    held = sum(tokens for _, tokens in runs)
    chosen = known.choose(0, computed, spans)
    assert known.choose(0, computed, spans) == chosen  # asking changes nothing
    assert 0 <= chosen.tokens <= held
    assert not chosen.tokens or not (computed + chosen.tokens) % alignment
    if chosen.tokens:
        load_s = known.costs.load_seconds(0, chosen.tokens, spans)
        assert load_s <= known.costs.prefill.seconds(computed, chosen.tokens)


@given(st.floats(1e9, 8e9), st.floats(1.05, 30))
def test_faster_tier_never_means_fewer_tokens(rate: float, factor: float) -> None:
    def loaded(bytes_per_s: float) -> int:
        known = taught({Tier.SSD: bytes_per_s})
        return known.choose(0, 0, [span(Tier.SSD, 10240)]).tokens

    assert loaded(rate * factor) >= loaded(rate)


# ---- a thousand requests ------------------------------------------------------------------------


def test_slow_disk_costs_next_to_nothing() -> None:
    engine = Engine(lambda n: 1.6e9)
    for _ in range(1000):
        engine.ask(10241, 10240)
    counts = Counter(engine.decisions)
    assert engine.ratio() <= 1.01
    ratios = list(map(float.__truediv__, engine.ours, engine.alone))
    assert max(ratios[1:]) <= 1.05 * 1.05  # and noise
    assert engine.decisions[0] is Decision.SHORTEN, "the first load is the probe"
    assert counts[Decision.LOAD] == 0
    assert counts[Decision.SHORTEN] == 1
    assert 0 < counts[Decision.PROBE] <= 60
    assert engine.probed <= 0.1 * counts[Decision.PROBE] * 1.3, "a daemon has others to serve"


@examples(25)
@given(
    st.floats(2e7, 2e10),
    st.floats(0.0002, 0.05),
    st.integers(64, 1500),
    st.integers(0, 10**6),
)
def test_no_tier_makes_prompts_slower_than_they_were(
    rate: float, latency: float, blocks: int, seed: int
) -> None:
    engine = Engine(lambda n: rate, latency, rng=random.Random(seed))
    for _ in range(300):
        held = BLOCK * engine.rng.randint(blocks // 2, blocks)
        engine.ask(held + engine.rng.randint(1, 40), held)
    assert engine.ratio(1) <= 1.05
    loads = [one for one in engine.decisions[:4] if one in (Decision.LOAD, Decision.SHORTEN)]
    assert len(loads) <= 1 or engine.ratio() <= 1.05, "one probe at most"


@pytest.mark.parametrize("source", [Tier.MEMORY, Tier.SSD])
def test_fast_tier_is_used_after_a_few_requests(source: Tier) -> None:
    engine = Engine(lambda n: 8e9, source=source)
    for _ in range(100):
        engine.ask(10241, 10240)
    assert engine.decisions[5:] == [Decision.LOAD] * 95
    assert engine.ratio(5) < 0.45
    assert max(map(float.__truediv__, engine.ours, engine.alone)) <= 1.05, "nobody waits to learn"


@pytest.mark.parametrize("latency", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_latency_is_told_from_bandwidth(latency: float, seed: int) -> None:
    """Small loads cannot tell the two apart. Prompts of one length, each computed in one step."""
    alone = Decider(step_tokens=16384, longest_load_s=60.0)
    for _ in range(3):
        alone.costs.step_ended(1, 0, 0.008)
        alone.costs.step_ended(10240, 10240 * 5120, 0.248)
    rng = random.Random(seed)
    decisions = []
    for number in range(20):
        chosen = alone.choose(number, 0, [span(Tier.MEMORY, 10224)])
        alone.settle(str(number), number, chosen)
        if chosen.tokens:
            taken = latency + chosen.tokens * BYTES_PER_TOKEN / 10e9
            taken *= rng.uniform(0.9, 1.1)
            alone.costs.ended(str(number), number, chosen, {Tier.REMOTE: taken})
        if chosen.probed:
            taken = latency + len(chosen.probed) * BYTES_PER_TOKEN / 10e9
            probe(alone, number, chosen, taken * rng.uniform(0.9, 1.1))
        tokens = 10240 - chosen.tokens
        seconds = 0.008 + 0.24 * tokens / 10240
        alone.costs.step_ended(tokens, tokens * (chosen.tokens + tokens / 2), seconds)
        decisions.append(chosen.decisions[Tier.REMOTE])
    assert decisions[6:] == [Decision.LOAD] * 14


@pytest.mark.parametrize("minor", [Tier.MEMORY, Tier.BACKING])
def test_place_that_holds_next_to_nothing_causes_no_probes(minor: Tier) -> None:
    engine = Engine(lambda n: 1.0e9)
    span_of = Span(Tier.REMOTE, 10240, {Tier.SSD: 0.96, minor: 0.04})
    probes = 0
    for number in range(300):
        chosen = engine.decider.choose(number, 0, [span_of])
        engine.decider.settle(str(number), number, chosen)
        taken = 0.001 + len(chosen.probed) * BYTES_PER_TOKEN / 1.0e9
        probe(engine.decider, number, chosen, taken)
        engine._compute(chosen.tokens, 10241, observe=True)
        probes += chosen.decisions[Tier.REMOTE] is Decision.PROBE
    assert probes < 30


def test_where_prefills_teach_nothing_tiers_are_met_all_the_same() -> None:
    blind = Decider()
    for _ in range(3):
        blind.costs.step_ended(128, 128 * 64, 0.004)
    decisions = []
    for number in range(40):
        chosen = blind.choose(number, 0, [span(Tier.MEMORY, 512)])
        blind.settle(str(number), number, chosen)
        taken = 0.001 + len(chosen.probed) * BYTES_PER_TOKEN / 10e9
        probe(blind, number, chosen, taken)
        decisions.append(chosen.decisions[Tier.REMOTE])
    assert Decision.PROBE in decisions


def test_tier_that_becomes_fast_is_found_and_one_that_becomes_slow_is_left() -> None:
    engine = Engine(lambda n: 8e9 if 400 <= n < 700 else 1.0e9)
    for _ in range(1000):
        engine.ask(10241, 10240)
    assert Decision.LOAD not in engine.decisions[1:400]
    assert set(engine.decisions[550:700]) == {Decision.LOAD}
    assert Decision.LOAD not in engine.decisions[705:]
    assert engine.ratio() <= 1.0
    assert engine.ratio(705) <= 1.05


def test_tier_that_hung_is_probed_again_although_probes_seem_too_slow() -> None:
    engine = Engine(lambda n: 8e9)
    for _ in range(8):
        engine.decider.speeds[Tier.SSD].observe(1e6, 3.0)
    for _ in range(400):
        engine.ask(10241, 10240)
        engine.now += 10
        if Decision.LOAD in engine.decisions:
            break
    assert Decision.LOAD in engine.decisions


@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_tier_about_as_fast_as_the_model_does_not_make_decisions_flap(noise: float) -> None:
    for rate in (2.2e9, 2.3e9, 2.45e9, 2.6e9, 2.8e9, 3.0e9):
        engine = Engine(lambda n, rate=rate: rate, noise=noise)
        for _ in range(300):
            engine.ask(10241, 10240)
        loads = [decision is Decision.LOAD for decision in engine.decisions]
        changes = sum(a != b for a, b in itertools.pairwise(loads))
        assert changes <= 6, rate
        assert engine.ratio() <= 1.05


def test_probes_do_not_pile_up() -> None:
    known = taught({Tier.SSD: 1.0e9})
    spans = [span(Tier.SSD, 10240)]
    decisions = Counter()
    for n in range(64):
        chosen = known.choose(0.0, 0, spans)
        known.settle(f"r{n}", 0.0, chosen)  # and none of them ends
        decisions[chosen.decisions[Tier.REMOTE]] += 1
    assert decisions == {Decision.PROBE: 1, Decision.RECOMPUTE: 63}


def test_probe_without_report_is_forgotten() -> None:
    known = taught({})
    spans = [span(Tier.MEMORY, 10240)]
    first = known.choose(0.0, 0, spans)
    assert first.probed
    known.settle("r0", 0.0, first)
    assert not known.choose(100.0, 0, spans).probed
    second = known.choose(1000.0, 0, spans)
    assert second.probed
    known.settle("r1", 1000.0, second)
    known.probes.end("r1", 1001.0, 0, 0.0)  # one that was disturbed teaches nothing
    known.probes.end("unheard of", 1001.0, 1e8, 1.0)
    assert not known.speeds[Tier.MEMORY].count
    assert not known.choose(1002.0, 0, spans).probed, "it may hang"
    assert known.choose(1012.0, 0, spans).probed


def test_load_that_hangs_is_the_last_for_a_while() -> None:
    known = taught({Tier.MEMORY: 10e9})
    spans = [span(Tier.MEMORY, 10240)]
    chosen = known.choose(0.0, 0, spans)
    assert chosen.tokens == 10240
    known.settle("r", 0.0, chosen)
    assert not known.choose(3.0, 0, spans).tokens, "the tier is stuck"
    known.costs.ended("r", 5.0, chosen, {Tier.REMOTE: 5.0}, has_hung=True)
    assert not known.choose(5.0, 0, spans).tokens
    probes = loads = 0
    for n in range(60):
        chosen = known.choose(5.0 + n, 0, spans)
        known.settle(str(n), 5.0 + n, chosen)
        probes += bool(chosen.probed)
        loads += bool(chosen.tokens)
        probe(known, n, chosen, 0.001 + len(chosen.probed) * BYTES_PER_TOKEN / 10e9)
        known.costs.ended(str(n), 5.0 + n, chosen, {Tier.REMOTE: 0.06} if chosen.tokens else {})
    assert probes <= 6
    assert loads >= 20, "it is found again"


def test_late_report_of_a_probe_counts() -> None:
    """An engine that is idle for minutes hears of it with the next request, which has begun one."""
    known = taught({})
    loads = 0
    for n in range(8):
        chosen = known.choose(100.0 * n, 0, [span(Tier.MEMORY, 10240)])
        known.settle(str(n), 100.0 * n, chosen)
        loads += chosen.tokens == 10240
        known.costs.ended(str(n), 100.0 * n, chosen, {Tier.REMOTE: 0.06})
        if n:
            nbytes = 1e7 * n
            known.probes.end(str(n - 1), 100.0 * n, nbytes, 0.001 + nbytes / 10e9)
    assert loads >= 3


def test_probe_follows_the_load_and_does_not_measure_mapped_memory() -> None:
    known = taught({Tier.CPU: 50e9}, trusted=(Tier.CPU, Tier.MEMORY))
    behind = Span(Tier.REMOTE, 5120, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    for n in range(6):
        chosen = known.choose(float(n), 0, [span(Tier.CPU, 5120), behind])
        assert not chosen.probed or chosen.probed.stop == 10240, "tails lie on the disk"
        known.settle(str(n), n, chosen)
        taken = len(chosen.probed) * BYTES_PER_TOKEN / 1e9 + 0.001
        probe(known, n, chosen, taken)
    assert known.speeds[Tier.SSD].count == 3
    assert not known.speeds[Tier.MEMORY].count
    assert known.speeds[Tier.SSD].seconds(1e8) == pytest.approx(0.1, rel=0.2)


def test_tier_behind_a_loaded_part_is_measured() -> None:
    """As daemons on the same host answer: leased memory, and a rest."""
    known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
    spans = [span(Tier.MEMORY, 5120), span(Tier.SSD, 5120)]
    tokens = []
    for n in range(8):
        chosen = known.choose(float(n), 0, spans)
        known.settle(str(n), n, chosen)
        known.costs.ended(str(n), n, chosen, {Tier.REMOTE: 0.05})
        probe(known, n, chosen, len(chosen.probed) * BYTES_PER_TOKEN / 6e9 + 0.001)
        tokens.append(chosen.tokens)
    assert tokens[0] == 5120
    assert tokens[-1] == 10240


@pytest.mark.parametrize("memory", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("fetched", [1.0, 0.5, 0.25])
def test_blocks_in_several_places_are_not_probed_with_every_request(
    memory: float, fetched: float
) -> None:
    """Not even where less comes than was asked for."""
    engine = Engine(lambda n: 0)
    mixed = Span(Tier.REMOTE, 10240, {Tier.MEMORY: memory, Tier.SSD: 1 - memory})
    head = int(10240 * memory)
    probes = loads = 0
    for n in range(200):
        chosen = engine.decider.choose(n, 0, [mixed])
        engine.decider.settle(str(n), n, chosen)
        engine._compute(chosen.tokens, 10241, observe=True)
        piece = chosen.probed
        probes += bool(piece)
        in_memory = max(0, min(piece.stop, head) - piece.start)
        taken = 0.001 + BYTES_PER_TOKEN * (in_memory / 4e9 + (len(piece) - in_memory) / 0.2e9)
        nbytes = fetched * len(piece) * BYTES_PER_TOKEN
        engine.decider.probes.end(str(n), n, nbytes, fetched * taken)
        if chosen.tokens:
            loads += 1
            taken = BYTES_PER_TOKEN * (head / 4e9 + (10240 - head) / 0.2e9)
            engine.decider.costs.ended(str(n), n, chosen, {Tier.REMOTE: taken})
    assert probes <= 40
    assert loads <= 3


def test_tier_that_is_used_is_not_probed() -> None:
    known = taught({Tier.MEMORY: 10e9})
    assert not known.choose(1e6, 0, [span(Tier.MEMORY, 10240)]).probed
    slow = taught({Tier.SSD: 1e9})
    assert slow.choose(1e6, 0, [span(Tier.SSD, 10240)]).probed
