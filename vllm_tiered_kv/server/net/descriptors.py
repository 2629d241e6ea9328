"""File descriptors: every client connection needs one, and the default soft limit is low."""

from __future__ import annotations

import contextlib
import resource
import sys

_MAX_FOR_OTHERS = 1024


def raise_limit() -> None:
    """Raises the soft limit to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # keep the current limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_connections() -> int:
    """How many descriptors connections may use, so that enough are left for files and processes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(limit // 4, _MAX_FOR_OTHERS)
