"""Daemons that share a Mooncake Store as their backing tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, Refused, blocks, key, wire
from tests.patience import eventually
from tests.stores.mooncake_servers import MemoryUse, MooncakeServers, mooncake_servers
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.server.daemon import Daemon
from vllm_tiered_kv.server.options import ServerOptions

SIZE = 64 << 10


@pytest.fixture(scope="module")
def servers() -> Iterator[MooncakeServers]:
    with mooncake_servers() as started:
        yield started


def backed_by(servers: MooncakeServers, more: str = "", memory: str = "16MiB") -> list[str]:
    return ["--memory", memory, "--backing", servers.url + more, "--backing-timeout", "5s"]


def test_blocks_in_mooncake_outlive_their_daemon(
    servers: MooncakeServers, start: StartDaemon, connect: Connect
) -> None:
    one = start(*backed_by(servers, "&prefix=outlive"))
    wanted = blocks(20, SIZE)
    client = connect(one.endpoint, block_bytes=[SIZE])
    client.put(wanted)
    assert client.put(blocks(1, SIZE, start=50), Durability.DISK) == [PutResult.STORED]
    client.ask(wire.Flush())
    one.kill()
    other = start(*backed_by(servers, "&prefix=outlive"))
    reader = connect(other.endpoint, block_bytes=[SIZE])
    assert reader.match([*wanted, key(99)]).tiers == [0, 0, 20]
    assert reader.get([*wanted, key(99)], stream=True) == wanted
    assert reader.match(list(wanted)).tiers == [20, 0, 0]
    assert reader.stats()["blocks"]["backing"] >= 21
    assert reader.ask(wire.Delete(KEY_BYTES, [key(0)])).count == 1
    assert reader.tiers([key(0)]) == [0]
    assert reader.stats()["backing_absent"] == 0
    assert other.terminate() == 0
    assert "Traceback" not in one.logs + other.logs


def test_blocks_move_between_the_memory_of_the_daemon_and_mooncake(
    servers: MooncakeServers, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second daemon reads from Mooncake what the first one wrote, both in registered memory."""
    use = MemoryUse(monkeypatch)
    wanted = blocks(20, SIZE)
    for name in "ab":
        options = ServerOptions(
            listen=[f"ipc://{tmp_path}/{name}.sock"], memory=16 << 20, http="off",
            backing=servers.url + "&prefix=memory", backing_timeout=5,
        )  # fmt: skip
        daemon = Daemon.open(options)
        serving = threading.Thread(target=daemon.run, daemon=True)
        serving.start()
        client = connect(options.listen[0], block_bytes=[SIZE])
        assert (client.get(list(wanted), stream=True) == wanted) == (name == "b")
        client.put(wanted)
        client.ask(wire.Flush())
        daemon.stop()
        serving.join(60)
        assert not serving.is_alive()
    assert len(use.moved) == 40
    assert use.is_registered()


@pytest.mark.slow
def test_daemon_whose_node_is_killed_serves_misses_and_all_blocks_after_that(
    start: StartDaemon, connect: Connect
) -> None:
    """Two replicas; the memory of the daemon holds half of the blocks, so that others are read from
    the store while a node dies."""
    with mooncake_servers() as servers:
        daemon = start(*backed_by(servers, "&replicas=2", memory="8MiB"))
        client = connect(daemon.endpoint, block_bytes=[SIZE])
        wanted = blocks(200, SIZE)
        keys = list(wanted)
        for n in range(0, 200, 20):
            client.put({key: wanted[key] for key in keys[n : n + 20]})
            client.ask(wire.Flush())
        stop = threading.Event()
        wrong: list[str] = []
        slowest = [0.0]

        def read() -> None:
            reader = connect(daemon.endpoint, block_bytes=[SIZE])
            while not stop.is_set():
                for n in range(0, 200, 20):
                    begin = time.monotonic()
                    got = reader.get(keys[n : n + 20], stream=True)
                    slowest[0] = max(slowest[0], time.monotonic() - begin)
                    wrong.extend("other bytes" for key in got if got[key] != wanted[key])

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.3)
        servers.nodes[0].kill()
        offered = blocks(20, SIZE, start=500)
        client.put(offered)
        servers.wait_for_nodes(1)
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
        assert wrong == []
        assert slowest[0] < 30
        for n in range(0, 200, 20):
            some = {key: wanted[key] for key in keys[n : n + 20]}
            eventually(lambda some=some: client.get(list(some), stream=True) == some)
        kept = client.get(list(offered), stream=True)
        assert kept.items() <= offered.items()
        # What the node did not take and memory has evicted since is lost, and the stop says so.
        assert daemon.terminate() == int(kept != offered)
        assert "Traceback" not in daemon.logs


def test_daemon_without_its_mooncake_serves_and_uses_it_once_it_is_back(
    start: StartDaemon, connect: Connect
) -> None:
    with mooncake_servers() as servers:
        servers.kill()
        daemon = start(*backed_by(servers))
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
        servers.start()
        eventually(lambda: client.match([key(99)]).count or client.stats()["backing_absent"] == 0)
        client.ask(wire.Flush())  # writes what could not be written before
        assert servers.metric("master_key_count") == 3
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.logs
