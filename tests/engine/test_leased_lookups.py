"""Engines beside their daemon: what a lookup leases is read in place, and always comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import total
from tests.engine.toy_at_daemon import (
    REMOTE,
    engine_at,
    prompts,
    serve,
    wait_attached,
    whole_blocks,
)
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of, requests_of
from vllm_tiered_kv.metrics import names

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("step_loads")]

COUNT = 5


def filled(model: Path, daemon: DaemonProcess, asked: list[list[int]], **settings) -> ToyEngine:
    """An engine whose prompts lie in the daemon's memory and nowhere else."""
    first = engine_at(model, daemon.ipc)
    wait_attached(first, daemon.ipc)
    serve(first, asked)
    first.close()
    second = engine_at(model, daemon.ipc, **settings)
    wait_attached(second, daemon.ipc)
    return second


def answered(toy: ToyEngine, prompt: list[int]) -> str:
    """A request that the daemon has been asked about, and which no step has seen yet."""
    request = toy.add(prompt, COUNT)
    lookup = toy.half._requests[request].remote.lookup
    assert lookup is not None
    answer = lookup.future.result(timeout=30)
    assert answer.leases, "nothing was leased"
    return request


def test_hit_is_one_request(
    tiny_model: Path, daemon: DaemonProcess, async_scheduling: bool
) -> None:
    asked = prompts(1, 6)
    toy = filled(tiny_model, daemon, asked, async_scheduling=async_scheduling)
    before = requests_of(daemon)
    serve(toy, asked)
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    assert total(toy, names.LOAD_FAILURES) == 0
    after = requests_of(daemon)
    assert after["borrow"] - before["borrow"] == len(asked)
    assert after.get("lend") == before.get("lend")
    assert after.get("match") == before.get("match")
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()


def test_first_step_after_a_request_already_loads_it(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler waits a moment for a daemon on this host instead of asking in the next step."""
    (asked,) = prompts(9, 1)
    toy = filled(tiny_model, daemon, [asked])
    # However busy this machine is. The limit of a step was set when the last one was planned.
    monkeypatch.setattr(toy.half.remote._lookups, "_step_wait_left_s", 30.0)
    toy.add(asked, COUNT)
    output = toy.scheduler.schedule()
    assert output.kv_connector_metadata.loads
    toy._in_flight.append((output, toy._execute(output)))
    toy.run()
    toy.assert_at_rest()
    toy.close()


def test_load_of_leased_blocks_that_all_ranks_mapped_does_not_wait(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    (asked,) = prompts(9, 1)
    toy = filled(tiny_model, daemon, [asked])
    remote, ready = toy.half.remote, toy.worker.worker_half._remote.regions.ready_arenas
    remote._arenas_of_rank.clear()
    state = toy.half._requests[answered(toy, asked)]
    remote.positions(state, 0, 4)  # takes the answer
    assert not remote.is_resident(state), "no worker has said anything"
    remote.update_mapped_arenas({0: {bytes(16): 1 << 40}})
    assert not remote.is_resident(state)
    remote.update_mapped_arenas({0: dict.fromkeys(ready, 64)})
    assert not remote.is_resident(state), "what was leased is not pinned yet"
    remote.update_mapped_arenas({0: ready})
    assert remote.is_resident(state)
    toy.run()
    toy.assert_at_rest()
    toy.close()


def test_step_has_begun_before_its_forward(tiny_model: Path, daemon: DaemonProcess) -> None:
    """A long one, as one that compiles, must not pass for an idle worker: memory of a daemon that
    has gone would be given up before the steps that were planned with it."""
    asked = prompts(3, 2)
    toy = filled(tiny_model, daemon, asked)
    regions = toy.worker.worker_half._remote.regions
    forward, seen = toy._forward, []

    def watched(request_id: str, count: int) -> list[int]:
        seen.append((regions._is_stepping, regions._steps))
        return forward(request_id, count)

    toy._forward = watched  # type: ignore[method-assign]
    before = regions._steps
    serve(toy, asked)
    assert len(seen) > 2
    assert all(is_stepping for is_stepping, _ in seen)
    assert [steps for _, steps in seen] == sorted({steps for _, steps in seen})  # each counts once
    assert seen[0][1] > before
    assert not regions._is_stepping
    toy.close()


class NoThreads:
    """`threading.Thread.start` of a process that may not have more of some kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.refused = 0
        self.lacking = True
        start = threading.Thread.start

        def failing(thread: threading.Thread) -> None:
            if self.lacking and thread.name.startswith(kind):
                self.refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)


def test_lookup_that_finds_no_thread_is_a_miss(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(4, 3)
    filled(tiny_model, daemon, asked).close()
    threads = NoThreads(monkeypatch, "tiered-kv-lookup")
    toy = engine_at(tiny_model, daemon.ipc)
    wait_attached(toy, daemon.ipc)
    serve(toy, asked)
    assert threads.refused >= len(asked)
    assert total(toy, names.LOOKUPS, REMOTE, "miss") == len(asked)
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == 0
    threads.lacking = False
    toy.half.index.clear()
    toy.drop_gpu_cache()
    serve(toy, asked)
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()


def test_leases_of_a_lookup_that_was_a_miss_are_released(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that finds no new thread has queued the lookup all the same: another may run it."""
    (asked,) = prompts(5, 1)
    toy = filled(tiny_model, daemon, [asked])
    pool = toy.half.remote._lookups._pool
    submit, leased = pool.submit, []

    def answers_and_fails(*args: object) -> None:
        submit(*args).result(30)
        leased.append(leases_of(daemon))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "submit", answers_and_fails)
    serve(toy, [asked])
    assert any(leased)
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()


def until_loading(toy: ToyEngine, request: str) -> None:
    """Beside the steps, or ahead of one; such a load may be over by the end of its step."""
    ledger = toy.half.ledger
    while not ledger.is_loading(request) and not ledger._step_loads:
        if toy.copier.ahead_blocks or request in toy.finished:
            break
        toy.step()


def _abort_at_once(toy: ToyEngine, prompt: list[int]) -> None:
    toy.abort(toy.add(prompt, COUNT))


def _abort_when_answered(toy: ToyEngine, prompt: list[int]) -> None:
    toy.abort(answered(toy, prompt))


def _abort_while_loading(toy: ToyEngine, prompt: list[int]) -> None:
    request = answered(toy, prompt)
    until_loading(toy, request)
    toy.abort(request)


def _reset(toy: ToyEngine, prompt: list[int]) -> None:
    answered(toy, prompt)
    toy.scheduler.reset_connector_cache()


def _reset_while_loading(toy: ToyEngine, prompt: list[int]) -> None:
    request = answered(toy, prompt)
    until_loading(toy, request)
    toy.scheduler.reset_connector_cache()


def _outdate(toy: ToyEngine, prompt: list[int]) -> None:
    state = toy.half._requests[answered(toy, prompt)]
    state.remote.lookup.renewable = True
    state.remote.lookup.fresh_until = 0.0


def _finish_on_the_device(toy: ToyEngine, prompt: list[int]) -> None:
    serve(toy, [prompt])
    toy.half.loads._pool = None  # it does not know yet that the device will have it all
    answered(toy, [*prompt[:20], 3])


@pytest.mark.parametrize(
    "end",
    [
        _abort_at_once,
        _abort_when_answered,
        _abort_while_loading,
        _reset,
        _reset_while_loading,
        _outdate,
        _finish_on_the_device,
    ],
)
def test_leases_are_released_however_the_request_ends(
    tiny_model: Path, daemon: DaemonProcess, end: Callable[[ToyEngine, list[int]], None]
) -> None:
    asked = prompts(2, 3)
    toy = filled(tiny_model, daemon, asked)
    toy.copier.max_delay = 0
    end(toy, asked[0])
    toy.run()
    toy.assert_at_rest()
    eventually(lambda: leases_of(daemon) == 0)
    toy.drop_gpu_cache()
    serve(toy, asked)
    toy.close()


def test_engine_that_stops_gives_everything_back(tiny_model: Path, daemon: DaemonProcess) -> None:
    asked = prompts(3, 3)
    toy = filled(tiny_model, daemon, asked)
    for prompt in asked:
        answered(toy, prompt)
    assert leases_of(daemon) == whole_blocks(asked)
    toy.close()
    assert leases_of(daemon) == 0


def test_preempted_request_leases_anew(tiny_model: Path, daemon: DaemonProcess) -> None:
    asked = prompts(4, 8, 60, 90)
    toy = filled(tiny_model, daemon, asked, gpu_blocks=48)
    ids = {toy.add(prompt, 40): prompt for prompt in asked}
    toy.run()
    for request, prompt in ids.items():
        assert toy.finished[request].tokens == play(prompt, 40)[0]
    toy.assert_at_rest()
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()


def test_daemon_frozen_after_the_lookup_is_not_missed(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    asked = prompts(5, 3)
    timeouts = {"remote_lookup_timeout": 5, "remote_load_timeout": 1}
    toy = filled(tiny_model, daemon, asked, extra=timeouts)
    ids = [answered(toy, prompt) for prompt in asked]
    daemon.freeze()
    toy.run(limit=100_000)
    daemon.thaw()
    for request, prompt in zip(ids, asked, strict=True):
        assert toy.finished[request].tokens == play(prompt, COUNT)[0]
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    assert total(toy, names.LOAD_FAILURES) == 0
    toy.assert_at_rest()
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()


def test_room_that_came_too_late_goes_back_though_nothing_is_asked_any_more(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    """A worker asked for room for its blocks, gave up, and has had nothing to do since."""
    timeouts = {"remote_lookup_timeout": 0.1, "remote_load_timeout": 0.3}
    toy = engine_at(tiny_model, daemon.ipc, extra=timeouts)
    wait_attached(toy, daemon.ipc)
    first, second = prompts(10, 2)
    serve(toy, [first])
    daemon.freeze()
    serve(toy, [second])
    daemon.thaw()
    memory = toy.worker.worker_half._remote.regions.of(daemon.ipc).memory
    eventually(lambda: memory.is_settled and leases_of(daemon) == 0)
    toy.close()


@pytest.mark.parametrize("restarted", [False, True], ids=["stays-away", "comes-back"])
def test_daemon_killed_after_the_lookup(
    tiny_model: Path, daemon: DaemonProcess, restarted: bool
) -> None:
    """Its memory stays mapped for a while and is read; another daemon's is another."""
    asked = prompts(6, 4)
    timeouts = {"remote_lookup_timeout": 5, "remote_load_timeout": 1}
    toy = filled(tiny_model, daemon, asked, extra=timeouts)
    ids = [answered(toy, prompt) for prompt in asked]
    daemon.kill()
    if restarted:
        daemon.restart()
    toy.run(limit=100_000)
    for request, prompt in zip(ids, asked, strict=True):
        assert toy.finished[request].tokens == play(prompt, COUNT)[0]
    toy.assert_at_rest()
    assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    if restarted:
        eventually(lambda: leases_of(daemon) == 0)
    toy.close()


_STINGY_DAEMON = """
import dataclasses
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.net.limits import ClientLimits

of_memory = ClientLimits.of_memory
ClientLimits.of_memory = lambda memory: dataclasses.replace(
    of_memory(memory), lookup_leases=64 * 96
)
raise SystemExit(cli.main())
"""


def test_blocks_beyond_the_limit_of_leases_are_loaded(tiny_model: Path, folder: Path) -> None:
    """Requests that wait together have more blocks than lookups may keep in place."""
    daemon = DaemonProcess(folder, "--memory", "16MiB")
    daemon.program = ["-c", _STINGY_DAEMON]
    with daemon:
        asked = prompts(7, 8, 70, 90)
        toy = filled(tiny_model, daemon, asked, gpu_blocks=256)
        before = requests_of(daemon)
        ids = {toy.add(prompt, COUNT): prompt for prompt in asked}
        for request in ids:
            toy.half._requests[request].remote.lookup.future.result(timeout=30)
        assert leases_of(daemon) == 64 * 2 // 3 < whole_blocks(asked)  # the share of one process
        toy.run()
        for request, prompt in ids.items():
            assert toy.finished[request].tokens == play(prompt, COUNT)[0]
        assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
        assert requests_of(daemon)["lend"] > before.get("lend", 0)
        toy.assert_at_rest()
        eventually(lambda: leases_of(daemon) == 0)
        toy.close()


def test_many_requests_and_aborts_leave_nothing_leased(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    asked = prompts(8, 12, 40, 90)
    toy = filled(tiny_model, daemon, asked, gpu_blocks=96)
    for round_ in range(6):
        ids = {toy.add(prompt, 3): prompt for prompt in asked}
        for n, request in enumerate(list(ids)):
            for _ in range(toy.rng.randrange(4)):
                if toy.scheduler.has_requests():
                    toy.step()
            if (n + round_) % 3 == 0:
                toy.abort(request)
                del ids[request]
            time.sleep(0.001)
        toy.run()
        for request, prompt in ids.items():
            assert toy.finished[request].tokens == play(prompt, 3)[0]
        toy.assert_at_rest()
        toy.drop_gpu_cache()
    assert total(toy, names.LOADED_BLOCKS, REMOTE) > 0
    eventually(lambda: leases_of(daemon) == 0)
    toy.close()
