"""Descriptors: each connection of a client is one, and a process may have few unless it asks."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> int:
    """As far as this user may; how many there can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
