"""A daemon with the maximum number of sessions forgets the least recently used one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.remote.daemon_facts import leases_of
from tests.remote.engine import IDENTITY, buffers, content, items, keys
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.remote.store import RemoteStore

CHAIN = keys("chain", 6)
_UNUSED_S = 1.1  # the daemon keeps sessions that were used more recently


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", "16MiB", "--max-sessions", "4") as running:
        yield running


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Callable[[str], RemoteStore]]:
    opened: list[RemoteStore] = []

    def connect_one(address: str) -> RemoteStore:
        opened.append(RemoteStore(address, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0))
        opened[-1].greet()
        return opened[-1]

    yield connect_one
    for store in opened:
        store.close()


@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("call", ["match", "get", "put", "flush"])
def test_call_in_a_forgotten_session_is_retried(
    daemon: DaemonProcess, connect: Callable[[str], RemoteStore], way: str, call: str
) -> None:
    address = daemon.endpoint if way == "tcp" else daemon.ipc
    store = connect(address)
    assert set(store.put(items(CHAIN))) == {PutResult.STORED}
    for _ in range(3):
        connect(address)
    time.sleep(_UNUSED_S)
    connect(address)  # the daemon forgets the first session
    if call == "match":
        assert store.match(CHAIN) == len(CHAIN)
    elif call == "get":
        into = buffers(len(CHAIN))
        assert store.get(CHAIN, into) == [True] * len(CHAIN)
        assert [bytes(buffer) for buffer in into] == [content(key) for key in CHAIN]
    elif call == "put":
        assert set(store.put(items(keys("new", 6)))) == {PutResult.STORED}
    else:
        assert store.flush()
    assert store.failed_calls == 0
    assert store.last_error is None


def test_leases_survive_a_forgotten_session(
    daemon: DaemonProcess, connect: Callable[[str], RemoteStore]
) -> None:
    store = connect(daemon.ipc)
    store.put(items(CHAIN))
    memory = store.attach()
    assert memory is not None
    lease = memory.lease(CHAIN)
    assert all(lease.leases)
    connect(daemon.ipc)
    connect(daemon.ipc)
    time.sleep(_UNUSED_S)
    connect(daemon.ipc)
    connect(daemon.ipc)  # the daemon forgets both sessions of the first client
    lease.release()
    assert memory.is_settled
    another = memory.lease(CHAIN)
    assert memory.are_still_valid(another)
    another.release()
    assert store.last_error is None
    time.sleep(_UNUSED_S)
    assert leases_of(daemon) == 0
