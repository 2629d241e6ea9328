"""Requests that stand for very much: served in pieces, with others in between."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, attach, block, blocks, key, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import PutResult

MIB = 1 << 20


@pytest.mark.slow
def test_gets_of_many_absent_blocks_do_not_block_others(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start()
    honest, greedy = connect(daemon.ipc), connect(daemon.endpoint)
    honest.put(blocks(1))
    absent = [key(n) for n in range(1000, 1000 + 65536)]
    under_way = {greedy.send(wire.Get(KEY_BYTES, absent, True)) for _ in range(8)}
    answered = 0
    while under_way:
        assert honest.get([key(0)]) == blocks(1)
        answered += 1
        while greedy.socket.poll(0):
            request_id, reply, _ = greedy.receive()
            assert isinstance(reply, wire.GetReply)
            assert (reply.positions, reply.more) == ([], False)
            under_way.remove(request_id)
    assert answered >= 30


@pytest.mark.slow
def test_large_requests_in_sequence_are_served(start: StartDaemon, connect: Connect) -> None:
    """Together they far exceed the in-flight limit."""
    client = connect(start().endpoint)
    absent = [key(n) for n in range(65536)]
    for _ in range(12):
        assert client.get(absent, stream=True) == {}


def test_get_with_sparse_hits_finds_all(start: StartDaemon, connect: Connect) -> None:
    client = connect(start().endpoint)
    there = {key(n): block(n) for n in range(0, 20_000, 1111)}
    assert set(client.put(there)) == {PutResult.STORED}
    assert client.get([key(n) for n in range(20_000)], stream=True) == there
    assert client.get([key(n) for n in range(1000, 2024)]) == {key(1111): block(1111)}


def test_match_pinning_million_blocks_stays_bounded(start: StartDaemon, connect: Connect) -> None:
    """Keys are repeated and expanded lazily, so memory stays bounded."""
    daemon = start()
    client = connect(daemon.endpoint, block_bytes=[64])
    head, endings = bytes(16), [key(n)[:8] for n in range(1024)]
    for first in range(0, 1024, 256):
        some = {head + end: block(1, 64) for end in endings[first : first + 256]}
        assert set(client.put(some)) == {PutResult.STORED}
    before = daemon.peak_rss_bytes()
    for _ in range(4):
        client.send(wire.Match(16, [head] * 1024, endings, 60_000))
    for _ in range(4):
        assert client.receive()[1] == wire.MatchReply(1024, [1024, 0, 0])
    eventually(lambda: client.stats()["pins"] == 1024)
    assert daemon.peak_rss_bytes() - before < 100 * MIB


_DAEMON_OF_A_STALLED_DISK = """
import time
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.stores.ssd.disk import OsDisk

write = OsDisk.write


def write_no_block(self, fd, data, offset):
    while data.nbytes == 4096:
        time.sleep(60)
    return write(self, fd, data, offset)


OsDisk.write, OsDisk.native = write_no_block, False
raise SystemExit(cli.main())
"""
_HANG_S = 10.0
_SLOW_S = 1.0  # each takes some hundredths of a second


def put_seconds(client: RawClient, start: int) -> float:
    wanted = blocks(1024, start=start)
    sent_at = time.monotonic()
    assert set(client.put(wanted)) == {PutResult.STORED}
    return time.monotonic() - sent_at


def test_full_write_queue_does_not_slow_puts(folder: Path) -> None:
    """Queued blocks are the least recently used, where eviction searches first."""
    arguments = (
        "--memory", "256MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "1GiB",
        "--http", "127.0.0.1:0",
    )  # fmt: skip
    daemon = DaemonProcess(folder, *arguments)
    daemon.program = ["-c", _DAEMON_OF_A_STALLED_DISK]
    is_over = threading.Event()
    answers: list[bytes] = []
    waits: list[float] = []

    def ask_how_it_is() -> None:
        while not is_over.wait(0.02):
            asked_at = time.monotonic()
            try:
                with urllib.request.urlopen(f"{daemon.http}/healthz", timeout=_HANG_S) as answer:
                    answers.append(answer.read())
            except OSError as error:
                answers.append(str(error).encode())
            waits.append(time.monotonic() - asked_at)

    with daemon, RawClient(daemon.ipc) as client, RawClient(daemon.endpoint) as honest:
        attached = attach(daemon.ipc_path)
        client.hello(arena=attached.token)
        honest.hello()
        health = threading.Thread(target=ask_how_it_is)
        health.start()
        try:
            for start in range(0, 64 * 1024, 1024):
                put_seconds(client, start)
            assert honest.stats()["pending_write_bytes"] == {"ssd": 64 * MIB}, "it is full"
            pinned = [key(n) for n in range(48 * 1024, 64 * 1024)]
            assert client.ask(wire.Pin(KEY_BYTES, pinned, 600_000)).count == 8 * 1024
            keys = [key(n) for n in range(100_000, 100_000 + 65536)]
            client.send(wire.Reserve(KEY_BYTES, keys, [None] * 65536, [4096] * 65536))
            answered = 0
            while not client.socket.poll(0):
                assert honest.tiers([key(0)]) == [wire.TierCode.MEMORY]
                answered += 1
            assert answered >= 10
            results = list(client.receive()[1].results)
            room = (
                32768 * 2 // 3
            )  # half of the memory is for leases, two thirds of it for one process
            assert results == [wire.RESERVED] * room + [3] * (65536 - room)
            puts = [put_seconds(client, start) for start in range(200_000, 204_096, 1024)]
            assert min(puts) < _SLOW_S, "not each, as others use this machine"
        finally:
            is_over.set()
            health.join()
            attached.close()
    assert set(answers) == {b"ok\n"}
    assert sorted(waits)[-3] < _SLOW_S
    assert max(waits) < _HANG_S
