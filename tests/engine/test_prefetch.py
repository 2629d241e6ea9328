"""Sessions whose tool is about to return, at real daemons; the model checks every byte."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, blocks, key, push_out
from tests.engine.oracle import PROMPTS
from tests.engine.real_engine import real_engine
from tests.engine.toy_asking import (
    ask,
    assert_tier_is_right,
    fill,
    held,
    seeded_prompt,
    total,
)
from tests.engine.toy_at_daemon import engine_at
from tests.engine.toy_engine import ToyEngine, play
from tests.remote.daemon_facts import pins_of
from vllm_tiered_kv.connector.scheduler import prefetch, retention
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.wire.messages import Pin

CPU, REMOTE = Tier.CPU.value, Tier.REMOTE.value
PAUSE_S = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds added to the clock of pauses and pins."""
    offset = [0.0]

    class Time:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + offset[0]

    monkeypatch.setattr(retention, "time", Time)
    monkeypatch.setattr(prefetch, "time", Time)
    return offset


def session(engine: ToyEngine, ids: list[int], **control: object) -> str:
    return ask(engine, ids, 4, session="a", tool_pending=PAUSE_S, **control)


def prefetched(engine: ToyEngine) -> float:
    return total(engine, names.PREFETCHED_BLOCKS)


def paused_and_evicted(engine: ToyEngine, ids: list[int]) -> str:
    """A session that found no room for pins, and that other requests have displaced since."""
    ask(engine, seeded_prompt(90, 65), 1, pin_seconds=3600)
    request = session(engine, ids)
    engine.drop_gpu_cache()
    fill(engine, 2, 100)
    assert held(engine, request) == 0
    assert prefetched(engine) == 0
    return request


def end(engine: ToyEngine) -> None:
    engine.half.retention.reset()
    engine.run()
    engine.assert_at_rest()
    engine.close()


@pytest.mark.parametrize(
    "shape",
    [{}, {"windows": (None, 10)}, {"ranks": 2}, {"ranks": 2, "replicas": 2, "cpu_blocks": 32}],
    ids=["full", "window", "ranks", "replicas"],
)
def test_session_is_in_the_cpu_tier_before_its_tool_returns(
    tiny_model: Path,
    daemon: DaemonProcess,
    async_scheduling: bool,
    clock: list[float],
    shape: dict[str, Any],
) -> None:
    settings = {"cpu_blocks": 64, "async_scheduling": async_scheduling, **shape}
    engine = engine_at(tiny_model, daemon.endpoint, **settings)
    ids = seeded_prompt(1)
    request = paused_and_evicted(engine, ids)
    clock[0] = PAUSE_S - 20
    fill(engine, 3, 8)
    assert prefetched(engine) == 0  # too early
    clock[0] = PAUSE_S - 4
    ask(engine, seeded_prompt(4, 9), 1)
    assert held(engine, request) == prefetched(engine) >= 11
    assert assert_tier_is_right(engine) > 0
    before = total(engine, names.HIT_TOKENS, CPU), total(engine, names.HIT_TOKENS, REMOTE)
    ask(engine, [*ids, *play(ids, 4)[0], 7, 8, 9], 1, session="a")
    after = total(engine, names.HIT_TOKENS, CPU), total(engine, names.HIT_TOKENS, REMOTE)
    assert (after[0] - before[0], after[1] - before[1]) == (44, 0)
    end(engine)


def test_session_that_came_back_is_not_prefetched(
    tiny_model: Path, daemon: DaemonProcess, clock: list[float]
) -> None:
    engine = engine_at(tiny_model, daemon.endpoint, cpu_blocks=64)
    ids = seeded_prompt(1)
    paused_and_evicted(engine, ids)
    ask(engine, [*ids, *play(ids, 4)[0], 7], 1, session="a")
    engine.drop_gpu_cache()
    fill(engine, 3, 100)
    clock[0] = PAUSE_S - 4
    ask(engine, seeded_prompt(4, 9), 1)
    assert prefetched(engine) == 0
    end(engine)


def test_idle_engine_prefetches_at_once_what_its_tier_lacks(
    tiny_model: Path, daemon: DaemonProcess, async_scheduling: bool
) -> None:
    first = engine_at(tiny_model, daemon.endpoint)
    ids = seeded_prompt(1)
    ask(first, ids, 4)
    first.close()
    engine = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    request = session(engine, ids, store=False)
    assert total(engine, names.HIT_TOKENS, REMOTE) == 40
    # The last blocks of the answer were stored by the first engine, too.
    assert held(engine, request) == prefetched(engine) == 11 == first_blocks(engine)
    end(engine)


def first_blocks(engine: ToyEngine) -> int:
    return len(engine.half.index.pinned_slots())


def test_prefetches_take_at_most_their_share_of_the_tier(
    tiny_model: Path, daemon: DaemonProcess, clock: list[float]
) -> None:
    first = engine_at(tiny_model, daemon.endpoint)
    asked = [seeded_prompt(seed, 33) for seed in range(6)]
    for ids in asked:
        ask(first, ids, 1)
    first.close()
    engine = engine_at(tiny_model, daemon.endpoint, cpu_blocks=64)  # a quarter: two sessions
    for number, ids in enumerate(asked):
        ask(engine, ids, 1, store=False, session=str(number), tool_pending=PAUSE_S)
    assert prefetched(engine) == 16
    clock[0] = 11.0
    ask(engine, seeded_prompt(9, 9), 1)
    assert prefetched(engine) == 16  # each idle engine tries once
    clock[0] = PAUSE_S - 4
    ask(engine, seeded_prompt(10, 9), 1)
    assert prefetched(engine) == 32
    end(engine)


def test_pinned_blocks_are_never_evicted_by_a_prefetch(
    tiny_model: Path, daemon: DaemonProcess, clock: list[float]
) -> None:
    engine = engine_at(tiny_model, daemon.endpoint, cpu_blocks=24, extra={"pin_share": 0.9})
    ids = seeded_prompt(1)
    request = session(engine, ids)
    engine.half.retention.reset()
    engine.half.prefetch.expect("a", [(keys, 0) for keys in _keys(engine, request)], 6.0, True)
    fill(engine, 2, 60)
    pinned = ask(engine, seeded_prompt(5, 81), 1, pin_seconds=3600)
    before = held(engine, pinned)
    clock[0] = 2.0
    ask(engine, seeded_prompt(4, 9), 1)
    assert held(engine, pinned) == before >= 20
    assert prefetched(engine) <= 4
    end(engine)


def _keys(engine: ToyEngine, request: str) -> list[list[Any]]:
    from tests.engine.toy_asking import keys_of

    return keys_of(engine, request)


def test_daemon_that_is_gone_at_the_end_of_the_pause_costs_nothing(
    tiny_model: Path, daemon: DaemonProcess, async_scheduling: bool, clock: list[float]
) -> None:
    engine = engine_at(
        tiny_model, daemon.endpoint, async_scheduling=async_scheduling, cpu_blocks=64
    )
    ids = seeded_prompt(1)
    paused_and_evicted(engine, ids)
    daemon.kill()
    clock[0] = PAUSE_S - 4
    ask(engine, seeded_prompt(4, 9), 1)
    assert prefetched(engine) == 0
    ask(engine, ids, 4)
    end(engine)


def test_reset_during_a_pause_prefetches_nothing(
    tiny_model: Path, daemon: DaemonProcess, clock: list[float]
) -> None:
    engine = engine_at(tiny_model, daemon.endpoint, cpu_blocks=64)
    paused_and_evicted(engine, seeded_prompt(1))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    clock[0] = PAUSE_S - 4
    ask(engine, seeded_prompt(4, 9), 1)
    assert prefetched(engine) == 0
    end(engine)


def test_daemon_reads_session_from_its_disk_before_the_tool_returns(
    tiny_model: Path, folder: Path, clock: list[float]
) -> None:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "128MiB")
    with DaemonProcess(folder, "--memory", "1MiB", *ssd) as daemon:
        with RawClient(daemon.endpoint) as other:
            other.hello()
            other.put(blocks(32))
            everything = [key(n) for n in range(32)]  # that may be pinned
            assert other.ask(Pin(KEY_BYTES, everything, 3_600_000)).count == 32
            engine = engine_at(tiny_model, daemon.ipc, cpu_blocks=64)
            session(engine, seeded_prompt(1))
            push_out(other, 1000)
            assert other.ask(Pin(KEY_BYTES, everything, 0)).count == 32
        assert pins_of(daemon) == 0
        clock[0] = PAUSE_S - 4
        ask(engine, seeded_prompt(4, 9), 1)
        deadline = time.monotonic() + 30
        while pins_of(daemon) < 11:
            assert time.monotonic() < deadline, "the daemon never pinned the session"
            time.sleep(0.01)
        assert prefetched(engine) == 0  # the memory of this daemon is as near as the CPU tier
        end(engine)


@pytest.mark.slow
def test_real_engine_finds_session_in_its_cpu_tier_when_the_daemon_is_gone(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    ids = max(PROMPTS, key=len)
    whole = (len(ids) - 1) // 32 * 32
    options = {"cpu_memory": "16MiB", "remote": daemon.endpoint, "remote_lookup_timeout": 10}
    with real_engine(tiny_model, options) as engine:
        (computed,) = engine.ask([ids])
        engine.settle()
        kept = dict(engine.kv_bytes)
        engine.half.index.clear()
        engine.drop_gpu_cache()
        (loaded,) = engine.ask([ids], control={"tool_pending": 60, "store": False})
        assert engine.total(names.HIT_TOKENS, REMOTE) == whole
        engine.settle()
        assert engine.total(names.PREFETCHED_BLOCKS) >= whole // 32
        daemon.kill()
        engine.drop_gpu_cache()
        (again,) = engine.ask([ids])
        assert engine.total(names.HIT_TOKENS, CPU) == whole == again.cached
        assert again.tokens == loaded.tokens == computed.tokens
        assert again.logprobs == computed.logprobs
        assert engine.kv_bytes == kept
        engine.half.retention.reset()
        engine.settle()
        engine.assert_at_rest()
