"""Who waits for whom, and what ends a wait, with a clock of the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from vllm_tiered_kv.connector.scheduler.compute_once import (
    ComputeOnce,
    Verdict,
)
from vllm_tiered_kv.connector.scheduler.remote_claims import RemoteClaims
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import WaitOutcome
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.store import ClaimResult
from vllm_tiered_kv.server.requests.claims import Claims as DaemonClaims

BLOCK = 16
RATE = 1000.0  # tokens per second
LOAD_TIMEOUT_S = 5.0


class Engine:
    """What vLLM tells `ComputeOnce`, in blocks. Prompts are written in blocks too: `A4B4` shares
    the first four with `A8`."""

    def __init__(
        self, hit_lag: int = 0, is_measured: bool = True, claims: RemoteClaims | None = None
    ) -> None:
        self.now = 100.0
        self.computed = Counter[str]()  # tokens
        self.recorder = Recorder()
        self.once = ComputeOnce(
            BLOCK,
            256,
            LOAD_TIMEOUT_S,
            lambda computed, tokens: tokens / RATE if is_measured else None,
            self.recorder,
            hit_lag,
            claims,
            lambda: self.now,
        )

    def admit(self, name: str, prompt: str, had: int = 0, is_loading: bool = False) -> None:
        self.once.admitted(name, keys(prompt), had * BLOCK, is_loading)
        self.computed[name] = had * BLOCK

    def waits(self, name: str, prompt: str, had: int = 0) -> bool:
        return self.verdict(name, prompt, had) is not Verdict.GO

    def verdict(self, name: str, prompt: str, had: int = 0) -> Verdict:
        limit = (len(keys(prompt)) * BLOCK - 1) // BLOCK * BLOCK
        return self.once.should_wait(name, keys(prompt), had * BLOCK, limit)

    def step(self, **blocks: int) -> None:
        self.step_tokens({name: count * BLOCK for name, count in blocks.items()})

    def step_tokens(self, scheduled: dict[str, int]) -> None:
        self.computed.update({name: self.computed[name] + n for name, n in scheduled.items()})
        self.once.step_planned(scheduled, self.computed.__getitem__)

    def outcomes(self) -> dict[str, float]:
        samples = self.recorder.samples(names.SHARED_PREFIX_WAITS)
        return {labels[0]: count for labels, count in samples.items()}

    @property
    def saved_blocks(self) -> float:
        return self.recorder.total(names.SHARED_PREFIX_TOKENS) / BLOCK


def keys(prompt: str) -> list[BlockKey]:
    """Like real keys, each stands for all before it."""
    chain, text = [], ""
    for name, count in zip(prompt[::2], prompt[1::2], strict=True):
        for _ in range(int(count)):
            text += name
            chain.append(BlockKey(text.encode()))
    return chain


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_follower_waits_until_the_shared_prefix_is_computed(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert engine.waits("b", "A6B2")
    engine.step(a=4)
    assert engine.waits("b", "A6B2", had=4)
    engine.step(a=2)
    assert not engine.waits("b", "A6B2", had=6)
    engine.admit("b", "A6B2", had=6)
    assert engine.outcomes() == {"served": 1}
    assert engine.saved_blocks == 6


def test_request_without_shared_prefix_does_not_wait(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert not engine.waits("b", "B8")
    engine.admit("b", "B8")
    assert engine.outcomes() == {}


def test_prefix_that_is_there_is_not_waited_for(engine: Engine) -> None:
    engine.admit("a", "A8", had=4)
    assert not engine.waits("b", "A4B4", had=4)


def test_hit_that_cannot_grow_is_not_waited_for(engine: Engine) -> None:
    """The last token is always computed, so the last block of an aligned prompt cannot be hit."""
    engine.admit("a", "A8")
    engine.step(a=7)
    assert not engine.waits("b", "A8", had=7)


def test_half_computed_block_is_still_ahead(engine: Engine) -> None:
    engine.admit("a", "A8")
    engine.step_tokens({"a": BLOCK + 3})
    assert engine.waits("b", "A8", had=1)


def test_block_that_was_computed_and_is_gone_is_not_waited_for(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert engine.waits("b", "A6B2")
    engine.step(a=4)
    assert not engine.waits("b", "A6B2", had=2)
    engine.admit("b", "A6B2", had=2)
    assert engine.outcomes() == {"not_found": 1}
    assert engine.saved_blocks == 2


def test_small_gain_is_not_waited_for() -> None:
    """A step of so few tokens costs as much as the wait."""
    once = ComputeOnce(4, 8192, LOAD_TIMEOUT_S, lambda computed, tokens: None, Recorder())
    once.admitted("a", keys("A9B9"), 0, False)
    assert once.should_wait("b", keys("A8C9"), 0, 64) is Verdict.GO
    assert once.should_wait("b", keys("A9C9"), 0, 64) is Verdict.WAIT


def test_leader_far_behind_the_tiers_is_not_waited_for(engine: Engine) -> None:
    """The follower would wait for 45 blocks, several steps, to save nine."""
    engine.admit("a", "A9A9A9A9A9A9")
    assert not engine.waits("b", "A9A9A9A9A9B2", had=36)
    engine.step(a=16)
    assert engine.waits("b", "A9A9A9A9A9B2", had=36)


def test_blocks_planned_in_this_step_count_as_computed(engine: Engine) -> None:
    """A step takes 16 blocks. The position of the leader follows when the step is complete."""
    engine.admit("a", "A9A9A9")
    assert engine.waits("b", "A9A9B2", had=14)


@pytest.mark.parametrize("end", ["finished", "restarted"])
def test_one_follower_takes_over_from_a_leader_that_ends(engine: Engine, end: str) -> None:
    engine.admit("a", "A8")
    assert all(engine.waits(name, "A8") for name in "bcd")
    engine.step(a=3)
    getattr(engine.once, end)("a")
    assert not engine.waits("b", "A8", had=3)
    engine.admit("b", "A8", had=3)
    assert all(engine.waits(name, "A8", had=3) for name in "cd")
    engine.step(b=4)
    for name in "cd":
        assert not engine.waits(name, "A8", had=7)
        engine.admit(name, "A8", had=7)
    assert engine.outcomes() == {"leader_ended": 1, "served": 2}
    assert engine.saved_blocks == 3 + 7 + 7


def test_leader_that_is_asked_again_does_not_wait_for_itself(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert not engine.waits("a", "A8")


def test_leader_without_tokens_for_many_steps_is_lost(engine: Engine) -> None:
    engine.admit("a", "A8")
    engine.step(a=1)
    for _ in range(16):
        engine.step(other=1)
        engine.step()  # computes nothing at all: no sign of being passed over
        assert engine.waits("b", "A8", had=1)
    engine.step(other=1)
    assert not engine.waits("b", "A8", had=1)
    engine.admit("b", "A8", had=1)
    assert engine.waits("c", "A8", had=1)  # for b, no longer for a
    assert engine.outcomes() == {"stalled": 1}


def test_overdue_leader_is_lost_and_one_follower_takes_over(engine: Engine) -> None:
    engine.admit("a", "A8")
    engine.step(a=1)
    assert all(engine.waits(name, "A8", had=1) for name in "bc")
    engine.now += 1.0 + 3 * 6 * BLOCK / RATE - 0.001
    assert all(engine.waits(name, "A8", had=1) for name in "bc")
    engine.now += 0.002
    assert not engine.waits("b", "A8", had=1)
    engine.admit("b", "A8", had=1)
    assert engine.waits("c", "A8", had=1)
    assert engine.outcomes() == {"deadline": 1}


def test_load_of_the_leader_extends_the_deadline(engine: Engine) -> None:
    engine.admit("a", "A8", had=2, is_loading=True)
    assert engine.waits("b", "A8", had=2)
    for _ in range(100):
        engine.step(other=1)  # a loads: it is not passed over
    engine.now += LOAD_TIMEOUT_S
    assert engine.waits("b", "A8", had=2)
    engine.now += 1.0 + 3 * 8 * BLOCK / RATE
    assert not engine.waits("b", "A8", had=2)


def test_unmeasured_prefill_has_a_deadline_too() -> None:
    engine = Engine(is_measured=False)
    engine.admit("a", "A8")
    assert engine.waits("b", "A8")
    engine.now += 3600
    assert not engine.waits("b", "A8")


def test_request_follows_three_leaders_at_most(engine: Engine) -> None:
    for name in "abc":
        engine.admit(name, "A8")
        assert engine.waits("z", "A8")
        engine.once.finished(name)
    engine.admit("d", "A8")
    assert not engine.waits("z", "A8")
    engine.admit("z", "A8")
    assert engine.outcomes() == {"leader_ended": 1}


def test_aborted_follower_is_counted_and_forgotten(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert engine.waits("b", "A8")
    engine.once.finished("b")
    engine.once.finished("b")
    assert engine.outcomes() == {"aborted": 1}


def test_forgotten_leaders_have_no_followers(engine: Engine) -> None:
    engine.admit("a", "A8")
    assert engine.waits("b", "A8")
    engine.once.forget_leaders()
    assert not engine.waits("b", "A8")


def test_leader_that_computed_its_prompt_is_forgotten(engine: Engine) -> None:
    engine.admit("a", "A8")
    engine.step(a=8)
    assert not engine.once._leaders


def test_hits_that_end_a_block_early_are_waited_for() -> None:
    """With EAGLE vLLM drops the last block of every hit."""
    engine = Engine(hit_lag=1)
    engine.admit("a", "A8")
    engine.step(a=4)
    assert engine.waits("b", "A6B2", had=3)
    engine.step(a=3)
    assert not engine.waits("b", "A6B2", had=5)
    engine.admit("b", "A6B2", had=5)
    assert engine.outcomes() == {"served": 1}


class Daemon:
    """Claims as a daemon keeps them, here of engines that share its memory and the test's clock.
    Answers arrive at once unless the test keeps them back."""

    timeout_s = 0.1

    def __init__(self, daemon: DaemonClaims, owner: bytes) -> None:
        self._daemon, self._owner = daemon, owner
        self.is_silent = False
        self.asked = 0

    def claim(self, keys: Sequence[BlockKey], first: int, ttl_s: float) -> Future[ClaimResult]:
        self.asked += 1
        future: Future[ClaimResult] = Future()
        if not self.is_silent:
            taken = [StoreKey(key) for key in keys[first:]]
            future.set_result(ClaimResult(*self._daemon.take(taken, self._owner, ttl_s)))
        return future

    def release(self, keys: Sequence[BlockKey], first: int) -> None:
        self._daemon.release([StoreKey(key) for key in keys[first:]], self._owner)

    def close(self) -> None:
        pass


@pytest.fixture
def engines() -> list[Engine]:
    """Three engines at one daemon. A hundred blocks take 1.6 s."""
    daemon = DaemonClaims(lambda: found[0].now)
    found = [Engine(claims=Daemon(daemon, bytes([n]))) for n in range(3)]
    return found


def pass_time(engines: list[Engine], seconds: float) -> None:
    for engine in engines:
        engine.now += seconds


LONG = "A9" * 10


def test_one_engine_computes_and_the_others_wait(engines: list[Engine]) -> None:
    first, second, third = engines
    assert first.verdict("a", LONG) is Verdict.GO
    first.admit("a", LONG)
    for other in (second, third):
        assert other.verdict("b", LONG) is Verdict.WAIT
        assert other.verdict("c", LONG) is Verdict.WAIT
    pass_time(engines, 0.05)
    assert second.verdict("b", LONG) is Verdict.LOOK_AGAIN
    assert second.verdict("b", LONG, had=40) is Verdict.WAIT
    pass_time(engines, 0.05)
    assert second.verdict("b", LONG, had=40) is Verdict.LOOK_AGAIN
    assert second.verdict("b", LONG, had=89) is Verdict.GO
    second.admit("b", LONG, had=89)
    assert second.outcomes() == {"served": 1}
    assert second.saved_blocks == 89


def test_prompt_of_a_few_milliseconds_is_not_claimed(engines: list[Engine]) -> None:
    assert engines[0].verdict("a", "A3") is Verdict.GO
    assert engines[0].once._claims.asked == 0


@pytest.mark.parametrize("end", ["finished", "restarted"])
def test_one_of_the_waiting_engines_takes_over_at_once(engines: list[Engine], end: str) -> None:
    first, second, third = engines
    assert first.verdict("a", LONG) is Verdict.GO
    first.admit("a", LONG)
    assert second.verdict("b", LONG) is third.verdict("b", LONG) is Verdict.WAIT
    first.step(a=20)
    getattr(first.once, end)("a")
    pass_time(engines, 0.05)
    verdicts = []
    for other in (second, third):
        assert other.verdict("b", LONG, had=20) is Verdict.LOOK_AGAIN
        verdicts.append(other.verdict("b", LONG, had=20))
    assert verdicts == [Verdict.GO, Verdict.WAIT]
    second.admit("b", LONG, had=20)
    assert second.outcomes() == {"leader_ended": 1}


def test_claim_of_a_dead_engine_ends(engines: list[Engine]) -> None:
    first, second, _ = engines
    assert first.verdict("a", LONG) is Verdict.GO
    first.admit("a", LONG)
    assert second.verdict("b", LONG) is Verdict.WAIT
    pass_time(engines, 1.0 + 3 * 2 * 256 / RATE - 0.1)  # two steps, and the slack
    assert second.verdict("b", LONG) is Verdict.LOOK_AGAIN
    assert second.verdict("b", LONG) is Verdict.WAIT
    pass_time(engines, 0.2)
    assert second.verdict("b", LONG) is Verdict.LOOK_AGAIN
    assert second.verdict("b", LONG) is Verdict.GO


def test_claim_of_an_engine_that_makes_progress_is_extended(engines: list[Engine]) -> None:
    first, second, _ = engines
    assert first.verdict("a", LONG) is Verdict.GO
    first.admit("a", LONG)
    assert second.verdict("b", LONG) is Verdict.WAIT
    for _ in range(4):
        pass_time(engines, 0.9)
        first.step(a=10)
        assert second.verdict("b", LONG) is not Verdict.GO
    assert first.once._claims.asked > 1


def test_waiting_engine_gives_up_at_its_own_deadline(engines: list[Engine]) -> None:
    """Whatever the other one claims: it may be hostile."""
    first, second, _ = engines
    hostile = first.once._claims
    verdicts = set()
    for _ in range(1000):
        hostile.claim(keys(LONG), 0, 60.0)
        verdicts.add(second.verdict("b", LONG))
        pass_time(engines, 0.01)
        if Verdict.GO in verdicts:
            break
    waited = second.now - 100.0
    assert 1.0 + 3 * 89 * BLOCK / RATE <= waited < 1.2 + 3 * 89 * BLOCK / RATE
    assert second.verdict("b", LONG) is Verdict.GO, "it has given up for good"
    second.admit("b", LONG)
    assert second.outcomes() == {"deadline": 1}


def test_silent_daemon_is_not_waited_for(engines: list[Engine]) -> None:
    first = engines[0]
    first.once._claims.is_silent = True
    assert first.verdict("a", LONG) is Verdict.WAIT
    first.now += 0.101
    assert first.verdict("a", LONG) is Verdict.GO
    assert first.verdict("a", LONG) is Verdict.GO
    assert first.once._claims.asked == 1


def test_request_that_ends_before_it_is_admitted_releases_its_claim(engines: list[Engine]) -> None:
    first, second, _ = engines
    assert first.verdict("a", LONG) is Verdict.GO
    first.once.finished("a")
    assert second.verdict("b", LONG) is Verdict.GO


def test_request_that_finds_no_room_keeps_its_claim_only_once(engines: list[Engine]) -> None:
    first, second, _ = engines
    assert first.verdict("a", LONG) is Verdict.GO
    assert first.verdict("a", LONG) is Verdict.GO, "vLLM had no blocks for it"
    assert second.verdict("b", LONG) is Verdict.WAIT
    pass_time(engines, 3.0)
    assert first.verdict("a", LONG) is Verdict.GO
    assert second.verdict("b", LONG) is Verdict.LOOK_AGAIN
    assert second.verdict("b", LONG) is Verdict.GO
    assert first.once._claims.asked == 1


def test_follower_that_asked_too_leaves_the_claim_to_its_leader(engines: list[Engine]) -> None:
    first, second, _ = engines
    assert first.verdict("a", LONG) is first.verdict("b", LONG) is Verdict.GO
    first.admit("a", LONG)
    first.step(a=90)
    first.admit("b", LONG, had=89)
    assert second.verdict("c", LONG) is Verdict.WAIT, "its last blocks are on their way"


def test_requests_of_one_engine_wait_for_their_leader_without_asking(
    engines: list[Engine],
) -> None:
    first = engines[0]
    assert first.verdict("a", LONG) is Verdict.GO
    first.admit("a", LONG)
    assert first.verdict("b", LONG) is Verdict.WAIT
    assert first.once._claims.asked == 1


def test_every_outcome_is_exposed() -> None:
    assert names.SHARED_PREFIX_WAITS.series == tuple((one.value,) for one in WaitOutcome)
