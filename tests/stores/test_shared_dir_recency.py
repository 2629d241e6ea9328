"""Times of last use in a shared directory: updated rarely, and for the whole chain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.stores.contract import chain_items, chain_keys, item, store_key
from tests.stores.shared_dir_cases import FaultyOps, file_of, opened
from vllm_tiered_kv.core.store import PutItem, StoreKey
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.recency import Recency, Use
from vllm_tiered_kv.stores.shared_dir.store import SharedDirStore

SIZE = 100
INTERVAL = 1000.0
OLD = 5 * INTERVAL


def age(store: SharedDirStore, keys: Iterable[StoreKey], by: float = OLD) -> None:
    for key in keys:
        path = file_of(store, key)
        when = path.stat().st_mtime - by
        os.utime(path, (when, when))


def is_warm(store: SharedDirStore, key: StoreKey) -> bool:
    return abs(time.time() - file_of(store, key).stat().st_mtime) < INTERVAL


def use(store: SharedDirStore, keys: Sequence[StoreKey]) -> None:
    buffers = [memoryview(bytearray(SIZE)) for _ in keys]
    assert store.get(keys, buffers) == [True] * len(keys)
    store.flush()


def old_chain(store: SharedDirStore, count: int) -> list[StoreKey]:
    """A chain that another process put long ago."""
    keys = chain_keys("a", count)
    with opened(Path(store.settings.root)) as other:
        other.put(chain_items(keys, SIZE))
    age(store, keys)
    return keys


def test_use_touches_block_once_per_interval(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 4)
        for _ in range(5):
            use(store, keys)
        assert all(is_warm(store, key) for key in keys)
        assert store.counts.snapshot()[Event.TOUCHED] == 4


def test_use_touched_by_another_host_is_not_touched_again(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 4)
        with opened(tmp_path, touch_interval_s=INTERVAL) as other:
            use(other, keys)
        use(store, keys)
        assert store.counts.snapshot()[Event.TOUCHED] == 0


def test_lookup_is_not_a_use(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 4)
        before = [file_of(store, key).stat() for key in keys]
        assert store.contains(keys) == [True] * 4
        assert store.match(keys) == 4
        assert None not in store.describe(keys)
        store.flush()
        after = [file_of(store, key).stat() for key in keys]
        assert [s.st_ctime_ns for s in after] == [s.st_ctime_ns for s in before]


def test_use_of_tail_touches_the_whole_chain(tmp_path: Path) -> None:
    """The reader has the head elsewhere and reads only the tail."""
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 10)
        use(store, keys[7:9])
        assert [is_warm(store, key) for key in keys] == [True] * 9 + [False]


def test_put_of_tail_touches_its_ancestors(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 5)
        store.put([item(store_key("next"), SIZE, keys[4])])
        store.flush()
        assert all(is_warm(store, key) for key in keys)


def test_touches_go_from_tail_to_head(tmp_path: Path) -> None:
    ops = FaultyOps()
    with opened(tmp_path, ops, touch_interval_s=INTERVAL) as store:
        stem = old_chain(store, 4)
        left, right = store_key("left"), store_key("right")
        store.put([item(left, SIZE, stem[3]), item(right, SIZE, stem[3])])
        store.flush()
        age(store, [*stem, left, right])
        with opened(tmp_path, ops, touch_interval_s=INTERVAL) as fresh:
            ops.calls.clear()
            use(fresh, [*stem[2:], left, right])
            touched = [args[0] for name, args in ops.calls if name == "touch"]
            order = [touched.index(str(file_of(store, key))) for key in (*reversed(stem), left)]
            assert order[:4] == sorted(order[:4])
            assert order[4] < order[0]
            assert touched.index(str(file_of(store, right))) < order[0]


def test_slow_conversation_refreshes_its_head(tmp_path: Path) -> None:
    """New blocks follow each other within the interval; the head must be refreshed all the same."""
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        now = [0.0]
        recency = Recency(
            store.tree, store.ops, store.counts, store.files, store.clock, INTERVAL, lambda: now[0]
        )
        keys = chain_keys("a", 30)
        for turn, (key, parent) in enumerate(zip(keys, [None, *keys[:-1]], strict=True)):
            store.put([PutItem(key, parent, memoryview(bytes(SIZE)))])
            store.flush()
            recency.refresh([Use(key, parent, time.time())])
            for earlier in keys[: turn + 1]:
                assert time.time() - file_of(store, earlier).stat().st_mtime < 1.1 * INTERVAL
            step = 0.4 * INTERVAL
            now[0] += step
            age(store, keys[: turn + 1], by=step)
        recency.close()
        assert store.counts.snapshot()[Event.TOUCHED] < 30 * 30


def test_walk_ends_at_a_gap(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 6)
        store.delete([keys[3]])
        use(store, keys[4:])
        assert [is_warm(store, keys[at]) for at in (0, 1, 2, 4, 5)] == [False] * 3 + [True] * 2


@pytest.mark.timeout(60)
def test_walk_with_cycle_ends(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = chain_keys("a", 3)
        with opened(tmp_path) as other:
            other.put([item(keys[at], SIZE, keys[(at + 1) % 3]) for at in range(3)])
        age(store, keys)
        use(store, keys[:1])
        assert all(is_warm(store, key) for key in keys)


def test_use_corrects_time_in_the_future(tmp_path: Path) -> None:
    with opened(tmp_path, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 2)
        age(store, keys, by=-20 * OLD)
        use(store, keys)
        assert all(is_warm(store, key) for key in keys)


def test_uses_beyond_the_queue_are_dropped_and_counted(tmp_path: Path) -> None:
    held = threading.Event()
    ops = FaultyOps()
    with opened(tmp_path, ops, touch_interval_s=INTERVAL) as store:
        keys = old_chain(store, 1)
        ops.faults["touch"] = lambda path: held.wait(60) and None
        for _ in range(1100):
            assert store.get(keys, [memoryview(bytearray(SIZE))]) == [True]
        held.set()
        assert store.counts.snapshot()[Event.TOUCH_SKIPPED] > 0
