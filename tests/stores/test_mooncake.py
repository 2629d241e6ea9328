"""Blocks in a Mooncake Store: a real master, two store nodes, and what goes wrong with them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.patience import eventually, mostly_slow
from tests.stores.contract import (
    MIB,
    StoreCase,
    StoreContract,
    assert_holds,
    assert_lacks,
    chain_items,
    chain_keys,
    content,
    item,
    read,
    store_key,
)
from tests.stores.mooncake_servers import (
    MemoryUse,
    MooncakeServers,
    mooncake_servers,
    require_mooncake,
)
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.stores.block_format import BlockHeader, encode_header
from vllm_tiered_kv.stores.registry import BackingOptions, check, open_store

KEPT = {PutResult.STORED, PutResult.PRESENT}
TIMEOUT_S = 2.0
LATE_S = 20.0  # far beyond any deadline, and below a hang


@pytest.fixture(scope="module")
def servers() -> Iterator[MooncakeServers]:
    with mooncake_servers() as started:
        yield started


@pytest.fixture(scope="module")
def library(servers: MooncakeServers) -> Iterator[Any]:
    """A client of Mooncake's own, for what others may do with the values."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    master = f"127.0.0.1:{servers.master.port}"
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0
    yield client
    client.close()


@pytest.fixture
def empty(servers: MooncakeServers, library: Any) -> MooncakeServers:
    library.remove_all(True)
    return servers


@pytest.fixture(scope="module")
def opened(servers: MooncakeServers) -> Iterator[Any]:
    store = open_store(BackingOptions(servers.url, timeout_s=TIMEOUT_S))
    yield store
    store.close()


@pytest.fixture
def store(opened: Any, empty: MooncakeServers) -> Any:
    """One client for most tests: it starts threads that live as long as the process."""
    opened._counts.clear()
    return opened


def name(key: StoreKey, prefix: str = "tiered-kv") -> str:
    """The key in Mooncake, as docs/stores.md says."""
    return f"{prefix}:1:{key.hex()}"


def block(key: StoreKey, nbytes: int, parent: StoreKey | None = None) -> bytes:
    payload = content(key, nbytes)
    checksum = xxhash.xxh3_64_intdigest(payload)
    return encode_header(BlockHeader(key, parent, nbytes, checksum)) + payload


# ---- the contract -------------------------------------------------------------------------------


class TestContract(StoreContract):
    @pytest.fixture
    def case(self, opened: Any, library: Any) -> StoreCase:
        @contextmanager
        def open_case(folder: Path, capacity_bytes: int) -> Iterator[Any]:
            if not (folder / "opened").exists():  # a second time, the blocks must be there
                (folder / "opened").touch()
                library.remove_all(True)
            close, opened.close = opened.close, lambda: None
            try:
                yield opened
            finally:
                opened.close = close

        return StoreCase("mooncake", open_case, persistent=True, describes=True, exact_usage=False)


def test_blocks_outlive_their_client(empty: MooncakeServers, store: Any) -> None:
    keys = chain_keys("a", 5)
    other = open_store(BackingOptions(empty.url, timeout_s=TIMEOUT_S))
    assert set(other.put(chain_items(keys))) == {PutResult.STORED}
    other.close()
    assert_lacks(other, keys[0])
    assert other.put([item(keys[0])]) == [PutResult.DROPPED]
    assert store.match(keys) == 5
    for key in keys:
        assert_holds(store, key, 4096)


# ---- format and memory --------------------------------------------------------------------------


def test_block_in_mooncake_has_the_documented_form(store: Any, library: Any) -> None:
    key, parent = store_key("a"), store_key("b")
    store.put([item(key, 1000, parent)])
    assert library.get(name(key)) == block(key, 1000, parent)


@pytest.fixture(scope="module")
def other(servers: MooncakeServers) -> Iterator[Any]:
    opened = open_store(BackingOptions(servers.url + "&prefix=other&replicas=2"))
    yield opened
    opened.close()


def test_prefixes_are_separate(store: Any, other: Any, library: Any) -> None:
    key = store_key("a")
    store.put([item(key)])
    assert_lacks(other, key)
    assert other.put([item(key, version=1)]) == [PutResult.STORED]
    assert library.is_exist(name(key, "other")) == 1
    assert_holds(store, key, 4096)


def test_blocks_move_within_registered_memory_only(store: Any) -> None:
    """Slots of an arena: nothing outside the slots of a call changes."""
    arena = np.full(8 * MIB, 0xA5, np.uint8)
    store.use_memory(HostRegion(arena.ctypes.data, arena.nbytes))
    view = memoryview(arena.data)
    keys = chain_keys("a", 3)
    for n, key in enumerate(keys):
        view[n * MIB : (n + 1) * MIB] = content(key, MIB)
    slots = [view[n * MIB : (n + 1) * MIB] for n in range(3)]
    parents = [None, *keys[:-1]]
    assert store.put(list(map(PutItem, keys, parents, slots))) == [PutResult.STORED] * 3
    before = bytes(view)
    wanted = [view[(5 + n) * MIB : (6 + n) * MIB] for n in range(3)]
    assert store.get(keys, wanted) == [True] * 3
    assert bytes(view) == before[: 5 * MIB] + before[: 3 * MIB]


def test_library_moves_blocks_from_and_to_the_buffers_of_the_caller(
    empty: MooncakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = MemoryUse(monkeypatch)
    arena = np.zeros(4 * MIB, np.uint8)
    start, view = arena.ctypes.data, memoryview(arena.data)
    store = open_store(BackingOptions(empty.url, timeout_s=TIMEOUT_S))
    store.use_memory(HostRegion(start, arena.nbytes))
    assert (start, arena.nbytes) in use.registered
    key = store_key("a")
    assert store.put([PutItem(key, None, view[:MIB])]) == [PutResult.STORED]
    assert store.get([key], [view[2 * MIB : 3 * MIB]]) == [True]
    assert use.moved == [(start, MIB), (start + 2 * MIB, MIB)]
    store.close()


def test_more_blocks_than_one_call_takes_are_moved(store: Any) -> None:
    keys = chain_keys("a", 150)
    assert set(store.put(chain_items(keys))) == {PutResult.STORED}
    buffers = [bytearray(4096) for _ in keys]
    assert all(store.get(keys, [memoryview(b) for b in buffers]))
    assert [bytes(b) for b in buffers] == [content(key, 4096) for key in keys]
    assert [fact.nbytes for fact in store.describe(keys)] == [4096] * 150


@pytest.mark.parametrize(
    "kind",
    ["flipped payload", "flipped header", "too short", "too long", "other key", "short", "empty"],
)
def test_garbage_under_a_key_is_a_miss_and_deleted(store: Any, library: Any, kind: str) -> None:
    key = store_key("a")
    value = bytearray(block(key, 4096))
    if kind == "flipped payload":
        value[-1] ^= 1
    elif kind == "flipped header":
        value[20] ^= 1
    elif kind == "too short":
        del value[-1]
    elif kind == "too long":
        value += b"x"
    elif kind == "other key":
        value = bytearray(block(store_key("b"), 4096))
    elif kind == "short":
        value = bytearray(b"hello")
    elif kind == "empty":
        value = bytearray(256 + 4096)
    assert library.put(name(key), bytes(value)) == 0
    assert read(store, key, 4096) is None
    assert store.damaged_blocks == 1
    assert library.is_exist(name(key)) == 0
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)


def test_describe_deletes_a_header_that_is_damaged(store: Any, library: Any) -> None:
    keys = chain_keys("a", 3)
    store.put([item(keys[0])])
    assert library.put(name(keys[1]), bytes(5000)) == 0
    assert library.put(name(keys[2]), b"hello") == 0
    facts = store.describe(keys)
    assert [fact is not None for fact in facts] == [True, False, False]
    assert store.damaged_blocks == 2
    assert store.contains(keys) == [True, False, False]


def test_replicas_are_asked_for(store: Any, other: Any, library: Any) -> None:
    key = store_key("a")
    assert store.put([item(key)]) + other.put([item(key)]) == [PutResult.STORED] * 2
    assert len(library.get_replica_desc(name(key))) == 1
    assert len(library.get_replica_desc(name(key, "other"))) == 2


def test_full_store_drops_blocks_and_counts_them(store: Any) -> None:
    payload = memoryview(bytes(64 * MIB))
    results = [store.put([PutItem(store_key(f"{n}"), None, payload)])[0] for n in range(9)]
    assert set(results) == {PutResult.STORED, PutResult.DROPPED}
    assert store.failed_blocks == results.count(PutResult.DROPPED)
    usage = store.usage()
    assert usage.capacity_bytes == 512 * MIB
    assert usage.used_bytes <= usage.capacity_bytes
    assert store.known_usage() == usage


# ---- URLs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mooncake://", "is not an address like host:50051"),
        ("mooncake://a:b", "is not an address"),
        ("mooncake://[::1", "is not a URL"),
        ("mooncake://me@a", "is not like mooncake://host:50051"),
        ("mooncake://a/x", "is not like mooncake://host:50051"),
        ("mooncake://a?replica=2", "unknown option 'replica', expected one of replicas, protocol"),
        ("mooncake://a?replicas=0", "replicas=0 is not a number from 1 to 16"),
        ("mooncake://a?replicas=x", "replicas=x is not a number"),
        ("mooncake://a?replicas=1&replicas=2", "more than once"),
        ("mooncake://a?protocol=udp", "is not one of tcp, rdma"),
        ("mooncake://a?devices=mlx5_0", "devices are for protocol=rdma"),
        ("mooncake://a?segment=-1", "size"),
        ("mooncake://a?prefix=a{b", "braces"),
    ],
)
def test_wrong_url_is_refused(url: str, said: str) -> None:
    require_mooncake()
    with pytest.raises(ConfigError, match="backing") as error:
        check(BackingOptions(url))
    assert said in str(error.value)


@pytest.mark.parametrize("more", [{"capacity_bytes": 1}, {"ttl_s": 60}])
def test_options_of_folders_are_refused(more: dict[str, int]) -> None:
    require_mooncake()
    with pytest.raises(ConfigError, match="is for file:// only"):
        check(BackingOptions("mooncake://a", **more))


def test_url_with_everything_is_understood() -> None:
    from vllm_tiered_kv.stores.mooncake.settings import parse_settings

    settings = parse_settings(
        BackingOptions(
            "mooncake://[::1]:7/?replicas=3&protocol=rdma&devices=mlx5_0,mlx5_1&prefix=p"
            "&metadata=http://m/metadata&host=me&segment=2GiB&metrics_port=0",
            timeout_s=10,
        )
    )
    assert (str(settings.master), settings.replicas, settings.protocol) == ("[::1]:7", 3, "rdma")
    assert (settings.devices, settings.metadata) == ("mlx5_0,mlx5_1", "http://m/metadata")
    assert (settings.host, settings.segment_bytes, settings.metrics_port) == ("me", 2 << 30, 0)
    assert (settings.prefix, settings.timeout_s) == ("p", 9.0)
    plain = parse_settings(BackingOptions("mooncake://a"))
    assert (plain.master.port, plain.replicas, plain.segment_bytes) == (50051, 1, 0)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_store_without_its_master_is_absent_and_used_once_it_is_there() -> None:
    with mooncake_servers() as servers:
        servers.kill()
        begin = time.monotonic()
        unanswered: list[int] = []
        options = BackingOptions(servers.url, timeout_s=TIMEOUT_S)
        store = open_store(options, lambda: unanswered.append(1))
        unanswered.clear()  # of opening
        key = store_key("a")
        assert_lacks(store, key)
        assert store.put([item(key)]) == [PutResult.FAILED]
        assert store.describe([key]) == [None]
        with pytest.raises(NotDeletedError):
            store.delete([key])
        assert time.monotonic() - begin < 1
        assert store.is_absent
        assert unanswered
        assert store.failed_blocks == 1
        servers.start()
        eventually(lambda: store.put([item(key)])[0] in KEPT)
        assert_holds(store, key, 4096)
        assert not store.is_absent
        store.close()


def test_killed_master_costs_one_slow_call_and_is_used_when_it_is_back() -> None:
    with mooncake_servers() as servers:
        store = open_store(BackingOptions(servers.url, timeout_s=TIMEOUT_S))
        keys = chain_keys("a", 8)
        assert set(store.put(chain_items(keys))) == {PutResult.STORED}
        servers.master.kill()
        begin = time.monotonic()
        for _ in range(200):
            assert read(store, keys[0], 4096) is None
        assert time.monotonic() - begin < LATE_S
        assert store.is_absent
        servers.master.start()
        servers.wait_for_nodes(2)  # they come back by themselves, and their blocks are gone
        eventually(lambda: store.put([item(keys[0])])[0] in KEPT, LATE_S)
        assert_holds(store, keys[0], 4096)
        store.close()


@pytest.mark.parametrize("replicas", mostly_slow([2, 1], quick=1))
def test_killed_node_costs_misses_and_is_used_when_it_is_back(replicas: int) -> None:
    """A node is killed while blocks are read and written: no wrong byte, no hang; with two
    replicas all blocks are there again once the master has noticed."""
    with mooncake_servers() as servers:
        url = f"{servers.url}&replicas={replicas}"
        store = open_store(BackingOptions(url, timeout_s=TIMEOUT_S))
        keys = chain_keys("a", 48)
        assert set(store.put(chain_items(keys, 256 << 10))) == {PutResult.STORED}
        stop = threading.Event()
        wrong: list[str] = []
        slowest = [0.0]

        def work(number: int) -> None:
            written = 0
            while not stop.is_set():
                begin = time.monotonic()
                buffers = [bytearray(256 << 10) for _ in keys]
                found = store.get(keys, [memoryview(b) for b in buffers])
                for key, buffer, is_read in zip(keys, buffers, found, strict=True):
                    if is_read and bytes(buffer) != content(key, 256 << 10):
                        wrong.append("other bytes")
                written += 1
                store.put([item(store_key(f"{number}/{written}"), 256 << 10)])
                slowest[0] = max(slowest[0], time.monotonic() - begin)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        servers.nodes[0].kill()
        servers.wait_for_nodes(1)
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(LATE_S)
            assert not thread.is_alive()
        assert wrong == []
        assert slowest[0] < LATE_S
        if replicas == 1:  # else the second try may have found every block at the other node
            assert store.damaged_blocks > 0, "some reads failed and are counted"
        here = store.contains(keys)
        assert all(here) if replicas == 2 else 0 < sum(here) < len(keys)
        buffers = [bytearray(256 << 10) for _ in keys]
        assert store.get(keys, [memoryview(b) for b in buffers]) == here
        servers.nodes[0].start()
        servers.wait_for_nodes(2)
        assert set(store.put(chain_items(keys, 256 << 10))) <= KEPT
        for key in keys:
            assert_holds(store, key, 256 << 10)
        store.close()


def test_transfer_that_fails_is_tried_once_more_and_then_counted(
    empty: MooncakeServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake.store import MooncakeDistributedStore

    fails = iter([True, False, True, True])

    class Failing(MooncakeDistributedStore):  # type: ignore[misc]
        def batch_get_into_multi_buffers(self, *arguments: Any) -> list[int]:
            codes: list[int] = super().batch_get_into_multi_buffers(*arguments)
            return [-800, *codes[1:]] if next(fails) else codes

    monkeypatch.setattr("vllm_tiered_kv.stores.mooncake.client.MooncakeDistributedStore", Failing)
    store = open_store(BackingOptions(empty.url, timeout_s=TIMEOUT_S))
    key = store_key("a")
    store.put([item(key)])
    assert_holds(store, key, 4096)
    assert store.damaged_blocks == 0
    assert read(store, key, 4096) is None
    assert store.damaged_blocks == 1
    assert list(fails) == []
    store.close()


def test_calls_to_a_frozen_master_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself waits thirty seconds."""
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "")  # so that the end of the test restores it
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS")
    with mooncake_servers() as servers:
        store = open_store(BackingOptions(servers.url, timeout_s=0.5))
        key = store_key("a")
        store.put([item(key)])
        with servers.master.frozen():
            begin = time.monotonic()
            assert read(store, key, 4096) is None
            assert store.put([item(store_key("b"))]) == [PutResult.FAILED]
            assert time.monotonic() - begin < LATE_S
        eventually(lambda: read(store, key, 4096) is not None, LATE_S)
        store.close()


def test_frozen_master_opens_the_breaker_while_calls_still_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "MC_RPC_TIMEOUT_MS", "6000"
    )  # else the library's calls end with the deadline
    with mooncake_servers() as servers:
        store = open_store(BackingOptions(servers.url, timeout_s=0.5))
        key = store_key("a")
        store.put([item(key)])
        with servers.master.frozen():
            waiting = [threading.Thread(target=store.contains, args=([key],)) for _ in range(3)]
            for thread in waiting:
                thread.start()
            time.sleep(0.7)
            begin = time.monotonic()
            assert_lacks(store, key)
            assert time.monotonic() - begin < 3, "it does not wait for the library"
            assert store.is_absent
            assert all(thread.is_alive() for thread in waiting)
        for thread in waiting:
            thread.join(LATE_S)
            assert not thread.is_alive()
        eventually(lambda: read(store, key, 4096) is not None, LATE_S)
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "given_up",
    [False, True],
    ids=["node given up by itself", "call given up after a minute"],
)
def test_call_to_a_frozen_node_ends_and_touches_its_buffers_no_more(
    given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a minute the library reports a failure although the transfer may still go on."""
    for variable in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
        monkeypatch.setenv(variable, "300" if given_up else "1")
    with mooncake_servers() as servers:
        store = open_store(BackingOptions(servers.url, timeout_s=TIMEOUT_S))
        keys = chain_keys("a", 8)
        assert set(store.put(chain_items(keys, MIB))) == {PutResult.STORED}
        buffers = [bytearray(MIB) for _ in keys]
        with servers.nodes[0].frozen():
            begin = time.monotonic()
            found = store.get(keys, [memoryview(b) for b in buffers])
            assert (time.monotonic() - begin > 30) == given_up
            for key, buffer, is_read in zip(keys, buffers, found, strict=True):
                assert not is_read or bytes(buffer) == content(key, MIB)
            assert not all(found)
            for buffer in buffers:
                buffer[:] = bytes(MIB)
        time.sleep(1)
        assert not any(map(any, buffers)), "the node sent late, into buffers of another use"
        servers.wait_for_nodes(2)
        eventually(lambda: set(store.put(chain_items(keys, MIB))) <= KEPT, LATE_S)
        for key in keys:
            assert_holds(store, key, MIB)
        store.close()


def test_wheel_without_its_system_libraries_says_what_to_install(tmp_path: Path) -> None:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", "--backing", "mooncake://localhost"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert said.returncode == 2
    assert "mooncake:// cannot load its library (libibverbs.so.1: cannot open)" in said.stderr
    assert "apt-get install libibverbs1 librdmacm1" in said.stderr
