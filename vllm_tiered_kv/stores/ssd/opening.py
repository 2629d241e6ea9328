"""Opens a folder: lock, format, recovery, and fitting the files to the capacity.

After every step a crash leaves a folder that can be opened again. Nothing is served before the
recovered state is durable: after a restart of the process alone, the journal may still be in the
page cache only.

To shrink a folder, the coldest blocks are evicted, and blocks beyond the new end of the data file
are copied to free slots before it. The order is: make a journal without the evicted blocks
durable; write the copies to their slots and make them durable; make a second journal with the new
slots durable; truncate the data file. A folder that crashed in between is shrunk again when it is
opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_tiered_kv.cache.durable_index import DurableIndex, SlotPool
from vllm_tiered_kv.core.arena_geometry import SlabGeometry
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.namespaces import QuotaOf
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.data_file import DataFile
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.folder import (
    DATA,
    FORMAT,
    JOURNAL,
    TEMPORARY,
    FolderLock,
    make_folder,
    read_superblock,
    write_superblock,
)
from vllm_tiered_kv.stores.ssd.journal import (
    Journal,
    JournalContents,
    open_journal,
    read_journal,
)
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, Superblock, decode, rows_of
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks, RecoveryReport, live_blocks

LEFT = "the space was made smaller"  # reason in the recovery report
_PROGRESS_BLOCKS = 1000


def fits(live: LiveBlocks, budget: Budget) -> bool:
    """Whether all blocks lie within the data file and the journal has room for them."""
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    last = int(live.records["slot"].max(initial=0))
    return last < budget.num_slabs * slots_per_slab and len(live.records) <= budget.max_blocks


def geometry_for(live: LiveBlocks, num_slabs: int, slab_bytes: int) -> SlabGeometry:
    geometry = SlabGeometry(num_slabs * slab_bytes, slab_bytes, ALIGNMENT)
    for _, slot_bytes in live.class_shapes:
        geometry.add_class(slot_bytes)
    return geometry


def choose_survivors(live: LiveBlocks, budget: Budget, report: RecoveryReport) -> LiveBlocks:
    """Evicts the coldest leaves of all chains until the rest fits the budget."""
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    old_slabs = int(live.records["slot"].max(initial=0)) // slots_per_slab + 1
    gone: set[int] = set()
    geometry = geometry_for(live, old_slabs, budget.slab_bytes)
    index = DurableIndex(geometry, "lru", on_leave=gone.add)
    index.restore_rows(rows_of(live.records), live.classes)
    slots = live.records["slot"].tolist()
    class_of = dict(zip(slots, live.classes.tolist(), strict=True))
    per_slab = [geometry.slots_in_slab(c) for c in range(len(live.class_shapes))]
    counts = np.bincount(live.classes, minlength=len(per_slab)).tolist()
    evicted = 0
    while _slabs(counts, per_slab) > budget.num_slabs or sum(counts) > budget.max_blocks:
        index.evict_coldest()
        for slot in gone:
            counts[class_of.pop(slot)] -= 1
            evicted += 1
        gone.clear()
    report.drop(LEFT, evicted)
    return select(live, [slot in class_of for slot in slots])


def _slabs(counts: list[int], per_slab: list[int]) -> int:
    return sum(-(-count // per) for count, per in zip(counts, per_slab, strict=True))


def select(live: LiveBlocks, stays: list[bool]) -> LiveBlocks:
    chosen = np.array(stays, np.bool_)
    return replace(live, records=live.records[chosen], classes=live.classes[chosen])


def move_inside(
    live: LiveBlocks,
    budget: Budget,
    data: DataFile,
    report: RecoveryReport,
    progress: Callable[[str], None],
) -> LiveBlocks:
    """Copies blocks beyond the new end of the file to free slots before it, hottest first."""
    geometry = geometry_for(live, budget.num_slabs, budget.slab_bytes)
    pool = SlotPool(geometry)
    end = budget.num_slabs * geometry.slots_per_slab
    records = live.records.copy()
    inside = records["slot"] < end
    pool.adopt(records["slot"][inside].tolist(), live.classes[inside].tolist())
    outside = np.flatnonzero(~inside).tolist()
    stays = [True] * len(records)
    for done, row in enumerate(reversed(outside)):
        if done % _PROGRESS_BLOCKS == 0:
            progress(f"moving blocks: {done} of {len(outside)}")
        size_class = int(live.classes[row])
        target = pool.allocate(size_class)
        if target is None:
            stays[row] = False
            report.drop(LEFT, 1)
            continue
        old = decode(records[row].tobytes())
        block = memoryview(bytearray(old.length))
        try:
            data.read(geometry.offset(old.slot, size_class), block)
            good = cpu.xxh3_64(block) == old.payload_checksum
            if good:
                data.write(geometry.offset(target, size_class), block)
        except OSError:
            good = False
        if not good:
            stays[row] = False
            pool.release(target)
            report.drop("could not be moved", 1)
            continue
        records[row]["slot"] = target
    return select(replace(live, records=records), stays)


@dataclass(frozen=True)
class OpenFolder:
    """A folder that is open and recovered; `SsdStore` takes over its parts."""

    lock: FolderLock
    store: bytes
    budget: Budget
    data: DataFile
    journal: Journal
    live: LiveBlocks
    report: RecoveryReport

    def close(self) -> None:
        self.journal.close()
        self.data.close()
        self.lock.release()


def open_folder(
    folder: Path,
    capacity_bytes: int,
    slab_bytes: int | None,
    disk: OsDisk,
    threads: int,
    progress: Callable[[str], None],
    quota_of: QuotaOf,
) -> OpenFolder:
    with ExitStack() as undo:
        make_folder(folder, disk)
        read_superblock(folder)  # raises before a LOCK file is created in a foreign folder
        lock = FolderLock(folder)
        undo.callback(lock.release)
        superblock = read_superblock(folder)
        if superblock is None:
            slab = Budget.divide(capacity_bytes, slab_bytes).slab_bytes
            superblock = Superblock(os.urandom(16), slab)
            undo.callback(_forget_new_folder, folder, disk)
            write_superblock(folder, superblock, disk)
        budget = Budget.divide(capacity_bytes, superblock.slab_bytes)
        data = DataFile(disk, folder, threads)
        undo.callback(data.close)
        report = RecoveryReport()
        journal, live = _recover(folder, superblock, budget, data, disk, report, progress, quota_of)
        undo.pop_all()
    return OpenFolder(lock, superblock.store, budget, data, journal, live, report)


def _forget_new_folder(folder: Path, disk: OsDisk) -> None:
    """Removes the files of a folder that could not be created, so that the next attempt can choose
    another slab size."""
    # Data before the journal: `verify` reports no loss for an empty journal without data.
    for name in (DATA, JOURNAL + TEMPORARY, JOURNAL, FORMAT + TEMPORARY, FORMAT):
        with suppress(OSError):
            disk.unlink(folder / name)


def _recover(
    folder: Path,
    superblock: Superblock,
    budget: Budget,
    data: DataFile,
    disk: OsDisk,
    report: RecoveryReport,
    progress: Callable[[str], None],
    quota_of: QuotaOf,
) -> tuple[Journal, LiveBlocks]:
    contents = read_journal(disk, folder, superblock.store)
    generation = contents.header.generation if contents.header else 0
    live = live_blocks(contents, superblock.slab_bytes, data.size(), report, quota_of)

    def rewrite() -> Journal:
        nonlocal generation
        generation += 1
        data.sync()  # blocks before their records, even if the previous run never synced
        return Journal.create(disk, folder, superblock.store, generation, live.records)

    if not fits(live, budget):
        live = choose_survivors(live, budget, report)
        rewrite().close()
        live = move_inside(live, budget, data, report, progress)
        journal = rewrite()
        _resize(folder, data, budget)
    else:
        # Write a new journal before the data file gets its length: records beyond the old end must
        # not become valid by the extension, and `verify` recognises an unused folder by this order.
        fresh = None if _can_append(contents, budget, report) else rewrite()
        try:
            _resize(folder, data, budget)
            data.sync()
        except BaseException:
            if fresh is not None:
                fresh.close()
            raise
        journal = fresh or open_journal(disk, folder, contents)
        journal.sync()
    disk.sync_folder(folder)
    data.sync()
    report.blocks = len(live.records)
    report.bytes = int(live.records["length"].sum(dtype=np.int64))
    return journal, live


def _resize(folder: Path, data: DataFile, budget: Budget) -> None:
    try:
        data.resize(budget.data_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        space = format_size(budget.capacity_bytes)
        raise ConfigError(
            "ssd_space", f"the file system of {folder} has no room for {space} ({error.strerror})"
        ) from error


def _can_append(contents: JournalContents, budget: Budget, report: RecoveryReport) -> bool:
    """Whether the journal can be appended to. A dropped record must leave the disk before its slot
    is reused, which takes a new journal."""
    return contents.is_clean and not report.dropped and contents.end <= budget.max_journal_records
