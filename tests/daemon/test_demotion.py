"""From memory to the SSD: the queue in between, `flush` and `delete` while it is full."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.daemon.raw_client import block
from tests.patience import eventually
from tests.stores.memory_blocks import MemoryBlocks, put_into
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.demotion import _SSD_WRITERS
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore, TierSettings
from vllm_tiered_kv.server.tiers.write_behind import WriteBehind
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy
from vllm_tiered_kv.stores.ssd.store import SsdStore

MIB = 1 << 20
SIZE = 32 << 10
PATIENCE_S = 30.0


def key(n: int) -> StoreKey:
    return StoreKey(bytes(16) + n.to_bytes(8, "little"))


def item(n: int) -> PutItem:
    return PutItem(key(n), None, memoryview(block(n, SIZE)), xxh3_64(block(n, SIZE)))


class GatedDisk(OsDisk):
    """Blocks are written only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0
        self.is_full = False
        self.flips_bits = False
        self.pause_s = 0.0

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        moved = super().read(fd, into, offset)
        if self.flips_bits and moved == SIZE:
            into[7] ^= 1
        return moved

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if data.nbytes == SIZE:
            self.waiting += 1
            assert self.gate.wait(PATIENCE_S)
            self.waiting -= 1
            time.sleep(self.pause_s)
        return super().write(fd, data, offset)


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def store(tmp_path: Path, disk: GatedDisk) -> Iterator[TieredStore]:
    """With a write queue of a single block, and a single worker."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    settings = TierSettings(workers=1, write_queue_bytes=SIZE)
    tiered = TieredStore(4 * MIB, ssd, None, Recorder(), settings)
    yield tiered
    disk.gate.set()
    tiered.close()


class Overheard(threading.Condition):
    """Tells when somebody waits for it. Whoever takes its lock after that comes second."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self.is_awaited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


@pytest.fixture
def ended(store: TieredStore) -> Overheard:
    """What those wait for who need room in the write queue, or a block out of it."""
    behind = store._demotion._behind[Tier.SSD.value]
    behind._ended = Overheard(behind._lock)
    return behind._ended


def put(store: TieredStore, n: int, durability: Durability = Durability.MEMORY) -> PutResult:
    answered = threading.Event()
    answer: list[PutResult] = []

    def done(results: list[PutResult]) -> None:
        answer.extend(results)
        answered.set()

    store.put([item(n)], durability, done, lambda: None)
    assert answered.wait(PATIENCE_S)
    return answer[0]


def test_delete_while_flush_waits_for_room_stays_deleted(
    store: TieredStore, disk: GatedDisk, ended: Overheard
) -> None:
    disk.gate.clear()
    assert put(store, 1) is put(store, 2) is PutResult.STORED
    eventually(lambda: disk.waiting == 1)
    flushed, deleted = threading.Event(), threading.Event()
    store.flush(lambda failed: flushed.set())
    assert ended.is_awaited.wait(PATIENCE_S), "the queue is not full"
    store.delete([key(2)], lambda count: deleted.set())
    assert deleted.wait(PATIENCE_S)
    disk.gate.set()
    assert flushed.wait(PATIENCE_S)
    assert store.ssd is not None
    assert store.ssd.contains([key(1), key(2)]) == [True, False]
    assert store.memory.contains([key(2)]) == [False]


def test_delete_during_write_stays_deleted(
    store: TieredStore, disk: GatedDisk, ended: Overheard
) -> None:
    disk.gate.clear()
    assert put(store, 1) is PutResult.STORED
    eventually(lambda: disk.waiting == 1)
    deleted, flushed = threading.Event(), threading.Event()
    store.delete([key(1)], lambda count: deleted.set())
    eventually(lambda: ended.is_awaited.is_set() or deleted.is_set())
    disk.gate.set()
    assert deleted.wait(PATIENCE_S)
    store.flush(lambda failed: flushed.set())
    assert flushed.wait(PATIENCE_S)
    assert store.ssd is not None
    assert store.ssd.contains([key(1)]) == [False]


def test_delete_with_second_write_queued_stays_deleted(tmp_path: Path, disk: GatedDisk) -> None:
    """A durable put of a block that is being written queues it a second time."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    tiered = TieredStore(4 * MIB, ssd, None, Recorder())
    behind = tiered._demotion._behind[Tier.SSD.value]
    behind._ended = ended = Overheard(behind._lock)
    try:
        disk.gate.clear()
        for n in range(_SSD_WRITERS):
            assert put(tiered, n) is PutResult.STORED
            eventually(lambda n=n: disk.waiting == n + 1)
        on_disk: list[PutResult] = []
        answered, deleted = threading.Event(), threading.Event()
        tiered.put(
            [item(0)],
            Durability.DISK,
            lambda results: (on_disk.extend(results), answered.set()),  # type: ignore[func-returns-value]
            lambda: None,
        )
        eventually(lambda: behind.pending_bytes == (_SSD_WRITERS + 1) * SIZE)
        tiered.delete([key(0)], lambda count: deleted.set())
        assert answered.wait(PATIENCE_S)
        assert on_disk == [PutResult.DROPPED]
        eventually(lambda: ended.is_awaited.is_set() or deleted.is_set())
        disk.gate.set()
        assert deleted.wait(PATIENCE_S)
        assert flush(tiered) == []
        assert ssd.contains([key(n) for n in range(4)]) == [False, True, True, True]
    finally:
        disk.gate.set()
        tiered.close()


def test_delete_during_promotion_is_not_demoted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is promoted before the SSD has deleted it and evicted afterwards."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB)
    store = TieredStore(4 * MIB, ssd, None, Recorder(), TierSettings(workers=2))
    really_delete = ssd.delete

    def delete(keys: Sequence[StoreKey]) -> int:
        answered = threading.Event()

        def read(position: int, held: PinnedSlot | None) -> None:
            store.memory.let_go([] if held is None else [held])
            answered.set()

        store.fetch([key(1)], read)
        assert answered.wait(PATIENCE_S)
        count = really_delete(keys)
        for n in range(2, 2 + 4 * MIB // SIZE):
            eventually(lambda: store.pending_writes() == {"ssd": (0, 0)})
            put(store, n)
        return count

    try:
        assert put(store, 1, Durability.DISK) is PutResult.STORED
        monkeypatch.setattr(ssd, "delete", delete)
        deleted = threading.Event()
        store.delete([key(1)], lambda count: deleted.set())
        assert deleted.wait(PATIENCE_S)
        assert not store.drain()
        assert ssd.contains([key(1), key(2)]) == [False, True]
    finally:
        store.close()


def test_eviction_of_unwritten_block_waits_for_write(store: TieredStore, disk: GatedDisk) -> None:
    disk.gate.clear()
    assert put(store, 1) is put(store, 2) is PutResult.STORED  # the queue has no room for both
    assert store.ssd is not None
    disk.gate.set()
    blocks = range(3, 3 + 2 * 4 * MIB // SIZE)  # twice what memory holds
    for n in blocks:
        eventually(lambda: not any(waiting for waiting, _ in store.pending_writes().values()))
        assert put(store, n) is PutResult.STORED
    assert store.memory.contains([key(2)]) == [False]
    assert store.ssd.contains([key(2)]) == [True]


def test_get_of_damaged_ssd_block_is_miss(store: TieredStore, disk: GatedDisk) -> None:
    def fetch() -> bytes | None:
        found: list[bytes | None] = []
        arrived = threading.Event()

        def ready(position: int, held: PinnedSlot | None) -> None:
            found.append(None if held is None else bytes(held.view))
            if held is not None:
                store.memory.let_go([held])
            arrived.set()

        store.fetch([key(1)], ready)
        assert arrived.wait(PATIENCE_S)
        return found[0]

    assert put(store, 1, Durability.DISK) is PutResult.STORED
    store.memory.delete([key(1)])
    assert fetch() == block(1, SIZE)
    store.memory.delete([key(1)])
    disk.flips_bits = True
    assert fetch() is None
    assert store.memory.contains([key(1)]) == [False]
    store.memory.check()


def test_flush_covers_blocks_only_received(store: TieredStore) -> None:
    """Even while the only worker is busy."""
    busy = threading.Event()
    store._pool.submit(lambda: busy.wait(PATIENCE_S))
    assert put(store, 1, Durability.RECEIVED) is PutResult.STORED
    flushed = threading.Event()
    store.flush(lambda failed: flushed.set())
    threading.Timer(0.2, busy.set).start()
    assert flushed.wait(PATIENCE_S)
    assert store.ssd is not None
    assert store.ssd.contains([key(1)]) == [True]


class GatedStore(MemoryBlocks):
    """A put ends when its block is let through."""

    def __init__(self) -> None:
        super().__init__(MIB)
        self.let_through = {key(n): threading.Event() for n in range(4)}

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        for one in items:
            assert self.let_through[one.key].wait(PATIENCE_S)
        return super().put(items, durability)


def test_drain_ignores_later_writes() -> None:
    """Otherwise it would never end while clients keep writing."""
    memory, target = MemoryStore(4 * MIB), GatedStore()
    put_into(memory, [item(1), item(2)])
    executor = StoreExecutor("test", 1, keeps_queue=True)
    behind = WriteBehind(memory, target, MIB, executor)

    def offer(n: int) -> None:
        (held,) = memory.hold([key(n)])
        assert held is not None
        assert behind.offer(held, Durability.MEMORY)

    offer(1)
    waits = threading.Event()
    drained = threading.Thread(target=behind.drain, args=[lambda left: waits.set()], daemon=True)
    drained.start()
    assert waits.wait(PATIENCE_S)
    offer(2)
    target.let_through[key(1)].set()
    drained.join(PATIENCE_S / 2)
    assert not drained.is_alive()
    assert behind.pending_blocks == 1
    target.let_through[key(2)].set()
    assert behind.close()
    assert executor.close()
    assert target.contains([key(1), key(2)]) == [True, True]
    assert not memory._index.pinned_slots()


class Forgetful(MemoryBlocks):
    """Does not say what became of the last block."""

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        return super().put(items, durability)[:-1]


def test_write_behind_callback_error_does_not_stop_writers() -> None:
    memory, target = MemoryStore(4 * MIB), Forgetful(MIB)
    put_into(memory, [item(n) for n in range(8)])
    told: list[PutResult] = []

    def deaf(result: PutResult) -> None:
        told.append(result)
        raise RuntimeError("on purpose")

    def on_failed(key: StoreKey, result: PutResult) -> None:
        raise RuntimeError("on purpose")

    executor = StoreExecutor("test", 1, keeps_queue=True)
    behind = WriteBehind(memory, target, MIB, executor, on_failed)
    for n in range(8):
        (held,) = memory.hold([key(n)])
        assert held is not None
        assert behind.offer(held, Durability.MEMORY, deaf)
        eventually(lambda n=n: len(told) == n + 1)
    assert told == [PutResult.FAILED] * 8
    closing = threading.Thread(target=behind.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert executor.close()
    assert not memory._index.pinned_slots()


def test_write_behind_block_larger_than_queue_is_written(tmp_path: Path) -> None:
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB)
    settings = TierSettings(write_queue_bytes=SIZE // 2)
    tiered = TieredStore(4 * MIB, ssd, None, Recorder(), settings)
    try:
        assert put(tiered, 1, Durability.DISK) is PutResult.STORED
        assert ssd.contains([key(1)]) == [True]
    finally:
        tiered.close()


def test_full_disk_is_offered_one_block_at_a_time(tmp_path: Path, disk: GatedDisk) -> None:
    """Otherwise evicting one block would offer a quarter of the memory in vain."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk, retry_seconds=0.01)
    tiered = TieredStore(4 * MIB, ssd, None, Recorder())
    try:
        disk.is_full = True
        for n in range(256):
            assert put(tiered, n) is PutResult.STORED
        refused = ssd.counters.failed_blocks
        assert refused > 0
        for n in range(1000, 1100):
            assert put(tiered, n) is PutResult.STORED
        assert ssd.counters.failed_blocks - refused < 500
        disk.is_full = False
        eventually(lambda: put(tiered, 2000, Durability.DISK) is not PutResult.FAILED)
        assert ssd.contains([key(2000)]) == [True]
    finally:
        disk.is_full = False
        tiered.close()


def flush(store: TieredStore) -> list[str]:
    answered = threading.Event()
    answer: list[str] = []

    def done(failed: list[str]) -> None:
        answer.extend(failed)
        answered.set()

    store.flush(done)
    assert answered.wait(PATIENCE_S)
    return answer


def test_flush_with_full_disk_reports_and_writes_later(store: TieredStore, disk: GatedDisk) -> None:
    disk.is_full = True
    for n in range(5):
        assert put(store, n) is PutResult.STORED
    assert flush(store) == ["5 blocks could not be written to ssd"]
    assert flush(store) == ["5 blocks could not be written to ssd"]
    disk.is_full = False
    eventually(lambda: flush(store) == [])  # after an error the store waits for some seconds
    assert store.ssd is not None
    assert store.ssd.contains([key(n) for n in range(5)]) == [True] * 5


def test_flush_ignores_deleted_and_evicted_blocks(store: TieredStore, disk: GatedDisk) -> None:
    disk.is_full = True
    assert put(store, 1) is PutResult.STORED
    assert flush(store) == ["1 blocks could not be written to ssd"]
    deleted = threading.Event()
    store.delete([key(1)], lambda count: deleted.set())
    assert deleted.wait(PATIENCE_S)
    assert flush(store) == []
    for n in range(200):  # more than memory holds
        put(store, n)
    flush(store)
    lost = sum(not here for here in store.memory.contains([key(n) for n in range(200)]))
    assert lost
    assert flush(store) == [f"{200 - lost} blocks could not be written to ssd"]


def test_flush_with_failing_sync_is_reported(
    store: TieredStore, disk: GatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(store, 1) is PutResult.STORED

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "sync", broken)
    assert flush(store) == ["1 blocks could not be written to ssd"]


def test_flush_with_slow_disk_reports_progress(store: TieredStore, disk: GatedDisk) -> None:
    told: list[tuple[str, int]] = []
    disk.gate.clear()
    for n in range(8):
        put(store, n)
    disk.pause_s = 0.4  # no second goes by without a block being written
    disk.gate.set()
    assert store.drain(lambda tier, left: told.append((tier, left))) == []
    assert told
    assert all(tier == Tier.SSD.value and 0 < left <= 8 for tier, left in told)


def test_drain_waits_for_running_flush(
    store: TieredStore, disk: GatedDisk, ended: Overheard
) -> None:
    """The running flush has taken the list of unwritten blocks."""
    disk.gate.clear()
    for n in range(20):
        put(store, n)
    store.flush(lambda failed: None)
    assert ended.is_awaited.wait(PATIENCE_S)
    opener = threading.Timer(0.3, disk.gate.set)
    opener.start()
    assert store.drain() == []
    assert store.ssd is not None
    assert all(store.ssd.contains([key(n) for n in range(20)]))
    opener.join()


@pytest.fixture
def failing_sync(disk: GatedDisk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """So many syncs of the data file fail, those of the store's other files do not."""
    left = [0]
    sync, opened, data = disk.sync, disk.open, set()

    def open_file(path: Path, flags: int) -> int:
        fd = opened(path, flags)
        (data.add if path.name == "data" else data.discard)(fd)
        return fd

    def sync_file(fd: int) -> None:
        if left[0] and fd in data:
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(disk, "open", open_file)
    monkeypatch.setattr(disk, "sync", sync_file)
    return left


LOST = range(5)


def lose_all(store: TieredStore, failing_sync: list[int]) -> None:
    """What the SSD had taken is gone from it, and still in memory."""
    for n in LOST:
        assert put(store, n) is PutResult.STORED
    failing_sync[0] = 1
    assert flush(store) == ["5 blocks could not be written to ssd"]
    assert store.ssd is not None
    assert not any(store.ssd.contains([key(n) for n in LOST]))


@pytest.mark.parametrize("fsync", FsyncPolicy)
def test_flush_writes_blocks_lost_by_failed_sync(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int], fsync: FsyncPolicy
) -> None:
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk, fsync=fsync)
    store = TieredStore(4 * MIB, ssd, None, Recorder())
    lose_all(store, failing_sync)
    assert flush(store) == []
    assert all(ssd.contains([key(n) for n in LOST]))
    store.close()
    with closing(SsdStore(tmp_path / "ssd", 16 * MIB)) as ssd:
        assert all(ssd.contains([key(n) for n in LOST]))


def lose_between_flushes(store: TieredStore, failing_sync: list[int]) -> None:
    """As `lose_all`, by a sync of the SSD's own."""
    for n in LOST:
        assert put(store, n) is PutResult.STORED
    store._demotion._behind[Tier.SSD.value].drain()
    failing_sync[0] = 1
    assert store.ssd is not None
    with store.ssd._lock:
        assert not store.ssd._committer.wait(store.ssd._committer.kick())


def test_flush_writes_blocks_lost_before_it(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int]
) -> None:
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    store = TieredStore(4 * MIB, ssd, None, Recorder())
    lose_between_flushes(store, failing_sync)
    assert flush(store) == []
    assert all(ssd.contains([key(n) for n in LOST]))
    store.close()


def test_flush_ignores_lost_blocks_written_again_and_evicted(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int]
) -> None:
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    store = TieredStore(1 * MIB, ssd, None, Recorder())
    lose_between_flushes(store, failing_sync)
    ssd.retry()
    store.memory.delete([key(n) for n in LOST])
    for n in (*LOST, *range(100, 500)):
        assert put(store, n) is PutResult.STORED
    assert not any(store.memory.contains([key(n) for n in LOST]))
    assert flush(store) == []
    store.close()


def test_eviction_writes_blocks_lost_by_failed_sync(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int]
) -> None:
    """The SSD lacks them although they were written: not because it has evicted them."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    store = TieredStore(1 * MIB, ssd, None, Recorder())
    lose_between_flushes(store, failing_sync)
    ssd.retry()
    assert not any(ssd.contains([key(n) for n in LOST]))
    assert not store._demotion.may_leave_memory(key(0))
    for n in range(100, 200):
        assert put(store, n) is PutResult.STORED
        store._demotion._behind[Tier.SSD.value].drain()
    assert not any(store.memory.contains([key(n) for n in LOST]))
    assert all(ssd.contains([key(n) for n in LOST]))
    assert flush(store) == []
    store.close()


def test_refused_block_written_later_is_not_written_again(tmp_path: Path, disk: GatedDisk) -> None:
    """By the flush, after the SSD has evicted it."""
    ssd = SsdStore(tmp_path / "ssd", 2 * MIB, disk=disk)
    store = TieredStore(4 * MIB, ssd, None, Recorder(), TierSettings(write_queue_bytes=SIZE))
    disk.gate.clear()
    assert put(store, 1) is put(store, 2) is PutResult.STORED
    eventually(lambda: disk.waiting == 1)
    disk.gate.set()
    behind = store._demotion._behind[Tier.SSD.value]
    behind.drain()
    assert put(store, 2, Durability.DISK) is PutResult.STORED
    for n in range(3, 100):
        assert put(store, n) is PutResult.STORED
        behind.drain()
    assert store.memory.contains([key(2)]) == [True]
    assert ssd.contains([key(2)]) == [False]
    assert flush(store) == []
    assert ssd.usage().blocks + ssd.counters.evicted_blocks == 99
    store.close()


@pytest.mark.parametrize("failures", [0, 1, 1000])
def test_drain_writes_or_reports_blocks_lost_by_sync(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int], failures: int
) -> None:
    """Including blocks that its own first attempt loses."""
    store = TieredStore(4 * MIB, SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk), None, Recorder())
    lose_all(store, failing_sync)
    failing_sync[0] = failures
    is_written = failures <= 1
    unwritten = [(left.blocks, left.has_failed) for left in store.drain()]
    assert unwritten == ([] if is_written else [(5, True)])
    failing_sync[0] = 0
    store.close()
    with closing(SsdStore(tmp_path / "ssd", 16 * MIB)) as ssd:
        assert ssd.contains([key(n) for n in LOST]) == [is_written] * 5


@pytest.mark.parametrize("is_last", [False, True])
def test_flush_reports_lost_evicted_blocks_once(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int], is_last: bool
) -> None:
    """The second attempt of the last flush does not find them."""
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    store = TieredStore(4 * MIB, ssd, None, Recorder())
    for n in range(3):
        assert put(store, n) is PutResult.STORED
    store._demotion._behind[Tier.SSD.value].drain()
    store.memory.delete([key(0)])  # as if evicted
    failing_sync[0] = 1
    with ssd._lock:
        assert not ssd._committer.wait(ssd._committer.kick())
    deleted = threading.Event()
    store.delete([key(1)], lambda count: deleted.set())
    assert deleted.wait(PATIENCE_S)
    told = list(map(str, store.drain())) if is_last else flush(store)
    assert told == ["1 blocks could not be written to ssd"]
    assert ssd.contains([key(n) for n in range(3)]) == [False, False, True]
    assert is_last or flush(store) == []
    store.close()


def test_flush_reports_blocks_evicted_after_a_failed_sync(
    tmp_path: Path, disk: GatedDisk, failing_sync: list[int]
) -> None:
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB, disk=disk)
    store = TieredStore(1 * MIB, ssd, None, Recorder())
    lose_all(store, failing_sync)
    with pytest.MonkeyPatch.context() as full:
        full.setattr(WriteBehind, "_has_room", lambda *_: False)
        for n in range(100, 500):
            put(store, n)
    assert not any(store.memory.contains([key(n) for n in LOST]))
    assert flush(store) == ["5 blocks could not be written to ssd"]
    assert flush(store) == []
    store.close()


def test_flush_with_full_backing_folder_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(self: FileOps, fd: int, parts: Sequence[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = TieredStore(
        4 * MIB, None, BackingTier(BackingOptions(f"file://{tmp_path}")), Recorder()
    )
    with monkeypatch.context() as full:
        full.setattr(FileOps, "writev", is_full)
        assert put(store, 1) is PutResult.STORED
        assert flush(store) == ["1 blocks found no room in backing"]
    assert flush(store) == []
    store.close()


def test_flush_writes_blocks_lost_by_backing_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    writev = FileOps.writev

    def count(self: FileOps, fd: int, parts: Sequence[memoryview]) -> int:
        written.append(fd)
        return writev(self, fd, parts)

    def fail(self: FileOps, fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(FileOps, "writev", count)
    store = TieredStore(
        4 * MIB, None, BackingTier(BackingOptions(f"file://{tmp_path}")), Recorder()
    )
    assert put(store, 1) is PutResult.STORED
    with monkeypatch.context() as failing:
        failing.setattr(FileOps, "syncfs", fail)
        assert flush(store) == ["1 blocks could not be written to backing"]
    assert flush(store) == []
    assert len(written) == 2
    store.close()
