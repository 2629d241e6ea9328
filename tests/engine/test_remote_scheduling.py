"""Engines over a real daemon, with a model whose every read of the cache is checked.

The daemon is killed, frozen, restarted empty and replaced while requests load and store. Whatever
happens to it, every request ends with the right tokens and nothing stays pinned.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import ask, keys_of, total
from tests.engine.toy_at_daemon import (
    REMOTE,
    TRANSPORTS,
    address,
    engine_at,
    prompts,
    serve,
    wait_attached,
    whole_blocks,
)
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import eventually, mostly_slow
from tests.remote.daemon_facts import leases_of, namespaces_of
from tests.remote.faulty_daemon import Fault, FaultyDaemon, Frames, block_reply, forgetful, framed
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Samples
from vllm_tiered_kv.remote.shared_memory import SharedMemory
from vllm_tiered_kv.wire.messages import ErrorReply, Get, Match, Request

pytestmark = pytest.mark.engine


def test_daemons_are_reached_before_the_first_request(tiny_model: Path) -> None:
    with FaultyDaemon() as daemon:
        toy = engine_at(tiny_model, daemon.address, extra={"remote_connections": 3})
        assert toy.scheduler.has_requests(), "an idle engine would not step"
        toy.run()
        # Three to load with, one to ask with.
        eventually(lambda: daemon.ops().count("hello") == 4)
        ask(toy, prompts(3, 1)[0], 1)
        toy.assert_at_rest()
        assert daemon.ops().count("hello") == 4
        toy.close()


def test_daemon_without_answer_to_hello_delays_no_request(tiny_model: Path) -> None:
    """As one that has bound its address and is still reading its disk."""
    with FaultyDaemon(lambda *_: []) as mute:
        toy = engine_at(tiny_model, mute.address, extra={"remote_load_timeout": 120})
        toy.run()
        eventually(lambda: mute.ops().count("hello"))
        begin = time.monotonic()
        toy.close()
        assert time.monotonic() - begin < 60, "it waited for as long as a load may take"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_second_engine_is_served_what_the_first_one_stored(
    tiny_model: Path, daemon: DaemonProcess, transport: str, async_scheduling: bool
) -> None:
    at = address(daemon, transport)
    asked = prompts(1, 6)
    first = engine_at(tiny_model, at, async_scheduling=async_scheduling)
    wait_attached(first, at)
    serve(first, asked)
    assert total(first, names.LOADED_BLOCKS) == 0
    first.close()

    second = engine_at(tiny_model, at, async_scheduling=async_scheduling)
    wait_attached(second, at)
    serve(second, asked)
    whole = whole_blocks(asked)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == whole
    assert total(second, names.HIT_TOKENS, REMOTE) == 4 * whole
    assert total(second, names.LOAD_FAILURES) == 0
    kept = total(second, names.STORED_BLOCKS, Tier.CPU.value)
    # What came over the network is kept here too; what lies in this host's memory is not.
    assert (kept >= whole) == (transport == "tcp")
    second.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tiers_serve_one_prefix_together(
    tiny_model: Path, daemon: DaemonProcess, transport: str
) -> None:
    """GPU, CPU tier and daemon each have a part of the same prefix."""
    at = address(daemon, transport)
    (prompt,) = prompts(2, 1, 200, 201)
    first = engine_at(tiny_model, at, cpu_blocks=64, max_tokens_per_step=64)
    wait_attached(first, at)
    serve(first, [prompt])
    first.close()
    second = engine_at(tiny_model, at, cpu_blocks=64, max_tokens_per_step=64)
    wait_attached(second, at)
    serve(second, [prompt[:64]])
    second.half.index.remove(_keys(second, prompt[:64])[10])
    serve(second, [prompt[:120]])
    serve(second, [prompt])
    assert total(second, names.LOADED_BLOCKS, REMOTE) > 0
    second.drop_gpu_cache()
    serve(second, [prompt])
    assert total(second, names.LOAD_FAILURES) == 0
    second.close()


def _keys(toy: ToyEngine, prompt: list[int]) -> list[bytes]:
    (keys,) = keys_of(toy, toy.add(prompt, 1))
    toy.run()
    return list(keys[: len(prompt) // 4])


def test_bytes_changed_in_the_daemon_are_recomputed(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    asked = prompts(3, 4)
    first = engine_at(tiny_model, daemon.endpoint)
    serve(first, asked)
    first.close()
    local = engine_at(tiny_model, daemon.ipc)
    wait_attached(local, daemon.ipc)
    memory: SharedMemory = local.worker.worker_half._remote.regions.of(daemon.ipc).memory
    np.frombuffer(memory.arena.view(0, memory.arena.capacity_bytes), np.uint8)[:] ^= 0x10
    del memory
    local.close()
    second = engine_at(tiny_model, daemon.endpoint)
    serve(second, asked)  # a wrong byte would be seen by the model
    assert total(second, names.LOAD_FAILURES, REMOTE) > 0
    assert total(second, names.LOADED_BLOCKS, REMOTE) == 0
    second.drop_gpu_cache()
    serve(second, asked)
    second.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_daemon_that_never_ran_is_a_miss(tiny_model: Path, folder: Path, transport: str) -> None:
    at = f"ipc://{folder}/nobody" if transport == "ipc" else "tcp://127.0.0.1:1"
    toy = engine_at(tiny_model, at, extra={"remote_lookup_timeout": 0.05})
    serve(toy, prompts(4, 4))
    assert total(toy, names.STORED_BLOCKS, REMOTE) == 0
    assert total(toy, names.DROPPED_BLOCKS, REMOTE) > 0
    toy.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_frozen_daemon_costs_deadlines_and_nothing_else(
    tiny_model: Path, daemon: DaemonProcess, transport: str
) -> None:
    at = address(daemon, transport)
    asked = prompts(5, 6)
    first = engine_at(tiny_model, at)
    wait_attached(first, at)
    serve(first, asked)
    first.close()
    timeouts = {"remote_lookup_timeout": 0.2, "remote_load_timeout": 0.5}
    second = engine_at(tiny_model, at, extra=timeouts, seed=1)
    wait_attached(second, at)

    def loads() -> float:
        """Within such deadlines, which a busy machine may miss now and then."""
        second.half.index.clear()
        second.drop_gpu_cache()
        serve(second, asked[:1])
        return total(second, names.LOADED_BLOCKS, REMOTE)

    loaded = eventually(loads)
    daemon.freeze()
    serve(second, asked[1:4])
    assert total(second, names.LOADED_BLOCKS, REMOTE) == loaded
    daemon.thaw()
    _until_served_again(second, loaded)
    second.close()


def _until_served_again(toy: ToyEngine, loaded: float) -> None:
    """The breaker lets a probe through after a while, and the tier is used again."""
    end = time.monotonic() + 60
    seed = 1000
    while total(toy, names.LOADED_BLOCKS, REMOTE) <= loaded:
        assert time.monotonic() < end, "the daemon is back, but nobody uses it"
        seed += 1
        asked = prompts(seed, 1)
        serve(toy, asked)
        toy.half.index.clear()
        toy.drop_gpu_cache()
        serve(toy, asked)
        time.sleep(0.05)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_daemon_that_dies_and_comes_back_empty(
    tiny_model: Path, daemon: DaemonProcess, transport: str
) -> None:
    at = address(daemon, transport)
    asked = prompts(6, 6)
    timeouts = {"remote_lookup_timeout": 0.2, "remote_load_timeout": 1}
    toy = engine_at(tiny_model, at, extra=timeouts)
    wait_attached(toy, at)
    serve(toy, asked)
    daemon.kill()
    toy.half.index.clear()
    toy.drop_gpu_cache()
    serve(toy, asked)
    loaded = total(toy, names.LOADED_BLOCKS, REMOTE)
    daemon.restart()
    _until_served_again(toy, loaded)
    toy.close()


def test_absent_daemon_is_distinguished_from_empty_one(
    tiny_model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = DaemonProcess(folder, "--memory", "16MiB")
    toy = engine_at(tiny_model, daemon.ipc)
    asked = prompts(8, 3)
    serve(toy, asked)

    def told(metric: names.Metric) -> dict[str, float]:
        return {labels[-1]: value for labels, value in toy.half.recorder.samples(metric).items()}

    toy.half.stats()
    assert told(names.DAEMON_ERRORS) == {daemon.ipc: 0}  # nobody was called
    assert told(names.LOOKUPS) == {"unavailable": len(asked)}
    assert set(told(names.DROPPED_BLOCKS)) == {"unavailable"}
    assert told(names.DAEMON_UP) == {daemon.ipc: 0}
    assert f"cannot reach the daemon at {daemon.ipc}" in caplog.text
    assert "is it running?" in caplog.text
    assert "share its memory" not in caplog.text
    with daemon:
        _until_served_again(toy, 0)
        toy.half.stats()
        assert told(names.DAEMON_UP) == {daemon.ipc: 1}
        assert f"the daemon at {daemon.ipc} is back" in caplog.text
        before = told(names.LOOKUPS)
        caplog.clear()
        daemon.kill()
        # The first of these lookups goes to a daemon that was up when last heard of.
        serve(toy, prompts(9, 3))
        toy.half.stats()
        after = told(names.LOOKUPS)
        assert after == {**before, "unavailable": before["unavailable"] + 3}
        assert told(names.DAEMON_UP) == {daemon.ipc: 0}
        assert f"cannot reach the daemon at {daemon.ipc}" in caplog.text
        toy.close()


def test_daemon_and_engine_log_the_same_namespace_and_model(
    tiny_model: Path, daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """By these an operator finds the row of an engine, and what to set a quota for."""
    caplog.set_level(logging.INFO, "vllm_tiered_kv")
    toy = engine_at(tiny_model, daemon.endpoint)
    serve(toy, prompts(8, 2))
    toy.close()
    ((name, row),) = namespaces_of(daemon).items()
    assert row["memory_blocks"] > 0
    assert f"namespace {name}: model {tiny_model}" in caplog.text
    assert row["model"] == str(tiny_model)
    assert f"namespace {name}: {row['client']!r}" in daemon.logs


def test_failed_calls_and_the_time_of_lookups_are_counted(tiny_model: Path) -> None:
    with FaultyDaemon() as late:
        late.delay = lambda request: 0.5 if isinstance(request, Match) else 0.0
        toy = engine_at(tiny_model, late.address, extra={"remote_lookup_timeout": 0.05})
        drained: list[float] = []
        drain = toy.half.recorder.drain

        def watched() -> Samples:
            samples = drain()
            seconds = samples.get(names.LOOKUP_SECONDS.name, {}).get(REMOTE, [])
            assert isinstance(seconds, list)
            drained.extend(seconds)
            return samples

        toy.half.recorder.drain = watched  # type: ignore[method-assign]
        serve(toy, prompts(8, 3))
        toy.half.stats()
        assert total(toy, names.DAEMON_ERRORS, late.address) > 0
        assert len(drained) == total(toy, names.LOOKUPS, REMOTE) > 0
        assert max(drained) >= 0.05
        toy.close()


def test_aborted_load_ends_before_its_blocks_are_given_away(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    asked = prompts(7, 12, 60, 120)
    first = engine_at(tiny_model, daemon.endpoint, gpu_blocks=48, cpu_blocks=600)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, daemon.endpoint, gpu_blocks=48, cpu_blocks=600)
    rng = random.Random(7)
    for round_ in range(8):
        ids = [second.add(prompt, 3) for prompt in asked]
        for _ in range(200):
            if second._in_flight or second.scheduler.has_requests():
                second.step()
            if ids and rng.random() < 0.1:
                second.abort(ids.pop(rng.randrange(len(ids))))
            time.sleep(0.0002)
        second.run()
        second.assert_at_rest()
        for request in ids:
            prompt = list(second.requests[request].prompt_token_ids)
            assert second.finished[request].tokens == play(prompt, 3)[0]
        second.half.index.clear()
        second.drop_gpu_cache()
        del round_
    assert total(second, names.LOADED_BLOCKS, REMOTE) > 0
    second.close()


def test_two_daemons_share_the_blocks_and_one_that_dies_costs_its_share(
    tiny_model: Path, folder: Path
) -> None:
    folders = [folder / "a", folder / "b"]
    for folder in folders:
        folder.mkdir()
    with (
        DaemonProcess(folders[0], "--memory", "16MiB") as a,
        DaemonProcess(folders[1], "--memory", "16MiB") as b,
    ):
        both = [a.endpoint, b.endpoint]
        asked = prompts(8, 24)
        extra = {"remote_lookup_timeout": 10, "remote_load_timeout": 10}
        first = engine_at(tiny_model, both, extra=extra, cpu_blocks=900)
        serve(first, asked)
        first.close()
        second = engine_at(tiny_model, both, extra=extra, cpu_blocks=900)
        serve(second, asked)
        whole = whole_blocks(asked)
        assert total(second, names.LOADED_BLOCKS, REMOTE) == whole
        second.half.stats()
        assert [total(second, names.DAEMON_UP, address) for address in both] == [1, 1]
        second.close()
        b.kill()
        third = engine_at(tiny_model, both, extra=extra, cpu_blocks=900)
        serve(third, asked)
        assert 0 < total(third, names.LOADED_BLOCKS, REMOTE) < whole
        # What the dead one had is recomputed and goes to the other. Now and then a request finds
        # out that the dead one is still dead.
        share = total(third, names.LOADED_BLOCKS, REMOTE)
        third.half.index.clear()
        third.drop_gpu_cache()
        serve(third, asked)
        assert total(third, names.LOADED_BLOCKS, REMOTE) - share > share
        third.half.stats()
        assert [total(third, names.DAEMON_UP, address) for address in both] == [1, 0]
        third.close()


def _silent(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
    return []


def _of_another_version(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
    refusal = ErrorReply(ErrorCode.UNSUPPORTED_VERSION, "only version 2 is spoken here")
    return [framed(request_id, refusal)]


def _mixed_up(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
    return [daemon.honest(request_id + 1, request)]


def _garbage(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
    return [[b"\xc1" * 40, b"?"]]


def _liar(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
    """Has everything, and sends other bytes."""
    if isinstance(request, Get):
        blocks = {position: bytes(96) for position in range(len(request.keys))}
        return [block_reply(request_id, blocks, flip=1)]
    return forgetful(daemon, request_id, request)


@pytest.mark.parametrize(
    "fault", [_silent, _of_another_version, _mixed_up, _garbage, forgetful, _liar]
)
def test_something_else_listens_there(tiny_model: Path, fault: Fault) -> None:
    with FaultyDaemon(fault) as other:
        is_understood = fault in (forgetful, _liar)  # and each request is to hear its answer
        lookup_s, load_s = (10, 5) if is_understood else (0.1, 0.5)
        timeouts = {"remote_lookup_timeout": lookup_s, "remote_load_timeout": load_s}
        toy = engine_at(tiny_model, other.address, extra=timeouts)
        serve(toy, prompts(9, 4))
        assert total(toy, names.LOADED_BLOCKS, REMOTE) == 0
        failures = total(toy, names.LOAD_FAILURES, REMOTE)
        # Once for each request: what a daemon lost is not asked for in a loop.
        assert failures == (4 if is_understood else 0)
        toy.close()


def test_daemon_replaced_by_another_version_while_it_is_loaded_from(tiny_model: Path) -> None:
    is_replaced = threading.Event()

    def replaced(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
        if isinstance(request, Get):
            is_replaced.set()  # in the midst of a load
        return _of_another_version(daemon, request_id, request) if is_replaced.is_set() else None

    asked = prompts(11, 4)
    with FaultyDaemon() as daemon:
        timeouts = {"remote_lookup_timeout": 5, "remote_load_timeout": 5}
        toy = engine_at(tiny_model, daemon.address, extra=timeouts)
        serve(toy, asked)
        for fault, loads in ((None, True), (replaced, False)):
            daemon.fault = fault
            before = total(toy, names.LOADED_BLOCKS, REMOTE)
            toy.half.index.clear()
            toy.drop_gpu_cache()
            serve(toy, asked)
            assert (total(toy, names.LOADED_BLOCKS, REMOTE) > before) == loads
        assert is_replaced.is_set()
        assert total(toy, names.LOAD_FAILURES, REMOTE) == 1, "the others were not even asked for"
        toy.close()


def test_slowed_daemon_serves_some_and_times_out_for_others(tiny_model: Path) -> None:
    """It keeps every block, and answers far within the deadlines, far beyond, or at about them."""
    rng = random.Random(13)
    deadline = 0.3
    slowed: dict[type, tuple[float, float]] = {}

    def delay(request: Request) -> float:
        return rng.uniform(*slowed.get(type(request), (0, 0)))

    def serve_from_daemon(toy: ToyEngine, prompt: list[int]) -> None:
        toy.half.index.clear()
        toy.drop_gpu_cache()
        serve(toy, [prompt])

    def served(toy: ToyEngine, done: Callable[[], bool]) -> bool:
        """Prompts the daemon holds, again and again until this has happened: the breaker may have
        to be waited for, and a busy machine needs another try."""
        end = time.monotonic() + 60
        for prompt in itertools.cycle(asked):
            serve_from_daemon(toy, prompt)
            if done() or time.monotonic() > end:
                return done()
            time.sleep(0.02)
        return False

    asked = prompts(13, 12)
    with FaultyDaemon() as daemon:
        first = engine_at(tiny_model, daemon.address)
        serve(first, asked)
        first.close()
        daemon.delay = delay
        timeouts = {"remote_lookup_timeout": deadline, "remote_load_timeout": deadline}
        toy = engine_at(tiny_model, daemon.address, extra=timeouts)
        short, long, about = (0, deadline / 20), (5 * deadline, 9 * deadline), (0, 2 * deadline)

        slowed.update({Match: short, Get: short})
        assert served(toy, lambda: total(toy, names.LOADED_BLOCKS, REMOTE) > 0)
        before = total(toy, names.LOAD_FAILURES, REMOTE)
        slowed[Get] = long
        assert served(toy, lambda: total(toy, names.LOAD_FAILURES, REMOTE) > before)
        before = total(toy, names.LOOKUPS, REMOTE, "timeout")
        slowed.update({Match: long, Get: short})
        assert served(toy, lambda: total(toy, names.LOOKUPS, REMOTE, "timeout") > before)
        slowed.update({Match: about, Get: about})
        for prompt in asked:
            serve_from_daemon(toy, prompt)
        slowed.clear()
        _until_served_again(toy, total(toy, names.LOADED_BLOCKS, REMOTE))
        toy.close()


@pytest.mark.parametrize("transport", mostly_slow(["ipc", "tcp"], 1))
@pytest.mark.parametrize(
    "async_scheduling", mostly_slow([True, False], 1), indirect=True, ids=["async", "sync"]
)
def test_chaos(
    tiny_model: Path,
    folder: Path,
    transport: str,
    async_scheduling: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Random requests, aborts and cache resets while the daemon is killed, frozen, restarted."""
    daemon = DaemonProcess(
        folder, "--memory", "1MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "4MiB"
    ).start()
    request.addfinalizer(daemon.end)
    at = address(daemon, transport)
    rng = random.Random(10)
    stop = threading.Event()

    def torment() -> None:
        chance = random.Random(11)
        while not stop.wait(chance.random() * 0.4):
            if chance.random() < 0.5:
                daemon.freeze()
                stop.wait(chance.random() * 0.8)
                daemon.thaw()
            else:
                daemon.kill()
                stop.wait(chance.random() * 0.5)
                daemon.restart()

    toy = engine_at(
        tiny_model,
        at,
        async_scheduling=async_scheduling,
        gpu_blocks=96,
        cpu_blocks=64,
        extra={"remote_lookup_timeout": 0.2, "remote_load_timeout": 0.3},
    )
    stems = prompts(12, 10, 40, 100)
    tormentor = threading.Thread(target=torment)
    tormentor.start()
    try:
        expected: dict[str, list[int]] = {}
        end = time.monotonic() + 8
        while time.monotonic() < end or len(expected) <= 100:
            assert time.monotonic() < end + 120
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(8, len(stem))] + [rng.randrange(3, 50)] * rng.randrange(9)
            name = toy.add(prompt, 4)
            expected[name] = play(prompt, 4)[0]
            for _ in range(rng.randrange(12)):
                if toy._in_flight or toy.scheduler.has_requests():
                    toy.step()
            if rng.random() < 0.1:
                toy.abort(name)
                del expected[name]
            if rng.random() < 0.05:
                toy.half.index.clear()
                toy.scheduler.reset_prefix_cache()
            time.sleep(0.002)
        toy.run(limit=100000)
    finally:
        stop.set()
        tormentor.join()
    toy.assert_at_rest()
    for name, tokens in expected.items():
        assert toy.finished[name].tokens == tokens
    assert len(expected) > 100
    _until_served_again(toy, total(toy, names.LOADED_BLOCKS, REMOTE))
    toy.close()
    eventually(lambda: leases_of(daemon) == 0)
