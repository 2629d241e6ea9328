"""Sliding windows and hybrids over a real daemon: only windows are asked for, leased and loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine import toy_asking
from tests.engine.toy_asking import total, workload
from tests.engine.toy_at_daemon import (
    REMOTE,
    TRANSPORTS,
    address,
    engine_at,
    prompts,
    serve,
    wait_attached,
)
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_groups import STATE
from tests.engine.window_shapes import SHAPES, window_blocks
from tests.patience import in_turn, mostly_slow
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine


EVERY_SHAPE = pytest.mark.parametrize(
    ("shape", "at"),
    in_turn(SHAPES, dict(zip(TRANSPORTS, TRANSPORTS, strict=True))),
    indirect=["at"],
)


@pytest.fixture(params=TRANSPORTS)
def at(request: pytest.FixtureRequest, daemon: DaemonProcess) -> str:
    return address(daemon, request.param)


@pytest.fixture
def open_engine(tiny_model: Path, at: str) -> Iterator:
    """Engines that are attached to the daemon, and closed in the end."""
    opened: list[ToyEngine] = []

    def opens(**settings) -> ToyEngine:
        toy = engine_at(tiny_model, at, **{"gpu_blocks": 160, "cpu_blocks": 256, **settings})
        opened.append(toy)
        wait_attached(toy, at)
        return toy

    yield opens
    for toy in opened:
        toy.close()


def keys_of(toy: ToyEngine, ids: list[int]) -> list[list[bytes]]:
    keys = toy_asking.keys_of(toy, toy.add(ids, 1))
    toy.run()
    return keys


@pytest.mark.parametrize("at", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_second_engine_is_leased_the_windows(open_engine, at: str, shape: dict) -> None:
    asked = prompts(1, 6)
    serve(open_engine(**shape), asked)
    second = open_engine(**shape)
    serve(second, asked)
    ends = [(len(ids) - 1) // second.alignment * second.alignment for ids in asked]
    assert total(second, names.HIT_TOKENS, REMOTE) == sum(ends)
    loaded = sum(window_blocks(second, end) for end in ends)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == loaded
    assert total(second, names.LOAD_FAILURES) == 0
    # What came over the network is kept here too; what lies in this host's memory is not.
    kept = total(second, names.STORED_BLOCKS, Tier.CPU.value)
    assert (kept >= loaded) == at.startswith("tcp")


@EVERY_SHAPE
def test_shared_prefixes_end_in_windows_far_inside(open_engine, at: str, shape: dict) -> None:
    rng = random.Random(3)
    (ids,) = prompts(2, 1, 90, 91)
    serve(open_engine(**shape), [ids])
    second = open_engine(**shape, extra={"cpu_memory": 64 * 3})  # next to no CPU tier
    for length in range(8, 90, 9):
        second.drop_gpu_cache()
        before = total(second, names.HIT_TOKENS)
        serve(second, [ids[:length] + [rng.randrange(3, 50) for _ in range(5)]])
        found = total(second, names.HIT_TOKENS) - before
        assert found == length // second.alignment * second.alignment


@pytest.mark.parametrize("windows", [(None, 10), (10,)], ids=["hybrid", "window"])
def test_cpu_tier_and_daemon_hold_a_window_together(open_engine, windows: tuple) -> None:
    (ids,) = prompts(4, 1, 76, 77)
    toy = open_engine(windows=windows)
    serve(toy, [ids])
    for group, keys in enumerate(keys_of(toy, ids)):
        toy.half.index.remove(keys[17 - group])
    toy.drop_gpu_cache()
    serve(toy, [ids])
    assert total(toy, names.HIT_TOKENS) == 72
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == len(windows)
    assert total(toy, names.LOADED_BLOCKS, Tier.CPU.value) == window_blocks(toy, 72) - len(windows)


def test_window_that_a_daemon_lacks_ends_the_hit_before_it(open_engine) -> None:
    """Some of the windows were never sent: the next end that has one is found."""
    (ids,) = prompts(5, 1, 76, 77)
    first = open_engine(windows=(None, 10))
    puts = first.half.remote.puts
    with mock.patch.object(puts, "offer"):  # nothing is sent
        serve(first, [ids])
    window_keys = keys_of(first, ids)[1]
    kept = {window_keys[position] for position in (5, 6, 7, 8, 10, 11, 16, 17)}
    uses = [use for use in first.half.index.slots() if use.key[-1] == 0 or use.key in kept]
    uses.sort(key=lambda use: use.used)
    puts.offer([(use.key, [use.slot]) for use in uses])
    first.run()
    serve(first, [[3, 4, 5]])  # a step sends them
    second = open_engine(windows=(None, 10))
    serve(second, [ids])
    assert total(second, names.HIT_TOKENS, REMOTE) == 36
    assert total(second, names.LOADED_BLOCKS, REMOTE) == 9 + 3


@pytest.mark.parametrize("windows", [(None, STATE), (STATE, None, STATE)], ids=["one", "two"])
def test_second_engine_finds_recurrent_states(open_engine, windows: tuple) -> None:
    asked = prompts(1, 6)
    first = open_engine(windows=windows, retention=0)
    serve(first, asked)
    second = open_engine(windows=windows, retention=0)
    serve(second, asked)
    ends = [(len(ids) - 1) // 4 * 4 for ids in asked]
    assert total(second, names.HIT_TOKENS, REMOTE) == sum(ends)
    states = (len(windows) - 1) * len(asked)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == sum(ends) // 4 + states
    # Where a prompt diverges there is no state, but the blocks of attention tell vLLM to keep it.
    (ids,) = asked[:1]
    second.drop_gpu_cache()
    second.half.index.clear()
    before = total(second, names.HIT_TOKENS, REMOTE)
    serve(second, [ids[: ends[0] - 1] + [7] * 9])
    assert total(second, names.HIT_TOKENS, REMOTE) == before
    second.drop_gpu_cache()
    second.half.index.clear()
    serve(second, [ids[: ends[0] - 1] + [8] * 9])
    assert total(second, names.HIT_TOKENS, REMOTE) - before == ends[0] - 4


RECURRENT = {"recurrent": {"windows": (None, STATE), "retention": 0}}


@pytest.mark.parametrize(
    "name", mostly_slow(["two_windows", "recurrent", "window", "small_window_blocks"], 2)
)
def test_random_clients_of_two_engines(open_engine, name: str, async_scheduling: bool) -> None:
    shape = {**SHAPES, **RECURRENT}[name]
    groups = len(shape["windows"])
    for seed in range(2):
        toy = open_engine(
            **shape,
            async_scheduling=async_scheduling,
            gpu_blocks=24 * groups,
            cpu_blocks=12 * groups,
            seed=seed,
        )
        toy.copier.fail_every = 0.05
        toy.copier.drop_stores = 0.1
        workload(toy, 5, 40)
        toy.assert_at_rest()
    toy.copier.fail_every = 0.0
    before = total(toy, names.LOADED_BLOCKS, REMOTE)
    toy.drop_gpu_cache()
    toy.half.index.clear()
    serve(toy, [list(request.prompt_token_ids) for request in toy.requests.values()][:8])
    assert total(toy, names.LOADED_BLOCKS, REMOTE) > before
