"""Daemons that share a Redis as their backing tier."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, Refused, blocks, key, wire
from tests.patience import eventually
from tests.stores.redis_servers import PRIMARIES, RedisServer, redis_cluster, redis_server
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode

SIZE = 64 << 10


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


def backed_by(server: RedisServer, more: str = "", timeout: str = "30s") -> list[str]:
    return ["--memory", "16MiB", "--backing", server.url + more, "--backing-timeout", timeout]


def test_blocks_in_redis_outlive_their_daemon(
    server: RedisServer, start: StartDaemon, connect: Connect
) -> None:
    one = start(*backed_by(server, "/?ttl=1h"))
    wanted = blocks(20, SIZE)
    client = connect(one.endpoint, block_bytes=[SIZE])
    client.put(wanted)
    assert client.put(blocks(1, SIZE, start=50), Durability.DISK) == [PutResult.STORED]
    client.ask(wire.Flush())
    one.kill()
    other = start(*backed_by(server, "/?ttl=1h"))
    reader = connect(other.endpoint, block_bytes=[SIZE])
    assert reader.match([*wanted, key(99)]).tiers == [0, 0, 20]
    assert reader.get([*wanted, key(99)], stream=True) == wanted
    assert reader.match(list(wanted)).tiers == [20, 0, 0]
    eventually(lambda: reader.stats()["blocks"]["backing"] == 21)
    assert reader.ask(wire.Delete(KEY_BYTES, [key(0)])).count == 1
    assert reader.tiers([key(0)]) == [0]
    assert reader.stats()["backing_absent"] == 0
    assert other.terminate() == 0
    assert server.client().dbsize() == 20
    assert "Traceback" not in one.logs + other.logs


def test_daemon_without_its_redis_serves_and_uses_it_once_it_is_back(
    server: RedisServer, start: StartDaemon, connect: Connect
) -> None:
    server.kill()
    daemon = start(*backed_by(server, timeout="2s"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(4, SIZE)
    assert client.put(wanted) == [PutResult.STORED] * 4
    assert client.get([*wanted, key(99)]) == wanted, "the rest are misses, in time"
    stats = client.stats()
    assert stats["backing_absent"] == 1
    assert stats["backing_timeouts"] > 0
    with pytest.raises(Refused) as refused:
        client.ask(wire.Delete(KEY_BYTES, [key(3)]))
    assert refused.value.code is ErrorCode.NOT_WRITTEN
    server.start()
    eventually(lambda: client.match([key(99)]).count or client.stats()["backing_absent"] == 0)
    client.ask(wire.Flush())  # writes what could not be written before
    assert server.client().dbsize() == 3
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.logs


def test_hung_node_of_a_cluster_costs_its_own_blocks_only(
    start: StartDaemon, connect: Connect
) -> None:
    """The daemon reads several blocks in a call, and those of the other nodes are in the same."""
    with redis_cluster() as cluster:
        options = ["--memory", "16MiB", "--backing", cluster.url, "--backing-timeout", "3s"]
        one = start(*options)
        wanted = blocks(40, SIZE)
        client = connect(one.endpoint, block_bytes=[SIZE])
        client.put(wanted)
        client.ask(wire.Flush())
        one.kill()
        other = start(*options)
        reader = connect(other.endpoint, block_bytes=[SIZE])
        assert reader.match(list(wanted)).tiers == [0, 0, 40], "it knows the nodes"
        hung = cluster.servers[::PRIMARIES]  # one primary and its replica
        lost = hung[0].client().dbsize()
        assert 0 < lost < 40
        for server in cluster.servers:
            server.client().config_set("cluster-require-full-coverage", "no")
        with contextlib.ExitStack() as stack:
            for server in hung:
                stack.enter_context(server.frozen())
            found = reader.get(list(wanted))
            assert len(found) == 40 - lost
            assert found.items() <= wanted.items()
        eventually(lambda: reader.get(list(wanted)) == wanted)
        assert other.terminate() == 0
        assert "Traceback" not in other.logs


def test_daemon_with_wrong_password_says_so_and_hides_it(server: RedisServer) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", "--memory", "16MiB", "--http", "off",
         "--listen", "tcp://127.0.0.1:*", "--backing", f"redis://me:secret@{server.address}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert said.returncode == 2
    assert "invalid username-password pair" in said.stderr
    assert f"redis://me:***@{server.address}" in said.stderr
    assert "secret" not in said.stderr
    assert "Traceback" not in said.stderr
