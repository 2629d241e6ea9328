"""The client with a real daemon that is stopped, killed, restarted or unreachable, under load."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.engine import (
    IDENTITY,
    NBYTES,
    RANK,
    block_keys,
    buffers,
    content,
    identity,
    items,
    keys,
    within,
)
from vllm_tiered_kv.core.breaker import BreakerState
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, store_key
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.store import RemoteMatch, RemoteStore
from vllm_tiered_kv.server.cli import main

GRACE_S = 10.0  # allowed beyond a deadline on a busy machine


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", "256MiB") as running:
        yield running


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[RemoteStore]:
    opened = RemoteStore(daemon.endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    yield opened
    opened.close()


def test_match_all_ranks_is_one_request(store: RemoteStore) -> None:
    names = block_keys("ranks", 6)
    ranks = [RankTag(tp) for tp in range(4)]
    for tp, present in enumerate((6, 5, 4, 6)):
        chain = [store_key(IDENTITY.namespace, name, ranks[tp]) for name in names]
        assert set(store.put(items(chain[:present]))) == {PutResult.STORED}
    assert store.match_all(names, ranks) == RemoteMatch(4, {Tier.MEMORY: 4})
    assert store.match_all(names, ranks[:2], pin_ms=1000) == RemoteMatch(5, {Tier.MEMORY: 5})
    assert store.match_all(names, ranks[3:]) == RemoteMatch(6, {Tier.MEMORY: 6})
    assert store.match_all(block_keys("other", 2), ranks) == RemoteMatch(0, {})
    assert store.match_all(names, ranks, deadline=time.monotonic() - 1) is None
    soon = time.monotonic() + 20
    assert store.contains_all(names[3:], ranks, soon) == [True, False, False]
    assert store.contains_all(names[3:], ranks[:2], soon) == [True, True, False]
    assert store.contains_all(names[3:], ranks, time.monotonic() - 1) == [False] * 3


def test_large_get_is_split_into_requests(store: RemoteStore) -> None:
    chain = keys("large", 300)
    assert set(store.put(items(chain))) == {PutResult.STORED}
    into = buffers(len(chain) + 1)
    assert store.get([*chain, *keys("other", 1)], into) == [True] * 300 + [False]
    for key, buffer in zip(chain, into, strict=False):
        assert bytes(buffer) == content(key)
    assert store.failed_calls == 0


def test_blocks_on_disk_survive_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "64MiB")
    with DaemonProcess(tmp_path, "--memory", "64MiB", *ssd) as daemon:
        store = RemoteStore(daemon.endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
        chain = keys("disk", 12)
        assert set(store.put(items(chain), Durability.DISK)) == {PutResult.STORED}
        assert set(store.put(items(chain), Durability.DISK)) == {PutResult.PRESENT}
        daemon.kill()
        daemon.restart()
        eventually(lambda: store.match(chain) == 12)
        assert store.match_all(block_keys("disk", 12), [RANK]) is not None
        into = buffers(12)
        assert store.get(chain, into) == [True] * 12
        assert [bytes(buffer) for buffer in into] == [content(key) for key in chain]
        assert caplog.text.count("was restarted") == 1
        store.close()


class Crowd:
    """Threads that call a store in a loop, each call with a deadline, and check the answers."""

    def __init__(self, store: RemoteStore, threads: int = 12, patience_s: float = 0.5) -> None:
        self._store = store
        self._patience = patience_s
        self._chains = [keys(f"crowd {n}", 8) for n in range(6)]
        self.wrong: list[str] = []
        self.hits = 0
        self.calls = 0
        self.slowest = 0.0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(seed,)) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a call hangs"
        assert self.wrong == []
        assert self.slowest < self._patience + GRACE_S

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            start = time.monotonic()
            try:
                self._call(rng, rng.choice(self._chains), start + self._patience)
            except BaseException as error:
                self.wrong.append(repr(error))
            self.slowest = max(self.slowest, time.monotonic() - start)
            self.calls += 1
            time.sleep(0.002)

    def _call(self, rng: random.Random, chain: list, deadline: float) -> None:  # type: ignore[type-arg]
        action = rng.randrange(3)
        if action == 0:
            self._store.put(items(chain), deadline=deadline)
        elif action == 1:
            self._store.match_all([key[16:33] for key in chain], [RANK], deadline=deadline)
        else:
            into = buffers(len(chain))
            found = self._store.get(chain, into, deadline=deadline)
            self.hits += sum(found)
            for key, buffer, hit in zip(chain, into, found, strict=True):
                if hit and bytes(buffer) != content(key):
                    self.wrong.append("a hit with other bytes")


def test_calls_to_a_stopped_daemon_keep_their_deadlines(
    daemon: DaemonProcess, store: RemoteStore
) -> None:
    crowd = Crowd(store)
    try:
        eventually(lambda: crowd.hits > 50)
        for _ in range(3):
            daemon.freeze()
            eventually(lambda: store.breaker.state is not BreakerState.CLOSED)
            time.sleep(0.5)
            daemon.thaw()
            before = crowd.hits
            eventually(lambda before=before: crowd.hits > before + 20)  # type: ignore[misc]
    finally:
        crowd.stop()


def test_breaker_ignores_calls_with_too_short_deadlines(
    daemon: DaemonProcess, store: RemoteStore
) -> None:
    """Under load a call may start shortly before its deadline."""
    names = block_keys("late", 4)
    assert store.match_all(names, [RANK]) == RemoteMatch(0, {})
    daemon.freeze()
    for _ in range(20):
        assert store.match_all(names, [RANK], deadline=within(0.01)) is None
    assert store.failed_calls
    assert store.breaker.is_up
    for _ in range(3):
        assert store.match_all(names, [RANK], deadline=within(1.0)) is None
    assert store.breaker.state is BreakerState.OPEN
    daemon.thaw()


def test_killed_daemon_gives_misses_until_it_restarts(
    daemon: DaemonProcess, store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = Crowd(store)
    try:
        for _ in range(2):
            before = crowd.hits
            eventually(lambda before=before: crowd.hits > before + 20)  # type: ignore[misc]
            daemon.kill()
            before = crowd.calls
            eventually(lambda before=before: crowd.calls > before + 100)  # type: ignore[misc]
            daemon.restart()
        before = crowd.hits
        eventually(lambda: crowd.hits > before + 20)
    finally:
        crowd.stop()
    assert caplog.text.count("was restarted") == 2


def test_put_to_a_stopped_daemon_releases_the_payload(
    daemon: DaemonProcess, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload exceeds the kernel's buffers, so that zmq is in the middle of sending it."""
    trackers: list[zmq.MessageTracker] = []
    send = zmq.Socket.send

    def watched(self: zmq.SyncSocket, *args: Any, **options: Any) -> Any:
        tracker = send(self, *args, **options)
        if tracker is not None:
            trackers.append(tracker)
        return tracker

    monkeypatch.setattr(zmq.Socket, "send", watched)
    chain = keys("stuck", 400)
    assert store.match(chain) == 0
    sources = [bytearray(content(key)) for key in chain]
    daemon.freeze()
    views = [memoryview(source) for source in sources]
    sent = [PutItem(key, None, view) for key, view in zip(chain, views, strict=True)]
    results = store.put(sent, Durability.DISK, deadline=within(1.0))
    contexts = [one._zmq.context for one in store._caller.pool._free.queue if one is not None]
    assert contexts == [None], "only its end proves that nothing is read any more"
    assert set(results) == {PutResult.FAILED}
    assert trackers
    # zmq has released the memory; a pyzmq thread releases its reference a little later.
    eventually(lambda: all(tracker.done for tracker in trackers))
    for view in views:
        view.release()
    for source in sources:
        source.clear()  # raises BufferError while anything references it
    daemon.thaw()
    eventually(lambda: store.contains(keys("other", 1)) == [False] and store.available)
    into = buffers(len(chain))
    for key, buffer, hit in zip(chain, into, store.get(chain, into), strict=True):
        assert not hit or bytes(buffer) == content(key)


def test_close_ends_waiting_calls(daemon: DaemonProcess, store: RemoteStore) -> None:
    assert store.match(keys("a", 1)) == 0
    daemon.freeze()
    answers: list[list[bool]] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(store.get(keys("a", 1), buffers(1), within(120)))
        )
        for _ in range(12)  # more than the pool has connections
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    store.close()
    for thread in threads:
        thread.join(60)
    assert answers == [[False]] * 12
    assert time.monotonic() - start < 60
    assert not store.available
    assert store.match(keys("a", 1)) == 0
    assert store.put(items(keys("a", 1))) == [PutResult.FAILED]
    assert store.attach() is None


def test_close_leaves_no_threads_or_descriptors(daemon: DaemonProcess) -> None:
    def use(address: str) -> None:
        store = RemoteStore(address, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
        crowd = Crowd(store, threads=6, patience_s=20.0)
        memory = store.attach()
        if memory is not None:
            memory.lease(keys("crowd 0", 3)).release()
        eventually(lambda: crowd.calls > 60)
        crowd.stop()
        store.close()

    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    use(daemon.endpoint)  # pyzmq starts one thread of its own and keeps it
    before = resources()
    for _ in range(3):
        use(daemon.endpoint)
        use(daemon.ipc)
    eventually(lambda: resources() <= before)


@pytest.mark.parametrize("listens", [True, False])
def test_address_without_a_daemon_is_a_miss(listens: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen(8)
        port = silent.getsockname()[1]
        store = RemoteStore(f"tcp://127.0.0.1:{port}", IDENTITY, connect_timeout_s=0.1)
        for _ in range(3):
            assert store.match(keys("a", 2)) == 0
        assert not store.available
        store.close()


def test_cluster_with_a_dead_daemon_loses_only_its_share(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(3)]
    for folder in folders:
        folder.mkdir()
    daemons = [DaemonProcess(folder, "--memory", "64MiB").start() for folder in folders]
    try:
        cluster = Cluster(
            [daemon.endpoint for daemon in daemons],
            IDENTITY,
            timeout_s=20.0,
            connect_timeout_s=10.0,
        )
        chains = {name: keys(name, 2) for name in (f"chain {n}" for n in range(30))}

        def home(name: str) -> RemoteStore:
            server = cluster.server_for(chains[name][0][16:33])
            assert server is not None
            return server

        homes = {name: home(name) for name in chains}
        assert len(set(homes.values())) == 3
        for name, chain in chains.items():
            assert set(homes[name].put(items(chain))) == {PutResult.STORED}
        lost = cluster.stores[daemons[0].endpoint]
        lost.breaker._cooldown = lost.breaker._longest = 600.0  # no probe during the test
        daemons[0].kill()
        eventually(lambda: lost.match(keys("any", 1)) == 0 and not lost.available)
        for name, chain in chains.items():
            if homes[name] is lost:
                assert home(name) is not lost
                assert home(name).match(chain) == 0
            else:
                assert home(name) is homes[name]
                assert home(name).match(chain) == 2
        cluster.close()
    finally:
        for daemon in daemons:
            daemon.end()


def keygen(folder: Path, name: str) -> tuple[Path, Path]:
    """Returns the public and the secret file."""
    assert main(["keygen", str(folder), name]) == 0
    return folder / f"{name}.key", folder / f"{name}.key_secret"


def test_curve_connections_accept_known_keys_only(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    server_public, server_secret = keygen(tmp_path, "server")
    _, known = keygen(clients, "known")
    stranger_public, stranger = keygen(tmp_path, "stranger")
    arguments = ("--secret-key", str(server_secret), "--clients", str(clients))
    with DaemonProcess(tmp_path, "--memory", "64MiB", *arguments) as daemon:

        def client(curve: CurveKeys | None) -> RemoteStore:
            return RemoteStore(
                daemon.endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=5.0, curve=curve
            )

        allowed = client(CurveKeys.load(known, server_public))
        chain = keys("secret", 30)
        assert set(allowed.put(items(chain))) == {PutResult.STORED}
        into = buffers(30)
        assert allowed.get(chain, into) == [True] * 30
        assert bytes(into[29]) == content(chain[29])
        allowed.close()
        for curve in (
            None,
            CurveKeys.load(stranger, server_public),
            CurveKeys.load(known, stranger_public),
        ):
            denied = client(curve)
            for _ in range(3):
                assert denied.match(chain) == 0
            assert not denied.available
            denied.close()


def test_namespace_with_another_layout_is_refused(daemon: DaemonProcess) -> None:
    first = RemoteStore(daemon.endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    assert first.match(keys("a", 1)) == 0
    other = RemoteStore(daemon.endpoint, identity(4096), timeout_s=20.0, connect_timeout_s=10.0)
    assert other.match(keys("a", 1)) == 0
    assert first.available
    assert not other.available
    first.close()
    other.close()


def _in_a_child(endpoint: str, answers: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    mine = RemoteStore(endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    chain = keys("forked", 3)
    into = buffers(3)
    answers.put((mine.match(chain), mine.get(chain, into), bytes(into[2]) == content(chain[2])))
    mine.close()


def test_forked_child_opens_its_own_connections(daemon: DaemonProcess, store: RemoteStore) -> None:
    chain = keys("forked", 3)
    assert set(store.put(items(chain))) == {PutResult.STORED}
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=_in_a_child, args=(daemon.endpoint, answers))
    child.start()
    try:
        assert answers.get(timeout=60) == (3, [True] * 3, True)
    finally:
        child.join(60)
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGKILL)
    assert child.exitcode == 0
    assert store.match(chain) == 3
    assert NBYTES > 65536, "so that zmq refers to the payload instead of copying it"


def test_unresolvable_host_fails_at_once() -> None:
    """zmq reports no disconnect here, because there was no connection: only the retry event."""
    nowhere = ServerAddress.parse(f"tcp://{64 * 'x'}:9527")  # longer than a host name may be
    connection = Connection(Settings(nowhere, connect_timeout_s=600.0), IDENTITY.hello())
    with pytest.raises(ConnectionLost, match="nothing listens there"):
        connection.open(time.monotonic() + 60)
    connection.close()


def test_idle_connection_does_not_reconnect_to_a_dead_daemon(
    daemon: DaemonProcess, store: RemoteStore
) -> None:
    """zmq sends every attempt to the monitor. If nobody reads it, zmq's I/O thread blocks after a
    minute or two, some thousand attempts, and so does closing the connection."""
    assert store.put(items(keys("idle", 1))) == [PutResult.STORED]
    daemon.kill()
    host, port = daemon.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_server((host, int(port))) as listening:
        listening.settimeout(1.0)
        with pytest.raises(TimeoutError):
            listening.accept()
