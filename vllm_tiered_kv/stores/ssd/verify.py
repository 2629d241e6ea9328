"""Verifies a folder offline and read-only: every record of the journal and every block."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.errors import StoreFormatError
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.namespaces import no_quota
from vllm_tiered_kv.stores.ssd.disk import OsDisk, read_all
from vllm_tiered_kv.stores.ssd.folder import DATA, FORMAT, LOCK, FolderLock, read_superblock
from vllm_tiered_kv.stores.ssd.journal import JournalContents, read_journal
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, decode
from vllm_tiered_kv.stores.ssd.recovery import RecoveryReport, live_blocks

_PROGRESS_BLOCKS = 1000
_SHOWN_KEYS = 10


@dataclass
class VerifyReport:
    """The result of `verify`."""

    good_blocks: int = 0
    good_bytes: int = 0
    bad_keys: list[bytes] = field(default_factory=list)  # the checksum does not match
    unreadable_keys: list[bytes] = field(default_factory=list)  # the disk reports an error
    journal: RecoveryReport = field(default_factory=RecoveryReport)
    journal_missing: bool = False
    is_unused: bool = False  # neither journal nor data: never written, or both were deleted
    seconds: float = 0.0

    @property
    def is_sound(self) -> bool:
        """A torn journal tail is not damage: a crash leaves it, and recovery cuts it off."""
        return not (
            self.bad_keys
            or self.unreadable_keys
            or self.journal_missing
            or self.journal.damaged_records
            or self.journal.dropped
        )


def verify(
    folder: Path, progress: Callable[[str], None] | None = None, disk: OsDisk | None = None
) -> VerifyReport:
    """Verifies a folder. Raises StoreFormatError if it is not a store, StoreLockedError if it is in
    use."""
    if not (folder / FORMAT).exists() and not (folder / LOCK).exists():
        reason = "it has no FORMAT file" if folder.is_dir() else "there is no such folder"
        raise StoreFormatError(str(folder), reason)
    lock = FolderLock(folder, read_only=True)
    try:
        return _verify(folder, disk or OsDisk(), progress or (lambda line: None))
    finally:
        lock.release()


def _verify(folder: Path, disk: OsDisk, progress: Callable[[str], None]) -> VerifyReport:
    begin = time.monotonic()
    report = VerifyReport()
    superblock = read_superblock(folder)
    if superblock is None:  # the first start was interrupted after taking the lock
        report.is_unused = True
        return report
    contents = read_journal(disk, folder, superblock.store)
    report.journal_missing = contents.header is None
    try:
        data = disk.open(folder / DATA, 0)  # O_RDONLY
    except FileNotFoundError:
        _note_if_unused(report, contents, 0)
        live_blocks(contents, superblock.slab_bytes, 0, report.journal, no_quota)
        return report
    try:
        size = disk.size(data)
        _note_if_unused(report, contents, size)
        live = live_blocks(contents, superblock.slab_bytes, size, report.journal, no_quota)
        slots_per_slab = superblock.slab_bytes // ALIGNMENT
        for done, encoded in enumerate(live.records):
            if done % _PROGRESS_BLOCKS == 0:
                progress(f"verified {done} of {len(live.records)} blocks")
            record = decode(encoded.tobytes())
            slab, position = divmod(record.slot, slots_per_slab)
            block = memoryview(bytearray(record.length))
            offset = slab * superblock.slab_bytes + position * aligned(record.length, ALIGNMENT)
            try:
                read_all(disk, data, block, offset)
            except OSError:
                report.unreadable_keys.append(record.key)
                continue
            if cpu.xxh3_64(block) != record.payload_checksum:
                report.bad_keys.append(record.key)
                continue
            report.good_blocks += 1
            report.good_bytes += record.length
    finally:
        disk.close(data)
    report.seconds = time.monotonic() - begin
    progress(f"verified {len(live.records)} blocks")
    return report


def _note_if_unused(report: VerifyReport, contents: JournalContents, data_bytes: int) -> None:
    """Recognises a first start that was interrupted: the data file gets its length only after the
    journal exists."""
    if not contents.exists and not data_bytes:
        report.journal_missing, report.is_unused = False, True


def describe(report: VerifyReport) -> list[str]:
    """The report in lines for people."""
    lines = [
        f"{report.good_blocks} blocks ({format_size(report.good_bytes)}) are sound, "
        f"checked in {report.seconds:.1f} s"
    ]
    if report.journal.torn_bytes:
        lines.append(
            f"the journal ends in {report.journal.torn_bytes} bytes of an unfinished record, as "
            "after a crash; the daemon truncates them"
        )
    if report.is_unused:
        lines.append(
            "there is neither a journal nor data: the first start of the daemon was cut off before "
            "it had made them, or both files were deleted"
        )
    if report.journal_missing:
        lines.append("damaged: the journal is missing or cannot be read")
    if report.journal.damaged_records:
        lines.append(f"damaged: {report.journal.damaged_records} records of the journal")
    for reason, count in report.journal.dropped.items():
        lines.append(f"damaged: {count} blocks: {reason}")
    for what, keys in (
        ("do not match their checksum", report.bad_keys),
        ("cannot be read", report.unreadable_keys),
    ):
        if keys:
            lines.append(f"damaged: {len(keys)} blocks {what}:")
            lines += [f"  {key.hex()}" for key in keys[:_SHOWN_KEYS]]
            if len(keys) > _SHOWN_KEYS:
                lines.append(f"  and {len(keys) - _SHOWN_KEYS} more")
    return lines
