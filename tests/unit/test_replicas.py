"""Ranks that hold the same bytes, as with MLA: daemons hold them once, each rank loads them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.key_chain import extend_chain
from tests.patience import eventually
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.identity.shard import distinct_tags, holding_of, replicas_of
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.remote_puts import RemotePuts
from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.worker.remote_io import RemoteIO
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.cpu_copier import CpuChannel
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native import cpu as native
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.store import RemoteStore

NBYTES = 4096
GROUP = Group(0, 4, NBYTES, 0)
IDENTITY = EngineIdentity(bytes(32), (NBYTES,), "layout", "test")


def chain(count: int) -> list[BlockKey]:
    return extend_chain(b"replicas", list(range(4 * count)), 4)[0]


def parallel(tensor: int, pipeline: int = 1, context: int = 1, turns: int = 1) -> SimpleNamespace:
    """`context`: ranks of prefill context parallelism. `turns`: of decode context parallelism."""
    return SimpleNamespace(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        prefill_context_parallel_size=context,
        decode_context_parallel_size=turns,
        world_size=tensor * pipeline * context,
    )


# ---- who holds what -----------------------------------------------------------------------------


def test_ranks_that_hold_the_same_are_one_to_daemons() -> None:
    assert distinct_tags(parallel(4), 4) == [RankTag()]
    assert distinct_tags(parallel(4), 2) == [RankTag(tp=0), RankTag(tp=1)]
    assert distinct_tags(parallel(4), 1) == [RankTag(tp=n) for n in range(4)]
    assert distinct_tags(parallel(2, 2), 1) == [
        RankTag(tp=tensor, pp=stage) for stage in range(2) for tensor in range(2)
    ]
    holdings = [holding_of(rank, 4, 2) for rank in range(8)]
    assert [(h.tag.tp, h.tag.pp, h.replica) for h in holdings[:4]] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
    ]
    assert [h.tag.pp for h in holdings] == [0] * 4 + [1] * 4
    # With prefill context parallelism a pipeline stage has more ranks.
    assert distinct_tags(parallel(2, context=2), 4) == [RankTag()]
    assert distinct_tags(parallel(2, context=2, turns=2), 1) == [RankTag(tp=n) for n in range(4)]
    assert distinct_tags(parallel(1, 2, context=2), 1) == [
        RankTag(tp=number, pp=stage) for stage in range(2) for number in range(2)
    ]


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_exactly_one_replica_sends_a_job_and_they_share_the_work(replicas: int) -> None:
    ranks = [holding_of(rank, 8, replicas) for rank in range(replicas)]
    senders: Counter[int] = Counter()
    for key in chain(800):
        (sender,) = [holding.replica for holding in ranks if holding.sends(key)]
        senders[sender] += 1
    assert len(senders) == replicas
    assert min(senders.values()) > 400 / replicas


def test_stages_that_may_differ_are_not_replicas() -> None:
    """Each looks at its own layers: one might find replicas where another does not."""
    cache = SimpleNamespace(kv_tp_replicas=2)
    assert replicas_of(cache, parallel(2)) == 2  # type: ignore[arg-type]
    assert replicas_of(cache, parallel(2, 2)) == 1  # type: ignore[arg-type]


def test_ranks_of_prefill_context_parallelism_are_replicas_unless_they_divide_tokens() -> None:
    def found(tensor: int, same: int, **sizes: int) -> int:
        cache = SimpleNamespace(kv_tp_replicas=same)
        return replicas_of(cache, parallel(tensor, **sizes))  # type: ignore[arg-type]

    assert found(1, 1, context=4) == 4
    assert found(2, 2, context=4) == 8
    assert found(2, 1, context=4) == 1  # the copies of a shard do not follow each other
    assert found(1, 1, context=4, turns=4) == 1
    assert found(2, 2, context=4, pipeline=2) == 1


# ---- over a real daemon -------------------------------------------------------------------------


class Worker:
    """One of two ranks that hold the same, with a device of its own."""

    def __init__(self, rank: int, replicas: int, address: str, geometry: ArenaGeometry) -> None:
        self.arena = Arena(geometry.capacity_bytes)
        blocks = geometry.capacity_bytes // NBYTES
        self.device = np.zeros((blocks, NBYTES), np.uint8)
        runs = BlockRuns((Run(self.device.ctypes.data, NBYTES, NBYTES, 0),), blocks)
        layout = native.BlockLayout(*runs.arrays(), blocks)
        self.io = RemoteIO(
            TieredKVConfig.load({"remote": address}, {}),
            IDENTITY,
            holding_of(rank, 2, replicas),
            geometry,
            self.arena,
            lambda: CpuChannel({0: layout}, 1),
            lambda: (None, None),
        )

    def load(self, transfers: list) -> str | None:
        self.device[:] = 0
        self.io.loader.load("r", transfers)
        return eventually(self.io.loader.poll)[0].error


class Engine:
    """The scheduler's side of two ranks, over one daemon."""

    def __init__(self, address: str, replicas: int, blocks: int) -> None:
        self.keys = chain(blocks)
        self.geometry = ArenaGeometry(blocks * NBYTES, (NBYTES,))
        self.index = BlockIndex(self.geometry, "lru")
        self.recorder = Recorder()
        self.ledger = TransferLedger(self.index, self.recorder, 2)
        self.cluster = Cluster([address], IDENTITY)
        tags = distinct_tags(parallel(2), replicas)  # type: ignore[arg-type]
        self.lookups = RemoteLookups(self.cluster, tags, 20.0, 20.0, self.recorder)
        cpu = CpuTier([GROUP], self.index, self.ledger, self.recorder)
        self.writes = RemotePuts(self.cluster, cpu, self.geometry.capacity_bytes)
        self.tier = RemoteTier(self.cluster, self.lookups, self.writes, cpu, True, num_workers=2)
        self.workers = [Worker(rank, replicas, address, self.geometry) for rank in range(2)]

    def send(self, content: np.ndarray, per_job: int) -> None:
        """Stores blocks in both arenas, and sends them on in jobs of some size."""
        for first in range(0, len(self.keys), per_job):
            keys = self.keys[first : first + per_job]
            slots = []
            for number, key in enumerate(keys, first):
                parent = self.keys[number - 1] if number else None
                slot = self.index.reserve(key, parent, 0)
                assert slot is not None
                self.index.commit(slot)
                for worker in self.workers:
                    worker.arena.bytes_at(slot * NBYTES, NBYTES)[:] = content[number]
                slots.append(slot)
            self.writes.offer([(key, [slot]) for slot, key in zip(slots, keys, strict=True)])
        for job in self.writes.take():
            for worker in self.workers:
                worker.io.writer.begin(job)
        end = time.monotonic() + 30
        while self.ledger.has_open_puts:
            assert time.monotonic() < end, "a put was not reported by every rank"
            for worker in self.workers:
                for done in worker.io.writer.poll():
                    self.ledger.report_put(done.job_id, [done.report])
            time.sleep(0.002)

    def find(self) -> RequestState:
        self.index.clear()
        keys = SimpleNamespace(of_group=[self.keys])
        state = RequestState(None, keys)  # type: ignore[arg-type]
        eventually(lambda: self.tier.positions(state, 0, 4 * len(self.keys)) is not None)
        return state

    def close(self) -> None:
        for worker in self.workers:
            worker.io.close()
        self.tier.close()


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "16MiB") as process:
            yield process


def held_bytes(daemon: DaemonProcess) -> int:
    with contextlib.closing(RemoteStore(daemon.endpoint, IDENTITY)) as store:
        return store.usage().used_bytes


@pytest.mark.parametrize("way", ["tcp", "ipc"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_daemons_hold_one_copy_and_both_ranks_load_it(
    daemon: DaemonProcess, way: str, replicas: int
) -> None:
    blocks = 64
    content = np.random.default_rng(1).integers(0, 256, (blocks, NBYTES), np.uint8)
    engine = Engine(daemon.ipc if way == "ipc" else daemon.endpoint, replicas, blocks)
    if way == "ipc":
        for worker in engine.workers:
            eventually(lambda worker=worker: worker.io.regions.ready_arenas)
    engine.send(content, per_job=3)
    assert not engine.index.pinned_slots()
    assert engine.recorder.total(names.STORED_BLOCKS, "remote") == blocks
    assert engine.recorder.total(names.DROPPED_BLOCKS) == 0
    copies = 2 // replicas
    eventually(lambda: held_bytes(daemon) == copies * blocks * NBYTES)  # 0 if it answers too late

    for worker in engine.workers:  # whoever reads its own arena now reads nonsense
        worker.arena.bytes_at(0, worker.arena.nbytes)[:] = 0
    state = engine.find()
    split = engine.tier.split(state, GROUP, range(blocks), list(range(blocks)))
    assert not split.local
    assert (split.remote[0].leased is not None) == (way == "ipc")
    for worker in engine.workers:
        assert worker.load(split.remote) is None
        assert np.array_equal(worker.device[:blocks], content)
    state.remote.drop_lookup()
    engine.close()


def test_step_waits_until_each_worker_has_mapped_what_is_leased(daemon: DaemonProcess) -> None:
    """However few shards there are to ask for."""
    engine = Engine(daemon.ipc, replicas=2, blocks=8)
    for worker in engine.workers:
        eventually(lambda worker=worker: worker.io.regions.ready_arenas)
    engine.send(np.ones((8, NBYTES), np.uint8), per_job=8)
    state = engine.find()
    assert not engine.tier.is_resident(state)
    engine.tier.update_mapped_arenas({0: engine.workers[0].io.regions.ready_arenas})
    assert not engine.tier.is_resident(state)
    engine.tier.update_mapped_arenas({1: engine.workers[1].io.regions.ready_arenas})
    assert engine.tier.is_resident(state)
    state.remote.drop_lookup()
    engine.close()


def test_blocks_that_their_sender_could_not_send_are_counted_once(daemon: DaemonProcess) -> None:
    engine = Engine(daemon.endpoint, replicas=2, blocks=12)
    daemon.kill()
    engine.send(np.ones((12, NBYTES), np.uint8), per_job=2)
    assert not engine.index.pinned_slots()
    assert engine.recorder.total(names.STORED_BLOCKS, "remote") == 0
    dropped = [
        engine.recorder.total(names.DROPPED_BLOCKS, "remote", reason.value) for reason in DropReason
    ]
    assert sum(dropped) == 12
    engine.close()
