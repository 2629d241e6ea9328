"""Which releases of vLLM the connector works with, for those who judge without importing it."""

from __future__ import annotations

import re

OLDEST_VLLM = (0, 31)
"""The first release that calls all hooks as the connector needs them. 0.30 has the hooks, but does
not call `wait_for_save` in steps without a forward: an idle engine would not finish its stores."""

NEWEST_TESTED_VLLM = (0, 32)


def parse_version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None
