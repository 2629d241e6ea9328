"""What this package logs inside an engine appears in vLLM's log, as vLLM's own lines do.

vLLM sets up the logger `vllm` and nothing above it: lines of other packages would be lost below
warnings, and those would have neither time nor process.
"""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Idempotent. Whoever has set up this package's logger, or the root, is left alone; so are
    those who told vLLM to set up none."""
    ours, theirs = logging.getLogger("vllm_tiered_kv"), logging.getLogger("vllm")
    if ours.level != logging.NOTSET or ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
