"""The estimate of what unfinished messages use, and its return to the system."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import zmq

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient, blocks, key
from tests.daemon.test_network_memory import (
    LIMIT,
    LISTENER,
    MIB,
    TOO_MUCH,
    begin,
    connection,
    peer,
)
from tests.daemon.zmtp import ZmtpClient
from tests.patience import eventually
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.daemon import Daemon
from vllm_tiered_kv.server.net import connections, unfinished_memory
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.receiver import Message
from vllm_tiered_kv.server.net.sessions import Listener, Peer
from vllm_tiered_kv.stores.memory import MemoryStore
from vllm_tiered_kv.stores.ssd.store import SsdStore


def test_heap_is_trimmed_when_zmq_has_closed_what_was_shed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine that takes a while; what zmq freed after the trim would not be returned."""
    network = NetworkMemory(limit=100, max_request_bytes=40)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reactor = Reactor()
    limits = ClientLimits.of_memory(MIB)
    connections = Connections(reactor, context, limits, network, 10, 30.0, Recorder())
    trimmed = threading.Event()
    monkeypatch.setattr(unfinished_memory, "trim", trimmed.set)
    monkeypatch.setattr(unfinished_memory, "allocated_bytes", lambda: None)
    slow, other_end = socket.socketpair()
    inode = os.fstat(slow.fileno()).st_ino
    connections._open[slow.fileno()] = connection(LISTENER, inode, b"\1")
    network.hold(peer(1), 101)
    connections._shed()
    assert network.total == 0
    for _ in range(20):
        connections._check_connections(1.0)
    assert connections._trimmer.is_requested, "still to be trimmed"
    slow.close()
    while connections._trimmer.is_requested:
        connections._check_connections(1.0)
    assert trimmed.wait(60)
    other_end.close()
    reactor.close()
    context.term()


class Watched:
    """Connections of a process that has allocated as much as it is said to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: int | None = 500 * MIB
        self.indexes = 500 * MIB
        self.is_rewriting = False
        self.closed: list[int] = []
        self.reasons: list[str] = []
        monkeypatch.setattr(unfinished_memory, "allocated_bytes", lambda: self.allocated)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.network = NetworkMemory(64 * MIB, MIB)
        limits = ClientLimits.of_memory(32 * MIB)
        self.watched = Connections(
            Reactor(),
            self.context,
            limits,
            self.network,
            10,
            30.0,
            Recorder(),
            on_client_shed=lambda peer, why: self.reasons.append(why),
            index_bytes=lambda: None if self.is_rewriting else self.indexes,
        )
        monkeypatch.setattr(self.watched, "_disconnect", self.disconnect)
        self.listeners = [
            Listener(self.context.socket(zmq.ROUTER), "", is_local) for is_local in (False, True)
        ]
        monitor = self.context.socket(zmq.PAIR)
        self.watched._monitors.update(dict.fromkeys(self.listeners, monitor))
        for number, listener in enumerate([*self.listeners, self.listeners[1]]):
            self.watched._open[number] = connection(listener, 0, bytes([number]))

    def disconnect(self, descriptor: int) -> None:
        self.closed.append(descriptor)
        del self.watched._open[descriptor]

    def check(self, mebibytes: int) -> list[int]:
        """Grows by so much in a second, and says which connections were closed. Of the ipc clients
        only the last one sends messages."""
        if self.allocated is not None:
            self.allocated += mebibytes * MIB
        if 2 in self.watched._open:
            sender = Peer(self.listeners[1], b"\2")
            self.watched.message_received(sender, Message(b"\2", b"", 1, 2, "", False))
        self.watched._check_connections(1.0)
        closed, self.closed = self.closed, []
        return closed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    one = Watched(monkeypatch)
    one.check(0)
    yield one
    one.context.destroy(linger=0)


def test_memory_that_is_accounted_for_closes_no_connection(watched: Watched) -> None:
    for _ in range(20):
        watched.indexes += 100 * MIB
        assert watched.check(99) == []
    others = unfinished_memory._OTHER_BYTES // MIB
    watched.network.hold(peer(9), 60 * MIB)
    assert watched.check(others + 60) == []
    watched.network.release(peer(9), 60 * MIB)
    assert watched.check(-others - 60) == [], "it was used and freed"
    assert watched.check(others) == []
    assert watched.network.total == 0
    watched.network._hold(peer(9), 400 * MIB)
    assert watched.check(0) == [], "requests of a client that has left"


def test_memory_that_indexes_keep_of_blocks_that_left_closes_no_connection(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table does not shrink with its entries, so the bytes per block explain less afterwards."""
    read = 0
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: read)
    read = 16 * MIB
    assert watched.check(16) == []
    for _ in range(5):
        watched.indexes -= 100 * MIB
        assert watched.check(0) == []
    assert watched.network.total == 16 * MIB, "nor does it count for unfinished messages"
    watched.indexes += 500 * MIB
    assert watched.check(0) == []
    assert watched.check(400 + 512) == [1, 0], "what nothing explains does"


def test_only_bytes_of_messages_count_where_malloc_is_not_measured(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, what others have freed is not memory that a message may have got."""
    read = 0
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: read)
    watched.allocated = None
    watched.network.limit = 600 * MIB
    watched.network.hold(peer(9), 590 * MIB)
    assert watched.check(0) == []
    read = 8 * MIB
    assert watched.check(0) == []
    watched.network.release(peer(9), 590 * MIB)
    assert watched.check(0) == []
    assert 0 < watched.network.total <= 8 * MIB
    watched.network._hold(peer(9), 590 * MIB)
    assert watched.check(0) == []


def test_copies_of_an_index_close_no_connection(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: 16 * MIB)
    assert watched.check(16) == []
    watched.is_rewriting = True
    for _ in range(4):
        assert watched.check(200) == []
    assert watched.network.total <= 16 * MIB, "nor do they count for unfinished messages"
    assert watched.check(-800) == []
    watched.is_rewriting = False
    assert watched.check(400 + 512) == [1, 0], "it grew since before they were made"


def test_index_size_is_unknown_while_ssd_journal_is_rewritten(tmp_path: Path) -> None:
    memory, ssd = MemoryStore(1 * MIB), SsdStore(tmp_path / "ssd", 16 * MIB)
    daemon = cast(Daemon, SimpleNamespace(_opened=SimpleNamespace(memory=memory, ssd=ssd)))
    assert Daemon._index_bytes(daemon) == 0
    ssd._committer.is_rewriting = True
    assert Daemon._index_bytes(daemon) is None
    ssd.close()
    memory.close()


def test_unexplained_memory_closes_ipc_clients_that_are_silent(watched: Watched) -> None:
    assert watched.check(400) == [1]
    assert len(watched.reasons) == 1
    assert "may be" in watched.reasons[0], "it is not known to use the most"
    assert watched.check(-400) == []
    assert watched.check(400) == []


def test_unexplained_memory_that_fits_the_limit_closes_no_connection(watched: Watched) -> None:
    others = unfinished_memory._OTHER_BYTES // MIB
    assert watched.check(others + 60) == [], "of 64 MiB"
    assert watched.check(10) == [1]


def test_ipc_clients_are_spared_while_memory_is_being_freed(watched: Watched) -> None:
    watched.watched._ending[0] = os.fstat(0).st_ino
    assert watched.check(400) == [], "by a connection that zmq has not closed yet"
    watched.watched._ending.clear()
    assert watched.check(-1) == []
    assert watched.check(0) == [1]


def test_parts_that_tcp_explains_close_no_ipc_client(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: read)
    read = MIB
    assert watched.check(1 + 30) == []
    assert watched.network.total == 31 * MIB
    watched.watched._open[0].delivered = MIB
    assert watched.check(-31) == []
    assert watched.network.total == 0
    read = 11 * MIB
    assert watched.check(10 + 310) == [0]
    assert watched.network.total == 0


def test_message_that_has_arrived_at_busy_listener_is_not_counted_twice(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else everything else would seem to be less for a moment, and later to have grown."""
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: 1000 * MIB)
    watched.network.limit = 2048 * MIB
    watched.watched._max_unfinished = 1000 * MIB
    assert watched.check(1000) == []
    (tcp, _), sender = watched.listeners, Peer(watched.listeners[0], b"\0")
    other_end = watched.context.socket(zmq.DEALER)
    tcp.socket.bind("inproc://busy")
    other_end.connect("inproc://busy")
    other_end.send(b"more")
    assert tcp.socket.poll(0)
    watched.watched.message_received(sender, Message(b"\0", b"", 1000 * MIB, 0, "", False))
    watched.network.hold(sender, 1000 * MIB)
    assert watched.network.total < 1001 * MIB
    assert watched.check(0) == []
    watched.network.release(sender, 1000 * MIB)
    assert watched.check(-1000) == []
    assert watched.check(0) == []
    watched.network.hold(sender, 1500 * MIB)
    assert watched.check(1500) == []


def test_stream_of_messages_is_not_taken_for_one_that_never_ends(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check sees an unfinished message, but never the same one."""
    read = 0
    monkeypatch.setattr(connections, "_bytes_read", lambda descriptor: read)
    one = watched.watched._open[0]
    del watched.watched._open[1], watched.watched._open[2]
    for _ in range(1000):
        read += 8 * MIB
        one.delivered, one.had_message = read - 4 * MIB, True
        assert watched.check(1) == [], "nor does its memory count from the first one on"


def send_tiny_parts(endpoint: str, megabytes: int) -> None:
    """Sends a message of empty parts, for which zmq needs 32 times as much memory as for their
    bytes, and does not end it."""
    with ZmtpClient(endpoint) as client:
        client.socket.settimeout(1.0)  # it may not be told at once that the daemon has closed it
        for _ in range(16 * megabytes):
            if client.is_closed():
                raise ConnectionError
            with contextlib.suppress(TimeoutError):
                client.send(b"\x01\x00" * (32 << 10))
            time.sleep(0.01)  # 200 MB of memory a second: little arrives between two checks


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_message_of_very_many_tiny_parts_drops_client(
    start: StartDaemon, connect: Connect, over: str
) -> None:
    daemon = start(*LIMIT[:2], "--network-memory", "160MiB", "--prefault", "false")
    honest = connect(daemon.endpoint)
    honest.put(blocks(1))
    before = daemon.rss_bytes()
    endpoint = daemon.endpoint if over == "tcp" else daemon.ipc
    for _ in range(2):
        with pytest.raises(ConnectionError):
            send_tiny_parts(endpoint, 22)  # 704 MiB
        assert honest.get([key(0)]) == blocks(1)
        with RawClient(endpoint) as another:
            another.hello()
            assert another.get([key(0)]) == blocks(1)
        # malloc keeps the end of a heap, at most 64 MiB.
        eventually(lambda: daemon.rss_bytes() - before < 100 * MIB)
    assert TOO_MUCH in daemon.logs
    allowed = 160 * MIB if over == "tcp" else 160 * MIB + unfinished_memory._OTHER_BYTES
    assert daemon.peak_rss_bytes() - before < allowed + 160 * MIB
    assert honest.stats()["dropped_clients"] == 2
    assert honest.stats()["network_bytes"] < MIB


_DAEMON_THAT_TRIMS_SOON = """
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.net import unfinished_memory

unfinished_memory._TRIM_DELAY_S = 1.0
raise SystemExit(cli.main())
"""


def test_memory_of_clients_that_leave_in_mid_message_is_given_back(
    folder: Path, connect: Connect
) -> None:
    options = (*LIMIT[:2], "--network-memory", "1GiB", "--prefault", "false", "--io-threads", "1")
    with DaemonProcess(folder, *options, program=["-c", _DAEMON_THAT_TRIMS_SOON]) as daemon:
        honest = connect(daemon.endpoint)
        before = daemon.rss_bytes()
        with contextlib.ExitStack() as leaving:
            for _ in range(24):
                leaving.enter_context(begin(daemon, 16 * MIB))
            eventually(lambda: honest.stats()["network_bytes"] > 380 * MIB)
            assert daemon.rss_bytes() - before > 380 * MIB
        eventually(lambda: honest.stats()["network_bytes"] < MIB)
        # malloc keeps the end of a heap, at most 64 MiB.
        eventually(lambda: daemon.rss_bytes() - before < 100 * MIB)
        assert honest.stats()["dropped_clients"] == 0
        assert honest.put(blocks(1)) == [PutResult.STORED]
