"""Memory of the process: pages provided ahead of their use, buffers that malloc keeps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23  # since Linux 5.14


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise  # lets go of the GIL, unlike mmap.madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def populate(address: int, nbytes: int) -> bool:
    """Provides whole pages and changes no byte of them; False where the kernel cannot."""
    function = _madvise()
    return function is not None and function(address, nbytes, _MADV_POPULATE_WRITE) == 0


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
