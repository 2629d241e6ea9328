"""What pytest's own report says, whatever else its process has printed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count_passed(report: Path) -> int:
    """Tests that passed, of a file that pytest wrote for `--junitxml`; 0 if there is none."""
    if not report.exists():
        return 0
    count = 0
    for suite in ElementTree.parse(report).iter("testsuite"):
        count += int(suite.get("tests", 0))
        count -= sum(int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped"))
    return count
