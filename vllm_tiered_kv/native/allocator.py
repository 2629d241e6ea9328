"""Configures the C library to keep the memory of large buffers instead of returning it at once.

zmq allocates a buffer for every frame it receives. By default glibc returns the memory of such a
buffer to the kernel when it is freed, and the kernel allocates and clears it again page by page,
which takes longer than receiving the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

# From malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc accepts no larger value
_KEPT_BYTES = 256 << 20  # free memory at the end of a heap that glibc keeps
_GROWTH_BYTES = 16 << 20


def trim() -> None:
    """Returns free memory to the system, which takes a while if there is much of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@functools.cache
def keep_large_buffers() -> bool:
    """Applies the settings once per process; False if the C library does not support them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(ctypes.c_int(option), ctypes.c_int(value))
        for option, value in (
            (_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD),
            (_M_TRIM_THRESHOLD, _KEPT_BYTES),
            (_M_TOP_PAD, _GROWTH_BYTES),
        )
    )
