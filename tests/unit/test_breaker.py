"""The breaker as a state machine, with a manual clock."""

from __future__ import annotations

import logging

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.patience import examples
from vllm_tiered_kv.core.breaker import Attempt, Breaker, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("the daemon at tcp://a:1", clock=clock, jitter=lambda: 0.0)


def begin(breaker: Breaker) -> Attempt:
    attempt = breaker.begin()
    assert attempt is not None
    return attempt


def trip(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.fail(begin(breaker), "no answer in time")


def test_consecutive_failures_open_the_breaker(breaker: Breaker) -> None:
    for _ in range(2):
        breaker.fail(begin(breaker), "x")
    breaker.succeed(begin(breaker))
    for _ in range(2):
        breaker.fail(begin(breaker), "x")
    assert breaker.state is CLOSED
    breaker.fail(begin(breaker), "x")
    assert breaker.state is OPEN
    assert not breaker.available
    assert breaker.begin() is None


def test_half_open_breaker_admits_one_probe(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 0.49
    assert breaker.begin() is None
    clock.now += 0.02
    assert breaker.available
    probe = begin(breaker)
    assert probe.probe
    assert breaker.state is HALF_OPEN
    assert not breaker.available
    assert breaker.begin() is None
    breaker.succeed(probe)
    assert breaker.state is CLOSED
    assert begin(breaker) is not None


def test_cool_down_doubles_up_to_a_cap_and_resets(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    waits = []
    for _ in range(8):
        start = clock.now
        while not breaker.available:
            clock.now += 0.01
        waits.append(round(clock.now - start, 1))
        breaker.fail(begin(breaker), "still nothing")
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    clock.now += 10.1
    breaker.succeed(begin(breaker))
    trip(breaker)
    clock.now += 0.51
    assert breaker.available


def test_forgotten_probe_admits_the_next_probe(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 1
    breaker.forget(begin(breaker))
    assert breaker.state is OPEN
    assert begin(breaker).probe


def test_refusal_opens_the_breaker_for_long(breaker: Breaker, clock: Clock) -> None:
    breaker.refuse(begin(breaker), "wrong version")
    clock.now += 29
    assert not breaker.available
    clock.now += 2
    assert breaker.available


def test_stale_result_changes_nothing(breaker: Breaker, clock: Clock) -> None:
    early = [begin(breaker) for _ in range(3)]
    trip(breaker)
    breaker.succeed(early[0])
    assert breaker.state is OPEN
    clock.now += 1
    probe = begin(breaker)
    breaker.fail(early[1], "x")
    assert breaker.state is HALF_OPEN
    breaker.succeed(probe)
    for _ in range(3):
        breaker.fail(early[2], "x")
    assert breaker.state is CLOSED


def test_each_state_change_is_logged_once(
    breaker: Breaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trip(breaker)
    for _ in range(5):
        clock.now += 20
        breaker.fail(begin(breaker), "no answer in time")
    clock.now += 20
    breaker.succeed(begin(breaker))
    for _ in range(3):
        breaker.refuse(begin(breaker), "wrong version")
        clock.now += 40
    assert [record.getMessage() for record in caplog.records] == [
        "cannot reach the daemon at tcp://a:1 (no answer in time; is it running?); "
        "continuing without it",
        "the daemon at tcp://a:1 is back",
        "the daemon at tcp://a:1 refuses this client: wrong version; continuing without it",
    ]


def test_is_up_follows_the_last_result(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.is_up, "nothing is known yet"
    late = begin(breaker)
    breaker.succeed(begin(breaker))
    assert breaker.is_up
    breaker.fail(begin(breaker), "x")
    assert not breaker.is_up
    breaker.succeed(begin(breaker))
    assert breaker.is_up
    breaker.refuse(begin(breaker), "wrong version")
    assert not breaker.is_up
    breaker.succeed(late)
    assert not breaker.is_up
    clock.now += 40
    breaker.succeed(begin(breaker))
    assert breaker.is_up


def test_jitter_only_shortens_cool_downs(clock: Clock) -> None:
    breaker = Breaker("a", clock=clock, jitter=lambda: 1.0)
    trip(breaker)
    clock.now += 0.374
    assert not breaker.available
    clock.now += 0.002
    assert breaker.available


class BreakerMachine(RuleBasedStateMachine):
    """Attempts end in any order, arbitrarily late."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker("a", clock=self.clock)
        self.open_attempts: list[Attempt] = []
        self.longest = self.clock.now

    @rule()
    def call(self) -> None:
        available = self.breaker.available
        attempt = self.breaker.begin()
        assert (attempt is not None) == available
        if attempt is not None:
            self.open_attempts.append(attempt)

    @rule(
        which=st.integers(0, 100),
        how=st.sampled_from(["succeed", "fail", "refuse", "forget"]),
    )
    def end(self, which: int, how: str) -> None:
        if not self.open_attempts:
            return
        attempt = self.open_attempts.pop(which % len(self.open_attempts))
        if how in ("fail", "refuse"):
            getattr(self.breaker, how)(attempt, "x")
        else:
            getattr(self.breaker, how)(attempt)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def at_most_one_probe(self) -> None:
        current = [a for a in self.open_attempts if a.probe and a.period == self.breaker._period]
        assert len(current) == (self.breaker.state is HALF_OPEN)

    @invariant()
    def it_comes_back(self) -> None:
        if self.breaker.state is OPEN:
            assert self.breaker._open_until <= self.clock.now + 30


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = examples(60, stateful_step_count=40)


def test_forgotten_call_that_was_no_probe_changes_nothing(breaker: Breaker) -> None:
    breaker.forget(begin(breaker))
    assert breaker.state is CLOSED
