"""`tiered-kv-server verify`: reports which blocks of an SSD folder are intact or damaged."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.ssd.verify import VerifyReport, verify

_SHOWN_KEYS = 10


def verify_folder(folder: Path) -> int:
    """Prints the report. Returns the exit status: 1 if anything is damaged."""
    report = verify(folder, lambda line: print(line, file=sys.stderr, flush=True))
    for line in describe(report):
        print(line)
    return 0 if report.is_sound else 1


def describe(report: VerifyReport) -> list[str]:
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
