"""The workers' side of the daemons: loads in parts, memory to land in, leased blocks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.faulty_daemon import FaultyDaemon, Frames, framed
from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.identity.shard import Holding, Shard, holding_of
from vllm_tiered_kv.connector.worker.load_tracker import LoadTracker
from vllm_tiered_kv.connector.worker.remote_io import RemoteIO
from vllm_tiered_kv.connector.worker.remote_loader import RemoteLoader
from vllm_tiered_kv.connector.worker.shared_region import SharedRegion, SharedRegions
from vllm_tiered_kv.connector.worker.slot_workers import JobDone, PutWorker
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import PutItem, PutResult
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import PutJob, RemoteTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.errors import ArenaError, CudaError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.messages import Put, PutReply, Request, put_codes


def chain(count: int) -> list[BlockKey]:
    return [BlockKey(n.to_bytes(16, "little") + b"\0") for n in range(1, count + 1)]


def test_load_in_two_parts_is_over_with_the_second() -> None:
    loads = LoadTracker()
    loads.begin("a", 2)
    loads.begin("b", 1)
    loads.end("a", None)
    assert loads.take_finished() == []
    loads.end("b", Tier.REMOTE)
    loads.end("a", None)
    assert loads.take_finished() == [("b", Tier.REMOTE), ("a", None)]
    assert loads.take_finished() == []


@pytest.mark.parametrize("order", [(Tier.CPU, Tier.REMOTE), (Tier.REMOTE, Tier.CPU)])
def test_failure_that_names_bad_blocks_wins(order: tuple[Tier, Tier]) -> None:
    loads = LoadTracker()
    loads.begin("a", 2)
    for failed in order:
        loads.end("a", failed)
    assert loads.take_finished() == [("a", Tier.CPU)]


def test_ranks_are_numbered_as_vllm_does() -> None:
    assert [holding_of(rank, 2).tag for rank in range(4)] == [
        RankTag(tp=0, pp=0),
        RankTag(tp=1, pp=0),
        RankTag(tp=0, pp=1),
        RankTag(tp=1, pp=1),
    ]


def test_landing_memory_is_pinned_before_use() -> None:
    """However large it is: a GPU that reads memory which is not pinned takes the engine down."""
    pinned: list[int] = []

    def pin(address: int, nbytes: int) -> None:
        pinned.append(nbytes)

    def unpin(address: int) -> None: ...

    io = RemoteIO(
        TieredKVConfig.load({"remote": "tcp://127.0.0.1:1"}, {}),
        EngineIdentity(bytes(32), (64,), "LBHNC", "test"),
        Holding(RankTag()),
        ArenaGeometry(64, (64,)),
        Arena(64),
        lambda: SimpleNamespace(close=lambda: None),  # type: ignore[arg-type,return-value]
        lambda: (pin, unpin),
    )
    landing = io.loader._open_landing(300 << 20)
    assert pinned.count(300 << 20) == 1, "in one piece"
    assert landing.ready_bytes == landing.nbytes
    landing.close()
    io.close()


def test_descriptor_that_is_no_memory_is_closed(tmp_path: Path) -> None:
    memory = SharedArena.create(PAGE)
    fake = tmp_path / "file"
    fake.write_bytes(b"")
    os.truncate(fake, os.fstat(memory.fd).st_size)
    memory.close()
    fd = os.open(fake, os.O_RDWR)
    with pytest.raises(ArenaError):
        SharedArena.attach(fd, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


_DROPS_A_CLUSTER = """
import gc, sys
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.placement import Cluster

gc.disable()
for _ in range(20):
    cluster = Cluster([sys.argv[1]], EngineIdentity(bytes(32), (64,), "x", "test"))
    (store,) = cluster.stores.values()
    assert store.match_all([BlockKey(bytes(17))], [RankTag()]) is not None
    del cluster, store
    gc.collect()
"""


def test_engine_dropped_without_being_closed_does_not_hang() -> None:
    """A context of zmq waits for its sockets, and garbage is collected in any order."""
    with FaultyDaemon() as daemon:
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _DROPS_A_CLUSTER, daemon.address],
            check=True,
            timeout=180,
        )


class BrokenChannel:
    """A device that has had enough."""

    def scatter(self, *arguments: object) -> None:
        raise CudaError("planted")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "16MiB") as process:
            yield process


def attached(daemon: DaemonProcess) -> tuple[RemoteStore, SharedRegions, list[BlockKey]]:
    identity = EngineIdentity(bytes(32), (4096,), "layout", "test")
    store = RemoteStore(daemon.ipc, identity)
    keys = chain(8)
    shard = Shard(bytes(32), RankTag(), {0: 4096})
    items = [PutItem(key, None, memoryview(bytes(4096))) for key in shard.keys(keys)]
    assert set(store.put(items)) == {PutResult.STORED}
    regions = SharedRegions({daemon.ipc: store}, None, None)
    end = time.monotonic() + 30
    while not regions.of(daemon.ipc):
        assert time.monotonic() < end
        time.sleep(0.01)
    return store, regions, keys


def test_failing_load_releases_its_leases(daemon: DaemonProcess) -> None:
    store, regions, keys = attached(daemon)
    shard = Shard(bytes(32), RankTag(), {0: 4096})
    loader = RemoteLoader(
        {daemon.ipc: store}, shard, regions, BrokenChannel, Arena, 1 << 20, 2, timeout_s=30
    )
    transfer = RemoteTransfer(0, daemon.ipc, int64_array(list(range(8))), tuple(keys))
    loader.load("r", [transfer])
    end = time.monotonic() + 30
    done = []
    while not done:
        assert time.monotonic() < end
        done = loader.poll()
        time.sleep(0.005)
    assert [(load.request_id, load.error) for load in done] == [("r", "planted")]
    loader.close()
    # Nothing is held any more: deleted blocks free their memory at once.
    assert store.delete(shard.keys(keys)) == len(keys)
    assert store.usage().used_bytes == 0
    regions.close()
    store.close()


def writer_to(
    store: RemoteStore, address: str, regions: SharedRegions, arena: Arena, timeout_s: float
) -> PutWorker:
    shard = Shard(bytes(32), RankTag(), {0: 4096})
    return PutWorker(
        {address: store},
        shard,
        regions,
        arena,
        lambda group_id, slots: slots * 4096,
        timeout_s=timeout_s,
        is_ours=lambda key: True,
    )


@pytest.mark.parametrize("is_heard", [True, False])
def test_refused_put_is_distinguished_from_unanswered_one(is_heard: bool) -> None:
    def drop(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
        if not isinstance(request, Put):
            return None
        results = put_codes([PutResult.DROPPED] * len(request.keys))
        return [framed(request_id, PutReply(results))] if is_heard else []

    with FaultyDaemon() as daemon:
        daemon.fault = drop
        store = RemoteStore(daemon.address, EngineIdentity(bytes(32), (4096,), "layout", "x"))
        regions = SharedRegions({daemon.address: store}, None, None)
        arena = Arena(4 * 4096)
        writer = writer_to(store, daemon.address, regions, arena, 30 if is_heard else 0.5)
        key = chain(1)[0]
        for job in range(1, 4):  # one failure alone does not make a daemon unavailable
            writer.begin(PutJob(job, daemon.address, 0, int64_array([1]), (key,), (None,)))
            (done,) = eventually(writer.poll)
        reason = DropReason.REFUSED if is_heard else DropReason.UNAVAILABLE
        assert done.report == StoreReport(0, reason)
        writer.close()
        regions.close()
        store.close()


def test_blocks_are_sent_through_memory_that_is_not_pinned_yet(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning tens of gigabytes takes longer than a busy engine can keep blocks for the daemon."""
    store, regions, _ = attached(daemon)
    monkeypatch.setattr(SharedRegion, "pinned_bytes", 0)
    monkeypatch.setattr(store, "put", None)  # the way through a socket
    assert not regions.of(daemon.ipc)
    arena = Arena(4 * 4096)
    arena.bytes_at(4096, 4096)[:] = 7
    shard = Shard(bytes(32), RankTag(), {0: 4096})
    writer = writer_to(store, daemon.ipc, regions, arena, 30)
    key = chain(9)[-1]
    writer.begin(PutJob(1, daemon.ipc, 0, int64_array([1]), (key,), (None,)))
    assert eventually(writer.poll) == [JobDone(1, StoreReport(1))]
    into = memoryview(bytearray(4096))
    assert store.get([shard.key(key)], [into]) == [True]
    assert into == bytes([7]) * 4096
    writer.close()
    regions.close()
    store.close()
