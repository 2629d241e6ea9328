"""Connections without a session, with an unfinished message, or beyond the limit."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import (
    KEY_BYTES,
    NAMESPACE,
    RawClient,
    attach,
    block,
    blocks,
    key,
    wire,
)
from tests.daemon.test_security import Keys
from tests.daemon.zmtp import ZmtpClient, frame
from tests.patience import eventually
from tests.remote.engine import IDENTITY, items, keys
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Listener
from vllm_tiered_kv.wire.codec import encode_request

MIB = 1 << 20
MEMORY = ("--memory", "32MiB")  # messages of 8 MiB at most
TOO_LONG = "closed 1 connections: a message of more than 25165824 bytes"
FEW_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from vllm_tiered_kv.server.cli import main
sys.exit(main())
"""
# A message may take 2 s, and a client may read nothing for 10 s.
SHORT_DEADLINE = """
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.net import connections

connections._MAX_MESSAGE_STALLS = 0.2
"""
SLOW_FLUSH = """
import threading
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore

flush = TieredStore.flush
TieredStore.flush = lambda store, done: threading.Timer(6.0, flush, (store, done)).start()
"""


class Daemon:
    """With keys, or without."""

    def __init__(self, start: StartDaemon, keys: Keys | None) -> None:
        self._keys = keys
        self.process: DaemonProcess = start(*(keys.arguments if keys else ()), *MEMORY)

    def connect(self) -> RawClient:
        if self._keys is None:
            return RawClient(self.process.endpoint)
        return self._keys.connect(self.process.endpoint, "writer")


@pytest.fixture(params=["plain", "encrypted"])
def daemon(start: StartDaemon, folder: Path, request: pytest.FixtureRequest) -> Daemon:
    return Daemon(start, Keys(folder / "keys") if request.param == "encrypted" else None)


def long_frame(data: bytes) -> bytes:
    return b"\x03" + len(data).to_bytes(8, "big") + data


@pytest.mark.slow
def test_connection_without_hello_is_closed(start: StartDaemon, connect: Connect) -> None:
    daemon = start(*MEMORY)
    honest = connect(daemon.endpoint)
    honest.put(blocks(1))
    with ZmtpClient(daemon.endpoint) as silent, ZmtpClient(daemon.endpoint) as rude:
        deadline = time.monotonic() + 60
        while not (silent.is_closed() and rude.is_closed()):
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionError):
                rude.send(frame(b"no header", more=False))
                while rude.has_reply() and not rude.is_closed():
                    rude.receive()
            time.sleep(0.1)
    eventually(lambda: "no hello for 10 s" in daemon.logs)
    # Idle for as long, and still the same session.
    assert honest.get([key(0)]) == blocks(1)


def send_without_end(daemon: DaemonProcess) -> None:
    """Sends an endless message until the daemon closes the connection."""
    some = long_frame(bytes(64 << 10)) * 16
    with ZmtpClient(daemon.endpoint) as endless:
        for _ in range(1000):
            endless.send(some)
            time.sleep(0.02)  # 50 MiB a second


def test_connection_with_endless_message_is_closed(start: StartDaemon, connect: Connect) -> None:
    daemon = start(*MEMORY)
    honest = connect(daemon.endpoint)
    before = daemon.peak_rss_bytes()
    for _ in range(5):
        with pytest.raises(ConnectionError):
            send_without_end(daemon)
    eventually(lambda: daemon.logs.count(TOO_LONG) == 5)  # which it says afterwards
    assert daemon.peak_rss_bytes() - before < 200 * MIB
    assert honest.put(blocks(1)) == [PutResult.STORED]


def keep_busy(daemon: DaemonProcess, number: int, stop: threading.Event) -> None:
    """Keeps 64 requests in flight, so that the daemon always has messages waiting."""
    with RawClient(daemon.endpoint) as client:
        client.hello(namespace=bytes([number]) * 32)
        request = wire.Contains(24, [key(n) for n in range(200)])
        for _ in range(64):
            client.send(request)
        while not stop.is_set():
            client.receive()
            client.send(request)


@pytest.mark.slow
def test_busy_daemon_still_checks_connections(start: StartDaemon) -> None:
    daemon = start(*MEMORY)
    stop = threading.Event()
    busy = [threading.Thread(target=keep_busy, args=(daemon, n, stop)) for n in range(4)]
    for thread in busy:
        thread.start()
    try:
        with ZmtpClient(daemon.endpoint) as silent:
            with pytest.raises(ConnectionError):
                send_without_end(daemon)
            eventually(lambda: TOO_LONG in daemon.logs)  # which says so afterwards
            eventually(silent.is_closed)
        eventually(lambda: "no hello for 10 s" in daemon.logs)
        assert daemon.logs.count("closed 1 connections") == 2, "none of those in good faith"
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_connection_with_oversized_encrypted_message_is_closed(
    start: StartDaemon, folder: Path
) -> None:
    daemon = Daemon(start, Keys(folder / "keys"))
    with daemon.connect() as greedy:
        greedy.hello()
        greedy.socket.send_multipart([b"x", *[bytes(2 * MIB)] * 1000], copy=False)
        eventually(lambda: TOO_LONG in daemon.process.logs)
        with daemon.connect() as honest:
            honest.hello()
            assert honest.put(blocks(1)) == [PutResult.STORED]


def test_connections_within_limits_stay_open(daemon: Daemon) -> None:
    """Messages of the maximum size, and very many small ones."""
    with daemon.connect() as large, daemon.connect() as small:
        large.hello(block_bytes=[MIB])
        small.hello(namespace=bytes(32))
        payload = [block(n, MIB) for n in range(8)]
        checksums = [xxh3_64(part) for part in payload]
        for n in range(5):
            for m in range(8):  # all of them under way at once
                keys = [key(64 * n + 8 * m + i) for i in range(8)]
                put = wire.Put(24, keys, [None] * 8, [MIB] * 8, checksums, Durability.MEMORY)
                large.send(put, payload)
            for _ in range(8):
                assert isinstance(large.receive()[1], wire.PutReply)
        for n in range(30):
            for _ in range(100):
                small.send(wire.Contains(24, [key(n)] * 200))
            for _ in range(100):
                assert isinstance(small.receive()[1], wire.ContainsReply)
    assert " connections: " not in daemon.process.logs


def test_disconnect_without_descriptors_is_retried(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    context = zmq.Context()
    request.addfinalizer(lambda: context.destroy(linger=0))
    network = NetworkMemory(MIB, MIB)
    connections = Connections(
        Reactor(), context, ClientLimits.of_memory(32 * MIB), network, 1, 30, Recorder()
    )
    listener = Listener(context.socket(zmq.ROUTER), "tcp://", False)
    theirs, ours = socket.socketpair()

    def no_more(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with theirs, ours:
        connections._add(listener, ours.fileno())
        with monkeypatch.context() as without_descriptors:
            without_descriptors.setattr(os, "dup", no_more)
            connections._disconnect(ours.fileno())
        theirs.settimeout(60)
        connections._disconnect(ours.fileno())
        assert theirs.recv(1) == b""
        assert not connections._open


def late_hello(daemon: DaemonProcess) -> bool:
    """Whether hello is answered: messages on a closed connection are lost."""
    with RawClient(daemon.endpoint) as late:
        late.send(wire.Hello(1, "late", bytes(32), 24, [4096], "test", b""))
        return bool(late.socket.poll(2000)) and isinstance(late.receive()[1], wire.HelloReply)


def descriptors(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


@pytest.mark.slow
def test_connections_beyond_descriptors_are_closed(folder: Path) -> None:
    daemon = DaemonProcess(folder, *MEMORY)
    daemon.program = ["-c", FEW_DESCRIPTORS]
    with daemon, RawClient(daemon.endpoint) as honest, contextlib.ExitStack() as held:
        honest.hello()
        honest.put(blocks(1))
        for _ in range(400):
            held.enter_context(ZmtpClient(daemon.endpoint, shake_hands=False))
        assert honest.get([key(0)]) == blocks(1)
        # zmq accepts all that it has descriptors for, also for a moment those kept for others.
        eventually(lambda: "192 are open already" in daemon.logs and descriptors(daemon) < 240)
        attach(daemon.ipc_path).close()  # some are left for others
        # There is room again when the silent ones are cut off.
        assert eventually(lambda: late_hello(daemon)) is True
        assert honest.get([key(0)]) == blocks(1)


@contextlib.contextmanager
def impatient_daemon(folder: Path, more: str = "") -> Iterator[DaemonProcess]:
    program = ["-c", SHORT_DEADLINE + more + "\nraise SystemExit(cli.main())"]
    options = ("--memory", "64MiB", "--stall-timeout", "10s", "--prefault", "false")
    with DaemonProcess(folder, *options, program=program) as daemon:
        yield daemon


def idle_until_closed(daemon: DaemonProcess) -> None:
    """Connects over ipc without a word, and returns when the daemon has closed this connection.
    Those that were idle before are closed then, too."""
    with ZmtpClient(daemon.ipc) as idle:
        eventually(idle.is_closed)


def test_unfinished_message_over_ipc_is_closed_and_its_memory_returned(
    folder: Path, connect: Connect
) -> None:
    with impatient_daemon(folder) as daemon:
        honest = connect(daemon.endpoint)
        before = daemon.rss_bytes()
        with ZmtpClient(daemon.ipc) as stalled:
            for _ in range(192):
                stalled.send(long_frame(bytes(MIB)))
            eventually(lambda: daemon.rss_bytes() - before > 160 * MIB)
            eventually(stalled.is_closed)
        # malloc keeps the end of a heap, at most 64 MiB.
        eventually(lambda: daemon.rss_bytes() - before < 100 * MIB)
        assert honest.stats()["dropped_clients"] == 0, "it may have been an honest idle one"
        assert honest.put(blocks(1)) == [PutResult.STORED], "idle over tcp, and the same session"


def test_idle_ipc_client_reconnects_and_loses_nothing(folder: Path, connect: Connect) -> None:
    chain = keys("chain", 6)
    with impatient_daemon(folder) as daemon:
        watching = connect(daemon.endpoint)
        store = RemoteStore(daemon.ipc, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
        store.put(items(chain))
        memory = store.attach()
        assert memory is not None
        lease = memory.lease(chain)
        assert lease.is_complete
        idle_until_closed(daemon)
        assert watching.stats()["sessions"] == 2, "the one with a lease, and this one"
        assert memory.are_still_valid(lease)
        lease.release()
        eventually(lambda: watching.stats()["sessions"] == 1)
        assert watching.stats()["attached_processes"] == 1
        assert store.match(chain) == len(chain)
        again = memory.lease(chain)
        assert again.is_complete
        again.release()
        assert memory.is_settled
        assert store.failed_calls == 0
        assert store.last_error is None
        store.close()


def test_ipc_client_with_leases_is_idle_later_and_keeps_them(
    folder: Path, connect: Connect
) -> None:
    chain = keys("chain", 6)
    with impatient_daemon(folder, "connections._LEASES_FACTOR = 2") as daemon:
        watching = connect(daemon.endpoint)
        store = RemoteStore(daemon.ipc, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
        store.put(items(chain))
        memory = store.attach()
        assert memory is not None
        lease = memory.lease(chain)
        idle_until_closed(daemon)
        assert watching.stats()["sessions"] == 2, "the one with a lease, and this one"
        eventually(lambda: watching.stats()["sessions"] == 1)
        assert memory.are_still_valid(lease)
        assert watching.stats()["leases"] == len(chain)
        lease.release()
        assert store.match(chain) == len(chain)
        memory.settle()
        eventually(lambda: watching.stats()["leases"] == 0)
        assert store.failed_calls == 0
        assert store.last_error is None
        store.close()


def test_ipc_client_that_sends_short_requests_is_not_idle(folder: Path) -> None:
    with impatient_daemon(folder) as daemon, RawClient(daemon.ipc) as busy:
        busy.hello()
        with ZmtpClient(daemon.ipc) as idle:
            while not idle.is_closed():
                busy.tiers([key(0)])
                time.sleep(0.1)
        busy.tiers([key(0)])


def test_ipc_client_that_waits_for_an_answer_is_not_idle(folder: Path) -> None:
    with impatient_daemon(folder, SLOW_FLUSH) as daemon, RawClient(daemon.ipc) as waiting:
        waiting.hello()
        waiting.send(wire.Flush())
        idle_until_closed(daemon)
        assert isinstance(waiting.receive()[1], wire.FlushReply)
        assert waiting.put(blocks(1)) == [PutResult.STORED]


def test_ipc_client_that_reads_its_answer_slowly_is_not_idle(
    folder: Path, connect: Connect
) -> None:
    with impatient_daemon(folder) as daemon, ZmtpClient(daemon.ipc) as slow:
        payload = blocks(12, MIB)
        connect(daemon.endpoint, block_bytes=[MIB]).put(payload)
        hello = encode_request(1, wire.Hello(1, "slow", NAMESPACE, KEY_BYTES, [MIB], "test", b""))
        slow.send(frame(hello, more=False))
        slow.receive()
        get = encode_request(2, wire.Get(KEY_BYTES, list(payload), False))
        slow.send(b"\x02" + len(get).to_bytes(8, "big") + get)
        idle_until_closed(daemon)
        received = b""
        while len(received) < 12 * MIB:
            some = slow.socket.recv(MIB)
            assert some, "the daemon has closed the connection"
            received += some
        assert received.endswith(block(11, MIB))
