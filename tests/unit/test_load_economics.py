"""Load or recompute: decisions that neither flap nor lose time."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulated_engine import (
    BLOCK,
    BYTES_PER_TOKEN,
    STEP_TOKENS,
    Engine,
    Model,
    economics,
    span,
)
from vllm_tiered_kv.cache.load_choice import Choice, Span
from vllm_tiered_kv.cache.load_economics import LoadEconomics
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision


def taught(rates: dict[Tier, float], **settings) -> LoadEconomics:
    """One that has seen prefills of all sizes and loads at these speeds."""
    known, model = economics(**settings), Model()
    for computed, tokens in [(0, 8192), (8192, 8192), (0, 2048), (4096, 512), (0, 64)] * 2:
        attended = tokens * (computed + tokens / 2)
        known.prefill.observe(tokens, attended, model.step(computed, tokens))
    for tier, rate in rates.items():
        for nbytes in (1e6, 1e7, 1e8, 5e8) * 2:
            known.speeds[tier].observe(nbytes, 0.001 + nbytes / rate)
    return known


def test_the_cpu_tier_is_loaded_and_a_slow_rest_is_computed() -> None:
    known = taught({Tier.CPU: 50e9, Tier.SSD: 1.6e9})
    known._rehearsals.pace.since = 0
    chosen = known.choose(0, 0, 10241, [span(Tier.CPU, 5120), span(Tier.SSD, 5120)])
    assert chosen.tokens == 5120
    assert chosen.held == 10240
    assert chosen.decisions == {Tier.CPU: Decision.LOAD, Tier.REMOTE: Decision.RECOMPUTE}


def test_a_slow_piece_is_loaded_where_it_opens_the_way_to_a_fast_one() -> None:
    known = taught({Tier.CPU: 50e9, Tier.SSD: 1.6e9})
    spans = [span(Tier.SSD, 512), span(Tier.CPU, 9728)]
    assert known.choose(0, 0, 10241, spans).tokens == 10240
    assert known.choose(0, 0, 10241, spans[:1]).decisions[Tier.REMOTE] is not Decision.LOAD


def test_a_backlog_makes_a_tier_slower() -> None:
    known = taught({Tier.MEMORY: 8e9})
    spans = [span(Tier.MEMORY, 10240)]
    first = known.choose(0, 0, 10241, spans)
    assert first.tokens == 10240
    for n in range(3):
        known.settle(f"r{n}", 0.0, first)
    assert known.choose(0.0, 0, 10241, spans).tokens == 0
    for n in range(3):
        known.ended(f"r{n}", 0.3, first, {Tier.REMOTE: 0.075})
    assert known.choose(0.4, 0, 10241, spans).tokens == 10240


def test_what_would_be_given_up_before_it_is_there_is_not_begun() -> None:
    known = LoadEconomics(LoadPolicy.AUTO, BYTES_PER_TOKEN, BLOCK, STEP_TOKENS, 0.05)
    taught_ = taught({Tier.MEMORY: 8e9})
    known.prefill, known.speeds = taught_.prefill, taught_.speeds
    assert known.choose(0, 0, 10241, [span(Tier.MEMORY, 10240)]).tokens == 0
    assert known.choose(0, 0, 2561, [span(Tier.MEMORY, 2560)]).tokens == 2560


@pytest.mark.parametrize("place", [Tier.CPU, Tier.MEMORY])
def test_memory_of_this_host_is_loaded_from_however_long_it_took(place: Tier) -> None:
    """A busy engine sees loads that waited for its steps; if it computed instead, it would be
    busier, and never see another one."""
    known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
    for _ in range(16):
        chosen = known.choose(0, 0, 10241, [span(place, 10240)])
        assert chosen.tokens == 10240
        assert set(chosen.decisions.values()) == {Decision.LOAD}
        known.settle("r", 0, chosen)
        known.ended("r", 0, chosen, dict.fromkeys(chosen.decisions, 2.0))


def test_memory_that_is_mapped_is_trusted_like_the_cpu_tier() -> None:
    spans = [span(Tier.MEMORY, 10240)]
    mapped = economics(trusted=(Tier.CPU, Tier.MEMORY))
    assert mapped.choose(0, 0, 10241, spans).tokens == 10240
    assert economics().choose(0, 0, 10241, spans).tokens < 1024


@pytest.mark.parametrize(("rate", "loads"), [(1e9, True), (0.2e9, False)])
def test_what_a_tier_says_of_itself_stands_for_loads_until_one_was_seen(
    rate: float, loads: bool
) -> None:
    slow = economics(trusted=(Tier.CPU, Tier.MEMORY), prefill_at_most=5000.0)
    spans = [span(Tier.SSD, 10240)]
    assert not slow.choose(0, 0, 10241, spans).tokens, "nobody has said anything"
    slow.speeds[Tier.SSD].told(rate)
    first = slow.choose(0, 0, 10241, spans)
    assert bool(first.tokens) == loads, "587 MB against 2 s at least"
    fast = economics(trusted=(Tier.CPU, Tier.MEMORY))
    fast.speeds[Tier.SSD].told(100e9)
    assert not fast.choose(0, 0, 10241, spans).tokens, "a GPU may be faster still"
    if loads:
        slow.settle("r", 0, first)
        slow.ended("r", 10, first, {Tier.REMOTE: 10.0})
        assert not slow.choose(11, 0, 10241, spans).tokens, "it was not true"


def test_with_known_prefills_the_first_load_goes_by_what_a_tier_says() -> None:
    for rate, loads in ((8e9, True), (1.6e9, False)):
        known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
        known.speeds[Tier.SSD].told(rate)
        assert bool(known.choose(0, 0, 10241, [span(Tier.SSD, 10240)]).tokens) == loads


@pytest.mark.parametrize("policy", [LoadPolicy.ALWAYS, LoadPolicy.NEVER])
def test_either_can_be_forced(policy: LoadPolicy) -> None:
    forced = economics(policy)
    spans = [span(Tier.CPU, 64), span(Tier.SSD, 10240)]
    chosen = forced.choose(0, 0, 10400, spans)
    loads = policy is LoadPolicy.ALWAYS
    assert chosen.tokens == (10304 if loads else 0)
    assert set(chosen.decisions.values()) == {Decision.LOAD if loads else Decision.RECOMPUTE}
    forced.settle("r", 0, chosen)
    assert not len(forced._backlogs[Tier.REMOTE])


def test_should_prefills_never_be_seen_loads_go_on_all_the_same() -> None:
    blind = economics()
    for _ in range(8):
        blind.speeds[Tier.SSD].observe(1e8, 0.1)
    tokens = []
    for n in range(6):
        chosen = blind.choose(n, 0, 10241, [span(Tier.SSD, 10240)])
        blind.settle(f"r{n}", n, chosen)
        blind.ended(f"r{n}", n, chosen, {Tier.REMOTE: 0.1})
        tokens.append(chosen.tokens)
    assert tokens[0] < 1024
    assert tokens[-1] == 10240


def test_a_mixture_teaches_about_what_is_unknown() -> None:
    known = taught({Tier.MEMORY: 10e9})
    mixed = Span(Tier.REMOTE, 10240, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    for n in range(12):
        chosen = known.choose(n, 0, 10241, [mixed])
        known.settle(str(n), n, chosen)
        nbytes = (chosen.tokens + len(chosen.rehearsed)) * BYTES_PER_TOKEN
        taken = 0.002 + nbytes / 2 / 10e9 + nbytes / 2 / 6e9
        known.ended(str(n), n, chosen, {Tier.REMOTE: taken})
        rehearse(known, n, chosen, taken)
    assert chosen.tokens == 10240
    assert known.speeds[Tier.SSD].bytes_per_s == pytest.approx(6e9, rel=0.3)
    assert known.speeds[Tier.MEMORY].bytes_per_s == pytest.approx(10e9, rel=0.3)


def rehearse(known: LoadEconomics, number: int, chosen: Choice, taken: float) -> None:
    """As if what the n-th request, at that time, lets be fetched for nobody had come."""
    known.rehearsed(str(number), number, len(chosen.rehearsed) * BYTES_PER_TOKEN, taken)


lengths = st.integers(1, 4000).map(lambda blocks: blocks * BLOCK)


@given(
    st.floats(1e8, 1e11),
    st.floats(1e8, 1e11),
    st.integers(0, 500).map(lambda blocks: blocks * BLOCK),
    st.lists(st.tuples(st.sampled_from([Tier.CPU, Tier.SSD]), lengths), min_size=1, max_size=3),
    st.sampled_from([1, 3]),
)
def test_what_is_expected_to_be_slower_is_never_loaded(
    cpu: float, ssd: float, computed: int, runs: list[tuple[Tier, int]], blocks: int
) -> None:
    alignment = blocks * BLOCK
    runs[-1] = (runs[-1][0], runs[-1][1] + -(computed + sum(n for _, n in runs)) % alignment)
    known = taught({Tier.CPU: cpu, Tier.SSD: ssd})
    known._alignment = alignment
    spans = [span(tier, tokens) for tier, tokens in runs]
    held = sum(tokens for _, tokens in runs)
    chosen = known.choose(0, computed, computed + held + 1, spans)
    assert known.choose(0, computed, computed + held + 1, spans) == chosen  # asking changes nothing
    assert 0 <= chosen.tokens <= held
    assert not chosen.tokens or not (computed + chosen.tokens) % alignment
    if chosen.tokens:
        load_s = known.seconds(0, chosen.tokens, spans)
        assert load_s <= known.prefill.seconds(computed, chosen.tokens)


@given(st.floats(1e9, 8e9), st.floats(1.05, 30))
def test_a_faster_tier_never_means_fewer_tokens(rate: float, factor: float) -> None:
    def loaded(bytes_per_s: float) -> int:
        known = taught({Tier.SSD: bytes_per_s})
        return known.choose(0, 0, 10241, [span(Tier.SSD, 10240)]).tokens

    assert loaded(rate * factor) >= loaded(rate)


# ---- a thousand requests ------------------------------------------------------------------------


def test_a_slow_disk_costs_next_to_nothing() -> None:
    engine = Engine(lambda n: 1.6e9)
    for _ in range(1000):
        engine.ask(10241, 10240)
    counts = Counter(engine.decisions)
    assert engine.ratio() <= 1.01
    assert max(map(float.__truediv__, engine.ours, engine.alone)) <= 1.05 * 1.05  # and noise
    assert not counts[Decision.LOAD]
    assert 0 < counts[Decision.PROBE] <= 60
    assert engine.rehearsed <= 0.1 * counts[Decision.PROBE] * 1.3, "a daemon has others to serve"


@settings(max_examples=25, deadline=None)
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
    assert engine.ratio() <= 1.05


@pytest.mark.parametrize("source", [Tier.MEMORY, Tier.SSD])
def test_a_fast_tier_is_used_after_a_few_requests(source: Tier) -> None:
    engine = Engine(lambda n: 8e9, source=source)
    for _ in range(100):
        engine.ask(10241, 10240)
    assert engine.decisions[5:] == [Decision.LOAD] * 95
    assert engine.ratio(5) < 0.45
    assert max(map(float.__truediv__, engine.ours, engine.alone)) <= 1.05, "nobody waits to learn"


@pytest.mark.parametrize("latency", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_a_latency_is_not_taken_for_a_lack_of_bandwidth(latency: float, seed: int) -> None:
    """Small loads cannot tell the two apart. Prompts of one length, each computed in one step."""
    alone = LoadEconomics(LoadPolicy.AUTO, BYTES_PER_TOKEN, BLOCK, 16384, 60.0)
    for _ in range(3):
        alone.prefill.observe_least(0.008)
    rng = random.Random(seed)
    decisions = []
    for number in range(20):
        chosen = alone.choose(number, 0, 10240, [span(Tier.MEMORY, 10224)])
        alone.settle(str(number), number, chosen)
        if chosen.tokens:
            taken = latency + chosen.tokens * BYTES_PER_TOKEN / 10e9
            taken *= rng.uniform(0.9, 1.1)
            alone.ended(str(number), number, chosen, {Tier.REMOTE: taken})
        if chosen.rehearsed:
            taken = latency + len(chosen.rehearsed) * BYTES_PER_TOKEN / 10e9
            rehearse(alone, number, chosen, taken * rng.uniform(0.9, 1.1))
        tokens = 10240 - chosen.tokens
        if tokens > 128:
            seconds = 0.008 + 0.24 * tokens / 10240
            alone.prefill.observe(tokens, tokens * tokens / 2, seconds)
        decisions.append(chosen.decisions[Tier.REMOTE])
    assert decisions[6:] == [Decision.LOAD] * 14


@pytest.mark.parametrize("minor", [Tier.MEMORY, Tier.BACKING])
def test_a_place_that_holds_next_to_nothing_causes_no_probes(minor: Tier) -> None:
    engine = Engine(lambda n: 1.0e9)
    span_of = Span(Tier.REMOTE, 10240, {Tier.SSD: 0.96, minor: 0.04})
    probes = 0
    for number in range(300):
        chosen = engine.economics.choose(number, 0, 10241, [span_of])
        engine.economics.settle(str(number), number, chosen)
        taken = 0.001 + len(chosen.rehearsed) * BYTES_PER_TOKEN / 1.0e9
        rehearse(engine.economics, number, chosen, taken)
        engine._compute(chosen.tokens, 10241, observe=True)
        probes += chosen.decisions[Tier.REMOTE] is Decision.PROBE
    assert probes < 30


def test_where_prefills_teach_nothing_tiers_are_met_all_the_same() -> None:
    blind = economics()
    for _ in range(3):
        blind.prefill.observe(128, 128 * 64, 0.004)
    decisions = []
    for number in range(40):
        chosen = blind.choose(number, 0, 8192, [span(Tier.MEMORY, 512)])
        blind.settle(str(number), number, chosen)
        taken = 0.001 + len(chosen.rehearsed) * BYTES_PER_TOKEN / 10e9
        rehearse(blind, number, chosen, taken)
        decisions.append(chosen.decisions[Tier.REMOTE])
    assert Decision.PROBE in decisions


def test_a_tier_that_becomes_fast_is_found_and_one_that_becomes_slow_is_left() -> None:
    engine = Engine(lambda n: 8e9 if 400 <= n < 700 else 1.0e9)
    for _ in range(1000):
        engine.ask(10241, 10240)
    assert Decision.LOAD not in engine.decisions[:400]
    assert set(engine.decisions[550:700]) == {Decision.LOAD}
    assert Decision.LOAD not in engine.decisions[705:]
    assert engine.ratio() <= 1.0
    assert engine.ratio(705) <= 1.05


def test_a_tier_that_was_stuck_is_tried_again_though_every_probe_seems_too_dear() -> None:
    engine = Engine(lambda n: 8e9)
    for _ in range(8):
        engine.economics.speeds[Tier.SSD].observe(1e6, 3.0)
    for _ in range(400):
        engine.ask(10241, 10240)
        engine.now += 10
        if Decision.LOAD in engine.decisions:
            break
    assert Decision.LOAD in engine.decisions


@pytest.mark.parametrize("noise", [0.0, 0.08])
def test_a_tier_about_as_fast_as_the_model_does_not_make_decisions_flap(noise: float) -> None:
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
        chosen = known.choose(0.0, 0, 10241, spans)
        known.settle(f"r{n}", 0.0, chosen)  # and none of them ends
        decisions[chosen.decisions[Tier.REMOTE]] += 1
    assert decisions == {Decision.PROBE: 1, Decision.RECOMPUTE: 63}


def test_a_rehearsal_that_is_never_heard_of_is_forgotten() -> None:
    known = economics()
    spans = [span(Tier.MEMORY, 10240)]
    first = known.choose(0.0, 0, 10241, spans)
    assert first.rehearsed
    known.settle("r0", 0.0, first)
    assert not known.choose(1.0, 0, 10241, spans).rehearsed
    second = known.choose(100.0, 0, 10241, spans)
    assert second.rehearsed
    known.settle("r1", 100.0, second)
    known.rehearsed("r1", 101.0, 0, 0.0)  # one that was disturbed teaches nothing
    known.rehearsed("unheard of", 101.0, 1e8, 1.0)
    assert not known.speeds[Tier.MEMORY].count
    assert known.choose(102.0, 0, 10241, spans).rehearsed


def test_what_is_heard_of_late_counts_all_the_same() -> None:
    """An engine that is idle for minutes hears of it with the next request, which has begun one."""
    known = taught({})
    loads = 0
    for n in range(8):
        chosen = known.choose(100.0 * n, 0, 10241, [span(Tier.MEMORY, 10240)])
        known.settle(str(n), 100.0 * n, chosen)
        loads += chosen.tokens == 10240
        known.ended(str(n), 100.0 * n, chosen, {Tier.REMOTE: 0.06})
        if n:
            nbytes = 1e7 * n
            known.rehearsed(str(n - 1), 100.0 * n, nbytes, 0.001 + nbytes / 10e9)
    assert loads >= 3


def test_a_rehearsal_follows_what_is_loaded_and_says_nothing_about_mapped_memory() -> None:
    known = taught({Tier.CPU: 50e9}, trusted=(Tier.CPU, Tier.MEMORY))
    behind = Span(Tier.REMOTE, 5120, {Tier.MEMORY: 0.5, Tier.SSD: 0.5})
    for n in range(6):
        chosen = known.choose(float(n), 0, 10241, [span(Tier.CPU, 5120), behind])
        assert not chosen.rehearsed or chosen.rehearsed.stop == 10240, "tails lie on the disk"
        known.settle(str(n), n, chosen)
        taken = len(chosen.rehearsed) * BYTES_PER_TOKEN / 1e9 + 0.001
        rehearse(known, n, chosen, taken)
    assert known.speeds[Tier.SSD].count == 3
    assert not known.speeds[Tier.MEMORY].count
    assert known.speeds[Tier.SSD].bytes_per_s == pytest.approx(1e9, rel=0.2)


def test_what_lies_behind_a_part_that_is_loaded_is_learnt_too() -> None:
    """As daemons on the same host answer: leased memory, and a rest."""
    known = taught({}, trusted=(Tier.CPU, Tier.MEMORY))
    spans = [span(Tier.MEMORY, 5120), span(Tier.SSD, 5120)]
    tokens = []
    for n in range(8):
        chosen = known.choose(float(n), 0, 10241, spans)
        known.settle(str(n), n, chosen)
        known.ended(str(n), n, chosen, {Tier.REMOTE: 0.05})
        rehearse(known, n, chosen, len(chosen.rehearsed) * BYTES_PER_TOKEN / 6e9 + 0.001)
        tokens.append(chosen.tokens)
    assert tokens[0] == 5120
    assert tokens[-1] == 10240


@pytest.mark.parametrize("memory", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("fetched", [1.0, 0.5, 0.25])
def test_what_lies_in_several_places_is_not_rehearsed_with_every_request(
    memory: float, fetched: float
) -> None:
    """Not even where less comes than was asked for."""
    engine = Engine(lambda n: 0)
    mixed = Span(Tier.REMOTE, 10240, {Tier.MEMORY: memory, Tier.SSD: 1 - memory})
    head = int(10240 * memory)
    rehearsals = loads = 0
    for n in range(200):
        chosen = engine.economics.choose(n, 0, 10241, [mixed])
        engine.economics.settle(str(n), n, chosen)
        engine._compute(chosen.tokens, 10241, observe=True)
        piece = chosen.rehearsed
        rehearsals += bool(piece)
        in_memory = max(0, min(piece.stop, head) - piece.start)
        taken = 0.001 + BYTES_PER_TOKEN * (in_memory / 4e9 + (len(piece) - in_memory) / 0.2e9)
        nbytes = fetched * len(piece) * BYTES_PER_TOKEN
        engine.economics.rehearsed(str(n), n, nbytes, fetched * taken)
        if chosen.tokens:
            loads += 1
            taken = BYTES_PER_TOKEN * (head / 4e9 + (10240 - head) / 0.2e9)
            engine.economics.ended(str(n), n, chosen, {Tier.REMOTE: taken})
    assert rehearsals <= 40
    assert loads <= 3


def test_a_tier_that_is_used_is_not_rehearsed() -> None:
    known = taught({Tier.MEMORY: 10e9})
    assert not known.choose(1e6, 0, 10241, [span(Tier.MEMORY, 10240)]).rehearsed
    slow = taught({Tier.SSD: 1e9})
    assert slow.choose(1e6, 0, 10241, [span(Tier.SSD, 10240)]).rehearsed
