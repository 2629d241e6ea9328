"""Many namespaces in one tier: shared slabs, quotas and size classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stores.memory_blocks import MemoryBlocks
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.stores.namespaces import QuotaOf, no_quota
from vllm_tiered_kv.stores.ssd.store import SsdStore

MIB = 1 << 20
CAPACITY = 32 * MIB
SIZE = 128 << 10  # smaller blocks fill the index of an SSD before its space
LARGE = b"large".ljust(16)

Store = MemoryBlocks | SsdStore
Open = Callable[[QuotaOf], Store]


def all_of_it(namespace: bytes) -> int:
    """A quota that limits nothing, but gives each namespace its own slabs."""
    return CAPACITY


def key(namespace: bytes, n: int = 0) -> StoreKey:
    return StoreKey(namespace + n.to_bytes(8, "little"))


def keys(namespace: bytes, count: int) -> list[StoreKey]:
    return [key(namespace, n) for n in range(count)]


def put(store: Store, name: StoreKey, nbytes: int = SIZE) -> PutResult:
    [result] = store.put([PutItem(name, None, memoryview(name[-8:] * (nbytes // 8)))])
    return result


def is_whole(store: Store, name: StoreKey, nbytes: int = SIZE) -> bool:
    buffer = bytearray(nbytes)
    return store.get([name], [memoryview(buffer)]) == [True] and buffer == name[-8:] * (nbytes // 8)


def check(store: Store) -> None:
    with store._lock:
        store._index.check()


@pytest.fixture(params=["memory", "ssd"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    stores: list[Store] = []

    def make(quota_of: QuotaOf) -> Store:
        if request.param == "memory":
            stores.append(MemoryBlocks(CAPACITY, quota_of=quota_of))
        else:
            stores.append(SsdStore(tmp_path / "ssd", CAPACITY, io_threads=2, quota_of=quota_of))
        return stores[-1]

    yield make
    for store in stores:
        check(store)
        store.close()


@pytest.mark.parametrize("quota_of", [no_quota, all_of_it])
def test_namespaces_that_come_and_go_use_bounded_classes(
    open_store: Open, quota_of: QuotaOf
) -> None:
    store = open_store(quota_of)
    geometry = store._index.geometry
    for _ in range(5000 if isinstance(store, MemoryBlocks) else 500):  # a disk syncs for each
        assert put(store, key(os.urandom(16)), 4096) is PutResult.STORED
    assert len(geometry.slot_bytes) <= geometry.num_slabs + 1
    assert len(store._index._classes) <= geometry.num_slabs + 1


def test_small_namespaces_share_slabs(open_store: Open) -> None:
    store = open_store(no_quota)
    count = 0
    while all(store.contains(keys(LARGE, count))[:1]):
        assert put(store, key(LARGE, count)) is PutResult.STORED
        count += 1
    before = sum(store.contains(keys(LARGE, count)))
    for _ in range(40):
        assert put(store, key(os.urandom(16))) is PutResult.STORED
    ahead = before // 16  # a large SSD keeps a few slots free
    assert sum(store.contains(keys(LARGE, count))) >= before - 40 - ahead


def test_namespace_with_quota_stays_within_it(open_store: Open) -> None:
    quotas = {LARGE: 0}
    store = open_store(quotas.get)
    slab = quotas[LARGE] = store._index.geometry.slab_bytes
    others = [key(os.urandom(16)) for _ in range(20)]
    for name in others:
        assert put(store, name) is PutResult.STORED
    for n in range(slab // SIZE + 50):
        assert put(store, key(LARGE, n)) is PutResult.STORED
    assert all(is_whole(store, name) for name in others)
    assert sum(store.contains(keys(LARGE, slab // SIZE + 50))) <= slab // SIZE


def test_blocks_of_different_lengths_use_different_slabs(open_store: Open) -> None:
    store = open_store(no_quota)
    names = [(key(os.urandom(16)), SIZE * (1 + n % 5)) for n in range(40)]
    for name, nbytes in names:
        assert put(store, name, nbytes) is PutResult.STORED
    assert all(is_whole(store, name, nbytes) for name, nbytes in names)


# ---- on a disk, which outlives what it was told of quotas ---------------------------------------


def opened(folder: Path, quota_of: QuotaOf) -> SsdStore:
    return SsdStore(folder, CAPACITY, io_threads=2, quota_of=quota_of)


def test_recovery_restores_shared_slabs(tmp_path: Path) -> None:
    names = [key(os.urandom(16)) for _ in range(20)]
    store = opened(tmp_path / "ssd", no_quota)
    for name in names:
        put(store, name)
    store.close()
    store = opened(tmp_path / "ssd", no_quota)
    assert store.recovery.dropped == {}
    assert all(is_whole(store, name) for name in names)
    check(store)
    store.close()


def test_recovery_with_new_quota_separates_shared_slab(tmp_path: Path) -> None:
    first, last = b"a" * 16, b"b" * 16
    store = opened(tmp_path / "ssd", no_quota)
    for namespace in (first, last):
        for name in keys(namespace, 3):
            put(store, name)
    store.close()
    for quota_of in (all_of_it, no_quota):  # and nothing is lost when it is taken back
        store = opened(tmp_path / "ssd", quota_of)
        assert sum(store.recovery.dropped.values()) == (3 if quota_of is all_of_it else 0)
        assert store.contains(keys(first, 3)) == [False] * 3
        assert all(is_whole(store, name) for name in keys(last, 3))
        check(store)
        store.close()


def test_reserve_after_wait_does_not_use_reassigned_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put releases the lock while it waits for room, and its class has no block yet."""
    store = opened(tmp_path / "ssd", all_of_it)
    count = 0
    while not store.counters.evicted_blocks:
        put(store, key(LARGE, count))
        count += 1
    real = store._committer.wait_release
    waits = []

    def wait() -> bool:
        waits.append(1)
        released = real()
        store._table.size_class(key(b"other".ljust(16)), 2 * SIZE)  # of a put at the same time
        return released

    monkeypatch.setattr(store._committer, "wait_release", wait)
    name = key(b"mine".ljust(16))
    assert put(store, name) is PutResult.STORED
    assert waits
    assert store._index.owned_slots(store._table.size_class(name, SIZE)) > 0
    assert is_whole(store, name)
    check(store)
    store.close()
