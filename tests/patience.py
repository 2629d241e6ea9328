"""Waiting for what other threads and processes do, however long a busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Said = TypeVar("Said")


def eventually(ask: Callable[[], Said], seconds: float = 60.0) -> Said:
    """Asks until the answer is not empty, zero or False, and returns it."""
    end = time.monotonic() + seconds
    while not (said := ask()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return said
