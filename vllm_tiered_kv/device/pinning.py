"""Pins memory for a GPU, front to back, in a background thread.

Pinning costs about a quarter of a second per gigabyte, most of which the kernel spends on providing
the pages. It is asked for them beforehand: the driver holds up other threads' calls while it pins.
Only the first chunk is pinned before the caller goes on. `ready_bytes` says how far it got; what
lies beyond is not used yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native import prefault
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.option_values import format_size

logger = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 256 << 20
_PROVIDED_AT_ONCE = 64 << 20  # so that closing does not wait for long

Pin = Callable[[int, int], None]  # address, length
Unpin = Callable[[int], None]  # address


class BackgroundPinner:
    """Without `pin` there is nothing to do, and everything is ready. `close` is idempotent."""

    def __init__(
        self,
        region: HostRegion,
        pin: Pin | None,
        unpin: Unpin | None,
        advice: str,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        """`advice` ends the warning that is logged when only a part could be pinned."""
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
            except RuntimeError:  # what stays pinned could not be pinned by a second attempt
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
        self._provide(start, start + length)
        if self._stop.is_set():
            return
        pin(self._region.address + start, length)
        self._pinned.append(self._region.address + start)
        self.ready_bytes = start + length  # published last: readers only ever see pinned bytes

    def _provide(self, start: int, end: int) -> None:
        """Has the kernel provide these bytes, as far as it can: pinning does the rest."""
        for at in range(start, end, _PROVIDED_AT_ONCE):
            length = min(_PROVIDED_AT_ONCE, end - at)
            if self._stop.is_set() or not prefault.populate(self._region.address + at, length):
                return

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
