"""Load or recompute: estimates that survive noise, decisions that neither flap nor lose time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.cache.load_economics import Decision, LoadEconomics, Span
from vllm_tiered_kv.cache.speed_estimates import (
    Backlog,
    LoadSpeed,
    PrefillSpeed,
    Typical,
    fit_nonnegative,
)
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier

BLOCK = 16
BYTES_PER_TOKEN = 57344  # of a 7B model with grouped heads
STEP_TOKENS = 8192
LOOKS = {Tier.CPU: Tier.CPU, Tier.SSD: Tier.REMOTE, Tier.MEMORY: Tier.REMOTE}


def economics(policy: LoadPolicy = LoadPolicy.AUTO, **settings) -> LoadEconomics:
    return LoadEconomics(policy, BYTES_PER_TOKEN, BLOCK, STEP_TOKENS, 5.0, **settings)


def span(source: Tier, tokens: int) -> Span:
    return Span(LOOKS[source], tokens, {} if source is Tier.CPU else {source: 1.0})


@dataclass
class Model:
    """A GPU that takes 257 ms for 10,240 tokens."""

    step_s: float = 0.008
    token_s: float = 1.88e-5
    attended_s: float = 1.0e-9

    def step(self, computed: int, tokens: int) -> float:
        attended = tokens * (computed + tokens / 2)
        return self.step_s + self.token_s * tokens + self.attended_s * attended


@dataclass
class Engine:
    """One request after the other; everything takes as long as it is said to."""

    speed: Callable[[int], float]  # bytes per second of the tier for the n-th request
    latency_s: float = 0.001
    noise: float = 0.05
    source: Tier = Tier.SSD
    economics: LoadEconomics = field(default_factory=economics)
    model: Model = field(default_factory=Model)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 1000.0
    asked: int = 0
    ours: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def ask(self, prompt: int, held: int) -> Decision:
        chosen = self.economics.choose(self.now, 0, prompt, [span(self.source, held)])
        name = f"r{self.asked}"
        self.economics.settle(name, self.now, chosen)
        seconds = 0.0
        if chosen.tokens:
            nbytes = chosen.tokens * BYTES_PER_TOKEN
            load = self.latency_s + nbytes / self.speed(self.asked)
            load *= 1 + self.rng.uniform(-self.noise, self.noise)
            seconds += load + 0.001
            self.economics.ended(name, self.now + seconds, chosen, {LOOKS[self.source]: load})
        self.alone.append(self._compute(0, prompt, observe=False))
        self.ours.append(seconds + self._compute(chosen.tokens, prompt, observe=True))
        self.now += self.ours[-1] + 0.01
        self.asked += 1
        self.decisions.append(chosen.decisions[LOOKS[self.source]])
        return self.decisions[-1]

    def _compute(self, computed: int, prompt: int, observe: bool) -> float:
        total = 0.0
        while computed < prompt:
            tokens = min(STEP_TOKENS, prompt - computed)
            seconds = self.model.step(computed, tokens)
            seconds *= 1 + self.rng.uniform(-self.noise, self.noise) * observe
            if observe:
                attended = tokens * (computed + tokens / 2)
                self.economics.prefill.observe(tokens, attended, seconds)
            total += seconds
            computed += tokens
        return total

    def ratio(self, start: int = 0) -> float:
        return sum(self.ours[start:]) / sum(self.alone[start:])


# ---- estimates ----------------------------------------------------------------------------------


def test_what_a_step_costs_at_least_tells_what_its_tokens_cost() -> None:
    """Steps of one size alone might cost the same whatever they compute."""
    prefill = PrefillSpeed(16384)
    for _ in range(4):
        prefill.observe(10240, 10240 * 5120, 0.248)
    guessed = prefill.seconds(0, 10240)
    assert guessed < 0.2
    prefill.observe_least(0.008)
    for _ in range(4):
        prefill.observe(10240, 10240 * 5120, 0.248)
    assert prefill.seconds(0, 10240) == pytest.approx(0.245, rel=0.01)


def test_steps_larger_than_any_seen_may_cost_no_more() -> None:
    prefill = PrefillSpeed(8192)
    prefill.observe_least(0.005)
    for _ in range(4):
        prefill.observe(512, 512 * 256, 0.016)
    assert prefill.seconds(0, 2048) < 0.018
    for _ in range(4):
        prefill.observe(2048, 2048 * 1024, 0.044)
    assert prefill.seconds(0, 2048) > 0.035


@given(
    st.floats(1e-4, 0.05),
    st.floats(1e7, 1e11),
    # The only load of the largest size cannot be told from the truth.
    st.integers(0, 7).filter(lambda n: n != 5),
    st.floats(20, 1000),
)
def test_a_load_speed_is_found_and_one_outlier_changes_little(
    latency: float, rate: float, outlier: int, factor: float
) -> None:
    speed = LoadSpeed(0.001, 1e9)
    sizes = [1e6 * 3**n for n in (0, 4, 2, 5, 1, 6, 3, 5)]
    for n, size in enumerate(sizes):
        speed.observe(size, (latency + size / rate) * (factor if n == outlier else 1))
    for size in sizes:
        assert speed.seconds(size) == pytest.approx(latency + size / rate, rel=0.25)


def test_a_tier_that_gets_slower_is_noticed_after_two_loads_and_faster_after_most() -> None:
    speed = LoadSpeed(0.001, 1e9)
    for _ in range(8):
        speed.observe(1e8, 0.1)
    for taken, expected in [(1.0, 0.1), (1.0, 1.0)]:
        speed.observe(1e8, taken)
        assert speed.seconds(1e8) == pytest.approx(expected, rel=0.1)
    for _ in range(8):
        speed.observe(1e8, 1.0)
    for expected in (1.0, 1.0, 1.0):
        speed.observe(1e8, 0.1)
        assert speed.seconds(1e8) == pytest.approx(expected, rel=0.1)
    for _ in range(3):
        speed.observe(1e8, 0.1)
    assert speed.seconds(1e8) == pytest.approx(0.1, rel=0.1)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e4)), min_size=1, max_size=40))
def test_whatever_was_seen_more_bytes_never_take_less(samples: list[tuple[float, float]]) -> None:
    speed = LoadSpeed(0.001, 1e9)
    for nbytes, seconds in samples:
        speed.observe(nbytes, seconds)
    predicted = [speed.seconds(10.0**n) for n in range(13)]
    assert predicted == sorted(predicted)
    assert predicted[0] >= 0


@given(
    st.lists(
        st.tuples(st.integers(1, 10**5), st.integers(0, 10**6), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_was_seen_more_tokens_never_take_less(
    steps: list[tuple[int, int, float]],
) -> None:
    prefill = PrefillSpeed(STEP_TOKENS)
    for tokens, computed, seconds in steps:
        prefill.observe(tokens, tokens * (computed + tokens / 2), seconds)
    for computed in (0, 5000):
        predicted = [prefill.seconds(computed, 2.0**n) for n in range(20)]
        assert predicted == sorted(predicted)
        assert predicted[0] >= 0


def test_prefill_is_estimated_through_noise_and_a_compilation() -> None:
    model, rng = Model(), random.Random(3)
    prefill = PrefillSpeed(STEP_TOKENS)
    prefill.observe(8192, 8192 * 4096, 30.0)
    for _ in range(6):
        for computed, tokens in [(0, 8192), (8192, 2048), (0, 700), (10000, 60)]:
            seconds = model.step(computed, tokens) * rng.uniform(0.9, 1.1)
            prefill.observe(tokens, tokens * (computed + tokens / 2), seconds)
    expected = model.step(0, 8192) + model.step(8192, 2048)
    assert prefill.seconds(0, 10240) == pytest.approx(expected, rel=0.15)
    rate = prefill.tokens_per_s()
    assert rate is not None
    assert rate == pytest.approx(8192 / model.step(0, 8192), rel=0.15)


def test_short_steps_say_nothing_about_long_prompts_and_do_not_push_out_what_does() -> None:
    model = Model()
    prefill = PrefillSpeed(STEP_TOKENS)
    for _ in range(50):
        prefill.observe(20, 20 * 5010, model.step(5000, 20))
    assert not prefill.knows(10240)
    assert prefill.knows(60)
    assert prefill.seconds(0, 10240) < 0.1  # rather too little than hours
    prefill.observe(8192, 8192 * 4096, model.step(0, 8192))
    for _ in range(50):
        prefill.observe(20, 20 * 5010, model.step(5000, 20))
    assert prefill.knows(10240)
    assert prefill.seconds(0, 8192) == pytest.approx(model.step(0, 8192), rel=0.2)


def test_fitting_refuses_negative_coefficients() -> None:
    falling = fit_nonnegative([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])
    assert min(falling) >= 0
    assert falling[1] == 0


def test_the_typical_value_ignores_what_is_rare() -> None:
    typical = Typical(1.0)
    assert typical.value == 1.0
    for value in (2.0, 2.0, 900.0, 2.1):
        typical.observe(value)
    assert typical.value == pytest.approx(2.05)


def test_a_backlog_drains_as_expected_and_grows_when_it_is_stuck() -> None:
    backlog = Backlog()
    assert backlog.seconds(5.0) == 0
    backlog.begin("a", 2.0, 10.0)
    backlog.begin("b", 3.0, 10.5)
    assert backlog.seconds(11.0) == pytest.approx(4.0)
    assert backlog.seconds(12.0) == pytest.approx(3.0)
    assert backlog.seconds(15.0) == pytest.approx(6.0)  # three seconds late, three more
    backlog.end("a", 15.0)
    assert backlog.seconds(15.0) == pytest.approx(3.0)
    backlog.end("b", 16.0)
    backlog.end("never begun", 16.0)
    assert backlog.seconds(16.0) == 0


# ---- decisions ----------------------------------------------------------------------------------


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
    known._probing[Tier.REMOTE].since = 0
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
    known._probing[Tier.REMOTE].since = 0
    assert known.choose(0, 0, 10241, [span(Tier.MEMORY, 10240)]).tokens == 0
    assert known.choose(0, 0, 2561, [span(Tier.MEMORY, 2560)]).tokens == 2560


def test_the_cpu_tier_is_trusted_until_there_is_evidence() -> None:
    spans = [span(Tier.CPU, 10240)]
    assert economics().choose(0, 0, 10241, spans).tokens == 10240
    known = taught({})
    for n in range(8):
        assert known.choose(0, 0, 10241, spans).tokens == 10240, n
        known.speeds[Tier.CPU].observe(587e6, 2.0)
    assert known.choose(0, 0, 10241, spans).decisions[Tier.CPU] is not Decision.LOAD
    blind = economics()
    for _ in range(8):
        blind.speeds[Tier.CPU].observe(587e6, 2.0)
    assert blind.choose(0, 0, 10241, spans).tokens == 10240  # how long computing takes nobody knows


def test_memory_that_is_mapped_is_trusted_like_the_cpu_tier() -> None:
    spans = [span(Tier.MEMORY, 10240)]
    mapped = economics(trusted=(Tier.CPU, Tier.MEMORY))
    assert mapped.choose(0, 0, 10241, spans).tokens == 10240
    assert economics().choose(0, 0, 10241, spans).tokens < 1024


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
        known.settle(f"r{n}", n, chosen)
        nbytes = chosen.tokens * BYTES_PER_TOKEN
        taken = 0.002 + nbytes / 2 / 10e9 + nbytes / 2 / 6e9
        known.ended(f"r{n}", n, chosen, {Tier.REMOTE: taken})
    assert chosen.tokens == 10240
    assert known.speeds[Tier.SSD].bytes_per_s == pytest.approx(6e9, rel=0.3)
    assert known.speeds[Tier.MEMORY].bytes_per_s == pytest.approx(10e9, rel=0.3)


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
    for probing in known._probing.values():
        probing.since = 0
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
        known._probing[Tier.REMOTE].since = 0
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


@pytest.mark.parametrize("latency", [0.001, 0.002, 0.003])
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
        tokens = 10240 - chosen.tokens
        if tokens > 128:
            seconds = 0.008 + 0.24 * tokens / 10240
            alone.prefill.observe(tokens, tokens * tokens / 2, seconds)
        decisions.append(chosen.decisions[Tier.REMOTE])
    assert decisions[10:] == [Decision.LOAD] * 10


@pytest.mark.parametrize("minor", [Tier.MEMORY, Tier.BACKING])
def test_a_place_that_holds_next_to_nothing_causes_no_probes(minor: Tier) -> None:
    engine = Engine(lambda n: 1.0e9)
    span_of = Span(Tier.REMOTE, 10240, {Tier.SSD: 0.96, minor: 0.04})
    probes = 0
    for number in range(300):
        chosen = engine.economics.choose(number, 0, 10241, [span_of])
        engine.economics.settle(str(number), number, chosen)
        if chosen.tokens:
            taken = 0.001 + chosen.tokens * BYTES_PER_TOKEN / 1.0e9
            engine.economics.ended(str(number), number, chosen, {Tier.REMOTE: taken})
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
        if chosen.tokens:
            taken = 0.001 + chosen.tokens * BYTES_PER_TOKEN / 10e9
            blind.ended(str(number), number, chosen, {Tier.REMOTE: taken})
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
