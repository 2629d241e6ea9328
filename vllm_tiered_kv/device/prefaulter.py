"""Provides the memory of an arena in the background, front to back, before blocks need it."""

from __future__ import annotations

import logging
import threading

from vllm_tiered_kv.native import prefault
from vllm_tiered_kv.native.cpu import HostRegion

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20


class Prefaulter:
    """`close` before the memory goes; idempotent."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._provide, name="tiered-kv-prefault", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _provide(self) -> None:
        for start in range(0, self._region.nbytes, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, self._region.nbytes - start)
            if self._stop.is_set():
                return
            if not prefault.populate(self._region.address + start, length):
                logger.info("memory is provided as blocks come: the kernel does not do it earlier")
                return
