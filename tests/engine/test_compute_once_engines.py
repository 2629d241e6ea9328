"""One of several engines computes what all of them are asked, and the others load it from the
daemon, under vLLM's real schedulers and with a real daemon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import prompt, total
from tests.engine.toy_at_daemon import TRANSPORTS, address, wait_attached
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import mostly_slow
from vllm_tiered_kv.connector.scheduler import compute_once
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

ENGINES = 4
REQUESTS = 4  # of each engine
LENGTH = 401
STEP = 64


class CountingEngine(ToyEngine):
    computed = 0

    def _execute(self, output: Any) -> Any:
        self.computed += output.total_num_scheduled_tokens
        return super()._execute(output)


MakeEngines = Callable[..., list[CountingEngine]]


@pytest.fixture
def make_engines(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngines]:
    monkeypatch.setattr(compute_once, "_ASSUMED_RATE", 1000.0)
    monkeypatch.setattr(compute_once, "_SLACK_S", 60.0)  # nobody is late on a busy machine
    monkeypatch.setattr(compute_once, "_MIN_CLAIM_S", 0.0)  # nor too fast to claim on a quick one
    made: list[CountingEngine] = []

    def make(transport: str, async_scheduling: bool = False, **options: Any) -> list[Any]:
        at = address(daemon, transport)
        for _ in range(ENGINES):
            engine = CountingEngine(
                tiny_model,
                async_scheduling,
                gpu_blocks=2400,
                cpu_blocks=1000,
                max_tokens_per_step=STEP,
                max_seqs=32,
                extra_config={
                    "compute_once": True,
                    "remote": at,
                    "remote_lookup_timeout": 5,
                    "remote_landing": "64KiB",
                    **options,
                },
            )
            wait_attached(engine, at)
            made.append(engine)
        return made

    yield make
    for engine in made:
        engine.close()


def run_all(engines: list[CountingEngine], seconds: float = 60) -> None:
    """Steps all engines in turn until they are at rest."""
    end = time.monotonic() + seconds
    while busy := [e for e in engines if e.scheduler.has_requests() or e._in_flight]:
        assert time.monotonic() < end, "an engine did not become idle: a request hangs"
        for engine in busy:
            engine.step()
        if all(engine.idle for engine in busy):
            time.sleep(0.001)


def run_until(condition: Callable[[], bool], engines: list[CountingEngine]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the engines did not come so far"
        for engine in engines:
            engine.step()


def waits_for_another(engine: CountingEngine) -> bool:
    """Whether all requests wait for another engine, whose request has no name here."""
    once = engine.half.once
    assert once is not None
    return sum(not wait.leader.request_id for wait in once._waits.values()) == REQUESTS


def ask_all(engines: list[CountingEngine], ids: list[int]) -> list[list[str]]:
    return [[engine.add(ids, 1) for _ in range(REQUESTS)] for engine in engines]


def assert_answered(engine: CountingEngine, requests: list[str], ids: list[int]) -> None:
    expected = play(ids, 1)[0]
    assert all(engine.finished[request].tokens == expected for request in requests)
    engine.assert_at_rest()


@pytest.mark.parametrize("transport", mostly_slow(TRANSPORTS, 1))
def test_prompt_asked_of_four_engines_is_computed_once(
    make_engines: MakeEngines, transport: str, async_scheduling: bool
) -> None:
    engines = make_engines(transport, async_scheduling)
    ids = prompt(random.Random(1), LENGTH)
    requests = ask_all(engines, ids)
    run_all(engines)
    for engine, some in zip(engines, requests, strict=True):
        assert_answered(engine, some, ids)
    assert sum(engine.computed for engine in engines) <= LENGTH + 4 * ENGINES * REQUESTS
    served = [total(engine, names.SHARED_PREFIX_WAITS, "served") for engine in engines]
    assert sum(count > 0 for count in served) == ENGINES - 1


def test_without_the_option_every_engine_computes(make_engines: MakeEngines) -> None:
    engines = make_engines("ipc", compute_once=False)
    ids = prompt(random.Random(1), LENGTH)
    ask_all(engines, ids)
    run_all(engines)
    assert sum(engine.computed for engine in engines) > ENGINES * LENGTH / 2


@pytest.mark.parametrize("end", ["aborted", "silent"])
def test_another_engine_takes_over_in_mid_prefill(
    make_engines: MakeEngines, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """From an engine whose requests are aborted, at once; from one that makes no more steps, when
    its claim ends."""
    engines = make_engines("ipc")
    ids = prompt(random.Random(1), LENGTH)
    requests = ask_all(engines, ids)
    first, *others = engines
    # No claim of an engine that goes on ends because the machine is busy.
    monkeypatch.setattr(compute_once, "_SLACK_S", 30.0)
    with monkeypatch.context() as patch:
        if end == "silent":
            patch.setattr(compute_once, "_SLACK_S", 3.0)  # its claim ends soon
        run_until(lambda: first.computed >= LENGTH // 2, [first])
    run_until(lambda: all(map(waits_for_another, others)), others)
    assert not any(engine.computed for engine in others)
    if end == "aborted":
        for request in requests[0]:
            first.abort(request)
    left = engines if end == "aborted" else others
    begin = time.monotonic()
    run_all(left)
    took = time.monotonic() - begin
    assert took < 20.0, "an engine waited for the end of a claim of 30 s"
    if end == "silent":
        assert took > 0.5, "the claim ended before its time"
    for engine, some in zip(others, requests[1:], strict=True):
        assert_answered(engine, some, ids)
    assert sum(engine.computed for engine in others) <= LENGTH + 4 * ENGINES * REQUESTS
    ended = sum(total(e, names.SHARED_PREFIX_WAITS, "leader_ended") for e in others)
    assert ended == 1
    run_all(engines)


def test_engines_with_nothing_in_common_do_not_wait(make_engines: MakeEngines) -> None:
    engines = make_engines("ipc")
    asked = [prompt(random.Random(n), LENGTH) for n in range(ENGINES)]
    requests = [[engine.add(ids, 1)] for engine, ids in zip(engines, asked, strict=True)]
    run_all(engines)
    for engine, some, ids in zip(engines, requests, asked, strict=True):
        assert_answered(engine, some, ids)
        assert engine.computed == LENGTH
        assert total(engine, names.SHARED_PREFIX_WAITS) == 0
