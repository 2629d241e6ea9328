"""Garbage collection of a shared directory: what is removed, in which order, and what is kept.

The tests set the mtime of files and call `collect(now=...)` with a time in the future, because
ctime cannot be set.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.stores.contract import assert_holds, chain_items, chain_keys, item, read, store_key
from tests.stores.shared_dir_cases import FaultyOps, failing, file_of, litter, opened
from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.stores.shared_dir.gc import GcReport, GcThread, SharedDirGc
from vllm_tiered_kv.stores.shared_dir.store import SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import FOLDER, Identity

HOUR = 3600.0
BLOCK = 744  # with its header, 1000 bytes
LATER = 100 * HOUR  # how far in the future the collections of these tests stand


def set_age(store: SharedDirStore, keys: Sequence[StoreKey], age_s: float) -> None:
    """Sets the mtime as if the block was last used that long before the collection."""
    for key in keys:
        when = int((time.time() + LATER - age_s) * 1e9)
        os.utime(file_of(store, key), ns=(when, when))


def collect(store: SharedDirStore, **options: Any) -> GcReport:
    report = SharedDirGc(store, **options).collect(now=time.time() + LATER)
    assert report.errors == 0
    return report


def put_chain(store: SharedDirStore, name: str, count: int, age_s: float) -> list[StoreKey]:
    keys = chain_keys(name, count)
    assert set(store.put(chain_items(keys, BLOCK))) == {PutResult.STORED}
    store.flush()
    set_age(store, keys, age_s)
    return keys


# ---- what leaves --------------------------------------------------------------------------------


def test_collect_without_limits_removes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = put_chain(store, "a", 5, 90 * HOUR)
        report = collect(store)
        assert (report.scanned_blocks, report.scanned_bytes) == (5, 5000)
        assert report.removed_blocks == 0
        assert store.match(keys) == 5


def test_collect_removes_expired_blocks(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=10 * HOUR) as store:
        old = put_chain(store, "old", 5, 11 * HOUR)
        young = put_chain(store, "young", 5, 9 * HOUR)
        report = collect(store)
        assert (report.removed_blocks, report.removed_bytes) == (5, 5000)
        assert store.contains(old) == [False] * 5
        assert store.match(young) == 5
        assert store.usage().blocks == 5


def test_collect_beyond_capacity_removes_the_coldest(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=20_000, low_watermark=0.9) as store:
        chains = [put_chain(store, f"chain {at}", 4, (50 - 5 * at) * HOUR) for at in range(6)]
        report = collect(store)
        assert report.removed_bytes == 6000
        assert [store.match(chain) for chain in chains] == [0, 2, 4, 4, 4, 4]
        assert [sum(store.contains(chain)) for chain in chains] == [0, 2, 4, 4, 4, 4]
        assert store.usage().used_bytes == store.usage_tracker.usage.used_bytes == 18_000
        assert collect(store).removed_blocks == 0  # within the capacity: nothing more to do


@pytest.mark.parametrize("newer", ["tail", "head", "same"])
def test_collect_removes_tails_before_heads_of_any_date(tmp_path: Path, newer: str) -> None:
    """A put dates heads before tails; with coarse timestamps all dates are equal."""
    with opened(tmp_path, capacity_bytes=5000, low_watermark=1.0) as store:
        keys = put_chain(store, "a", 12, 50 * HOUR)
        for at, key in enumerate(keys):
            shift = {"tail": -at, "head": at, "same": 0}[newer]
            set_age(store, [key], 50 * HOUR + shift)
        collect(store)
        assert store.match(keys) == sum(store.contains(keys)) == 5


def test_collect_keeps_old_head_of_chain_in_use(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=8000, low_watermark=1.0) as store:
        used = put_chain(store, "used", 6, 50 * HOUR)
        set_age(store, used[5:], 50 * HOUR - 500)  # the touch interval is 600 s
        unused = put_chain(store, "unused", 6, 50 * HOUR - 100)
        collect(store)
        assert store.match(used) == 6
        assert store.match(unused) == sum(store.contains(unused)) == 2


def test_collect_with_few_candidates_takes_several_rounds(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=10_000, low_watermark=1.0) as store:
        chains = [put_chain(store, f"chain {at}", 10, (50 - 5 * at) * HOUR) for at in range(4)]
        gc = SharedDirGc(store, max_candidates=8)
        rounds = 0
        while gc.collect(now=time.time() + LATER).more:
            rounds += 1
        assert rounds == 3
        assert [store.match(chain) for chain in chains] == [0, 0, 0, 10]


# ---- what never leaves --------------------------------------------------------------------------


def test_collect_removes_nothing_within_grace_period(tmp_path: Path) -> None:
    """Even if the mtime of a file is old: it was published just now."""
    with opened(tmp_path, capacity_bytes=1000, ttl_s=2 * HOUR, grace_s=HOUR) as store:
        keys = chain_keys("a", 5)
        store.put(chain_items(keys, BLOCK))
        for key in keys:
            os.utime(file_of(store, key), (0, 0))
        report = SharedDirGc(store).collect()
        assert (report.scanned_blocks, report.removed_blocks) == (5, 0)
        report = SharedDirGc(store).collect(now=time.time() + 1.1 * HOUR)
        assert report.removed_blocks == 5


def test_collect_uses_publication_time_of_slow_writer(tmp_path: Path) -> None:
    """Written two hours ago, published now: mtime is old, ctime is not."""

    def age_then_link(source: str, target: str) -> None:
        os.utime(source, (time.time() - 2 * HOUR,) * 2)

    with opened(tmp_path, FaultyOps(link=age_then_link), capacity_bytes=1) as store:
        store.put([item(store_key("a"), BLOCK)])
        store.flush()
        SharedDirGc(store).collect()
        assert_holds(store, store_key("a"), BLOCK)


@pytest.mark.parametrize("call", ["lstat", "rename"])
def test_collect_keeps_block_used_after_scan_and_its_heads(tmp_path: Path, call: str) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ops, capacity_bytes=3000, low_watermark=1.0) as store:
        keys = put_chain(store, "a", 6, 50 * HOUR)
        other = put_chain(store, "b", 3, 20 * HOUR)
        tail = file_of(store, keys[5])

        def use(path: str, *args: Any) -> None:
            if path == str(tail) and tail.exists():
                os.utime(tail)

        ops.faults[call] = use
        report = collect(store)
        ops.faults.clear()
        assert store.match(keys) == 6
        assert store.match(other) == 3  # what could not be freed is left to the next collection
        assert (report.spared_blocks, report.removed_blocks) == (6, 0)
        assert litter(tmp_path) == []


def test_collect_keeps_block_published_after_scan(tmp_path: Path) -> None:
    """Another collector removed the block, and a writer put it again, just before our rename."""
    ops = FaultyOps()
    with opened(tmp_path) as other, opened(tmp_path, ops, ttl_s=HOUR) as store:
        [key] = put_chain(store, "a", 1, 50 * HOUR)

        def replace(*args: Any) -> None:
            assert other.delete([key]) == 1
            assert other.put([item(key, BLOCK)]) == [PutResult.STORED]

        ops.faults["rename"] = replace
        report = collect(store)
        assert (report.removed_blocks, report.spared_blocks) == (0, 1)
        assert_holds(store, key, BLOCK)
        assert litter(tmp_path) == []


def test_collect_keeps_block_found_present_by_put(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=HOUR) as store:
        keys = chain_keys("a", 2)
        store.put(chain_items(keys, BLOCK))
        for key in keys:
            os.utime(file_of(store, key), (0, 0))
        assert store.put([item(keys[0], BLOCK)]) == [PutResult.PRESENT]
        now = time.time()
        assert file_of(store, keys[0]).stat().st_mtime > now - 60
        assert file_of(store, keys[1]).stat().st_mtime == 0


def test_put_rewrites_block_collected_meanwhile(tmp_path: Path) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ops) as store:
        [key] = put_chain(store, "a", 1, 0)
        os.utime(file_of(store, key), (0, 0))
        path = file_of(store, key)

        def collected(target: str) -> None:
            if target == str(path) and path.exists():
                path.unlink()

        ops.faults["touch"] = collected
        assert store.put([item(key, BLOCK)]) == [PutResult.STORED]
        assert_holds(store, key, BLOCK)


def test_reader_continues_with_removed_block(tmp_path: Path) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ttl_s=HOUR) as other, opened(tmp_path, ops) as store:
        [key] = put_chain(store, "a", 1, 50 * HOUR)
        ops.faults["preadv"] = lambda *args: collect(other) and None
        assert read(store, key, BLOCK) is not None
        assert store.contains([key]) == [False]


# ---- collectors that die, or run at once --------------------------------------------------------


def left_in_trash(store: SharedDirStore, key: StoreKey, seen: Identity) -> Path:
    """Leaves what a collector leaves that dies right after its rename."""
    trash = Path(store.tree.trash_path(key, seen))
    file_of(store, key).rename(trash)
    return trash


def test_collect_finishes_removal_of_dead_collector(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        [key] = put_chain(store, "a", 1, LATER)
        left_in_trash(store, key, Identity.of(file_of(store, key).stat()))
        assert SharedDirGc(store).collect().removed_trash == 0  # it may be alive: too early
        assert collect(store).removed_trash == 1
        assert litter(tmp_path) == []
        assert store.contains([key]) == [False]


def test_collect_restores_changed_block_of_dead_collector(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        one, two = chain_keys("a", 2)
        store.put([item(key, BLOCK) for key in (one, two)])
        store.flush()
        left_in_trash(store, one, Identity(1, 1))
        left_in_trash(store, two, Identity(1, 1))
        assert store.put([item(two, BLOCK)]) == [PutResult.STORED]  # published again meanwhile
        assert store.contains([one]) == [False]
        assert collect(store).restored_blocks == 2
        for key in (one, two):
            assert_holds(store, key, BLOCK)
        assert litter(tmp_path) == []


def test_collect_restores_block_without_hard_links(tmp_path: Path) -> None:
    with opened(tmp_path, FaultyOps(link=failing(errno.EPERM))) as store:
        [key] = put_chain(store, "a", 1, HOUR)
        left_in_trash(store, key, Identity(1, 1))
        assert collect(store).restored_blocks == 1
        assert_holds(store, key, BLOCK)
        assert litter(tmp_path) == []


def test_two_collectors_free_no_more_than_one(tmp_path: Path) -> None:
    """The second one scans what the first is about to remove, and removes after it."""
    ops = FaultyOps()
    limits = {"capacity_bytes": 20_000, "low_watermark": 0.5}
    with opened(tmp_path, **limits) as first, opened(tmp_path, ops, **limits) as second:
        chains = [put_chain(first, f"chain {at}", 4, (90 - 5 * at) * HOUR) for at in range(10)]
        reports = []

        def overtake(*args: Any) -> None:
            if not reports:
                reports.append(collect(first))

        ops.faults["rename"] = overtake
        report = collect(second)
        assert reports[0].removed_blocks == 30
        assert (report.removed_blocks, report.gone_blocks) == (0, 30)
        assert [first.match(chain) for chain in chains] == [0] * 7 + [2, 4, 4]


def test_many_collectors_at_once_keep_the_limits(tmp_path: Path) -> None:
    limits = {"capacity_bytes": 50_000, "low_watermark": 1.0}
    with opened(tmp_path, **limits) as store:
        chains = [put_chain(store, f"chain {at}", 5, (90 - at) * HOUR) for at in range(40)]
        reports: list[GcReport] = []
        threads = [
            threading.Thread(target=lambda: reports.append(collect(store))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        # Standing in the future, one takes what another is about to remove for left behind.
        assert sum(report.removed_blocks + report.removed_trash for report in reports) == 150
        assert [store.match(chain) for chain in chains] == [0] * 30 + [5] * 10


# ---- litter and clocks --------------------------------------------------------------------------


def test_collect_removes_stale_temporary_files(tmp_path: Path) -> None:
    with opened(tmp_path, stale_temp_s=HOUR) as store:
        temp = Path(store.tree.temp_path(store_key("a")))
        temp.parent.mkdir(parents=True)
        temp.write_bytes(b"half a blo")
        draft = tmp_path / f".{FOLDER}-host-1-0123456789abcdef"
        (draft / "blocks").mkdir(parents=True)
        SharedDirGc(store).collect(now=time.time() + 0.9 * HOUR)
        assert temp.exists()
        assert draft.exists()
        report = SharedDirGc(store).collect(now=time.time() + 1.1 * HOUR)
        assert report.removed_temps == 1
        assert litter(tmp_path) == []
        assert not draft.exists()


def test_collect_removes_abandoned_folders(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=HOUR) as store:
        [key] = put_chain(store, "a", 1, 50 * HOUR)
        shard = file_of(store, key).parent
        collect(store)
        collect(store)
        assert not shard.parent.exists()
        assert store.put([item(key, BLOCK)]) == [PutResult.STORED]


def test_collect_counts_and_keeps_foreign_files(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=HOUR, stale_temp_s=HOUR) as store:
        [key] = put_chain(store, "a", 1, 50 * HOUR)
        shard = file_of(store, key).parent
        foreign = [shard / name for name in ("notes.tmp", ".x.trash", ".nfs01", "aa.blk")]
        for path in foreign:
            path.write_bytes(b"mine")
        assert collect(store).foreign_files == 4
        assert collect(store).foreign_files == 4
        assert all(path.exists() for path in foreign)


def test_collect_redates_block_from_the_future(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=HOUR) as store:
        [key] = put_chain(store, "a", 1, 0)
        ahead = time.time() + 1000 * HOUR
        os.utime(file_of(store, key), (ahead, ahead))
        report = collect(store)
        assert (report.redated_blocks, report.removed_blocks) == (1, 0)
        assert abs(file_of(store, key).stat().st_mtime - time.time()) < 60
        assert collect(store).removed_blocks == 1  # and is an ordinary block from now on


def test_collect_ignores_the_clock_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, ttl_s=2 * HOUR, grace_s=HOUR, capacity_bytes=1) as store:
        keys = chain_keys("a", 3)
        store.put(chain_items(keys, BLOCK))
        for wrong in (0.0, 4e9):
            monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
            SharedDirGc(store).collect()
            assert store.match(keys) == 3


def test_collect_without_server_clock_removes_nothing(tmp_path: Path) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ops, capacity_bytes=1, grace_s=0.0) as store:
        keys = put_chain(store, "a", 3, LATER)
        ops.faults["touch"] = failing(errno.EROFS)
        report = SharedDirGc(store).collect()
        assert report.errors == 1
        assert report.error_text
        assert store.match(keys) == 3


def test_server_clock_recreates_its_file(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        os.unlink(store.tree.clock_path)
        assert abs(store.clock.measure() - time.time()) < 60


def test_collect_continues_after_unreadable_folder(tmp_path: Path) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ops, ttl_s=HOUR) as store:
        keys = put_chain(store, "a", 20, 50 * HOUR)
        bad = str(file_of(store, keys[0]).parent)
        ops.faults["scandir"] = lambda path: failing(errno.EIO)() if path == bad else None
        report = SharedDirGc(store).collect(now=time.time() + LATER)
        assert report.errors == 1
        assert 0 < report.removed_blocks < 20
        assert store.contains(keys[:1]) == [True]


# ---- the thread ---------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_gc_thread_collects_and_stops(tmp_path: Path) -> None:
    with opened(tmp_path, capacity_bytes=2500, low_watermark=1.0, grace_s=0.0) as store:
        keys = chain_keys("a", 6)
        store.put(chain_items(keys, BLOCK))
        thread = GcThread(store, 0.02)
        wait_for(lambda: sum(store.contains(keys)) <= 2)
        thread.stop()
        assert store.match(keys) == 2
        thread.stop()


def test_gc_thread_skips_round_after_another_host(tmp_path: Path) -> None:
    with opened(tmp_path) as store, opened(tmp_path) as other:
        SharedDirGc(other).collect()
        assert not SharedDirGc(store).due(HOUR)
        assert SharedDirGc(store).due(0.0)
        before = os.stat(store.tree.collected_path).st_mtime_ns
        thread = GcThread(store, 1000.0)
        thread.wake()  # but not where someone asked for it
        wait_for(lambda: os.stat(store.tree.collected_path).st_mtime_ns > before)
        thread.stop()


def test_collect_can_be_interrupted(tmp_path: Path) -> None:
    with opened(tmp_path, ttl_s=HOUR) as store:
        keys = put_chain(store, "a", 5, 50 * HOUR)
        assert collect(store, stop=lambda: True).interrupted
        assert store.match(keys) == 5
