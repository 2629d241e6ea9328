"""The SSD tier without faults: order of use, sizes and buffers, durability, concurrency."""

from __future__ import annotations

import mmap
import os
import random
import stat
import threading
import time
from pathlib import Path

import pytest

from tests.stores.ssd_blocks import (
    NAMESPACE,
    SMALL,
    check,
    content,
    item,
    key,
    opened,
    present,
    put,
    read,
)
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.ssd import committer
from vllm_tiered_kv.stores.ssd.disk import OsDisk

MIB = 1 << 20


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_recovered_blocks_can_be_evicted(tmp_path: Path, eviction: str) -> None:
    with opened(tmp_path / "store", eviction=eviction) as store:
        put(store, *range(60))
        before = present(store, range(60))
    with opened(tmp_path / "store", eviction=eviction) as store:
        assert present(store, range(60)) == before
        put(store, *range(100, 160))
        assert set(present(store, range(60))) < set(before)
        check(store)


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    """Blocks hold what users wrote."""
    folder = tmp_path / "store"
    with opened(folder) as store:
        put(store, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == dict.fromkeys(("FORMAT", "LOCK", "data", "journal"), 0o600)


def test_order_of_use_survives_restart(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        put(store, *range(0, 40, 4))  # of one size
        hot = [0, 4, 8]
        for number in hot:
            assert read(store, number) is not None
    with opened(tmp_path / "store") as store:
        number = 1000
        while len(present(store, range(0, 40, 4))) > len(hot):
            put(store, number)
            number += 4
        assert present(store, range(0, 40, 4)) == hot


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_eviction_after_restart_removes_tails_first(tmp_path: Path, eviction: str) -> None:
    chain = range(0, 40, 4)
    with opened(tmp_path / "store", eviction=eviction) as store:
        results = store.put([item(n, n - 4 if n else None) for n in chain])
        assert results == [PutResult.STORED] * len(chain)
    with opened(tmp_path / "store", eviction=eviction) as store:
        for number in range(1000, 1400, 4):
            put(store, number)
            keys = [key(n) for n in chain]
            assert store.match(keys) == sum(store.contains(keys))


def test_put_block_larger_than_slab_is_dropped_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "store") as store:
        huge = PutItem(key(1), None, memoryview(bytes(MIB)))
        assert store.put([huge, huge]) == [PutResult.DROPPED] * 2
        assert store.counters.dropped_blocks == 2
        assert sum("too large" in record.message for record in caplog.records) == 1
        put(store, 1)
    with opened(tmp_path / "larger", 16 * MIB, slab_bytes=4 * MIB) as store:
        assert store.put([huge]) == [PutResult.STORED]


@pytest.mark.parametrize("bad", [b"", bytes(65)])
def test_put_with_invalid_key_is_dropped(tmp_path: Path, bad: bytes) -> None:
    with opened(tmp_path / "store") as store:
        block = memoryview(bytes(100))
        assert store.put([PutItem(StoreKey(bad), None, block)]) == [PutResult.DROPPED]
        if bad:
            assert store.put([PutItem(key(1), StoreKey(bad), block)]) == [PutResult.DROPPED]
        longest = StoreKey(bytes(64))
        assert store.put([PutItem(longest, StoreKey(bytes(63)), block)]) == [PutResult.STORED]
    with opened(tmp_path / "store") as store:
        assert store.contains([longest]) == [True]


def test_aligned_and_unaligned_buffers_round_trip(tmp_path: Path) -> None:
    with opened(tmp_path / "store", MIB) as store:
        for number, (length, skew) in enumerate([(8192, 0), (8192, 1), (8000, 0), (1, 7)]):
            source, target = mmap.mmap(-1, 16384), mmap.mmap(-1, 16384)
            block = random.Random(number).randbytes(length)
            source[skew : skew + length] = block
            payload = memoryview(source)[skew : skew + length]
            assert store.put([PutItem(key(number), None, payload)]) == [PutResult.STORED]
            into = memoryview(target)[skew : skew + length]
            assert store.get([key(number)], [into]) == [True]
            assert into == block
            assert target[skew + length : skew + length + 100] == bytes(100)


def test_slot_contains_no_bytes_of_another_block(tmp_path: Path) -> None:
    """The rest of a slot's last page is zeros, not old contents of a bounce buffer."""
    with opened(tmp_path / "store", MIB) as store:
        secret = b"secret!!" * 512
        for number in range(8):
            odd = PutItem(key(number), None, memoryview(secret + b"x"))
            small = PutItem(key(100 + number), None, memoryview(b"small"))
            assert store.put([odd]) == store.put([small]) == [PutResult.STORED]
        store.flush()
        data = (tmp_path / "store" / "data").read_bytes()
    at = -1
    for _ in range(8):
        at = data.index(b"small", at + 1)
        assert data[at + 5 : at + 4096] == bytes(4091)


def test_concurrent_puts_share_syncs(tmp_path: Path) -> None:
    class SlowSync(OsDisk):
        def sync(self, fd: int) -> None:
            time.sleep(0.02)
            super().sync(fd)

    with opened(tmp_path / "store", 4 * MIB, disk=SlowSync()) as store:
        before = store.counters.syncs
        together = threading.Barrier(16)  # the last may begin when the first could have ended

        def put_one(number: int) -> None:
            together.wait(60)
            put(store, number, durability=Durability.DISK)

        threads = [threading.Thread(target=put_one, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert present(store, range(16)) == list(range(16))
        assert store.counters.syncs - before < 16  # two for each put otherwise


def test_put_in_memory_becomes_durable_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "INTERVAL_SECONDS", 0.01)
    with opened(tmp_path / "store") as store:
        put(store, 1)
        journal = tmp_path / "store" / "journal"
        empty = journal.stat().st_size
        deadline = time.monotonic() + 30
        while journal.stat().st_size == empty:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_durable_put_of_present_block_syncs_it(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        put(store, 1)
        assert store.put([item(1)], Durability.DISK) == [PutResult.PRESENT]
        journal = (tmp_path / "store" / "journal").read_bytes()
        assert key(1) in journal


def test_store_does_not_use_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_clock() -> float:
        raise AssertionError("the wall clock was read")

    monkeypatch.setattr(time, "time", no_clock)
    monkeypatch.setattr(time, "time_ns", no_clock)
    with opened(tmp_path / "store") as store:
        put(store, *range(50), durability=Durability.DISK)
        store.flush()
    for path in (tmp_path / "store").iterdir():
        os.utime(path, (0, 1))  # 1970
    with opened(tmp_path / "store") as store:
        assert present(store, range(50))


def test_closed_store_misses_and_drops(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        put(store, 1)
    assert read(store, 1) is None
    assert store.match([key(1)]) == store.delete([key(1)]) == 0
    assert store.put([item(2)]) == [PutResult.DROPPED]
    assert store.describe([key(1)]) == [None]
    store.flush()
    store.close()


def test_slot_being_read_is_not_reused(tmp_path: Path) -> None:
    """A read is delayed while its block is deleted and the store is overwritten repeatedly."""

    class SlowRead(OsDisk):
        slow = threading.Event()
        go_on = threading.Event()

        def read(self, fd: int, into: memoryview, offset: int) -> int:
            if self.slow.is_set():
                self.slow.clear()
                self.go_on.wait(30)
            return super().read(fd, into, offset)

    disk = SlowRead()
    with opened(tmp_path / "store", disk=disk) as store:
        put(store, 0)
        disk.slow.set()
        found: list[bytes | None] = []
        reader = threading.Thread(target=lambda: found.append(read(store, 0)))
        reader.start()
        while disk.slow.is_set():
            time.sleep(0.001)
        store.delete([key(0)])
        for number in range(4, 400, 4):
            put(store, number)
        disk.go_on.set()
        reader.join()
        assert found == [content(0)]
        check(store)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_many_threads_on_too_small_store_read_no_wrong_block(tmp_path: Path, eviction: str) -> None:
    errors: list[BaseException] = []
    stored = [0] * 4

    def work(thread: int) -> None:
        rng = random.Random(thread)
        try:
            for _ in range(150):
                first = rng.randrange(300)
                batch = [item(n) for n in range(first, first + rng.randint(1, 6))]
                durability = rng.choice(list(Durability))
                stored[thread] += store.put(batch, durability).count(PutResult.STORED)
                numbers = [rng.randrange(300) for _ in range(6)]
                buffers = [bytearray(len(content(n))) for n in numbers]
                hits = store.get([key(n) for n in numbers], [memoryview(b) for b in buffers])
                for number, buffer, hit in zip(numbers, buffers, hits, strict=True):
                    assert not hit or buffer == content(number)
                if rng.random() < 0.2:
                    store.delete([key(rng.randrange(300))])
        except BaseException as error:
            errors.append(error)

    with opened(tmp_path / "store", eviction=eviction) as store:
        threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        check(store)
        assert sum(stored) > 300
        assert store.counters.bad_blocks == store.counters.failed_blocks == 0
        left = present(store, range(310))
    with opened(tmp_path / "store", eviction=eviction) as store:
        assert present(store, range(310)) == left
        for number in left:
            assert read(store, number) == content(number)


def test_misuse_raises_and_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        put(store, 0, 1)
        with pytest.raises(ValueError):
            store.get([key(0), key(1)], [memoryview(bytearray(4096))])
        every_other = memoryview(bytearray(8192))[::2]
        with pytest.raises(TypeError):
            store.get([key(1), key(0)], [memoryview(bytearray(5000)), every_other])
        with pytest.raises(TypeError):
            store.put([item(2), PutItem(key(3), None, every_other)])
        assert not store._index.pinned_slots()
        assert store.usage().blocks == store._index.held == 2


def test_describe_follows_puts(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        put(store, 0)
        assert store.put([item(1, 0)]) == [PutResult.STORED]
        [facts, missing] = store.describe([key(1), key(2)])
        assert missing is None
        assert facts is not None
        assert (facts.nbytes, facts.parent) == (len(content(1)), key(0))
        assert facts.checksum == xxh3_64(content(1))
        assert read(store, 1) == content(1)
    assert NAMESPACE in (tmp_path / "store" / "journal").read_bytes()
    assert store.usage().capacity_bytes == SMALL
