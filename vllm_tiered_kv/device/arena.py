"""The memory of the CPU tier: one anonymous mapping, pinned in the background when there is a GPU.

Pinning costs about a tenth of a second per gigabyte. Only the first chunk is pinned before the
engine goes on; the rest follows in a thread, front to back, which is also the order slots are
handed out in. `ready_bytes` says how far it got; a slot beyond it is not used yet.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_tiered_kv.config import format_size
from vllm_tiered_kv.errors import ConfigError, CudaError
from vllm_tiered_kv.native.cpu import HostRegion

logger = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 256 << 20


class Arena:
    """`nbytes` of memory at a fixed address. `close` is idempotent and gives everything back."""

    def __init__(
        self,
        nbytes: int,
        pin: Callable[[int, int], None] | None = None,
        unpin: Callable[[int], None] | None = None,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        _require_memory(nbytes)
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages: faster pinning
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8)
        self.nbytes = nbytes
        self.pin_chunk_bytes = chunk_bytes
        self.region = HostRegion(self._view.ctypes.data, nbytes)
        self._unpin = unpin
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self._pinner: threading.Thread | None = None
        self.ready_bytes = nbytes
        if pin is not None:
            self.ready_bytes = 0
            self._pin_next(pin, chunk_bytes)
            self._pinner = threading.Thread(
                target=self._pin_all, args=(pin, chunk_bytes), name="tiered-kv-pin", daemon=True
            )
            self._pinner.start()

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        """A view of part of the arena; for tests and checks."""
        assert self._view is not None, "the arena is closed"
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        self._stop.set()
        if self._pinner is not None:
            self._pinner.join()
            self._pinner = None
        while self._pinned and self._unpin is not None:
            self._unpin(self._pinned.pop())
        if self._view is not None:
            self._view = None
            # A caller still holding a view keeps the mapping alive; it goes with that view.
            with contextlib.suppress(BufferError):
                self._map.close()

    def _pin_next(self, pin: Callable[[int, int], None], chunk_bytes: int) -> None:
        start = self.ready_bytes
        length = min(chunk_bytes, self.nbytes - start)
        pin(self.region.address + start, length)
        self._pinned.append(self.region.address + start)
        self.ready_bytes = start + length  # published last: readers only ever see pinned bytes

    def _pin_all(self, pin: Callable[[int, int], None], chunk_bytes: int) -> None:
        while self.ready_bytes < self.nbytes and not self._stop.is_set():
            try:
                self._pin_next(pin, chunk_bytes)
            except CudaError as error:
                logger.warning(
                    "only %s of %s of the CPU tier could be pinned (%s); the rest stays unused. "
                    "Lower cpu_memory or raise the limit of locked memory (ulimit -l)",
                    format_size(self.ready_bytes),
                    format_size(self.nbytes),
                    error,
                )
                return


def _require_memory(nbytes: int) -> None:
    limit = memory_limit()
    if nbytes > limit:
        raise ConfigError(
            "cpu_memory",
            f"{format_size(nbytes)} for this worker is more than the machine or container has "
            f"({limit / 2**30:.1f}GiB); choose less",
        )


def memory_limit() -> int:
    """Physical memory, or the container's limit where that is lower."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or the word "max"
            limit = min(limit, int(Path("/sys/fs/cgroup", name).read_text()))
    return limit
