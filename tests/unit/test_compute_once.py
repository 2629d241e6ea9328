"""Who waits for whom, and what ends a wait, with a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv.connector.scheduler.compute_once import ComputeOnce, is_requested
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import WaitOutcome
from vllm_tiered_kv.metrics.recorder import Recorder

BLOCK = 16
RATE = 1000.0  # tokens per second
LOAD_TIMEOUT_S = 5.0


class Engine:
    """What vLLM tells `ComputeOnce`, in blocks. Prompts are written in blocks too: `A4B4` shares
    the first four with `A8`."""

    def __init__(self, hit_lag: int = 0, is_measured: bool = True) -> None:
        self.now = 100.0
        self.recorder = Recorder()
        self.once = ComputeOnce(
            BLOCK,
            256,
            LOAD_TIMEOUT_S,
            lambda computed, tokens: tokens / RATE if is_measured else None,
            self.recorder,
            hit_lag,
            lambda: self.now,
        )

    def admit(self, name: str, prompt: str, had: int = 0, is_loading: bool = False) -> None:
        self.once.admitted(name, keys(prompt), had * BLOCK, is_loading)

    def waits(self, name: str, prompt: str, had: int = 0) -> bool:
        limit = (len(keys(prompt)) * BLOCK - 1) // BLOCK * BLOCK
        return self.once.should_wait(name, keys(prompt), had * BLOCK, limit)

    def step(self, **blocks: int) -> None:
        self.once.step_planned({name: count * BLOCK for name, count in blocks.items()})

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


def test_nothing_shared_never_waits(engine: Engine) -> None:
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
    engine.once.step_planned({"a": BLOCK + 3})
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
    assert not once.should_wait("b", keys("A8C9"), 0, 64)
    assert once.should_wait("b", keys("A9C9"), 0, 64)


def test_leader_far_behind_the_tiers_is_not_waited_for(engine: Engine) -> None:
    """The follower would wait for six blocks to save two."""
    engine.admit("a", "A8")
    assert not engine.waits("b", "A6B2", had=4)
    engine.step(a=2)
    assert engine.waits("b", "A6B2", had=4)


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


def test_forgotten_leaders_lead_nobody(engine: Engine) -> None:
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


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, "default"),
        ({}, "default"),
        ({"compute_once": True}, True),
        ({"compute_once": False}, False),
        ({"compute_once": "yes"}, "default"),
        (["compute_once"], "default"),
    ],
)
@pytest.mark.parametrize("default", [False, True])
def test_parameter_of_a_request_overrides_the_option(
    params: Any, expected: Any, default: bool
) -> None:
    request: Any = SimpleNamespace(kv_transfer_params=params)
    assert is_requested(request, default) is (default if expected == "default" else expected)


def test_every_outcome_is_exposed() -> None:
    assert names.SHARED_PREFIX_WAITS.series == tuple((one.value,) for one in WaitOutcome)
