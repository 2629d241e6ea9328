"""What requests ask of the cache, under vLLM's real schedulers; the model checks every byte."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import (
    ask,
    assert_tier_is_right,
    fill,
    held,
    keys_of,
    prompt,
    seeded_prompt,
    total,
)
from tests.engine.toy_at_daemon import engine_at
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import STATE
from tests.remote.daemon_facts import pins_of, requests_of
from vllm_tiered_kv.connector.scheduler import retention
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

CPU, REMOTE = Tier.CPU.value, Tier.REMOTE.value


SHAPES: list[dict[str, Any]] = [
    {},
    {"extra_config": {"store": "lazy"}, "gpu_blocks": 24},
    {"windows": (None, 10)},
    {"windows": (None, STATE)},
    {"extra_config": {"reuse_partial_tail": True}},
]
SHAPE_NAMES = ["eager", "lazy", "window", "recurrent", "tail"]


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_store_false_stores_nothing_of_the_request(
    tiny_model: Path, async_scheduling: bool, shape: dict[str, Any]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, **shape)
    ids = seeded_prompt(1, 42)
    request = ask(engine, ids, 10, store=False)
    again = ask(engine, ids, 10, store=False)  # GPU hits, whose stores are deferred
    for seed in range(2, 6):  # lets the lazy store see the blocks
        ask(engine, seeded_prompt(seed, 60), 1, store=False)
    assert held(engine, request) == held(engine, again) == 0
    assert total(engine, names.STORED_BLOCKS) == 0
    engine.drop_gpu_cache()
    ask(engine, ids, 10)  # misses; what it asks for itself is stored
    assert total(engine, names.HIT_TOKENS) == 0
    engine.assert_at_rest()


@pytest.mark.parametrize("limit", [0, 3, 4, 11, 40, 1000])
def test_max_store_tokens_is_exact_in_whole_blocks(
    tiny_model: Path, async_scheduling: bool, limit: int
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, max_tokens_per_step=12)
    request = ask(engine, seeded_prompt(1, 41), 6, max_store_tokens=limit)
    assert held(engine, request) == min(limit, 46) // 4
    # GPU hits of a request without a limit are stored by it.
    ask(engine, seeded_prompt(1, 41), 6)
    assert held(engine, request) == 46 // 4
    engine.assert_at_rest()
    assert assert_tier_is_right(engine) > 0


@pytest.mark.usefixtures("step_loads")
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_load_false_computes_what_the_gpu_lacks(
    tiny_model: Path, async_scheduling: bool, shape: dict[str, Any]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, **shape)
    ids = seeded_prompt(1, 42)
    for seed in (1, 2, 3, 4):
        ask(engine, seeded_prompt(seed, 42))
    engine.drop_gpu_cache()
    before = total(engine, names.LOADED_BLOCKS), total(engine, names.MISS_TOKENS)
    ask(engine, ids, load=False)
    assert (total(engine, names.LOADED_BLOCKS), total(engine, names.MISS_TOKENS)) == before
    engine.drop_gpu_cache()
    ask(engine, ids)
    engine.assert_at_rest()
    if "gpu_blocks" not in shape:  # else the lazy store may not have seen the blocks
        assert total(engine, names.HIT_TOKENS) > 0


@pytest.mark.usefixtures("step_loads")
@pytest.mark.parametrize("limit", [0, 3, 4, 11, 39, 40, 1000])
def test_max_load_tokens_is_exact_in_whole_blocks(
    tiny_model: Path, async_scheduling: bool, limit: int
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, extra_config={"reuse_partial_tail": True})
    ids = seeded_prompt(1, 42)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids, max_load_tokens=limit)
    assert total(engine, names.HIT_TOKENS) == (limit // 4 * 4 if limit < 1000 else 41)
    engine.assert_at_rest()


def test_max_load_tokens_counts_from_what_the_gpu_has(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    ids = seeded_prompt(1, 41)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids[:17], load=False)  # the GPU has its blocks now
    ask(engine, ids, max_load_tokens=8)
    assert total(engine, names.HIT_TOKENS) == 8
    engine.assert_at_rest()


def test_max_load_tokens_with_window_loads_the_window_of_the_shorter_prefix(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, windows=(None, 10), cpu_blocks=128)
    ids = seeded_prompt(1, 81)
    ask(engine, ids[:41])  # so that the window at token 40 is stored
    engine.drop_gpu_cache()
    ask(engine, ids)
    engine.drop_gpu_cache()
    before = total(engine, names.HIT_TOKENS)
    ask(engine, ids, max_load_tokens=40)
    assert total(engine, names.HIT_TOKENS) - before == 40
    engine.assert_at_rest()


def test_unknown_key_runs_as_without_and_is_named_in_the_response(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    answers = []
    finish = engine.scheduler.connector.request_finished_all_groups

    def spy(request: Any, block_ids: Any) -> Any:
        answers.append(finish(request, block_ids))
        return answers[-1]

    engine.scheduler.connector.request_finished_all_groups = spy
    ask(engine, seeded_prompt(1), stor=False, max_load_tokens="many")
    ask(engine, seeded_prompt(1))
    assert total(engine, names.STORED_BLOCKS) == 11
    (_, named), nothing = answers
    assert nothing == (False, None)
    assert len(named["tiered_kv"]["ignored"]) == 2
    assert total(engine, names.REQUEST_CONTROLS, "ignored") == 1


# ---- pins ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds added to the clock of pins."""
    offset = [0.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + offset[0]

    monkeypatch.setattr(retention, "time", Time)
    return offset


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=["full", "window", "state"]
)
def test_pin_keeps_blocks_for_its_time_and_not_longer(
    tiny_model: Path, async_scheduling: bool, clock: list[float], shape: dict[str, Any]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=64, **shape)
    ids = seeded_prompt(1, 41)
    request = ask(engine, ids, 1, pin_seconds=600)
    engine.drop_gpu_cache()
    pinned = len(engine.half.index.pinned_slots())
    assert 0 < pinned <= 16
    fill(engine, 2, 200)
    ask(engine, ids, 1)
    assert total(engine, names.HIT_TOKENS) == 40
    clock[0] = 601.0
    fill(engine, 3, 200)
    assert held(engine, request) == 0
    engine.assert_at_rest()


def test_pins_take_at_most_their_share_of_the_tier(tiny_model: Path, clock: list[float]) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=40, extra_config={"pin_share": 0.5})
    rng = random.Random(1)
    for _ in range(5):
        ask(engine, prompt(rng, 33), 1, pin_seconds=3600)
        engine.drop_gpu_cache()
    assert len(engine.half.index.pinned_slots()) == 20
    assert total(engine, names.UNPINNED_BLOCKS) == 5 * 8 - 20
    engine.half.stats()
    other = ask(engine, seeded_prompt(9, 65), 1)  # others still have the rest of the tier
    assert held(engine, other) == 16
    clock[0] = 3601.0
    ask(engine, seeded_prompt(9, 65), 1)
    engine.assert_at_rest()


def test_pin_share_zero_pins_nothing(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, extra_config={"pin_share": 0})
    ask(engine, seeded_prompt(1), pin_seconds=60, tool_pending=5)
    engine.assert_at_rest()


def test_reset_ends_pins_and_sessions(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ask(engine, seeded_prompt(1), pin_seconds=60, session="a")
    assert engine.half.index.pinned_slots()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.assert_at_rest()
    assert engine.half.index.used_bytes == 0
    assert not len(engine.half.retention._sessions)


def test_removed_block_is_pinned_again_when_it_is_stored_again(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    request = ask(engine, seeded_prompt(1), pin_seconds=60)
    (keys,) = keys_of(engine, request)
    engine.half.index.remove(keys[2])
    engine.drop_gpu_cache()
    ask(engine, seeded_prompt(1), 1)
    assert engine.half.index.slot_of(keys[2]) in engine.half.index.pinned_slots()
    engine.half.retention.reset()
    engine.assert_at_rest()


# ---- sessions -----------------------------------------------------------------------------------


def test_ended_session_leaves_first_except_blocks_that_others_used(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=64)
    system = seeded_prompt(1, 16)
    older = ask(engine, seeded_prompt(2, 33), 1)
    first = [*system, *seeded_prompt(3, 17)]
    ask(engine, first, 5, session="a")
    other = ask(engine, [*system, *seeded_prompt(4, 17)], 1, session="b")
    turn = [*first, *play(first, 5)[0], *seeded_prompt(5, 9)]
    last = ask(engine, turn, 6, session="a", session_ended=True, pin_seconds=600)
    engine.drop_gpu_cache()
    private = held(engine, last) - 4
    assert total(engine, names.ENDED_BLOCKS) == private
    # Fills the free slots, and as many as the session's private blocks leave.
    free = 64 - engine.half.index.held
    fill(engine, 6, free + private)
    assert held(engine, last) == 4
    assert held(engine, older) == 8
    assert held(engine, other) == 8
    assert len(engine.half.index.pinned_slots()) == 4  # what it shares with others
    engine.half.retention.reset()
    engine.assert_at_rest()


def test_session_of_another_salt_cannot_be_ended(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    ask(engine, seeded_prompt(1), salt="mine", session="a")
    ask(engine, seeded_prompt(2, 9), 1, salt="theirs", session="a", session_ended=True)
    assert total(engine, names.ENDED_BLOCKS) == 2
    ask(engine, seeded_prompt(3, 9), 1, salt="mine", session="a", session_ended=True)
    assert total(engine, names.ENDED_BLOCKS) == 2 + 11 + 2
    engine.assert_at_rest()


def test_tool_pending_keeps_the_conversation_with_its_answer(
    tiny_model: Path, async_scheduling: bool, clock: list[float]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=64)
    ids = seeded_prompt(1, 33)
    ask(engine, ids, 12, session="a", tool_pending=30)
    engine.drop_gpu_cache()
    clock[0] = 59.0
    fill(engine, 2, 200)
    ask(engine, [*ids, *play(ids, 12)[0], 7, 8, 9], 1, session="a")
    assert total(engine, names.HIT_TOKENS) == 44
    clock[0] = 61.0
    ask(engine, seeded_prompt(9), 1)
    engine.assert_at_rest()


# ---- daemons ------------------------------------------------------------------------------------


def test_tiers_limit_loads_and_what_is_sent(tiny_model: Path, daemon: DaemonProcess) -> None:
    engine = engine_at(tiny_model, daemon.endpoint)
    ids = seeded_prompt(1, 41)
    ask(engine, ids, 1, tiers=["cpu"])
    assert total(engine, names.STORED_BLOCKS, CPU) == 10
    assert total(engine, names.STORED_BLOCKS, REMOTE) == 0
    other = seeded_prompt(2, 41)
    ask(engine, other, 1)
    assert total(engine, names.STORED_BLOCKS, REMOTE) == 10
    engine.drop_gpu_cache()
    ask(engine, other, 1, tiers=["remote"])
    assert total(engine, names.HIT_TOKENS, REMOTE) == 40
    engine.drop_gpu_cache()
    ask(engine, other, 1, tiers=["cpu"])
    assert total(engine, names.HIT_TOKENS, CPU) == 40
    engine.drop_gpu_cache()
    ask(engine, ids, 1, tiers="remote")  # the daemon has none of it
    assert total(engine, names.HIT_TOKENS) == 80
    engine.assert_at_rest()
    engine.close()
    second = engine_at(tiny_model, daemon.endpoint)
    asked = total(second, names.LOOKUPS)
    ask(second, other, 1, load=False)
    second.drop_gpu_cache()
    assert total(second, names.LOOKUPS) == asked
    ask(second, other, 1, store=False, max_load_tokens=12)
    assert total(second, names.HIT_TOKENS) == 12
    second.assert_at_rest()
    second.close()


def test_store_false_sends_nothing_to_daemons(tiny_model: Path, daemon: DaemonProcess) -> None:
    engine = engine_at(tiny_model, daemon.endpoint)
    ask(engine, seeded_prompt(3, 41), 9, store=False)
    assert total(engine, names.STORED_BLOCKS) == 0
    assert "put" not in requests_of(daemon)
    engine.assert_at_rest()
    engine.close()


def test_tool_pending_pins_at_the_daemon(tiny_model: Path, daemon: DaemonProcess) -> None:
    engine = engine_at(tiny_model, daemon.endpoint)
    ask(engine, seeded_prompt(4, 41), 6, tool_pending=20)
    end = time.monotonic() + 30
    while pins_of(daemon) < 11:
        assert time.monotonic() < end, "the daemon never pinned the blocks"
        time.sleep(0.01)
    engine.half.retention.reset()
    engine.assert_at_rest()
    engine.close()
