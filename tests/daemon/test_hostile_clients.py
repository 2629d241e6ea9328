"""Garbage, half messages, clients that vanish or never read: the daemon goes on, and is small."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, NAMESPACE, RawClient, block, blocks, key, wire
from tests.patience import eventually, examples, mostly_slow
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.wire.codec import encode_request

MIB = 1 << 20
ROOM_TO_GROW = 48 * MIB  # allocators keep some; what is leaked by thousands of messages is more

some_key = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
headers = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda keys: encode_request(1, wire.Contains(KEY_BYTES, keys)),
        st.lists(some_key, max_size=5),
    ),
    st.builds(
        lambda keys, stream: encode_request(2, wire.Get(KEY_BYTES, keys, stream)),
        st.lists(some_key, max_size=5),
        st.booleans(),
    ),
    st.builds(
        lambda keys, lengths: encode_request(
            3,
            wire.Put(
                KEY_BYTES,
                keys,
                [None] * len(keys),
                (lengths * 5)[: len(keys)],
                [1] * len(keys),
                Durability.MEMORY,
            ),
        ),
        st.lists(some_key, min_size=1, max_size=5),
        st.lists(st.sampled_from([1, 4096, 8192]), min_size=1, max_size=5),
    ),
    st.builds(
        lambda ns, width, lengths: encode_request(
            4, wire.Hello(1, "fuzz", ns, width, lengths, "x", b"")
        ),
        st.sampled_from([NAMESPACE, bytes(32)]),
        st.integers(1, 48),
        st.lists(st.integers(1, 10000), max_size=3, unique=True),
    ),
    st.builds(
        lambda leases: encode_request(5, wire.Release(leases)),
        st.lists(st.integers(1, 100), max_size=5, unique=True),
    ),
    st.sampled_from([wire.Flush(), wire.Info(), wire.Stats()]).map(
        lambda request: encode_request(6, request)
    ),
)
bodies = st.lists(st.one_of(st.binary(max_size=200), st.just(bytes(4096))), max_size=4)


def drain(client: RawClient) -> None:
    while client.socket.poll(0):
        client.socket.recv_multipart()


def test_daemon_receiving_garbage_keeps_serving(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "32MiB")
    honest = connect(daemon.endpoint)
    honest.put(blocks(8))
    rude = [connect(daemon.endpoint, greet=n % 2 == 0) for n in range(4)]
    rude.append(connect(daemon.ipc))
    grown_from = daemon.rss_bytes()
    seen = 0

    @examples(400, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(headers, bodies, st.integers(0, 4)), min_size=1, max_size=8))
    def bombard(messages: list[tuple[bytes, list[bytes], int]]) -> None:
        nonlocal seen
        for header, body, who in messages:
            damaged = bytearray(header)
            if damaged and seen % 3 == 0:
                damaged[seen % len(damaged)] ^= 1 << (seen % 8)
            rude[who].socket.send_multipart([bytes(damaged), *body])
            seen += 1
        for client in rude:
            drain(client)

    bombard()
    assert honest.get([key(n) for n in range(8)]) == blocks(8)
    noise = random.Random(1)
    for _ in range(3000):
        frames = [noise.randbytes(noise.randrange(200)) for _ in range(noise.randrange(1, 6))]
        rude[noise.randrange(5)].socket.send_multipart(frames)
        if noise.randrange(20) == 0:
            for client in rude:
                drain(client)
    eventually(lambda: honest.stats().get("errors", {}).get("bad_message", 0) > 1000)
    assert honest.get([key(n) for n in range(8)]) == blocks(8)
    assert "Traceback" not in daemon.logs
    assert daemon.rss_bytes() - grown_from < ROOM_TO_GROW
    assert daemon.terminate() == 0


def test_daemon_receiving_raw_tcp_bytes_keeps_serving(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "32MiB")
    host, _, port = daemon.endpoint.removeprefix("tcp://").rpartition(":")
    for n in range(100):
        with socket.create_connection((host, int(port))) as rude:
            rude.sendall(os.urandom(n) if n % 2 else b"GET / HTTP/1.1\r\n\r\n")
    connect(daemon.endpoint).put(blocks(1))


def test_frame_larger_than_any_block_closes_connection(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start("--memory", "32MiB")  # blocks up to 1 MiB
    rude = connect(daemon.endpoint)
    rude.socket.send_multipart([b"x", bytes(64 * MIB)])
    with pytest.raises(TimeoutError):
        rude.receive(timeout_s=0.5)
    connect(daemon.endpoint).put(blocks(1))
    assert daemon.rss_bytes() < 300 * MIB


@pytest.mark.slow
def test_many_namespaces_stay_bounded(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "32MiB")
    client = connect(daemon.endpoint, greet=False)
    for n in range(6000):
        client.send(wire.Hello(1, "x", n.to_bytes(32, "big"), KEY_BYTES, [4096], "x", b""))
        if n % 8 == 7:
            for _ in range(8):
                client.receive()
    stats = client.stats()
    assert stats["namespaces"] == 4096
    assert stats["sessions"] == 1


@pytest.mark.slow
def test_circular_chains_are_evicted(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    for n in range(0, 2000, 2):
        pair = {key(n): block(n), key(n + 1): block(n + 1)}
        client.put(pair, parents=[key(n + 1), key(n)])
        client.put({key(10_000 + n): block(n)}, parents=[key(10_000 + n)])
    assert client.put(blocks(1, start=50_000)) == [PutResult.STORED]
    assert client.tiers([key(0), key(1)]) == [0, 0]


def test_requests_beyond_inflight_limit_are_refused(start: StartDaemon, connect: Connect) -> None:
    """Every request is answered, however many are sent at once."""
    daemon = start("--memory", "64MiB")
    client = connect(daemon.endpoint)
    ids = {client.send(wire.Flush()) for _ in range(2000)}
    while ids:
        request_id, reply, _ = client.receive()
        assert isinstance(reply, (wire.FlushReply, wire.ErrorReply))
        ids.remove(request_id)


NEVER_READS = """
    import sys, time
    from tests.daemon.raw_client import RawClient, key, wire, KEY_BYTES
    client = RawClient(sys.argv[1], rcvhwm=1, rcvbuf=65536)
    client.hello(block_bytes=[1 << 20])
    for _ in range(50):
        client.send(wire.Get(KEY_BYTES, [key(n) for n in range(40)], True))
    print("asked", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("over", mostly_slow(["tcp", "ipc"], 1))
@pytest.mark.parametrize("how", mostly_slow(["reads nothing", "stopped"], 1))
def test_client_that_never_reads_is_bounded_and_dropped(
    start: StartDaemon, connect: Connect, over: str, how: str
) -> None:
    daemon = start("--memory", "64MiB", "--stall-timeout", "5s")  # not for those who read
    client = connect(daemon.endpoint, block_bytes=[MIB])
    wanted = blocks(40, MIB)
    for k, payload in wanted.items():
        assert client.put({k: payload}) == [PutResult.STORED]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(NEVER_READS),
            daemon.endpoint if over == "tcp" else daemon.ipc,
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        if how == "stopped":
            process.send_signal(signal.SIGSTOP)
        share = 64 * MIB // 4
        assert eventually(lambda: client.stats()["reply_bytes"]) <= share
        for _ in range(3):
            assert client.get(list(wanted), stream=True) == wanted
        # It may take a moment until zmq is done with what this client has received.
        eventually(lambda: client.stats()["reply_bytes"] <= share)
        eventually(lambda: client.stats()["reply_bytes"] == 0)
        process.kill()
        process.wait()
        eventually(lambda: client.stats()["reply_bytes"] == 0)
        assert client.get(list(wanted), stream=True) == wanted
    finally:
        process.kill()
        process.wait()
    assert daemon.terminate() == 0


def test_clients_killed_midway_leave_nothing_pinned(start: StartDaemon, connect: Connect) -> None:
    """Interrupted puts and gets leave no pin and no partial block."""
    daemon = start("--memory", "64MiB")
    client = connect(daemon.endpoint, block_bytes=[MIB])
    wanted = blocks(30, MIB)
    for k, payload in wanted.items():
        client.put({k: payload})
    for n in range(10):
        victim = RawClient(daemon.endpoint)
        victim.hello(block_bytes=[MIB])
        victim.send(wire.Get(KEY_BYTES, list(wanted), True))
        payload = block(1000 + n, MIB)
        put = wire.Put(
            KEY_BYTES, [key(1000 + n)], [None], [MIB], [xxh3_64(payload)], Durability.MEMORY
        )
        victim.send(put, [payload])
        victim.socket.close(linger=0)
        victim.context.term()
    eventually(lambda: client.stats()["reply_bytes"] == 0)
    eventually(lambda: client.stats()["put_bytes"] == 0)
    found = client.get([key(1000 + n) for n in range(10)], stream=True)
    for k, payload in found.items():
        assert payload == block(int.from_bytes(k[:8], "little"), MIB)
    assert client.get(list(wanted)[:4]) == {k: wanted[k] for k in list(wanted)[:4]}


def test_puts_beyond_limit_are_dropped(start: StartDaemon, connect: Connect) -> None:
    """Queued bytes are bounded: some puts are dropped, all are answered."""
    daemon = start("--memory", "8MiB", "--workers", "1")
    clients = [connect(daemon.endpoint, block_bytes=[256 << 10]) for _ in range(8)]
    payload = block(1, 256 << 10)
    checksum = xxh3_64(payload)
    asked = 0
    for n in range(40):
        for c, client in enumerate(clients):
            keys = [key(c * 10_000 + n * 10 + i) for i in range(4)]
            client.send(
                wire.Put(
                    KEY_BYTES,
                    keys,
                    [None] * 4,
                    [len(payload)] * 4,
                    [checksum] * 4,
                    Durability.MEMORY,
                ),
                [payload] * 4,
            )
            asked += 1
    answered = 0
    for client in clients:
        for _ in range(40):
            _, reply, _ = client.receive()
            assert isinstance(reply, wire.PutReply)
            answered += 1
    assert answered == asked
    assert clients[0].stats()["put_bytes"] == 0
    assert daemon.rss_bytes() < 300 * MIB


_DAEMON_THAT_TAKES_OVER_LATER = """
import os
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.tiers.fills import Fills

collect, gate = Fills.collect, os.environ["GATE"]


def collect_when_allowed(self):
    if os.path.exists(gate):
        collect(self)


Fills.collect = collect_when_allowed
raise SystemExit(cli.main())
"""


def test_puts_after_dropped_head_are_dropped(
    folder: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tail would evict the head of its own chain and be unreachable."""
    size = 16 << 10
    gate = folder / "gate"
    monkeypatch.setenv("GATE", str(gate))
    daemon = DaemonProcess(folder, "--memory", "1MiB")
    daemon.program = ["-c", _DAEMON_THAT_TAKES_OVER_LATER]
    with daemon:
        client = connect(daemon.endpoint, block_bytes=[size])
        offer_more_than_there_is_room_for(client, size, gate)


def offer_more_than_there_is_room_for(client: RawClient, size: int, gate: Path) -> None:
    keys = [key(n) for n in range(160)]

    def offer(first: int) -> int:
        numbers = range(first, first + 16)
        payload = [block(n, size) for n in numbers]
        put = wire.Put(
            KEY_BYTES,
            [keys[n] for n in numbers],
            [keys[n - 1] if n else None for n in numbers],
            [size] * 16,
            [xxh3_64(part) for part in payload],
            Durability.MEMORY,
        )
        return client.send(put, payload)

    replies: list[tuple[int, wire.PutReply]] = []

    def take_replies(count: int) -> None:
        replies.extend(client.receive()[:2] for _ in range(count))

    for first in range(0, 80, 16):
        offer(first)
    take_replies(3)  # while two are being copied there is room for no more
    gate.touch()
    take_replies(2)
    for first in range(80, 160, 16):
        offer(first)
        take_replies(1)
    replies.sort(key=lambda reply: reply[0])
    got = [result for _, reply in replies for result in wire.put_results(reply.results)]
    stored = got.count(PutResult.STORED)
    assert stored == 32
    assert got == [PutResult.STORED] * stored + [PutResult.DROPPED] * (160 - stored)
    assert client.match(keys).count == sum(map(bool, client.tiers(keys))) == stored


def test_frozen_daemon_answers_after_resume(start: StartDaemon, connect: Connect) -> None:
    daemon: DaemonProcess = start()
    client = connect(daemon.endpoint)
    daemon.freeze()
    client.send(wire.Info())
    assert not client.socket.poll(300, zmq.POLLIN)
    daemon.thaw()
    assert isinstance(client.receive()[1], wire.InfoReply)
