"""Tells the C library to keep the memory of large buffers instead of giving it back at once.

zmq allocates a buffer for every frame it receives. Left to itself, glibc returns a block's worth of
memory to the kernel after each one, and the kernel hands it out again page by page, cleared: that
costs more than receiving the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

# From malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more
_KEPT_BYTES = 256 << 20  # free memory at the end of a heap that is not worth returning
_GROWTH_BYTES = 16 << 20


def trim() -> None:
    """Gives back to the system what is free now. Takes a while where that is much."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@functools.cache
def keep_large_buffers() -> bool:
    """Once for the process; False where the C library knows no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(ctypes.c_int(option), ctypes.c_int(value))
        for option, value in (
            (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
            (_M_TRIM_THRESHOLD, _KEPT_BYTES),
            (_M_TOP_PAD, _GROWTH_BYTES),
        )
    )
