"""Populates the pages of an arena in a background thread, before blocks are written to them."""

from __future__ import annotations

import logging
import threading

from vllm_tiered_kv.native import memory
from vllm_tiered_kv.native.cpu import HostRegion

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20


class Prefaulter:
    """Populates a region of the daemon's memory. Call `close` before unmapping it; idempotent."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._populate, name="tiered-kv-prefault", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _populate(self) -> None:
        for start in range(0, self._region.nbytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, self._region.nbytes - start)
            if self._stop.is_set():
                return
            if not memory.populate(self._region.address + start, length):
                logger.info(
                    "the kernel cannot populate memory in advance; pages are allocated when blocks "
                    "are written"
                )
                return
