"""Has the kernel provide memory ahead of its first use.

Otherwise it does so page by page while blocks are copied in, which takes longer than the copy.
"""

from __future__ import annotations

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
