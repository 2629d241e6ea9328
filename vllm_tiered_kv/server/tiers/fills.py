"""Copies received blocks into their slots.

Native threads copy and hash the payloads. Python threads would need the GIL before and after each
copy, and compete for it with the event loop, which is busy receiving the next blocks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from vllm_tiered_kv.native.cpu import FillPool

logger = logging.getLogger(__name__)

Filled = Callable[[list[int]], None]
"""Called with the checksums of the blocks that got a slot."""

Watch = Callable[[int, Callable[[], None]], None]
"""Has an event loop call back when a descriptor is readable."""


class Fills:
    """Runs copies on native threads and calls back when they end. `TieredStore` uses it. An event
    loop collects the results; without one, `start` waits for them."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._pool = FillPool()
        self._tickets = itertools.count(1)
        self._in_flight: dict[int, Filled] = {}
        self._starting = threading.Lock()
        self._collecting = threading.Lock()  # held until all callbacks have returned
        self._is_watched = watch is not None
        if watch is not None:
            watch(self._pool.descriptor, self.collect)

    def start(
        self, into: Sequence[memoryview], sources: Sequence[memoryview], filled: Filled
    ) -> None:
        """Copies each source into its slot, then calls `filled` from any thread. Keeps the memory
        alive until then."""
        with self._starting:  # the pool must get tickets in order
            ticket = next(self._tickets)
            self._in_flight[ticket] = filled
            try:
                self._pool.start(ticket, into, sources, 0)
            except BaseException:
                del self._in_flight[ticket]
                raise
        if not self._is_watched:
            self.settle()

    def collect(self) -> None:
        with self._collecting:
            for ticket, checksums in self._pool.collect():
                filled = self._in_flight.pop(ticket)
                try:
                    filled(checksums)
                except Exception:
                    logger.exception("cannot publish received blocks")

    def settle(self) -> None:
        """Waits until all copies started before have ended and their callbacks have returned."""
        self._pool.wait()
        self.collect()
