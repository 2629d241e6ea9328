"""Workers read what their scheduler has leased: from the memory they have mapped, asking nobody."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import requests_of
from tests.remote.engine import block_keys, content, items
from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker import shared_region
from vllm_tiered_kv.connector.worker.remote_loader import RemoteLoader
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.connector.worker.step_loads import StepLoads
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.core.transfer import LeasedBlocks, LoadJob, RemoteTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.cpu_copier import CpuChannel
from vllm_tiered_kv.errors import UnsafeAnswerError
from vllm_tiered_kv.native import cpu as native
from vllm_tiered_kv.remote import local_daemon
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.shared_memory import LookupLease
from vllm_tiered_kv.remote.store import RemoteStore

NBYTES = 4096
RANKS = (RankTag(tp=0), RankTag(tp=1))
IDENTITY = EngineIdentity(bytes(32), (NBYTES,), "layout", "test")
KEYS = block_keys("leased", 8)


@dataclass
class Worker:
    """The rank 1 of an engine over one daemon, and the leases of its scheduler."""

    daemon: DaemonProcess
    store: RemoteStore
    scheduler: LocalDaemon
    regions: SharedRegions
    loader: RemoteLoader
    device: np.ndarray

    def lease(self) -> LookupLease:
        match = self.scheduler.lookup(KEYS, RANKS, NBYTES, time.monotonic() + 20)
        assert match is not None
        assert match.lease is not None
        return match.lease

    def load(self, transfer: RemoteTransfer) -> str | None:
        """Why it failed, if it did."""
        self.device[:] = 0
        self.loader.load("r", [transfer])
        end = time.monotonic() + 60
        while not (done := self.loader.poll()):
            assert time.monotonic() < end
            time.sleep(0.005)
        (one,) = done
        return one.error

    def is_right(self) -> bool:
        wanted = [content(key, NBYTES) for key in shard(RANKS[1]).keys(KEYS)]
        return [bytes(self.device[n]) for n in range(len(KEYS))] == wanted


def shard(rank: RankTag) -> Shard:
    return Shard(IDENTITY.namespace, rank, {0: NBYTES})


def leased(
    lease: LookupLease, ranks: Sequence[RankTag] = RANKS, **changes: object
) -> RemoteTransfer:
    blocks = {"arena_id": lease.arena_id, "generations": lease.generations, **changes}
    places = LeasedBlocks(ranks=tuple(ranks), offsets=lease.offsets, **blocks)  # type: ignore[arg-type]
    ids = int64_array(list(range(len(KEYS))))
    address = lease._memory._address
    return RemoteTransfer(0, str(address), ids, tuple(KEYS), places)


@pytest.fixture
def worker() -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "16MiB") as daemon:
            made = make(daemon)
            yield made
            made.loader.close()
            made.regions.close()
            made.scheduler.close()
            made.store.close()


def make(daemon: DaemonProcess) -> Worker:
    store = RemoteStore(daemon.ipc, IDENTITY, timeout_s=5.0, connect_timeout_s=10.0)
    for rank in RANKS:
        assert set(store.put(items(shard(rank).keys(KEYS), NBYTES))) == {PutResult.STORED}
    own = RemoteStore(daemon.ipc, IDENTITY, timeout_s=1.0, connect_timeout_s=10.0)
    regions = SharedRegions({daemon.ipc: own}, None, None)
    end = time.monotonic() + 30
    while not regions.of(daemon.ipc):
        assert time.monotonic() < end
        time.sleep(0.01)
    device = np.zeros((len(KEYS), NBYTES), np.uint8)
    runs = BlockRuns((Run(device.ctypes.data, NBYTES, NBYTES, 0),), len(KEYS))
    layout = native.BlockLayout(*runs.arrays(), len(KEYS))
    loader = RemoteLoader(
        {daemon.ipc: own},
        shard(RANKS[1]),
        regions,
        lambda: CpuChannel({0: layout}, 1),
        Arena,
        1 << 20,
        2,
        timeout_s=1.0,
    )
    return Worker(daemon, store, LocalDaemon(store), regions, loader, device)


def test_each_rank_reads_its_own_blocks_without_a_request(worker: Worker) -> None:
    transfer = leased(worker.lease())
    before = requests_of(worker.daemon)
    assert worker.load(transfer) is None
    assert worker.is_right()
    after = requests_of(worker.daemon)
    assert {op for op in after if after[op] != before.get(op)} <= {"hello", "stats"}


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_leased_blocks_are_loaded_after_the_daemon_died(worker: Worker, how: str) -> None:
    transfer = leased(worker.lease())
    if how == "frozen":
        worker.daemon.freeze()
        error = worker.load(transfer)
        worker.daemon.thaw()
    else:
        # Held as by a copy under way: otherwise the worker soon gives up a dead daemon's memory.
        resident = worker.regions.resident(transfer, shard(RANKS[1]))
        assert resident is not None
        worker.daemon.kill()
        channel = worker.loader._channels[0]
        (blocks,) = resident.blocks
        channel.scatter(blocks.group_id, blocks.block_ids, blocks.region, blocks.offsets)
        error = None if resident.are_intact else "changed"
        resident.leave()
    assert error is None
    assert worker.is_right()


def test_leased_blocks_are_loaded_from_the_pinned_part(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning all of a large daemon's memory takes long after an engine was started anew."""
    lease = worker.lease()
    transfer = leased(lease)
    end = int(lease.offsets[1].max()) + NBYTES
    monkeypatch.setattr(shared_region.SharedRegion, "pinned_bytes", end - 1)
    assert worker.regions.resident(transfer, shard(RANKS[1])) is None
    monkeypatch.setattr(shared_region.SharedRegion, "pinned_bytes", end)
    resident = worker.regions.resident(transfer, shard(RANKS[1]))
    assert resident is not None
    resident.leave()
    assert worker.load(transfer) is None
    assert worker.is_right()


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(RANKS, {"arena_id": bytes(16)}), ((RANKS[0], RankTag(tp=2)), {})],
    ids=["another memory", "another rank"],
)
def test_places_that_are_not_ours_are_not_read(
    worker: Worker, ranks: Sequence[RankTag], changes: dict[str, object]
) -> None:
    """The blocks are asked for by their keys instead."""
    lease = worker.lease()
    transfer = leased(lease, ranks, **changes)
    assert worker.regions.resident(transfer, shard(RANKS[1])) is None
    lease.offsets[:] = 0
    assert worker.load(transfer) is None
    assert worker.is_right()
    assert requests_of(worker.daemon)["lend"] > 0


def test_blocks_that_changed_are_not_used(worker: Worker) -> None:
    """They cannot while the lease lasts: the process that leased them has released them."""
    lease = worker.lease()
    transfer = leased(lease, generations=lease.generations + np.uint64(2))
    assert worker.load(transfer) == "blocks changed while they were copied"


class StepCopier:
    """Has copied everything by the end of the step."""

    def step_load(
        self, numbers: list[int], blocks: list[PinnedBlocks], by_layer: bool, overtakes: bool
    ) -> None:
        self.numbers = numbers

    def poll_step_loads(self) -> list[int]:
        return self.numbers


@pytest.mark.parametrize("later", [0, 2])
def test_step_never_answers_from_blocks_that_changed(worker: Worker, later: int) -> None:
    """Its answer may be out when that is seen."""
    lease = worker.lease()
    transfer = leased(lease, generations=lease.generations + np.uint64(later))
    remote = SimpleNamespace(resident=lambda one: worker.regions.resident(one, shard(RANKS[1])))
    ahead, copier = StepLoads(steps_can_be_discarded=True), StepCopier()
    job = LoadJob("r", (), (transfer,), 7)
    ahead.start(copier, remote, [job], by_layer=False, overtakes=False)  # type: ignore[arg-type]
    if later:
        with pytest.raises(UnsafeAnswerError, match="changed while a step read"):
            ahead.poll(copier)  # type: ignore[arg-type]
    else:
        ahead.poll(copier)  # type: ignore[arg-type]
        assert ahead.take_ended() == {7: [True]}
    assert not ahead._residents


def test_memory_stays_mapped_until_the_last_copy_has_ended(worker: Worker) -> None:
    transfer = leased(worker.lease())
    resident = worker.regions.resident(transfer, shard(RANKS[1]))
    assert resident is not None
    region = worker.regions.of(worker.daemon.ipc)
    assert region is not None
    worker.regions.close()
    assert not region.memory.closed
    assert resident.are_intact
    assert worker.regions.resident(transfer, shard(RANKS[1])) is None
    resident.leave()
    assert region.memory.closed


def test_part_of_the_leased_blocks_is_loaded(worker: Worker) -> None:
    lease = worker.lease()
    part = leased(lease).part(2, 5)
    assert part.leased is not None
    assert np.array_equal(part.leased.offsets, lease.offsets[:, 2:5])
    some = leased(lease).leased.at(int64_array([5, 1]))  # type: ignore[union-attr]
    assert np.array_equal(some.generations, lease.generations[:, [5, 1]])
    offsets, _ = some.of_rank(RANKS[1])  # type: ignore[misc]
    assert offsets.flags.c_contiguous
    assert offsets.tolist() == [lease.offsets[1, 5], lease.offsets[1, 1]]


def test_memory_of_a_daemon_that_has_gone_is_kept_a_while_and_only_one_at_a_time(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps planned while it was there may still read it; two at a time may be too much."""
    monkeypatch.setattr(shared_region, "_KEPT_S", 600.0)
    transfer = leased(worker.lease())
    worker.daemon.kill()
    worker.daemon.start()
    old = transfer.leased.arena_id
    eventually(lambda: old not in worker.regions.ready_arenas)
    assert not worker.regions.ready_arenas
    resident = worker.regions.resident(transfer, shard(RANKS[1]))
    assert resident is not None
    resident.leave()
    monkeypatch.setattr(shared_region, "_KEPT_S", 0.0)
    eventually(lambda: bool(worker.regions.ready_arenas))
    assert old not in worker.regions.ready_arenas
    assert worker.regions.resident(transfer, shard(RANKS[1])) is None


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "others follow"])
def test_memory_of_a_daemon_that_has_gone_outlasts_a_long_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The next one may have been planned when the daemon was there."""
    monkeypatch.setattr(shared_region, "_KEPT_S", 0.0)
    monkeypatch.setattr(local_daemon, "_MAINTAIN_EVERY_S", 0.02)
    transfer = leased(worker.lease())
    worker.regions.step_begins()
    worker.daemon.kill()
    worker.daemon.start()
    eventually(lambda: not worker.regions.ready_arenas)
    time.sleep(0.5)  # many looks
    resident = worker.regions.resident(transfer, shard(RANKS[1]))
    assert resident is not None
    resident.leave()
    if ends:
        worker.regions.step_ends()
    else:
        for _ in range(shared_region._STEPS_AHEAD):
            worker.regions.step_begins()
    eventually(lambda: bool(worker.regions.ready_arenas))
    assert worker.regions.resident(transfer, shard(RANKS[1])) is None
