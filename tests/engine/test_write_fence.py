"""The write fence: a step that overwrites a block waits for the store that still reads it.

Stores never end by themselves here. They read their blocks when a step waits for them, or at the
very end, when wrong content in the tier shows that a wait was missing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total
from tests.engine.toy_engine import ToyEngine, play
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

NEVER = 1 << 30


def finish(engine: ToyEngine, *requests: str) -> None:
    """Steps until these requests have finished; stores may still be in flight."""
    for _ in range(2000):
        if all(engine.requests[request].is_finished() for request in requests):
            engine.land()
            return
        engine.step()
    raise AssertionError("a request hangs")


def read_the_rest(engine: ToyEngine) -> None:
    """Lets all remaining stores read their blocks, and checks the tier."""
    engine.copier.store_delay = 0
    engine.copier.settle()
    engine.run()
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def seeded_prompt(seed: int, length: int) -> list[int]:
    return prompt(random.Random(seed), length)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["hashes", "no_hashes"])
def test_forward_waits_before_it_overwrites_blocks_of_a_finished_request(
    tiny_model: Path, async_scheduling: bool, prefix_caching: bool
) -> None:
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=14,
        max_tokens_per_step=64,
        prefix_caching=prefix_caching,
        store_delay=NEVER,
    )
    for seed in range(3):
        finish(engine, engine.add(seeded_prompt(seed, 41), 6))
    assert engine.copier.waited_for >= 20
    read_the_rest(engine)
    assert total(engine, names.STORED_BLOCKS) == 3 * 11
    assert total(engine, names.DROPPED_BLOCKS) == 0


def test_forward_does_not_wait_for_stores_of_other_blocks(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=128, store_delay=NEVER)
    for seed in range(3):
        finish(engine, engine.add(seeded_prompt(seed, 41), 6))
    assert engine.copier.waited_for == 0
    read_the_rest(engine)


def test_forward_waits_before_it_overwrites_blocks_behind_a_window(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        windows=(None, 6),
        gpu_blocks=44,
        cpu_blocks=128,
        max_tokens_per_step=16,
        store_delay=NEVER,
    )
    finish(engine, engine.add(seeded_prompt(1, 121), 4))
    assert engine.copier.waited_for > 0
    read_the_rest(engine)
    assert total(engine, names.STORED_BLOCKS) == 60 + 2


def test_forward_waits_before_it_overwrites_blocks_of_a_preempted_request(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """vLLM preempts the request and reallocates its blocks in one step, with stores in flight."""
    engine = ToyEngine(
        tiny_model, async_scheduling, gpu_blocks=28, cpu_blocks=64, store_delay=NEVER
    )
    asked = [engine.add(seeded_prompt(seed, 40), 40) for seed in range(2)]
    while not any(engine.requests[request].num_preemptions for request in asked):
        assert engine.copier.waited_for == 0
        engine.step()
    finish(engine, *asked)
    assert engine.copier.waited_for > 0
    read_the_rest(engine)


@pytest.mark.parametrize("loads", ["step", "async", "early"])
def test_load_waits_before_it_overwrites_blocks_of_a_finished_request(
    tiny_model: Path, async_scheduling: bool, loads: str
) -> None:
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=24,
        cpu_blocks=64,
        max_tokens_per_step=128,
        extra_config={"step_loads": "never" if loads == "async" else "auto"},
    )
    held = [seeded_prompt(seed, 33) for seed in (1, 2)]
    for ids in held:
        ask(engine, ids, 1)
    engine.drop_gpu_cache()
    engine.copier.store_delay = NEVER
    finish(engine, engine.add(seeded_prompt(3, 81), 1))
    engine.drop_gpu_cache()
    assert engine.copier.waited_for == 0
    asked = [engine.add(ids, 1) for ids in (held if loads == "early" else held[:1])]
    finish(engine, *asked)
    assert total(engine, names.HIT_BLOCKS) == 8 * len(asked)
    assert bool(engine.copier.early_blocks) is (loads == "early")
    assert bool(engine.copier.ahead_blocks) is (loads != "async")
    assert engine.copier.waited_for > 0
    read_the_rest(engine)


def test_verification_reads_its_blocks_before_they_are_overwritten(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=14,
        cpu_blocks=128,
        max_tokens_per_step=64,
        extra_config={"verify_fraction": 1},
    )
    held = seeded_prompt(1, 41)
    ask(engine, held, 1)
    engine.drop_gpu_cache()
    engine.copier.store_delay = NEVER
    finish(engine, engine.add(held, 1))
    finish(engine, engine.add(seeded_prompt(2, 41), 1))
    read_the_rest(engine)
    assert total(engine, names.VERIFIED_BLOCKS) == 10
    assert total(engine, names.DIFFERING_BLOCKS) == 0
    engine.close()


@dataclass
class ClearingToyEngine(ToyEngine):
    """Overwrites new blocks before any hook, as Model Runner V2 may."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._new: list[int] = []
        pool = self.scheduler.kv_cache_manager.block_pool
        allocate = pool.get_new_blocks

        def get_new_blocks(count: int) -> list[Any]:
            blocks = allocate(count)
            self._new += [block.block_id for block in blocks]
            return blocks

        pool.get_new_blocks = get_new_blocks

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for cache in self.caches:
            cache[self._new] = -5
        self._new = []
        return super()._execute(output)


def test_step_waits_for_its_stores_if_vllm_zeroes_new_blocks(tiny_model: Path) -> None:
    engine = ClearingToyEngine(tiny_model, gpu_blocks=14, max_tokens_per_step=64, store_delay=NEVER)
    engine.worker.worker_half._steps_zero_blocks = True
    for seed in range(3):
        finish(engine, engine.add(seeded_prompt(seed, 41), 1))
    read_the_rest(engine)
    assert total(engine, names.STORED_BLOCKS) == 30


def test_without_the_fence_the_tier_holds_wrong_blocks(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the other tests detect a missing fence."""
    engine = ToyEngine(
        tiny_model, async_scheduling, gpu_blocks=14, max_tokens_per_step=64, store_delay=NEVER
    )
    monkeypatch.setattr(engine.half.ledger.fence, "take", lambda: None)
    for seed in range(3):
        finish(engine, engine.add(seeded_prompt(seed, 41), 6))
    with pytest.raises(AssertionError):
        read_the_rest(engine)


def test_reset_keeps_slots_of_stores_in_flight_in_use(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The blocks are dropped, but the stores write to their slots until they end."""
    engine = ToyEngine(
        tiny_model, async_scheduling, gpu_blocks=14, max_tokens_per_step=64, store_delay=NEVER
    )
    finish(engine, engine.add(seeded_prompt(1, 41), 1))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    ids = seeded_prompt(2, 41)
    second = engine.add(ids, 1)
    finish(engine, second)
    assert engine.copier.waited_for > 0
    assert engine.finished[second].tokens == play(ids, 1)[0]
    read_the_rest(engine)


def test_lookup_waits_for_a_store_in_flight(tiny_model: Path, async_scheduling: bool) -> None:
    """An engine that has stopped stepping has not received its last store reports."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=128)
    engine.copier.store_delay = 3
    prompts = [seeded_prompt(seed, 41) for seed in range(8)]
    finish(engine, *[engine.add(ids, 1) for ids in prompts])
    assert total(engine, names.STORED_BLOCKS) < 80
    engine.drop_gpu_cache()
    again = [engine.add(ids, 1) for ids in prompts]
    finish(engine, *again)
    assert total(engine, names.HIT_TOKENS) == 8 * 40
    engine.run()
    engine.assert_at_rest()


def test_lookup_waits_at_most_a_second_for_a_store(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=128, store_delay=NEVER)
    monkeypatch.setattr("vllm_tiered_kv.connector.scheduler.load_planner._STORE_WAIT_S", 0.05)
    ids = seeded_prompt(1, 41)
    finish(engine, engine.add(ids, 1))
    engine.drop_gpu_cache()
    request = engine.add(ids, 1)
    for _ in range(3):
        engine.step()
        assert not engine.requests[request].num_computed_tokens
    while not engine.requests[request].is_finished():
        engine.step()
    engine.land()
    assert total(engine, names.HIT_TOKENS) == 0
    read_the_rest(engine)
