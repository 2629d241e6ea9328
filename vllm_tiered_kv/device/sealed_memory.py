"""Anonymous memory that several processes map and none of them can resize."""

from __future__ import annotations

import fcntl
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Shrinking memory that another process has mapped would make that process crash (SIGBUS)."""


def create_sealed(name: str, nbytes: int, flags: int = 0) -> int:
    """Creates memory and returns its descriptor, which the caller closes; OSError on failure."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
