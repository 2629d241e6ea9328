"""Estimates of speed that survive noise, outliers and change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.simulated_engine import STEP_TOKENS, Model
from vllm_tiered_kv.cache.cost_model import (
    PrefillRate,
    TierSpeed,
)


def test_fixed_cost_of_a_step_separates_the_cost_of_its_tokens() -> None:
    """Steps of one size alone might cost the same whatever they compute."""
    prefill = PrefillRate(16384)
    for _ in range(4):
        prefill.observe(10240, 10240 * 5120, 0.248)
    guessed = prefill.seconds(0, 10240)
    assert guessed < 0.2
    prefill.observe(1, 500, 0.008)
    for _ in range(4):
        prefill.observe(10240, 10240 * 5120, 0.248)
    assert prefill.seconds(0, 10240) == pytest.approx(0.245, rel=0.01)


@given(
    st.floats(1e-4, 0.05),
    st.floats(1e7, 1e11),
    # The only load of the largest size cannot be told from the truth.
    st.integers(0, 7).filter(lambda n: n != 5),
    st.floats(20, 1000),
)
def test_load_speed_is_found_and_one_outlier_changes_little(
    latency: float, rate: float, outlier: int, factor: float
) -> None:
    speed = TierSpeed()
    sizes = [1e6 * 3**n for n in (0, 4, 2, 5, 1, 6, 3, 5)]
    for n, size in enumerate(sizes):
        speed.observe(size, (latency + size / rate) * (factor if n == outlier else 1))
    for size in sizes:
        assert speed.seconds(size) == pytest.approx(latency + size / rate, rel=0.25)


def test_tier_that_changes_is_believed_after_three_loads() -> None:
    speed = TierSpeed()
    for usual, changed in ((0.1, 1.0), (1.0, 0.1)):
        for _ in range(5):
            speed.observe(1e8, usual)
        for expected in (usual, usual, changed):
            speed.observe(1e8, changed)
            assert speed.seconds(1e8) == pytest.approx(expected, rel=0.1)


def test_tier_that_hangs_is_believed_at_once() -> None:
    speed = TierSpeed()
    for _ in range(5):
        speed.observe(1e8, 0.1)
    speed.observe(1e8, 5.0, has_hung=True)
    assert speed.seconds(1e8) == pytest.approx(5.0)
    assert speed.count == 1


def test_samples_from_before_a_slowdown_do_not_predict_other_sizes() -> None:
    speed = TierSpeed()
    for _ in range(8):
        speed.observe(5e8, 0.05)
    for size in (5e8, 5e8, 1e8, 1e8, 1e8):
        speed.observe(size, size / 1e9)
    assert speed.seconds(5e8) == pytest.approx(0.5, rel=0.2)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e4)), min_size=1, max_size=40))
def test_whatever_was_seen_more_bytes_never_take_less(samples: list[tuple[float, float]]) -> None:
    speed = TierSpeed()
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
    prefill = PrefillRate(STEP_TOKENS)
    for tokens, computed, seconds in steps:
        prefill.observe(tokens, tokens * (computed + tokens / 2), seconds)
    for computed in (0, 5000):
        predicted = [prefill.seconds(computed, 2.0**n) for n in range(20)]
        assert predicted == sorted(predicted)
        assert predicted[0] >= 0


def test_prefill_is_estimated_through_noise_and_a_compilation() -> None:
    model, rng = Model(), random.Random(3)
    prefill = PrefillRate(STEP_TOKENS)
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
    prefill = PrefillRate(STEP_TOKENS)
    for _ in range(50):
        prefill.observe(20, 20 * 5010, model.step(5000, 20))
    assert not prefill.knows(0, 10240)
    assert prefill.seconds(0, 10240) < 0.1  # rather too little than hours
    for _ in range(3):
        prefill.observe(8192, 8192 * 4096, model.step(0, 8192))
    for _ in range(50):
        prefill.observe(400, 400 * 8200, model.step(8000, 400))
        prefill.observe(20, 20 * 5010, model.step(5000, 20))
    assert prefill.knows(0, 10240)
    assert prefill.seconds(0, 8192) == pytest.approx(model.step(0, 8192), rel=0.2)


@pytest.mark.parametrize("length", [8192, 20480, 102400])
@pytest.mark.parametrize("attended_s", [0.0, 1e-9])
def test_steps_at_the_end_of_a_prompt_tell_what_all_of_it_takes(
    length: int, attended_s: float
) -> None:
    """All before is loaded. What its tokens cost is not seen, only that they cost no more."""
    model = Model(attended_s=attended_s)
    prefill = PrefillRate(STEP_TOKENS)
    tokens = prefill.comparable(length)
    for _ in range(3):
        assert not prefill.knows(0, length)
        prefill.observe(1, length, model.step(length, 1))
        computed = length - tokens
        prefill.observe(tokens, tokens * (computed + tokens / 2), model.step(computed, tokens))
    assert prefill.knows(0, length)
    steps = [(start, min(STEP_TOKENS, length - start)) for start in range(0, length, STEP_TOKENS)]
    expected = sum(model.step(*step) for step in steps)
    assert prefill.seconds(0, length) == pytest.approx(expected, rel=0.3)
    assert not prefill.knows(0, length // 2), "nothing was seen there"


def test_speed_that_is_shown_is_that_of_the_loads_there_were() -> None:
    """Loads of about one size that differ by chance seem to take no time for a byte."""
    speed = TierSpeed()
    assert speed.recent_bytes_per_s is None
    for nbytes, seconds in ((1e6, 0.010), (2.5e6, 0.010), (1e6, 0.011), (2.4e6, 0.009)):
        speed.observe(nbytes, seconds)
    assert speed.recent_bytes_per_s == pytest.approx(6.9e6 / 0.04)
