"""Copies of plain bytes."""

from __future__ import annotations

import numpy as np


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """A copy that leaves other threads running meanwhile, as assigning a memoryview does not."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
