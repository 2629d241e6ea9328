"""Loss of power at any instant, with any part of what was not synced gone, torn or reordered.

A workload runs on a recording disk. For many instants and many fates of the unsynced writes the
folder is rebuilt and recovered. What must hold for every one of them:

- recovery does not raise;
- a key that is reported reads back right, every one of them: a block is synced before its record,
  and a slot is written again only after its block's removal was synced;
- what was acknowledged as DISK, and had not left by then, is there;
- the store goes on working.

The same search with a guard taken away has to find a violation: otherwise it would prove nothing.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import mostly_slow
from tests.stores.ssd_blocks import SMALL, check, key, opened, present
from tests.stores.ssd_power_loss import RecordingDisk, leftovers
from tests.stores.ssd_workload import (
    ACKNOWLEDGE,
    KEYS,
    LEAVE,
    Violation,
    inspect,
    note_departures,
    still_owed,
    work,
)
from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.stores.ssd import committer
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where possible: only the order of calls matters here."""
    shared = Path("/dev/shm")
    base = tmp_path_factory.mktemp("ssd")
    if shared.is_dir():
        base = shared / f"{base.parent.name}-{base.name}-{random.SystemRandom().randrange(1 << 32)}"
        base.mkdir()
    yield base
    shutil.rmtree(base)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody waits for shall become durable within a short workload too."""
    monkeypatch.setattr(committer, "INTERVAL_SECONDS", 0.002)


def record(
    folder: Path,
    seed: int,
    lies: frozenset[str] = frozenset(),
    threads: int = 1,
    steps: int = 80,
    capacities: tuple[int, ...] = (SMALL,),
    fsync: FsyncPolicy = FsyncPolicy.GROUP,
) -> RecordingDisk:
    """A run of the workload, through as many openings as there are capacities."""
    disk = RecordingDisk(folder, lies)
    for number, capacity in enumerate(capacities):
        with opened(folder, capacity, disk=disk, fsync=fsync) as store:
            left = note_departures(store, disk)
            with ThreadPoolExecutor(threads) as pool:
                seeds = [seed + 7 * number + thread for thread in range(threads)]
                workers = [pool.submit(work, store, disk, left, s, steps) for s in seeds]
            for worker in workers:
                worker.result()
            check(store)
            if number < len(capacities) - 1:  # what a smaller capacity evicts has left
                for n in present(store, range(KEYS)):
                    if capacities[number + 1] < capacity:
                        disk.note(LEAVE, key(n))
    return disk


def owed(disk: RecordingDisk, instant: int) -> set[bytes]:
    """Acknowledged as on disk by then, and still here."""
    return still_owed(set(), [(e, name) for time, e, name in disk.log.events if time <= instant])


def search(
    disk: RecordingDisk,
    folder: Path,
    disks: int,
    seed: int,
    capacity: int = SMALL,
    then: Callable[[Path, set[bytes], random.Random], None] | None = None,
    strict: bool = True,
) -> None:
    rng = random.Random(seed)
    for number in range(disks):
        instant = rng.randint(0, disk.log.time)
        found = folder / f"found-{number}"
        leftovers(disk, instant, rng, found)
        if then is not None:
            then(found, owed(disk, instant), rng)
        else:
            inspect(found, owed(disk, instant), capacity, strict)
        shutil.rmtree(found)


@pytest.mark.parametrize("seed", mostly_slow(range(6), 2))
def test_power_loss_at_any_point_recovers(folder: Path, seed: int) -> None:
    disk = record(folder / "store", seed, threads=1 + seed % 3)
    assert len(disk.log.syncs) > 20
    search(disk, folder, 150, seed)


@pytest.mark.parametrize(
    "capacities", mostly_slow([(SMALL, SMALL), (320 << 10, SMALL), (SMALL, 320 << 10)], 1)
)
def test_power_loss_while_resizing_recovers(folder: Path, capacities: tuple[int, ...]) -> None:
    disk = record(folder / "store", 40, capacities=capacities, steps=50)
    search(disk, folder, 150, 40, capacity=max(capacities))
    disk.log.events.clear()  # opened with less space, not everything can be there
    search(disk, folder, 100, 41, capacity=min(capacities))


@pytest.mark.slow
def test_power_loss_during_recovery_recovers(folder: Path) -> None:
    disk = record(folder / "store", 60, threads=2)
    count = 0

    def again(found: Path, owed_keys: set[bytes], rng: random.Random) -> None:
        nonlocal count
        second = RecordingDisk(found)
        for name in owed_keys:
            second.note(ACKNOWLEDGE, name)
        with opened(found, disk=second) as store:
            left = note_departures(store, second)
            work(store, second, left, rng.randrange(1 << 30), 6)
        for attempt in range(4):
            count += 1
            instant = rng.randint(len(owed_keys), second.log.time)
            later = found.parent / f"later-{count}-{attempt}"
            leftovers(second, instant, rng, later)
            inspect(later, owed(second, instant), SMALL)
            shutil.rmtree(later)

    search(disk, folder, 60, 60, then=again)


def test_power_loss_without_syncs_serves_no_wrong_bytes(folder: Path) -> None:
    """FsyncPolicy.NEVER promises nothing after a loss of power, but never a wrong byte."""
    disk = record(folder / "store", 70, fsync=FsyncPolicy.NEVER)
    disk.log.events.clear()
    search(disk, folder, 150, 70, strict=False)


@pytest.mark.parametrize("lie", ["data", "journal", "journal.tmp", "folder"])
def test_power_loss_test_detects_missing_sync(folder: Path, lie: str) -> None:
    disk = record(folder / "store", 80, lies=frozenset({lie}))
    with pytest.raises(Violation):
        search(disk, folder, 400, 80)


def test_power_loss_test_detects_missing_quarantine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_at_once(
        index: DurableIndex, key: bytes, parent: bytes | None, size_class: int
    ) -> int | None:
        index._native.release(index._native.take_quarantined())
        slot = index._native.reserve(key, parent, size_class, 0)
        if slot is None and index._native.make_room(size_class, 1, parent):
            index._native.release(index._native.take_quarantined())
            slot = index._native.reserve(key, parent, size_class, 0)
        return slot

    monkeypatch.setattr(DurableIndex, "reserve", free_at_once)
    monkeypatch.setattr(DurableIndex, "take_quarantined", lambda index: [])
    disk = record(folder / "store", 90)
    with pytest.raises(Violation):
        search(disk, folder, 400, 90)


def test_power_loss_test_detects_records_before_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = committer.Committer._write

    def journal_first(
        self: committer.Committer, records: list[bytes], rewrite: bool, data: bool, everything: bool
    ) -> None:
        write(self, records, rewrite, False, everything)
        if data:
            self._data.sync()

    monkeypatch.setattr(committer.Committer, "_write", journal_first)
    disk = record(folder / "store", 100)
    with pytest.raises(Violation):
        search(disk, folder, 400, 100)
