"""Ranks that fail apart from each other: a hit counts only where all of them have it. They divide
heads, layers, or the tokens of a block (context parallelism)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total, workload
from tests.engine.toy_groups import EXPORTED_STATE, STATE, WrongRead
from tests.engine.toy_ranks import RankedToyEngine
from tests.patience import in_turn, mostly_slow
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason

pytestmark = pytest.mark.usefixtures("step_loads")

STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
TURNS = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 2}
# Prefill context parallelism, with the tokens of a block divided among its ranks.
CONTEXT = {**TURNS, "tensor_parallel_size": 1, "prefill_context_parallel_size": 2}
KINDS: dict[str, dict] = {
    "tensor": {},
    "pipeline": STAGES,
    "decode_context": TURNS,
    "prefill_context": CONTEXT,
}
EITHER_KIND = pytest.mark.parametrize("parallel", KINDS.values(), ids=list(KINDS))
SCHEDULERS = {"sync": False, "async": True}
WAYS_OF_LOADS = {"step_loads": "auto", "beside_loads": "never"}
EITHER_RANK = pytest.mark.parametrize("bad", [0, 1], ids=["first-rank", "second-rank"])


def test_each_rank_stores_and_loads_its_own_shard(
    tiny_model: Path, async_scheduling: bool, step_loads: str
) -> None:
    engine = RankedToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    assert total(engine, names.STORED_BLOCKS) == 11
    engine.drop_gpu_cache()
    request = ask(engine, ids)
    assert total(engine, names.LOADED_BLOCKS) == 10
    assert engine.reported_loads == ([] if step_loads == "auto" else [request])
    engine.assert_at_rest()
    engine.drop_gpu_cache()
    first, second = (rank.arena for rank in engine.all_ranks)
    second[:] = first  # what the other rank holds is of no use here
    with pytest.raises(WrongRead):
        ask(engine, ids)


@EITHER_KIND
@EITHER_RANK
def test_load_that_one_rank_cannot_do_is_recomputed_on_all(
    tiny_model: Path, async_scheduling: bool, bad: int, step_loads: str, parallel: dict
) -> None:
    engine = RankedToyEngine(tiny_model, async_scheduling, parallel_config=parallel)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.copiers[bad].fail_every = engine.copiers[bad].fail_ahead = 1.0
    if step_loads == "auto" and (async_scheduling or parallel in (STAGES, CONTEXT)):
        with pytest.raises(CudaError):  # such a step cannot be taken back
            ask(engine, ids)
        return
    request = ask(engine, ids)
    assert engine.reported_loads == ([] if step_loads == "auto" else [request])
    assert total(engine, names.LOAD_FAILURES) == 1
    assert total(engine, names.LOADED_BLOCKS) == 0
    engine.copiers[bad].fail_every = engine.copiers[bad].fail_ahead = 0.0
    engine.drop_gpu_cache()
    hits = total(engine, names.HIT_TOKENS)
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) > hits  # the recomputation was stored anew
    engine.assert_at_rest()


@EITHER_KIND
@EITHER_RANK
def test_block_that_one_rank_did_not_store_is_a_miss(
    tiny_model: Path, async_scheduling: bool, bad: int, parallel: dict
) -> None:
    engine = RankedToyEngine(tiny_model, async_scheduling, parallel_config=parallel)
    engine.copiers[bad].drop_stores = 1.0
    rng = random.Random(2)
    asked = [prompt(rng, 61) for _ in range(4)]
    for ids in asked:
        ask(engine, ids, 2)
    dropped = total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.COPY_FAILED.value)
    assert dropped > 0
    # What the other rank has stored all of counts for nothing.
    full = sum((len(ids) + 1) // engine.alignment for ids in asked)
    assert total(engine, names.STORED_BLOCKS) + dropped == full
    engine.copiers[bad].drop_stores = 0.0
    for ids in asked:
        engine.drop_gpu_cache()
        ask(engine, ids, 2)
    assert total(engine, names.LOAD_FAILURES) == 0
    engine.assert_at_rest()


@EITHER_KIND
def test_load_is_over_when_the_slowest_rank_is_done(
    tiny_model: Path, async_scheduling: bool, parallel: dict
) -> None:
    """The blocks of an aborted request stay its own until then."""
    engine = RankedToyEngine(tiny_model, async_scheduling, gpu_blocks=40, parallel_config=parallel)
    engine.copiers[0].max_delay = 0
    engine.copiers[1].max_delay = 12
    rng = random.Random(3)
    ids = prompt(rng, 61)
    ask(engine, ids)
    for steps in range(12):
        engine.drop_gpu_cache()
        loading = engine.add(ids, 4)
        for _ in range(steps):
            engine.step()
        if not engine.requests[loading].is_finished():
            engine.abort(loading)
        ask(engine, prompt(rng, 61))  # would be given the blocks that are still written
        engine.run()
        engine.assert_at_rest()


HYBRIDS: dict[str, dict] = {
    "same_blocks": {},
    "fine_hashes": {"hash_size": 2},
    "same_spans": {"block_size": 8, "block_sizes": (4, 8)},
}


@WITH_RECURRENT_STATES
@pytest.mark.parametrize(
    ("shape", "async_scheduling", "step_loads"),
    in_turn(HYBRIDS, SCHEDULERS, WAYS_OF_LOADS),
    indirect=["async_scheduling", "step_loads"],
)
@pytest.mark.parametrize("state", mostly_slow([STATE, EXPORTED_STATE], 1))
def test_random_clients_of_hybrids_whose_states_are_not_divided(
    tiny_model: Path, async_scheduling: bool, state: int, shape: dict
) -> None:
    engine = RankedToyEngine(
        tiny_model,
        async_scheduling,
        windows=(None, state),
        gpu_blocks=28,  # forces preemption
        cpu_blocks=60,
        parallel_config=TURNS,
        **shape,
    )
    for copier in engine.copiers:
        copier.fail_every = 0.05
        copier.drop_stores = 0.1
    workload(engine, 5, 60)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert total(engine, names.HIT_TOKENS) > 0
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0


@pytest.mark.parametrize(
    ("async_scheduling", "step_loads", "turns"),
    in_turn(SCHEDULERS, WAYS_OF_LOADS, {"two": 2, "four": 4}),
    indirect=["async_scheduling", "step_loads"],
)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_random_clients_of_both_context_parallelisms_over_tensor_parallel_ranks(
    tiny_model: Path, async_scheduling: bool, turns: int, seed: int
) -> None:
    """DCP spans the ranks of PCP, so that two of four hold each token, or all four."""
    parallel = {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": turns,
        "cp_kv_cache_interleave_size": 2,
    }
    engine = RankedToyEngine(
        tiny_model,
        async_scheduling,
        ranks=4,
        gpu_blocks=40 // turns,
        cpu_blocks=30,
        parallel_config=parallel,
        seed=seed,
    )
    assert engine.alignment == 4 * turns
    for number, copier in enumerate(engine.copiers):
        copier.fail_every = 0.1
        copier.drop_stores = 0.05
        copier.max_delay = 2 + 3 * number
    workload(engine, seed, 60)
    engine.assert_at_rest()
    assert total(engine, names.HIT_TOKENS) > 0
    ids = prompt(random.Random(seed), 61)
    for copier in engine.copiers:
        copier.fail_every = copier.drop_stores = 0.0
    ask(engine, ids)
    engine.drop_gpu_cache()
    arenas = [rank.arena for rank in engine.all_ranks]
    arenas[1][:] = arenas[2]  # what another rank holds is of no use here
    with pytest.raises(WrongRead):
        ask(engine, ids)


OPTIONS: dict[str, dict] = {
    "eager": {},
    "slow": {"store_delay": 4},
    "lazy": {"store": "lazy", "lazy_window": 24},
    "tails": {"reuse_partial_tail": True},
}


@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
@pytest.mark.parametrize(
    ("parallel", "async_scheduling", "options"),
    in_turn(KINDS, SCHEDULERS, OPTIONS),
    indirect=["async_scheduling"],
)
def test_random_clients(
    tiny_model: Path,
    async_scheduling: bool,
    seed: int,
    options: dict,
    step_loads: str,
    parallel: dict,
) -> None:
    options = dict(options)
    engine = RankedToyEngine(
        tiny_model,
        async_scheduling,
        store_delay=options.pop("store_delay", None),
        gpu_blocks=28,
        cpu_blocks=30,
        extra_config=options,
        parallel_config=parallel,
        seed=seed,
    )
    for number, copier in enumerate(engine.copiers):
        copier.fail_every = 0.2
        copier.drop_stores = 0.1
        copier.max_delay = 2 + 3 * number
        # A pipeline has already started later steps, and Model Runner V2 rewinds no request on the
        # GPU. So a failed step cannot be discarded.
        can_rewind = not async_scheduling and parallel not in (STAGES, CONTEXT)
        copier.fail_ahead = 0.2 if can_rewind else 0.0
    workload(engine, seed, 60)
    engine.assert_at_rest()
    assert total(engine, names.HIT_TOKENS) > 0
