"""Opening a folder: lock, format, recovery, and making the files fit the capacity.

Every step leaves a folder that opens again after a crash. Nothing is served before what was found
is durable: after a mere restart the journal may still be in the page cache only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.option_values import format_size
from vllm_tiered_kv.stores.namespaces import HasQuota
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.data_file import DataFile
from vllm_tiered_kv.stores.ssd.disk import Disk
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
from vllm_tiered_kv.stores.ssd.record_format import Superblock
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks, RecoveryReport, live_blocks
from vllm_tiered_kv.stores.ssd.shrink import choose_survivors, fits, move_inside


@dataclass(frozen=True)
class OpenFolder:
    """A folder ready for use."""

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
    disk: Disk,
    threads: int,
    progress: Callable[[str], None],
    has_quota: HasQuota,
) -> OpenFolder:
    with ExitStack() as undo:
        make_folder(folder, disk)
        read_superblock(folder)  # a folder that is not ours does not even get a LOCK
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
        journal, live = _recover(
            folder, superblock, budget, data, disk, report, progress, has_quota
        )
        undo.pop_all()
    return OpenFolder(lock, superblock.store, budget, data, journal, live, report)


def _forget_new_folder(folder: Path, disk: Disk) -> None:
    """A folder that could not be made must not bind the next attempt to its slab size."""
    # Data before the journal: with the journal alone `verify` knows that nothing was lost.
    for name in (DATA, JOURNAL + TEMPORARY, JOURNAL, FORMAT + TEMPORARY, FORMAT):
        with suppress(OSError):
            disk.unlink(folder / name)


def _recover(
    folder: Path,
    superblock: Superblock,
    budget: Budget,
    data: DataFile,
    disk: Disk,
    report: RecoveryReport,
    progress: Callable[[str], None],
    has_quota: HasQuota,
) -> tuple[Journal, LiveBlocks]:
    contents = read_journal(disk, folder, superblock.store)
    generation = contents.header.generation if contents.header else 0
    live = live_blocks(contents, superblock.slab_bytes, data.size(), report, has_quota)

    def rewrite() -> Journal:
        nonlocal generation
        generation += 1
        data.sync()  # no record before its block, even if a previous run never synced
        return Journal.create(disk, folder, superblock.store, generation, live.records)

    if not fits(live, budget):
        live = choose_survivors(live, budget, report)
        rewrite().close()
        live = move_inside(live, budget, data, report, progress)
        journal = rewrite()
        _resize(folder, data, budget)
    else:
        # A new one comes before the data has its length: what was missing must not seem to be
        # there, and by this `verify` knows a folder that never held a block.
        fresh = None if _can_go_on(contents, budget, report) else rewrite()
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


def _can_go_on(contents: JournalContents, budget: Budget, report: RecoveryReport) -> bool:
    """A record that is not believed must leave the disk before its slot is used again."""
    return contents.is_clean and not report.dropped and contents.end <= budget.max_journal_records
