"""Sends this package's log lines to vLLM's log, in vLLM's format.

vLLM configures only the logger `vllm`. Without this, INFO lines of this package would be dropped,
and its warnings would lack time and process.
"""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Adds vLLM's log handlers to this package's logger. Does nothing if the user has configured
    this logger or the root logger, or has told vLLM to configure none. Idempotent."""
    ours, theirs = logging.getLogger("vllm_tiered_kv"), logging.getLogger("vllm")
    if ours.level != logging.NOTSET or ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
