"""A request from arrival to end under vLLM's real schedulers, step by step and at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.conformance.contract_engine import LOADING, ContractEngine
from tests.engine.toy_asking import seeded_prompt
from tests.patience import mostly_slow


@pytest.mark.usefixtures("beside_loads")
def test_asynchronous_load_step_by_step(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ContractEngine(tiny_model, async_scheduling)
    ids = seeded_prompt(1, 41)
    engine.ask(ids)
    engine.drop_gpu_cache()
    engine.computed.clear()

    request_id = engine.add(ids, 6)
    request = engine.requests[request_id]
    assert request.status is RequestStatus.WAITING
    engine.until_loading(request_id)
    assert engine.calls.asked[-1] == (request_id, 40, True)
    assert engine.calls.admitted[-1] == (request_id, 40)
    assert request.num_computed_tokens == 40
    blocks = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
    assert len(blocks) == 10
    assert engine.half.index.pinned_slots()
    # Not yet in the prefix cache: nobody else may read what is still being written.
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].block_hash is None for block in blocks)

    while request.status is LOADING:
        assert engine.computed[request_id] == 0
        engine.step()
    assert engine.reported_loads == [request_id]
    assert not engine.half.index.pinned_slots()
    engine.run()
    engine.assert_said(request_id, ids)
    assert engine.computed[request_id] - 6 <= 1  # one token of the prompt, then its answer
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_others_run_while_one_loads(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ContractEngine(tiny_model, async_scheduling)
    engine.copier.max_delay = 12
    ids, other = seeded_prompt(1, 41), seeded_prompt(2, 20)
    engine.ask(ids)
    engine.drop_gpu_cache()
    loading = engine.add(ids, 4)
    engine.until_loading(loading)
    running = engine.add(other, 30)
    seen_together = 0
    while engine.requests[loading].status is LOADING:
        engine.step()
        seen_together += running in {r.request_id for r in engine.scheduler.running}
    assert seen_together
    engine.run()
    engine.assert_said(loading, ids, 4)
    engine.assert_said(running, other, 30)
    engine.assert_conforms()


def test_vllm_counts_what_was_asked_and_found(tiny_model: Path, step_loads: str) -> None:
    """vLLM's own statistics of external hits: asked once, however often it had to wait."""
    engine = ContractEngine(tiny_model)
    ids = seeded_prompt(1, 41)
    for _ in range(2):
        engine.ask(ids)
        engine.drop_gpu_cache()
    stats = engine.scheduler.connector_prefix_cache_stats
    engine.scheduler.connector_prefix_cache_stats = type(stats)()
    engine.add(ids, 1)
    queries = hits = 0
    while engine.scheduler.has_requests():
        output = engine.scheduler.schedule()
        done = engine.scheduler.update_from_output(output, engine._execute(output))
        for outputs in done.values():
            if outputs.scheduler_stats is not None:
                found = outputs.scheduler_stats.connector_prefix_cache_stats
                queries += found.queries
                hits += found.hits
        engine._collect()
    assert (queries, hits) == (41, 40)
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_load_without_free_gpu_blocks_is_not_begun(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The answer is discarded when vLLM finds no blocks; asked again, it is given again."""
    engine = ContractEngine(tiny_model, async_scheduling, gpu_blocks=16)
    ids = seeded_prompt(1, 41)
    engine.ask(ids)
    engine.drop_gpu_cache()
    running = engine.add(seeded_prompt(2, 25), 8)  # nine blocks of fifteen
    for _ in range(3):
        engine.step()
    waiting = engine.add(ids, 4)
    asked = len(engine.calls.asked)
    for _ in range(3):
        engine.step()
    assert [tokens for _, tokens, _ in engine.calls.asked[asked:]] == [40] * (
        len(engine.calls.asked) - asked
    )
    assert len(engine.calls.asked) > asked
    assert engine.requests[waiting].status is RequestStatus.WAITING
    assert engine.calls.loads_of(waiting) == 0
    assert not engine.half.index.pinned_slots(), "pinned for a load that has no blocks"
    engine.run()
    assert engine.calls.loads_of(waiting) == 1
    engine.assert_said(running, seeded_prompt(2, 25), 8)
    engine.assert_said(waiting, ids, 4)
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_loaded_request_is_preempted_and_starts_over(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ContractEngine(tiny_model, async_scheduling, gpu_blocks=24, cpu_blocks=64)
    first, second = seeded_prompt(1, 33), seeded_prompt(2, 33)
    for ids in (first, second):
        engine.ask(ids)
    engine.drop_gpu_cache()
    asked = [(engine.add(ids, 30), ids) for ids in (first, second)]
    engine.run()
    assert sum(engine.requests[r].num_preemptions for r, _ in asked) > 0
    for request_id, ids in asked:
        engine.assert_said(request_id, ids, 30)
        # What is loaded again after a preemption is one more load, reported once more.
        assert engine.calls.loads_of(request_id) >= 1
        assert engine.calls.loads_of(request_id) <= 1 + engine.requests[request_id].num_preemptions
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_chunked_prefill_behind_a_load(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ContractEngine(tiny_model, async_scheduling, max_tokens_per_step=8)
    stem = seeded_prompt(1, 24)
    engine.ask(stem)
    engine.drop_gpu_cache()
    ids = stem + seeded_prompt(2, 30)
    engine.computed.clear()
    request_id = engine.ask(ids)
    assert (request_id, 24) in engine.calls.admitted
    assert engine.calls.loads_of(request_id) == 1
    # The last token of an answer is not computed; asynchronous scheduling runs a step too far.
    assert engine.computed[request_id] - (len(ids) - 24) in (5, 6)
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_twins_at_once(tiny_model: Path, async_scheduling: bool) -> None:
    """The same prompt several times, cold and warm, with copies of different speed."""
    engine = ContractEngine(tiny_model, async_scheduling, gpu_blocks=128)
    ids = seeded_prompt(1, 41)
    for _ in range(3):
        asked = [engine.add(ids, 5) for _ in range(5)]
        engine.run()
        for request_id in asked:
            engine.assert_said(request_id, ids, 5)
        engine.drop_gpu_cache()
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_priorities(tiny_model: Path, async_scheduling: bool) -> None:
    """Under vLLM's priority policy a late, urgent request pushes out one that has loaded."""
    engine = ContractEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=24,
        cpu_blocks=64,
        engine_args={"scheduling_policy": "priority"},
    )
    prompts = [seeded_prompt(seed, 33) for seed in range(3)]
    for ids in prompts:
        engine.ask(ids)
    engine.drop_gpu_cache()
    late = engine.add(prompts[0], 30, priority=9)
    for _ in range(6):
        engine.step()
    urgent = [engine.add(ids, 20, priority=1) for ids in prompts[1:]]
    engine.run()
    assert engine.requests[late].num_preemptions > 0
    engine.assert_said(late, prompts[0], 30)
    for request_id, ids in zip(urgent, prompts[1:], strict=True):
        engine.assert_said(request_id, ids, 20)
    engine.assert_conforms()


@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
@pytest.mark.usefixtures("step_loads")
def test_anything_goes(tiny_model: Path, async_scheduling: bool, seed: int) -> None:
    """Shared prefixes, priorities, aborts and failing loads on too little memory."""
    rng = random.Random(seed)
    engine = ContractEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=28,
        cpu_blocks=40,
        seed=seed,
        engine_args={"scheduling_policy": "priority"},
    )
    engine.copier.fail_every = 0.1
    stems = [seeded_prompt(100 + n, rng.randrange(8, 40)) for n in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(40):
        stem = rng.choice(stems)
        ids = stem[: rng.randrange(4, len(stem) + 1)] + seeded_prompt(number, rng.randrange(1, 16))
        count = rng.randrange(1, 12)
        asked[engine.add(ids, count, priority=rng.randrange(3))] = (ids, count)
        for _ in range(rng.randrange(5)):
            engine.step()
        if rng.random() < 0.25:
            alive = [r for r in asked if not engine.requests[r].is_finished()]
            if alive:
                engine.abort(rng.choice(alive))
        if rng.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
    engine.run()
    for request_id, (ids, count) in asked.items():
        engine.assert_said(request_id, ids, count)
    engine.assert_conforms()
