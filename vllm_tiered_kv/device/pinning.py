"""Populates the pages of memory in a background thread, and pins them for a GPU, from the lowest
address to the highest.

Pinning takes about a quarter of a second per gigabyte, most of it in the kernel to allocate pages.
The pages are populated before they are pinned, because the CUDA driver blocks the calls of other
threads while it pins. Only the first chunk is pinned before the constructor returns. `ready_bytes`
is the size of the pinned part; the rest is not used yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native import memory
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.options import format_size

logger = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 256 << 20
_POPULATE_BYTES = 64 << 20  # small, so that `close` does not wait for long

Pin = Callable[[int, int], None]  # address, length
Unpin = Callable[[int], None]  # address


def populate(region: HostRegion, start: int, end: int, stop: threading.Event) -> bool:
    """Asks the kernel to allocate the pages of a part of the region, until `stop`; False if it
    cannot: then they are allocated when they are pinned or written."""
    return all(
        stop.is_set() or memory.populate(region.address + at, min(_POPULATE_BYTES, end - at))
        for at in range(start, end, _POPULATE_BYTES)
    )


class Prefaulter:
    """Populates a region of the daemon's memory before blocks are written to it. Call `close`
    before unmapping it; idempotent."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._populate, name="tiered-kv-prefault", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _populate(self) -> None:
        if not populate(self._region, 0, self._region.nbytes, self._stop):
            logger.info(
                "the kernel cannot populate memory in advance; pages are allocated when blocks "
                "are written"
            )


class BackgroundPinner:
    """Pins a region chunk by chunk. The owner of the region creates and closes it.

    Any thread may read `ready_bytes`. Without `pin` the whole region is ready at once. `close` is
    idempotent.
    """

    def __init__(
        self,
        region: HostRegion,
        pin: Pin | None,
        unpin: Unpin | None,
        advice: str,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        """`advice` is appended to the warning that is logged if pinning fails halfway."""
        self._region = region
        self._unpin = unpin
        self._advice = advice
        self._chunk_bytes = chunk_bytes
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.ready_bytes = region.nbytes
        if pin is not None:
            self.ready_bytes = 0
            self._pin_next(pin)
            thread = threading.Thread(
                target=self._pin_all, args=(pin,), name="tiered-kv-pin", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # unpin, so that a second attempt can pin the same memory
                self.close()
                raise
            self._thread = thread

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._pinned and self._unpin is not None:
            self._unpin(self._pinned.pop())

    def _pin_next(self, pin: Pin) -> None:
        start = self.ready_bytes
        length = min(self._chunk_bytes, self._region.nbytes - start)
        populate(self._region, start, start + length, self._stop)
        if self._stop.is_set():
            return
        pin(self._region.address + start, length)
        self._pinned.append(self._region.address + start)
        self.ready_bytes = start + length  # published last: readers only ever see pinned bytes

    def _pin_all(self, pin: Pin) -> None:
        while self.ready_bytes < self._region.nbytes and not self._stop.is_set():
            try:
                self._pin_next(pin)
            except CudaError as error:
                logger.warning(
                    "only %s of %s could be pinned (%s); %s",
                    format_size(self.ready_bytes),
                    format_size(self._region.nbytes),
                    error,
                    self._advice,
                )
                return
