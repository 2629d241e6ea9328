"""Asynchronous copies of blocks on native threads."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.native import _cpu


class FillPool:
    """Copies received blocks to their slots without blocking the caller. Thread-safe.

    The daemon's event loop starts copies and collects finished ones when `descriptor` is readable.
    """

    def __init__(self) -> None:
        self._native = _cpu.FillPool()

    @property
    def descriptor(self) -> int:
        """Readable while there are finished copies to collect. Closed with this pool."""
        return self._native.descriptor

    def start(
        self,
        ticket: int,
        into: Sequence[memoryview],
        sources: Sequence[memoryview],
        threads: int = 0,
    ) -> None:
        """Like `copy_and_hash`, but returns at once. The buffers are held until the ticket is
        collected. Each ticket must be larger than the one before."""
        self._native.start(ticket, into, sources, threads)

    def collect(self) -> list[tuple[int, list[int]]]:
        """Returns the tickets finished since the last call, with the checksums of their blocks."""
        return self._native.collect()

    def wait(self) -> None:
        """Waits until all copies started before the call have finished and can be collected."""
        self._native.wait()
