"""vLLM's priorities: a request may lose its place in the very step that was to fill its blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.toy_asking import assert_tier_is_right, prompt, total, workload
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import EXPORTED_STATE, STATE
from vllm_tiered_kv.metrics import names

STORES = pytest.mark.parametrize(
    "options", [{}, {"store": "lazy", "lazy_window": 24}], ids=["eager", "lazy"]
)


class PrioritizedToyEngine(ToyEngine):
    def add(self, *what: Any, **request_args: Any) -> str:
        return super().add(*what, **{"priority": self.rng.randrange(3), **request_args})


def prioritized(model: Path, async_scheduling: bool, **facts: Any) -> ToyEngine:
    args = {"scheduling_policy": "priority", "long_prefill_token_threshold": 8}
    return PrioritizedToyEngine(model, async_scheduling, engine_args=args, **facts)


@STORES
def test_blocks_of_a_request_that_is_taken_out_of_its_step_are_not_found(
    tiny_model: Path, options: dict[str, Any]
) -> None:
    engine = prioritized(
        tiny_model, False, gpu_blocks=11, max_tokens_per_step=16, extra_config=options
    )
    rng = random.Random(1)
    long, short = prompt(rng, 38), prompt(rng, 8)
    victim = engine.add(long, 2, priority=9)
    engine.step()
    engine.add(short, 3, priority=0)
    engine.step()
    assert engine.requests[victim].num_computed_tokens == 24
    # There are two more blocks. The victim gets both, the other one takes one of them away.
    engine.step()
    assert engine.requests[victim].num_preemptions == 1
    pool = engine.scheduler.kv_cache_manager.block_pool
    hashes = engine.requests[victim].block_hashes
    found = [pool.get_cached_block(each, [0]) is not None for each in hashes]
    assert found == [True] * 6 + [False] * (len(hashes) - 6)
    engine.run()
    assert engine.finished[victim].tokens == play(long, 2)[0]
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert not engine.half._stale_hash_guard._requests
    assert not engine.half._stale_hash_guard._filled


@pytest.mark.parametrize("seed", [0, 2, 3])  # with preemptions
@STORES
def test_random_clients(
    tiny_model: Path, async_scheduling: bool, seed: int, options: dict[str, Any]
) -> None:
    engine = prioritized(
        tiny_model,
        async_scheduling,
        windows=(None, 8),
        gpu_blocks=50,  # forces preemption
        cpu_blocks=60,
        max_tokens_per_step=24,
        extra_config=options,
        seed=seed,
    )
    workload(engine, seed, 50)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert total(engine, names.LOADED_BLOCKS) > 0


@WITH_RECURRENT_STATES
@pytest.mark.parametrize("state", [STATE, EXPORTED_STATE], ids=["state", "exported"])
def test_random_clients_with_recurrent_layers(
    tiny_model: Path, async_scheduling: bool, state: int
) -> None:
    engine = prioritized(
        tiny_model,
        async_scheduling,
        windows=(None, state),
        gpu_blocks=36,  # forces preemption
        cpu_blocks=60,
        max_tokens_per_step=24,
        retention=8,
        seed=2,
    )
    workload(engine, 2, 50)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert total(engine, names.LOADED_BLOCKS) > 0
