"""Batches of blocks, transferred by native code or by Python threads, with the same results."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stores.ssd_blocks import check, key, opened
from vllm_tiered_kv.core.store import PutItem, PutResult
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.folder import DATA
from vllm_tiered_kv.stores.ssd.store import SsdStore

NBYTES = 3 * 4096
COUNT = 20


class SeenDisk(OsDisk):
    """Behaves like the real disk; as a subclass it receives every call."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.moved += 1
        return super().read(fd, into, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.moved += 1
        return super().write(fd, data, offset)


def aligned_views(count: int, seed: int | None = None) -> list[memoryview]:
    whole = memoryview(mmap.mmap(-1, count * NBYTES))
    if seed is not None:
        whole[:] = random.Random(seed).randbytes(len(whole))
    return [whole[n * NBYTES : (n + 1) * NBYTES] for n in range(count)]


def plain_views(count: int) -> list[memoryview]:
    return [memoryview(bytearray(NBYTES + 1))[1:] for _ in range(count)]


@pytest.fixture(params=["native", "python"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SsdStore]:
    disk = OsDisk() if request.param == "native" else SeenDisk()
    with opened(tmp_path / "store", 4 << 20, disk=disk, retry_seconds=60) as store:
        yield store
        check(store)


def offer(store: SsdStore, views: list[memoryview], checksums: list[int | None]) -> list[PutResult]:
    items = [
        PutItem(key(n), None, v, c) for n, (v, c) in enumerate(zip(views, checksums, strict=True))
    ]
    return store.put(items)


def disk_of(store: SsdStore) -> OsDisk:
    disk = store._data._disk
    assert isinstance(disk, OsDisk)
    return disk


@pytest.mark.parametrize("into", [aligned_views, plain_views], ids=["aligned", "plain"])
def test_batch_round_trip(store: SsdStore, into: object) -> None:
    assert callable(into)
    views = aligned_views(COUNT, seed=1)
    assert offer(store, views, [xxh3_64(view) for view in views]) == [PutResult.STORED] * COUNT
    places = into(COUNT)
    order = random.Random(2).sample(range(COUNT), COUNT)
    assert all(store.get([key(n) for n in order], places))
    assert places == [views[n] for n in order]


def test_native_io_is_used_only_with_the_real_disk(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = disk_of(store)
    before = getattr(disk, "moved", 0)
    native_blocks = 0

    def count(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, offsets: Sequence[int], *arguments: Any) -> Any:
            nonlocal native_blocks
            native_blocks += len(offsets)
            return call(fd, offsets, *arguments)

        return counted

    for name in ("read_blocks", "write_blocks"):
        monkeypatch.setattr(cpu, name, count(getattr(cpu, name)))
    offer(store, aligned_views(COUNT, seed=1), [None] * COUNT)
    assert all(store.get([key(n) for n in range(COUNT)], aligned_views(COUNT)))
    if isinstance(disk, SeenDisk):
        assert native_blocks == 0
        assert disk.moved - before >= 2 * COUNT
    else:
        assert native_blocks == 2 * COUNT


def test_get_that_was_interrupted_keeps_the_blocks(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(store, aligned_views(COUNT, seed=1), [None] * COUNT)
    keys = [key(n) for n in range(COUNT)]
    with monkeypatch.context() as patched:
        patched.setattr(store._data, "read_blocks", lambda places: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.get(keys, aligned_views(COUNT))
    assert all(store.get(keys, aligned_views(COUNT)))


def test_get_with_read_errors_removes_the_blocks(store: SsdStore) -> None:
    offer(store, aligned_views(COUNT, seed=1), [None] * COUNT)
    data = os.dup(store._data._fd)
    nothing = os.open("/proc/self/mem", os.O_RDONLY)  # EIO where nothing is mapped: here
    os.dup2(nothing, store._data._fd)
    os.close(nothing)
    assert not any(store.get([key(n) for n in range(3)], aligned_views(3)))
    assert store.counters.read_errors == 3
    os.dup2(data, store._data._fd)
    os.close(data)
    found = store.get([key(n) for n in range(COUNT)], aligned_views(COUNT))
    assert found == [n >= 3 for n in range(COUNT)]


def test_put_batch_refuses_only_the_wrong_checksum(store: SsdStore) -> None:
    views = aligned_views(COUNT, seed=1)
    checksums: list[int | None] = [xxh3_64(view) for view in views]
    checksums[7] = 12345
    results = offer(store, views, checksums)
    assert results == [PutResult.FAILED if n == 7 else PutResult.STORED for n in range(COUNT)]
    found = store.get([key(n) for n in range(COUNT)], aligned_views(COUNT))
    assert found == [n != 7 for n in range(COUNT)]


def test_get_batch_removes_only_the_damaged_block(store: SsdStore) -> None:
    views = aligned_views(COUNT, seed=1)
    offer(store, views, [None] * COUNT)
    [slot] = store._index.pin([key(5)])
    store._index.unpin([slot])
    with (store.folder / DATA).open("r+b") as file:
        file.seek(store._table.offset(slot, NBYTES) + 100)
        file.write(b"\xff\x00\xff\x00")
    for _ in range(2):
        found = store.get([key(n) for n in range(COUNT)], aligned_views(COUNT))
        assert found == [n != 5 for n in range(COUNT)]
    assert store.counters.bad_blocks == 1


def test_put_batch_on_failing_disk_fails_and_pauses_writes(store: SsdStore) -> None:
    views = aligned_views(COUNT, seed=1)
    assert offer(store, views[:4], [None] * 4) == [PutResult.STORED] * 4
    direct = os.O_DIRECT if store.direct_io else 0
    writable = os.dup(store._data._fd)
    read_only = os.open(store.folder / DATA, os.O_RDONLY | direct)
    os.dup2(read_only, store._data._fd)
    os.close(read_only)
    items = [PutItem(key(100 + n), None, view) for n, view in enumerate(views)]
    assert store.put(items) == [PutResult.FAILED] * COUNT
    os.dup2(writable, store._data._fd)
    os.close(writable)
    assert store.put(items[:1]) == [PutResult.FAILED]  # without another try, for a while
    assert store.counters.retired_slots == 0
    assert all(store.get([key(n) for n in range(4)], aligned_views(4)))
