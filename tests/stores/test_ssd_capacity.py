"""The capacity of an SSD tier: never exceeded, divided by quotas, shrunk and grown."""

from __future__ import annotations

import itertools
import random
import threading
import tracemalloc
from pathlib import Path

import pytest

from tests.stores.ssd_blocks import check, content, item, key, opened, present, put, read
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.stores.ssd.budget import MIN_CAPACITY, Budget
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.store import SsdStore

KIB = 1 << 10
MIB = 1 << 20


def used_on_disk(folder: Path) -> tuple[int, int]:
    """Bytes in files, and bytes the file system spends on them and on the folder."""
    total = blocks = 0
    for path in [folder, *folder.iterdir()]:
        try:
            facts = path.stat()
        except FileNotFoundError:  # a temporary file, gone by now
            continue
        total += facts.st_size if path != folder else 0
        blocks += facts.st_blocks * 512
    return total, blocks


class WatchingDisk(OsDisk):
    """Measures the folder after every call that can make it larger."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.most = (0, 0)

    def _measure(self) -> None:
        sizes, blocks = used_on_disk(self._folder)
        self.most = (max(self.most[0], sizes), max(self.most[1], blocks))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        moved = super().write(fd, data, offset)
        self._measure()
        return moved

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._measure()

    def rename(self, source: Path, target: Path) -> None:
        self._measure()
        super().rename(source, target)


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, 200 * KIB + 123, 333 * KIB, MIB, 3 * MIB])
def test_ssd_capacity_is_never_exceeded(tmp_path: Path, capacity: int) -> None:
    folder = tmp_path / "store"
    disk = WatchingDisk(folder)
    rng = random.Random(capacity)
    with opened(folder, capacity, disk=disk) as store:
        for _ in range(120):
            first = rng.randrange(2000)
            store.put([item(n) for n in range(first, first + 8)])
            usage = store.usage()
            assert usage.used_bytes <= usage.capacity_bytes == capacity
        assert store.counters.evicted_blocks > 0
        store.flush()
        check(store)
    assert store.counters.compactions > 0
    assert disk.most[0] <= capacity
    assert disk.most[1] <= capacity


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, MIB, 1 << 30, 100 << 30, 5 << 40])
def test_budget_shares_add_up(capacity: int) -> None:
    budget = Budget.divide(capacity, None)
    index = 3 * 168 * budget.max_blocks
    assert budget.data_bytes + index <= capacity
    assert budget.data_bytes >= capacity * (0.98 if capacity >= 1 << 30 else 0.6)
    assert budget.num_slabs >= 8
    if capacity >= 1 << 30:
        assert budget.max_blocks * 64 * KIB >= 0.9 * capacity


def test_budget_with_too_small_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 160KiB"):
        SsdStore(tmp_path / "store", MIN_CAPACITY - 1)
    with opened(tmp_path / "store", 64 * MIB) as store:
        put(store, 1)
    with pytest.raises(ConfigError, match="slab"):
        SsdStore(tmp_path / "store", MIN_CAPACITY)
    with opened(tmp_path / "store", 64 * MIB) as store:
        assert present(store, [1]) == [1]


def test_shrinking_keeps_hottest_and_growing_keeps_all(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened(folder, 800 * KIB) as store:
        put(store, *range(100))
        for number in (3, 50, 97):
            assert read(store, number) == content(number)
    lines: list[str] = []
    with opened(folder, 400 * KIB, progress=lines.append) as store:
        left = present(store, range(100))
        assert 20 < len(left) < 100
        assert {3, 50, 97} <= set(left)
        assert store.recovery.blocks == len(left)
        assert store.recovery.dropped == {"the space was made smaller": 100 - len(left)}
        assert [read(store, number) for number in left] == [content(n) for n in left]
        assert any("moving" in line for line in lines)
        check(store)
        assert max(used_on_disk(folder)) <= 400 * KIB
        put(store, *range(200, 220))
    left += range(200, 220)
    with opened(folder, 400 * KIB) as store:
        left = present(store, left)
    with opened(folder, 2 * MIB) as store:
        assert present(store, left) == left
        put(store, *range(300, 400))
        assert [read(store, number) for number in left] == [content(n) for n in left]
        check(store)


def test_shrinking_evicts_tails_first(tmp_path: Path) -> None:
    chains = [range(start, start + 80, 4) for start in (0, 80, 160)]
    with opened(tmp_path / "store", 400 * KIB) as store:
        for chain in chains:
            store.put([item(n, n - 4 if n > chain[0] else None) for n in chain])
    with opened(tmp_path / "store", 200 * KIB) as store:
        assert store.recovery.dropped
        for chain in chains:
            keys = [key(n) for n in chain]
            assert store.match(keys) == sum(store.contains(keys))


def test_quota_protects_other_namespaces(tmp_path: Path) -> None:
    greedy = b"greedy".ljust(16)
    with opened(tmp_path / "store", MIB, quota_of={greedy: 240 * KIB}.get) as store:
        put(store, *range(20))
        for number in range(400):
            name = StoreKey(greedy + number.to_bytes(8, "little"))
            assert store.put([PutItem(name, None, memoryview(bytes(4096)))]) == [PutResult.STORED]
        assert present(store, range(20)) == list(range(20))
        assert store.usage().used_bytes < 500 * KIB
        check(store)


def test_put_evicts_no_more_than_needed(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        number = 0
        while not store.counters.evicted_blocks:
            put(store, number)
            number += 4  # of one size
        warm = present(store, range(0, number, 4))[-20:]
        assert store.put([item(n) for n in (number, *warm)]) == [
            PutResult.STORED,
            *([PutResult.PRESENT] * len(warm)),
        ]
        assert store.counters.evicted_blocks == 2


def test_concurrent_puts_waiting_for_room_all_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that makes room only for itself would lose it to the other puts repeatedly."""

    class HeldUp(OsDisk):
        go_on = threading.Event()

        def sync(self, fd: int) -> None:
            assert self.go_on.wait(60)
            super().sync(fd)

    disk, writers = HeldUp(), 50
    disk.go_on.set()
    block = memoryview(bytes(64 * KIB))
    with opened(tmp_path / "store", 8 * MIB, disk=disk, slab_bytes=256 * KIB) as store:
        numbers = itertools.count()

        def put_one() -> list[PutResult]:
            return store.put([PutItem(key(next(numbers)), None, block)])

        while not store.counters.evicted_blocks:
            assert put_one() == [PutResult.STORED]
        assert store._index.free_slots(0) == 0
        waiting = threading.Semaphore(0)
        wait_release = store._committer.wait_release

        def wait() -> bool:
            waiting.release()
            return wait_release()

        monkeypatch.setattr(store._committer, "wait_release", wait)
        disk.go_on.clear()
        results: list[PutResult] = []
        threads = [
            threading.Thread(target=lambda: results.extend(put_one())) for _ in range(writers)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert waiting.acquire(timeout=60)
        disk.go_on.set()
        for thread in threads:
            thread.join()
        assert results == [PutResult.STORED] * writers
        check(store)


def test_evict_ahead_keeps_few_slots_free_and_fills_quota(tmp_path: Path) -> None:
    limited = b"limited".ljust(16)
    quota_of = {limited: MIB}.get
    with opened(tmp_path / "store", 16 * MIB, slab_bytes=MIB, quota_of=quota_of) as store:
        block = memoryview(bytes(8192))
        for number in range(1500):
            mine = StoreKey(limited + number.to_bytes(8, "little"))
            for name in (mine, key(number)):
                assert store.put([PutItem(name, None, block)]) == [PutResult.STORED]
        names = [StoreKey(limited + n.to_bytes(8, "little")) for n in range(1500)]
        assert sum(store.contains(names)) == 128  # all of its one slab: 1 MiB
        assert store.usage().blocks >= 186 - 10  # what the index of this space holds
        check(store)


def test_put_of_small_blocks_fills_the_index_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "store", 8 * MIB) as store:
        most = store._budget.max_blocks
        for start in range(0, 2 * most, 16):
            items = [
                PutItem(key(number), None, memoryview(b"tiny"))
                for number in range(start, start + 16)
            ]
            assert store.put(items) == [PutResult.STORED] * 16
        assert store.usage().blocks == most
        assert sum("index is full" in record.message for record in caplog.records) == 1
        check(store)
    with opened(tmp_path / "store", 8 * MIB) as store:
        assert store.recovery.blocks == most


def test_smaller_quota_applies_to_recovered_blocks(tmp_path: Path) -> None:
    def names(count: int) -> list[StoreKey]:
        return [StoreKey(b"owner".ljust(16) + n.to_bytes(8, "little")) for n in range(count)]

    def used(store: SsdStore) -> int:
        return sum(store.contains(names(100))) * 4096

    owner = b"owner".ljust(16)
    unlimited, limited = {owner: MIB}.get, {owner: 128 * KIB}.get
    with opened(tmp_path / "store", MIB, slab_bytes=64 * KIB, quota_of=unlimited) as store:
        put(store, *range(20))
        for name in names(100):
            assert store.put([PutItem(name, None, memoryview(bytes(4096)))]) == [PutResult.STORED]
        assert used(store) == 400 * KIB
    with opened(tmp_path / "store", MIB, quota_of=limited) as store:
        assert 64 * KIB < used(store) <= 128 * KIB
        assert present(store, range(20)) == list(range(20))
        check(store)
        for name in names(100):
            assert store.put([PutItem(name, None, memoryview(bytes(4096)))]) != [PutResult.FAILED]
        assert used(store) <= 128 * KIB
        check(store)


def test_block_needs_no_python_object(tmp_path: Path) -> None:
    """There may be ten million blocks; the compiled index keeps everything about them."""
    payload = memoryview(bytes(4096))
    numbers = range(500)
    with opened(tmp_path, 64 * MIB) as store:
        put(store, 10_000)  # what the first one needs
        items = [PutItem(key(n), key(n - 1) if n else None, payload) for n in numbers]
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        assert store.put(items) == [PutResult.STORED] * len(numbers)
        assert store.flush()
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert present(store, numbers) == list(numbers)
    assert taken / len(numbers) < 100
    with opened(tmp_path, 64 * MIB) as store:
        assert present(store, numbers) == list(numbers)
        assert store.describe([key(5)])[0].parent == key(4)  # type: ignore[union-attr]
