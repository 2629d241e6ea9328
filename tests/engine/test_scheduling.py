"""The connector under vLLM's real schedulers, with copies of random duration.

The toy model checks every read of the cache against the only right value, so each of these tests
detects blocks that are reused too early, lost or mixed up.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total, workload
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import WrongRead
from tests.patience import mostly_slow
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason

pytestmark = pytest.mark.usefixtures("step_loads")


def test_repeated_prompt_is_loaded_except_its_last_token(
    tiny_model: Path, async_scheduling: bool, step_loads: str
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 0
    assert total(engine, names.MISS_TOKENS) == 40
    engine.drop_gpu_cache()
    request = ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 40
    assert total(engine, names.LOADED_BLOCKS) == 10
    assert engine.reported_loads == ([] if step_loads == "auto" else [request])
    assert engine.copier.ahead_blocks == (10 if step_loads == "auto" else 0)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def test_block_aligned_prompt_computes_its_last_block(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 40)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 36
    engine.assert_at_rest()


def test_load_skips_blocks_that_the_gpu_has(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    rng = random.Random(1)
    shared = prompt(rng, 20)
    ask(engine, shared + prompt(rng, 21))
    ask(engine, shared + prompt(rng, 9))
    assert total(engine, names.LOADED_BLOCKS) == 0
    engine.assert_at_rest()


def test_answer_blocks_are_stored_up_to_the_last_full_one(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The next turn of a chat hits the answer of this one."""
    for count in range(1, 14):
        engine = ToyEngine(tiny_model, async_scheduling)
        ids = prompt(random.Random(count), 9)
        ask(engine, ids, count)
        # The KV of all tokens but the last one sampled exists.
        assert total(engine, names.STORED_BLOCKS) == (9 + count - 1) // 4, count
        engine.drop_gpu_cache()
        turn = ids + play(ids, count)[0] + [7, 8, 9]
        ask(engine, turn)
        assert total(engine, names.HIT_TOKENS) == (9 + count - 1) // 4 * 4, count
        engine.assert_at_rest()


def test_store_decode_off_stores_prompt_blocks_only(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, extra_config={"store_decode": False})
    ask(engine, prompt(random.Random(1), 10), 20)
    assert total(engine, names.STORED_BLOCKS) == 2
    engine.assert_at_rest()


def test_request_with_unreadable_adapter_runs_uncached(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    with monkeypatch.context() as patch:
        patch.setattr(engine.half._key_maker, "keys_for", _unreadable)
        ask(engine, ids)
        engine.drop_gpu_cache()
        ask(engine, ids)
    assert total(engine, names.STORED_BLOCKS) == 0
    engine.assert_at_rest()


def _unreadable(request: object) -> None:
    raise PermissionError("adapter_model.safetensors")


def test_requests_with_different_salts_share_no_blocks(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 30)
    for salt in ("", "a", "b"):
        ask(engine, ids, salt=salt)
        engine.drop_gpu_cache()
    assert total(engine, names.HIT_TOKENS) == 0
    ask(engine, ids, salt="a")
    assert total(engine, names.HIT_TOKENS) == 28


def test_failed_load_is_recomputed_and_not_retried(
    tiny_model: Path, async_scheduling: bool, step_loads: str
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.copier.fail_every = engine.copier.fail_ahead = 1.0
    if step_loads == "auto" and async_scheduling:
        with pytest.raises(CudaError):  # such a step cannot be discarded
            ask(engine, ids)
        return
    request = ask(engine, ids)
    assert engine.reported_loads == ([] if step_loads == "auto" else [request])
    assert total(engine, names.LOAD_FAILURES) == 1
    assert total(engine, names.LOADED_BLOCKS) == 0
    engine.copier.fail_every = engine.copier.fail_ahead = 0.0
    engine.drop_gpu_cache()
    ask(engine, ids)  # the recomputed blocks were stored again
    assert total(engine, names.LOADED_BLOCKS) == 10
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def test_abort_after_any_number_of_steps_leaks_nothing(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The request waits, loads, computes or stores when it is aborted."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=64)
    engine.copier.max_delay = 6
    ids = prompt(random.Random(1), 61)
    ask(engine, ids)
    for steps in range(16):
        engine.drop_gpu_cache()
        request = engine.add(ids, 8)
        for _ in range(steps):
            engine.step()
        if not engine.requests[request].is_finished():
            engine.abort(request)
        engine.run()
        engine.assert_at_rest()
        assert engine.reported_loads.count(request) <= 1
    ask(engine, ids)
    assert assert_tier_is_right(engine)


def test_reset_drops_all_blocks_and_stores_in_flight(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    engine.copier.max_delay = 4
    ids = prompt(random.Random(1), 41)
    running = engine.add(ids, 30)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    assert engine.finished[running].tokens == play(ids, 30)[0]
    # Blocks that the request computed before the reset must not be stored in the new epoch.
    assert engine.half.index.used_bytes == 0
    assert total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.RESET.value) > 0
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 0
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 40
    engine.assert_at_rest()


def test_reset_prefix_cache_with_running_requests_succeeds(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The connector holds no block references that would prevent a reset."""
    engine = ToyEngine(tiny_model, async_scheduling)
    rng = random.Random(5)
    asked = {}
    resets = 0
    for round_ in range(30):
        ids = prompt(rng, rng.randrange(10, 60))
        asked[engine.add(ids, 10)] = ids
        for _ in range(rng.randrange(4)):
            engine.step()
        # vLLM itself refuses while a load is in flight or, with overlapping steps, a step.
        engine.land()
        if not engine.scheduler.kv_holding_waiting:
            assert engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=round_ % 3 == 0
            )
            resets += 1
    engine.run()
    assert resets > 3
    for request, ids in asked.items():
        assert engine.finished[request].tokens == play(ids, 10)[0]
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_hash_only_mode_stores_and_loads_nothing(tiny_model: Path) -> None:
    ids = prompt(random.Random(1), 41)
    engine = ToyEngine(tiny_model, extra_config={"mode": "hash_only"})
    for _ in range(2):
        ask(engine, ids)
        engine.drop_gpu_cache()
    assert total(engine, names.STORED_BLOCKS) == total(engine, names.HIT_TOKENS) == 0
    assert total(engine, names.MISS_TOKENS) == 80
    engine.assert_at_rest()


@pytest.mark.parametrize("seed", mostly_slow(range(3), 2))
@pytest.mark.parametrize(
    "options",
    [
        {"eviction": "lru"},
        {"eviction": "s3fifo"},
        {"store": "lazy", "lazy_window": 24},
        {"store_decode": False},
        {"store_delay": 4},
        {"store_delay": 4, "store": "lazy", "lazy_window": 24},
    ],
    ids=["lru", "s3fifo", "lazy", "prompts", "slow", "lazy_slow"],
)
def test_random_workload_reads_only_right_kv(
    tiny_model: Path, async_scheduling: bool, seed: int, options: dict
) -> None:
    options = dict(options)
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        store_delay=options.pop("store_delay", None),
        gpu_blocks=28,  # forces preemption
        cpu_blocks=30,  # forces eviction
        max_seqs=8,
        second_runner=seed % 2 == 1,
        extra_config=options,
        seed=seed,
    )
    engine.copier.fail_every = 0.05
    engine.copier.drop_stores = 0.1
    workload(engine, seed, 60)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert total(engine, names.LOADED_BLOCKS) > 0
    assert total(engine, names.EVICTED_BLOCKS) > 0
    if engine.store_delay is not None:
        assert engine.copier.waited_for > 0


def test_random_workload_without_gpu_prefix_cache_reads_only_right_kv(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, gpu_blocks=60, cpu_blocks=30, prefix_caching=False
    )
    workload(engine, 3, 60)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert total(engine, names.LOADED_BLOCKS) > 0


def test_flipped_bit_in_a_slot_is_a_wrong_read(tiny_model: Path, async_scheduling: bool) -> None:
    """Shows that the toy engine detects wrong content."""
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.arena[3, 1, 2] ^= 1
    with pytest.raises(WrongRead):
        ask(engine, ids)
