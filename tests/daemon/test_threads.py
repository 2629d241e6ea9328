"""A daemon that gets no threads from the system for a while, as in a container with a limit."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.memory_blocks import put_into
from vllm_tiered_kv.core.store import PutItem, StoreKey
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.daemon import Daemon
from vllm_tiered_kv.server.net.http import HttpServer
from vllm_tiered_kv.server.options import ServerOptions
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore

MIB = 1 << 20
PATIENCE_S = 30.0
Refuse = Callable[[int], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The next so many threads cannot be started."""
    really_start = threading.Thread.start
    left = 0

    def start(thread: threading.Thread) -> None:
        nonlocal left
        if left:
            left -= 1
            raise RuntimeError("can't start new thread")
        really_start(thread)

    def refuse(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(threading.Thread, "start", start)
    return refuse


def test_flush_without_new_threads_works(refuse: Refuse) -> None:
    store = TieredStore(4 * MIB, None, None, Recorder())
    answers: list[list[str]] = []
    answered = threading.Semaphore(0)

    def done(failed: list[str]) -> None:
        answers.append(failed)
        answered.release()

    try:
        refuse(100)
        for _ in range(2):
            store.flush(done)
            assert answered.acquire(timeout=PATIENCE_S)
        assert answers == [[], []]
    finally:
        refuse(0)
        store.close()
    store.flush(done)
    assert answers[2:] == [["the daemon has stopped"]]


def test_requests_without_new_threads_run_once(refuse: Refuse) -> None:
    """A request answered as failed must not run later: its pins would leak."""
    go_on = threading.Event()
    store = TieredStore(
        4 * MIB,
        None,
        None,
        Recorder(),
        on_deleted=lambda deleted: go_on.wait(PATIENCE_S) and None,
    )
    answers: list[int] = []
    answered = threading.Semaphore(0)

    def done(present: int | None) -> None:
        answers.append(-1 if present is None else present)
        answered.release()

    keys = [StoreKey(bytes(16) + n.to_bytes(8, "little")) for n in range(3)]
    try:
        assert put_into(store.memory, [PutItem(keys[0], None, memoryview(bytes(4096)))])
        store.delete(keys[:1], done)  # keeps a thread
        refuse(100)
        store.delete(keys[1:2], done)
        refuse(0)
        go_on.set()
        store.delete(keys[2:], done)
        for _ in keys:
            assert answered.acquire(timeout=PATIENCE_S)
    finally:
        go_on.set()
        store.close()
    assert sorted(answers) == [0, 0, 1]


def status_of(address: str) -> int:
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


def test_http_recovers_after_thread_failure(refuse: Refuse) -> None:
    server = HttpServer("127.0.0.1:0", lambda: "", lambda: None)
    try:
        refuse(20)
        for _ in range(20):
            with pytest.raises(ConnectionError):
                status_of(server.address)
        assert status_of(server.address) == 200
    finally:
        server.close()


def send_slowly(slow: socket.socket) -> None:
    for _ in range(int(PATIENCE_S / 0.02)):
        slow.sendall(b"G")
        time.sleep(0.02)


def test_http_endless_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.server.net.http._REQUEST_TIMEOUT_S", 0.3)
    server = HttpServer("127.0.0.1:0", lambda: "", lambda: None)
    host, port = server.address.split(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=PATIENCE_S) as slow,
            pytest.raises(ConnectionError),
        ):
            send_slowly(slow)
        assert status_of(server.address) == 200
    finally:
        server.close()


def test_daemon_without_new_threads_stops(refuse: Refuse, tmp_path: Path) -> None:
    options = ServerOptions(listen=[f"ipc://{tmp_path}/kv.sock"], memory=4 * MIB, http="off")
    daemon = Daemon.open(options)
    serving = threading.Thread(target=daemon.run, daemon=True)
    serving.start()
    refuse(1)
    daemon.stop()
    serving.join(PATIENCE_S)
    assert not serving.is_alive()
    assert daemon.all_written
