"""Descriptors: each connection of a client is one, and a process may have few unless it asks."""

from __future__ import annotations

import contextlib
import resource
import sys

_MAX_FOR_OTHERS = 1024


def raise_limit() -> None:
    """As far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_connections() -> int:
    """How many of them clients may take, so that enough are left for files and processes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(limit // 4, _MAX_FOR_OTHERS)
