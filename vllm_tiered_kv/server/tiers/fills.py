"""Blocks that were received, on their way into their slots.

Native threads copy and hash them. A thread of Python's would need the interpreter before each copy
and again after it, and take it from the loop, which is busy receiving the next blocks just then.
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


class Fills:
    """Whoever calls `collect` is told what has ended: the loop, once it watches the descriptor.
    Until then everybody waits for what he starts."""

    def __init__(self) -> None:
        self._pool = FillPool()
        self._tickets = itertools.count(1)
        self._under_way: dict[int, Filled] = {}
        self._starting = threading.Lock()
        self._collecting = threading.Lock()  # held until all who were told have returned
        self._is_watched = False

    def watch(self, watch: Callable[[int, Callable[[], None]], None]) -> None:
        """`watch` has a loop call something whenever a descriptor is readable."""
        watch(self._pool.descriptor, self.collect)
        self._is_watched = True

    def start(
        self, into: Sequence[memoryview], sources: Sequence[memoryview], filled: Filled
    ) -> None:
        """Copies each source into its place and then calls `filled`, from any thread. The memory
        is kept until then."""
        with self._starting:  # tickets reach the pool in their order
            ticket = next(self._tickets)
            self._under_way[ticket] = filled
            try:
                self._pool.start(ticket, into, sources)
            except BaseException:
                del self._under_way[ticket]
                raise
        if not self._is_watched:
            self.settle()

    def collect(self) -> None:
        with self._collecting:
            for ticket, checksums in self._pool.collect():
                filled = self._under_way.pop(ticket)
                try:
                    filled(checksums)
                except Exception:
                    logger.exception("what was received could not be taken over")

    def settle(self) -> None:
        """Returns when all that was started before has ended, and who had to be told was told."""
        self._pool.wait()
        self.collect()
