"""Populates the pages of memory before their first use.

Otherwise the kernel allocates them one by one while blocks are copied, which takes longer than the
copy itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_MADV_POPULATE_WRITE = 23  # since Linux 5.14


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise  # releases the GIL, unlike mmap.madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def populate(address: int, nbytes: int) -> bool:
    """Populates whole pages and keeps their content; False if the kernel does not support it."""
    function = _madvise()
    return function is not None and function(address, nbytes, _MADV_POPULATE_WRITE) == 0
