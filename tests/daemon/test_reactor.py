"""The loop: what it calls, in which order, and that nothing stops it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from vllm_tiered_kv.server.net.reactor import Reactor


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    loop = Reactor()
    yield loop
    loop.close()


def test_post_from_other_threads_runs_on_loop(reactor: Reactor) -> None:
    seen: list[int] = []

    def post_many(first: int) -> None:
        for n in range(first, first + 1000):
            reactor.post(lambda n=n: seen.append(n))  # type: ignore[misc]

    threads = [threading.Thread(target=post_many, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while len(seen) < 4000:
        reactor.turn()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(4000))
    assert [n for n in seen if n < 1000] == list(range(1000))


def test_timers_fire_in_order(reactor: Reactor) -> None:
    seen: list[str] = []
    reactor.after(0.03, lambda: seen.append("late"))
    reactor.after(0.01, lambda: seen.append("early"))

    def tick() -> None:
        seen.append("tick")
        if "late" in seen and seen.count("tick") >= 2:  # however late each of them comes
            reactor.stop()

    reactor.every(0.01, tick)
    reactor.run()
    assert [one for one in seen if one != "tick"] == ["early", "late"]


def test_watch_calls_back_for_descriptors_and_sockets(reactor: Reactor) -> None:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://reactor-test")
    push.connect("inproc://reactor-test")
    read_end, write_end = os.pipe()
    seen: list[bytes] = []
    reactor.watch(pull, lambda: seen.append(pull.recv()))
    reactor.watch(read_end, lambda: seen.append(os.read(read_end, 10)))
    push.send(b"socket")
    os.write(write_end, b"pipe")
    while len(seen) < 2:
        reactor.turn()
    reactor.unwatch(read_end)
    os.write(write_end, b"unheard")
    reactor.post(lambda: None)
    reactor.turn()
    assert sorted(seen) == [b"pipe", b"socket"]
    reactor.unwatch(pull)
    for end in (read_end, write_end):
        os.close(end)
    pull.close()
    push.close()
    context.term()


def test_failing_callback_does_not_stop_loop(
    reactor: Reactor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    seen: list[int] = []
    reactor.post(fail)
    reactor.post(lambda: seen.append(1))
    reactor.after(0, fail)
    reactor.after(0, lambda: seen.append(2))
    reactor.after(0.01, reactor.stop)
    reactor.run()
    assert seen == [1, 2]
    assert caplog.text.count("RuntimeError: on purpose") == 2


def test_run_on_loop_from_loop_runs_at_once(reactor: Reactor) -> None:
    order: list[str] = []

    def on_loop() -> None:
        reactor.run_on_loop(lambda: order.append("inside"))
        order.append("after")
        reactor.stop()

    reactor.run_on_loop(on_loop)
    assert order == []
    reactor.run()
    assert order == ["inside", "after"]


def test_background_work_yields_to_other_callbacks(reactor: Reactor) -> None:
    """A long piece of background work runs once per turn, other callbacks in between."""
    seen: list[str] = []

    def piece(name: str) -> None:
        time.sleep(0.006)
        seen.append(name)
        reactor.post_background(lambda: piece(name))

    for name in ("a", "b"):
        reactor.post_background(lambda name=name: piece(name))  # type: ignore[misc]
    reactor.post(lambda: seen.append("posted"))
    reactor.turn()
    reactor.after(0, lambda: seen.append("timer"))
    for _ in range(3):
        reactor.turn()
    assert seen == ["posted", "a", "timer", "b", "a", "b"]


def test_short_background_pieces_share_a_turn(reactor: Reactor) -> None:
    seen: list[int] = []
    for n in range(3):
        reactor.post_background(lambda n=n: seen.append(n))  # type: ignore[misc]
    while len(seen) < 3:
        reactor.turn()
    assert seen == [0, 1, 2]
