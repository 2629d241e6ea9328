"""A Mooncake Store, a Redis or a bucket directly behind an engine, without a daemon."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.engine import IDENTITY, NBYTES, block_keys, buffers, content, items, within
from tests.stores.mooncake_servers import MooncakeServers, mooncake_servers
from tests.stores.redis_servers import redis_server
from tests.stores.s3_servers import s3_server, use_credentials
from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.direct_store import DirectStore, open_direct
from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker.remote_io import open_cluster
from vllm_tiered_kv.connector.worker.remote_loader import RemoteLoader
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.connector.worker.slot_workers import PutWorker
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.core.store import PutResult, StoreKey, store_key
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import PutJob, RemoteTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.cpu_copier import CpuChannel
from vllm_tiered_kv.errors import ConfigError, TransferPending
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import cpu as native
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.store import RemoteMatch
from vllm_tiered_kv.stores.redis.store import RedisStore

RANKS = [RankTag(tp=0), RankTag(tp=1)]


def keys_of(blocks: list[BlockKey], ranks: list[RankTag]) -> list[StoreKey]:
    return [store_key(IDENTITY.namespace, key, rank) for rank in ranks for key in blocks]


@pytest.fixture(scope="module")
def mooncake() -> Iterator[MooncakeServers]:
    with mooncake_servers() as started:
        yield started


@pytest.fixture(params=["mooncake", "redis", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "mooncake":
        yield request.getfixturevalue("mooncake").url
        return
    if request.param == "s3":
        use_credentials(monkeypatch)
        with s3_server() as service:
            yield service.url()
        return
    with redis_server() as server:
        yield server.url


@contextlib.contextmanager
def direct(url: str, timeout_s: float = 10.0) -> Iterator[DirectStore]:
    store = DirectStore(url, IDENTITY, timeout_s)
    store.greet()
    try:
        yield store
    finally:
        store.close()


def test_blocks_of_all_ranks_are_found_read_and_deleted(url: str) -> None:
    blocks = block_keys("direct", 40)
    with direct(url) as store:
        assert store.is_up
        assert store.match_all(blocks, RANKS, 0, within(10)) == RemoteMatch(0, {})
        assert set(store.put(items(keys_of(blocks, RANKS[:1])))) == {PutResult.STORED}
        assert set(store.put(items(keys_of(blocks[:30], RANKS[1:])))) == {PutResult.STORED}
    with direct(url) as other:
        found = other.match_all(blocks, RANKS, 0, within(10))
        assert found == RemoteMatch(30, {Tier.BACKING: 30})
        assert other.contains_all(blocks, RANKS, within(10)) == [True] * 30 + [False] * 10
        asked = keys_of(blocks, RANKS)
        into = buffers(len(asked))
        assert other.get(asked, into, within(10)) == [True] * 70 + [False] * 10
        for key, buffer in zip(asked[:70], into, strict=False):
            assert bytes(buffer) == content(key)
        assert other.delete(asked) == 70
        assert other.failed_calls == 0


def test_daemon_with_the_same_store_behind_it_shares_the_blocks(url: str) -> None:
    blocks = block_keys("shared", 10)
    wanted = keys_of(blocks, RANKS[:1])
    with tempfile.TemporaryDirectory(prefix="kv-") as folder, direct(url) as store:
        store.put(items(wanted))
        with DaemonProcess(Path(folder), "--memory", "16MiB", "--backing", url) as daemon:
            cluster = Cluster([daemon.endpoint], IDENTITY, timeout_s=30)
            (remote,) = cluster.stores.values()
            found = remote.match_all(blocks, RANKS[:1], 0, within(30))
            assert found == RemoteMatch(10, {Tier.BACKING: 10})
            into = buffers(10)
            assert all(remote.get(wanted, into, within(30)))
            assert [bytes(buffer) for buffer in into] == [content(key) for key in wanted]
            more = keys_of(block_keys("of the daemon", 5), RANKS[:1])
            remote.put(items(more))
            assert remote.flush()
            cluster.close()
        assert store.get(more, buffers(5)) == [True] * 5


@pytest.mark.parametrize(
    ("remote", "sentence"),
    [
        (["mooncake://a", "tcp://b:1"], "remote: a store such as mooncake:// or redis:// is the"),
        ("mooncake://a/?replicas=99", "remote: replicas=99 is not a number from 1 to 16"),
        ("mooncake://a/?segment=20GiB", "remote: segment would lend its memory to the store once"),
        ("redis://a/?prefix={x}", "remote: prefix may have no spaces"),
        (
            "file:///mnt/kv",
            "remote: 'file:///mnt/kv' is not an address; that of a daemon starts with tcp:// or "
            "ipc://, that of a store with mooncake:// (needs pip install 'vllm-tiered-kv[moon",
        ),
        ("valkey://kv:secret@a", "remote: 'valkey://kv:***@a' is not an address; that"),
        ("a:1", "remote: 'a:1' is not an address; write it like \"tcp://host:9527\""),
    ],
)
def test_wrong_address_is_refused(remote: str | list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_cluster(TieredKVConfig.load({"remote": remote}), IDENTITY)
    assert str(refused.value).startswith(sentence)


def test_address_with_commas_and_a_password_is_one_address_without_it() -> None:
    url = "redis://kv:secret@a:1,b:2/?ttl=7d"
    config = TieredKVConfig.load({"remote": url})
    assert config.remote == (url,)
    (store,) = open_direct(config, IDENTITY).stores.values()
    assert "secret" not in store.address
    assert "secret" not in config.describe()


def test_secrets_of_a_store_are_not_taken_for_options() -> None:
    environ = {"TIERED_KV_REDIS_USERNAME": "kv", "TIERED_KV_REDIS_PASSWORD": "secret"}
    assert TieredKVConfig.load({"remote": "redis://a"}, environ).remote == ("redis://a",)


def test_libraries_of_stores_are_loaded_only_for_them() -> None:
    program = (
        "import sys\n"
        "from tests.remote.engine import IDENTITY\n"
        "from vllm_tiered_kv.config import TieredKVConfig\n"
        "from vllm_tiered_kv.connector.worker.remote_io import open_cluster\n"
        "config = TieredKVConfig.load({'remote': 'tcp://127.0.0.1:1'})\n"
        "open_cluster(config, IDENTITY).close()\n"
        "assert not {'mooncake', 'obstore', 'redis'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_absent_store_is_a_miss_until_it_is_there() -> None:
    with mooncake_servers() as servers:
        servers.kill()
        blocks = block_keys("late", 4)
        wanted = keys_of(blocks, RANKS[:1])
        with direct(servers.url, timeout_s=2.0) as store:
            begin = time.monotonic()
            assert not store.is_up
            assert store.available, "otherwise nobody would notice that it is back"
            assert store.match_all(blocks, RANKS[:1], 0, within(10)) is None
            assert store.get(wanted, buffers(4), within(10)) == [False] * 4
            assert store.put(items(wanted), deadline=within(10)) == [PutResult.FAILED] * 4
            assert time.monotonic() - begin < 5
            assert store.failed_calls > 0
            servers.start()
            eventually(lambda: store.put(items(wanted), deadline=within(10))[0] in _KEPT)
            assert store.is_up
            assert store.match_all(blocks, RANKS[:1], 0, within(10)) is not None


_KEPT = (PutResult.STORED, PutResult.PRESENT)


class Worker:
    """The loader and the put worker of one rank, over real stores."""

    def __init__(self, store: DirectStore, count: int) -> None:
        self.store = store
        self.shard = Shard(IDENTITY.namespace, RANKS[0], {0: NBYTES})
        self.arena = Arena(count * NBYTES)
        stores = {store.address: store}
        self.regions = SharedRegions(stores, None, None)
        self.device = np.zeros((count, NBYTES), np.uint8)
        runs = BlockRuns((Run(self.device.ctypes.data, NBYTES, NBYTES, 0),), count)
        channel = CpuChannel({0: native.BlockLayout(*runs.arrays(), count)}, 1)
        self.landings: list[Arena] = []

        def open_landing(nbytes: int) -> Arena:
            self.landings.append(Arena(nbytes))
            store.use_memory(self.landings[-1].region)
            return self.landings[-1]

        store.use_memory(self.arena.region)
        self.loader = RemoteLoader(
            stores, self.shard, self.regions, lambda: channel, open_landing, 4 << 20, 1, 0.5
        )
        self.writer = PutWorker(
            stores, self.shard, self.regions, self.arena,
            lambda group, slots: slots * NBYTES, 0.5, lambda key: True, threads=1,
        )  # fmt: skip

    def put(self, blocks: list[BlockKey], job_id: int = 1) -> None:
        for slot, key in enumerate(self.shard.keys(blocks)):
            self.arena.bytes_at(slot * NBYTES, NBYTES)[:] = np.frombuffer(content(key), np.uint8)
        slots = int64_array(list(range(len(blocks))))
        parents = (None, *blocks[:-1])
        self.writer.begin(PutJob(job_id, self.store.address, 0, slots, tuple(blocks), parents))

    def puts(self, blocks: list[BlockKey]) -> bool:
        self.put(blocks, job_id=3)
        (done,) = eventually(self.writer.poll)
        return done.report == StoreReport(len(blocks))

    def load(self, blocks: list[BlockKey]) -> str | None:
        ids = int64_array(list(range(len(blocks))))
        self.device[:] = 0
        transfer = RemoteTransfer(0, self.store.address, ids, tuple(blocks), None)
        self.loader.load("r", [transfer])
        (done,) = eventually(self.loader.poll)
        return done.error

    def close(self) -> None:
        self.loader.close()
        self.writer.close()
        self.regions.close()
        self.arena.close()


def test_frozen_nodes_cost_a_deadline_and_no_wrong_byte() -> None:
    """The transfer goes on in a thread of its own, and keeps its buffers."""
    blocks = block_keys("frozen", 24)
    with mooncake_servers() as servers, direct(servers.url) as store:
        worker = Worker(store, len(blocks))
        wanted = b"".join(map(content, worker.shard.keys(blocks)))
        worker.put(blocks)
        (done,) = eventually(worker.writer.poll)
        assert done.report == StoreReport(len(blocks))
        assert worker.load(blocks) is None
        assert worker.device.tobytes() == wanted
        before = len(worker.landings)
        with contextlib.ExitStack() as frozen:
            for node in servers.nodes:
                frozen.enter_context(node.frozen())
            begin = time.monotonic()
            with pytest.raises(TransferPending) as pending:
                store.get(keys_of(blocks[:1], RANKS[:1]), buffers(1), within(0.2))
            ended: list[bool] = []
            pending.value.on_end(lambda: ended.append(True))
            worker.put(block_keys("lost", 4), job_id=2)
            for _ in range(2):
                assert worker.load(blocks) == "the store has not answered in time"
            assert time.monotonic() - begin < 4
            assert len(worker.landings) == before + 1, "the first one may still be written to"
            assert worker.writer.poll() == [], "a put is reported when nothing reads its slots"
            assert not ended
        (done,) = eventually(worker.writer.poll)
        assert done.report == StoreReport(0, DropReason.UNAVAILABLE)
        eventually(lambda: ended and worker.loader._spare_landings.qsize() == 2)
        servers.wait_for_nodes(2)
        eventually(lambda: worker.puts(blocks))  # the master may have forgotten them meanwhile
        assert worker.load(blocks) is None
        assert worker.device.tobytes() == wanted
        assert len(worker.landings) == before + 1, "buffers of transfers that have ended are used"
        worker.close()


def test_store_of_whose_transfers_none_ends_counts_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.connector.direct_store._MAX_LATE", 2)
    with mooncake_servers() as servers, direct(servers.url, timeout_s=2.0) as store:
        wanted = keys_of(block_keys("down", 1), RANKS[:1])
        store.put(items(wanted))
        with contextlib.ExitStack() as frozen:
            for node in servers.nodes:
                frozen.enter_context(node.frozen())
            for _ in range(2):
                with pytest.raises(TransferPending):
                    store.get(wanted, buffers(1), within(0.1))
            assert not store.available
            assert store.get(wanted, buffers(1), within(0.1)) == [False]
        eventually(lambda: store.available)
        eventually(lambda: _reads(store, wanted))


def test_transfer_of_a_daemon_thread_outlives_the_main_thread() -> None:
    """The threads of the loader and of the put worker are daemon threads, and new threads inherit
    that; a process that ends during a transfer would crash."""
    with redis_server() as server, direct(server.url) as store:
        found: list[Any] = []

        def load() -> None:
            found.extend(store._transfer(lambda _: [threading.current_thread().daemon], None) or ())

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join()
        assert found == [False]


_STOPS = """
import sys, threading, time
from tests.remote.engine import IDENTITY, NBYTES, block_keys, buffers, items, within
from vllm_tiered_kv.connector.direct_store import DirectStore
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.store import store_key
from vllm_tiered_kv.errors import TransferPending

store = DirectStore(sys.argv[1], IDENTITY, 10.0)
keys = [store_key(IDENTITY.namespace, key, RankTag()) for key in block_keys("stops", 8)]
store.put(items(keys))
print("stored", flush=True)
sys.stdin.readline()

def load():
    try:
        store.get(keys, buffers(8), within(0.2))
    except TransferPending:
        print("pending", flush=True)

thread = threading.Thread(target=load, daemon=True)  # like those of the loader
thread.start()
thread.join()
store.close()
"""


@pytest.mark.slow
def test_process_whose_transfer_hangs_ends(tmp_path: Path) -> None:
    with mooncake_servers() as servers:
        process = subprocess.Popen(
            [sys.executable, "-c", _STOPS, servers.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stored\n"
            with contextlib.ExitStack() as frozen:
                for node in servers.nodes:
                    frozen.enter_context(node.frozen())
                said, _ = process.communicate("\n", timeout=90)
                assert said.startswith("pending\n")
                assert process.returncode == 0
        finally:
            process.kill()
            process.wait()


class _Unwalked(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a walk over all slots of Redis takes a millisecond")


def test_step_of_vllm_may_ask_whether_redis_is_up() -> None:
    with redis_server() as server, direct(server.url) as store:
        nodes = cast(RedisStore, store._store).nodes
        nodes._owners = _Unwalked(nodes._owners or [])
        assert store.is_up
        assert len(nodes.masters) == 1


def test_refused_password_is_logged_once_and_never_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.connector.direct_store._OPEN_AGAIN_S", 0.0)
    with redis_server("--requirepass", "right") as server:
        url = server.url.replace("redis://", "redis://:wrong-one@")
        with direct(url) as store:
            for _ in range(3):
                assert store.match_all(block_keys("a", 1), RANKS, 0, within(5)) is None
            assert not store.is_up
            assert store.failed_calls >= 3
    (told,) = [line for line in caplog.messages if "cannot use the store" in line]
    assert "user or password" in told
    assert "continuing without it" in told
    assert "wrong-one" not in caplog.text


def _reads(store: DirectStore, wanted: list[StoreKey]) -> Any:
    try:
        return all(store.get(wanted, buffers(len(wanted)), within(5)))
    except TransferPending:
        return False
