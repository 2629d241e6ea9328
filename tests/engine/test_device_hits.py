"""Requests whose blocks the GPU had all along: nothing is worked out while they wait, and yet what
they used counts as used, and what the tier lacks of them is stored."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.toy_asking import assert_tier_is_right, total
from tests.engine.toy_at_daemon import REMOTE, engine_at
from tests.engine.toy_engine import ToyEngine, play
from tests.remote.faulty_daemon import FaultyDaemon
from vllm_tiered_kv.connector.identity.request_keys import RequestKeys
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.wire.messages import Match

PROMPT = list(range(10, 41))  # 7 full blocks and 3 tokens
FULL = [*PROMPT, 41]  # vLLM computes its last token again, and with it a whole block
BOTH = pytest.mark.parametrize("asked", [PROMPT, FULL], ids=["partial", "full"])


def serve(engine: ToyEngine, prompt: list[int], max_tokens: int = 1) -> None:
    request_id = engine.add(prompt, max_tokens)
    engine.run()
    assert engine.finished[request_id].tokens == play(prompt, max_tokens)[0]


def answer_from_device(engine: ToyEngine) -> None:
    """Stops with the answer: what the request left behind has not been looked at."""
    serve(engine, PROMPT)
    request_id = engine.add(PROMPT, 1)
    while request_id not in engine.finished:
        engine.step()


def keys_of(engine: ToyEngine, prompt: list[int]) -> list[bytes]:
    request = engine.requests[engine.add(prompt, 1)]
    keys = engine.half._key_maker.keys_for(request)
    keys.extend(request, len(prompt))
    engine.run()
    return list(keys.of_group[0])


@BOTH
def test_gpu_hit_makes_no_keys_before_the_answer(
    tiny_model: Path, async_scheduling: bool, asked: list[int]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    serve(engine, asked)
    request_id = engine.add(asked, 1)
    with mock.patch.object(RequestKeys, "extend", autospec=True) as extend:
        while request_id not in engine.finished:
            engine.step()
        assert not extend.called
    assert engine.half.has_pending_push_work(), "an idle engine would never look at it"
    engine.run()
    engine.assert_at_rest()
    assert not engine.half.stores.has_deferred


@BOTH
def test_gpu_hit_stores_blocks_that_the_tier_lacks(
    tiny_model: Path, async_scheduling: bool, asked: list[int]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    keys = keys_of(engine, asked)
    for key in (*keys[2:5], keys[-1]):
        engine.half.index.remove(key)
    serve(engine, asked)
    assert all(engine.half.index.lookup(key) is Lookup.HIT for key in keys)
    engine.drop_gpu_cache()
    serve(engine, asked)  # the toy notices wrong bytes
    engine.assert_at_rest()


def serve_uncertainly(engine: ToyEngine, prompt: list[int], end: str) -> None:
    """The request is aborted after a step, or vLLM clears its blocks before we could read them."""
    if end == "zeroed":
        engine.half._store_on_finish = False
        serve(engine, prompt)
        return
    request_id = engine.add(prompt, 5)
    engine.step()
    engine.abort(request_id)
    engine.run()


@pytest.mark.parametrize("end", ["aborted", "zeroed"])
def test_gpu_hit_of_an_unconfirmed_request_stores_blocks_that_the_tier_lacks(
    tiny_model: Path, async_scheduling: bool, end: str
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    keys = keys_of(engine, PROMPT)
    for key in keys[2:5]:
        engine.half.index.remove(key)
    serve_uncertainly(engine, PROMPT, end)
    assert all(engine.half.index.lookup(key) is Lookup.HIT for key in keys)
    engine.drop_gpu_cache()
    serve(engine, PROMPT)
    engine.assert_at_rest()


@pytest.mark.parametrize("store_decode", [True, False], ids=["all", "prompts"])
@pytest.mark.parametrize("end", ["aborted", "zeroed"])
def test_last_block_that_the_gpu_did_not_have_is_new(
    tiny_model: Path, async_scheduling: bool, end: str, store_decode: bool
) -> None:
    """All before it were there, of another prompt. It is stored in the step that fills it."""
    extra = {"store_decode": store_decode}
    engine = ToyEngine(tiny_model, async_scheduling, extra_config=extra)
    serve(engine, [*FULL[:28], 5])
    serve_uncertainly(engine, FULL, end)
    keys = keys_of(engine, FULL)
    assert all(engine.half.index.lookup(key) is Lookup.HIT for key in keys)
    engine.assert_at_rest()


@BOTH
def test_gpu_hit_counts_as_use_of_the_tier(
    tiny_model: Path, async_scheduling: bool, asked: list[int]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=16, gpu_blocks=64)
    keys = keys_of(engine, asked)
    serve(engine, list(range(50, 75)))  # 6 blocks: 13 or 14 of 16 are taken
    serve(engine, asked)
    serve(engine, list(range(80, 105)))  # 6 more: some have to leave
    assert all(engine.half.index.lookup(key) is Lookup.HIT for key in keys)


def lookups(daemon: FaultyDaemon) -> int:
    return sum(isinstance(request, Match) for request in daemon.seen)


def test_gpu_hit_asks_no_daemon(tiny_model: Path, async_scheduling: bool) -> None:
    with FaultyDaemon() as daemon:
        engine = engine_at(tiny_model, daemon.address, async_scheduling=async_scheduling)
        serve(engine, PROMPT)
        engine.half.index.clear()
        asked = lookups(daemon)
        assert asked
        request_id = engine.add(PROMPT, 3)
        assert (
            engine.half._requests[request_id].remote.lookup is None
        )  # the answer might come too late
        engine.run()
        assert lookups(daemon) == asked
        engine.drop_gpu_cache()
        engine.half.index.clear()
        serve(engine, PROMPT)
        assert lookups(daemon) > asked
        engine.assert_at_rest()
        engine.close()


def test_daemon_is_asked_after_all_where_the_gpu_lacks_a_part(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The last block is there, one before it is not."""
    with FaultyDaemon() as daemon:
        engine = engine_at(tiny_model, daemon.address, async_scheduling=async_scheduling)
        serve(engine, PROMPT)
        engine.half.index.clear()
        manager = engine.scheduler.kv_cache_manager
        third = engine.requests["r0"].block_hashes[2]
        (block,) = manager.block_pool.get_cached_block(third, [0])
        manager.evict_blocks({block.block_id})
        serve(engine, PROMPT)
        assert engine.half.recorder.total(names.LOADED_BLOCKS, REMOTE) == 5
        engine.assert_at_rest()
        engine.close()


def test_step_with_a_prefill_defers_stores_of_gpu_hits(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    answer_from_device(engine)
    other = engine.add(list(range(110, 141)), 2)
    engine.step()
    assert engine.half.stores.has_deferred
    engine.run()
    assert engine.finished[other].tokens == play(list(range(110, 141)), 2)[0]
    assert not engine.half.stores.has_deferred
    engine.assert_at_rest()


def test_deferred_stores_of_earlier_requests_do_not_delay_a_request(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """Asynchronous scheduling plans a step in which nothing is computed before the answer comes."""
    engine = ToyEngine(tiny_model, async_scheduling)
    serve(engine, PROMPT)
    for _ in range(3):
        request_id = engine.add(PROMPT, 1)
        with mock.patch.object(engine.half.stores, "_store_deferred") as see:
            while request_id not in engine.finished:
                engine.step()
            assert not see.called
    assert len(engine.half.stores._deferred) == 3
    engine.run()
    assert not engine.half.stores.has_deferred
    engine.assert_at_rest()


@pytest.mark.parametrize("pause", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_engine_that_is_paused_with_requests_comes_to_rest(
    tiny_model: Path, async_scheduling: bool, pause: PauseState
) -> None:
    """vLLM tells who paused it, or lets it sleep, when the engine has no work left."""
    engine = ToyEngine(tiny_model, async_scheduling)
    answer_from_device(engine)
    queued = engine.add([*PROMPT, 7, 8], 2)
    assert engine.half.stores.has_deferred
    engine.half.index.touch([engine.half.index.slots()[0].key])
    engine.scheduler.set_pause_state(pause)
    for _ in range(50):
        if not engine.scheduler.has_requests():
            break
        engine.step()
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    assert engine.finished[queued].tokens == play([*PROMPT, 7, 8], 2)[0]
    engine.assert_at_rest()


def test_queued_requests_do_not_delay_stores_of_gpu_hits(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, max_seqs=1)
    answer_from_device(engine)
    engine.add(list(range(110, 141)), 30)
    engine.add(list(range(210, 241)), 1)
    for _ in range(10):
        engine.step()
    assert len(engine.finished) == 2, "the first of them is still at it"
    assert not engine.half.stores.has_deferred
    engine.run()
    engine.assert_at_rest()


def test_deferred_stores_are_bounded(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    serve(engine, PROMPT)
    for _ in range(40):  # somebody always waits
        request_id = engine.add(PROMPT, 1)
        while request_id not in engine.finished:
            engine.step()
        assert len(engine.half.stores._deferred) <= 17
    engine.run()
    engine.assert_at_rest()


def test_reset_forgets_deferred_stores(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    answer_from_device(engine)
    engine.land()
    assert engine.half.stores.has_deferred
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.half.stores.has_deferred
    engine.run()
    assert not len(engine.half.index)
    serve(engine, PROMPT)
    engine.assert_at_rest()


def test_longer_answer_stores_its_blocks_as_ever(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    serve(engine, PROMPT)
    serve(engine, PROMPT, max_tokens=10)
    engine.drop_gpu_cache()
    longer = PROMPT + play(PROMPT, 10)[0]
    before = engine.half.recorder.total(names.LOADED_BLOCKS)
    serve(engine, longer)
    assert engine.half.recorder.total(names.LOADED_BLOCKS) - before >= len(longer) // 4 - 1
    engine.assert_at_rest()


def test_blocks_reused_by_another_request_are_not_stored(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """Looked at late, when its blocks have been computed anew: vLLM's hash is gone from them."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=12, max_tokens_per_step=64)
    serve(engine, PROMPT)
    engine.half.index.clear()  # the tier has lost it, the GPU has not
    request_id = engine.add(PROMPT, 1)
    other = list(range(50, 91))
    while request_id not in engine.finished:
        engine.step()
    serve(engine, other)
    assert total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.REUSED.value) > 0
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
