"""`tiered-kv-server verify`: reports which blocks of an SSD folder are intact or damaged."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_tiered_kv.stores.ssd.verify import describe, verify


def verify_folder(folder: Path) -> int:
    """Prints the report. Returns the exit status: 1 if anything is damaged."""
    report = verify(folder, lambda line: print(line, file=sys.stderr, flush=True))
    for line in describe(report):
        print(line)
    return 0 if report.is_sound else 1
