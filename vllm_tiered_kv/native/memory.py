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
        function = ctypes.CDLL(None).madvise  # releases the GIL, unlike mmap.madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def populate(address: int, nbytes: int) -> bool:
    """Populates whole pages and keeps their content; False if the kernel does not support it."""
    function = _madvise()
    return function is not None and function(address, nbytes, _MADV_POPULATE_WRITE) == 0


# From malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc accepts no larger value
_KEPT_BYTES = 256 << 20  # free memory at the end of a heap that glibc keeps
_GROWTH_BYTES = 16 << 20
_PROBE_BYTES = 64 << 20  # address space that is never touched


def trim() -> None:
    """Returns free memory to the system, which takes a while if there is much of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@functools.cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    """None without glibc 2.33, or if another malloc is preloaded, of which glibc knows nothing."""
    try:
        library = ctypes.CDLL(None)
        function, malloc, free = library.mallinfo2, library.malloc, library.free
    except (OSError, AttributeError):
        return None
    function.restype, malloc.restype = _MallInfo, ctypes.c_void_p
    malloc.argtypes, free.argtypes, free.restype = (ctypes.c_size_t,), (ctypes.c_void_p,), None
    before = _handed_out(function())
    probe = malloc(_PROBE_BYTES)
    grown = _handed_out(function()) - before
    free(probe)
    return function if grown > _PROBE_BYTES // 2 else None


def _handed_out(info: _MallInfo) -> int:
    return int(info.uordblks + info.hblkhd)


def allocated_bytes() -> int | None:
    """What malloc has handed out and not got back, without free memory that it keeps; None if only
    another malloc than glibc's knows it."""
    function = _mallinfo()
    return None if function is None else _handed_out(function())


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
