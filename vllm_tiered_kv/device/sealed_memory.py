"""Memory without a name that several processes map, of a size that none of them can change."""

from __future__ import annotations

import fcntl
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can shrink it under another's feet."""


def create_sealed(name: str, nbytes: int, flags: int = 0) -> int:
    """A descriptor of fresh memory, the caller's to close; an OSError if it cannot be had."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
