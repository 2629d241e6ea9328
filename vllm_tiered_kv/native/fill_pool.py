"""Copies of blocks that nobody waits for in Python, done by native threads."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.native import _cpu


class FillPool:
    """All calls may be made from any thread."""

    def __init__(self) -> None:
        self._native = _cpu.FillPool()

    @property
    def descriptor(self) -> int:
        """Readable while there is something to collect. Closed with this pool."""
        return self._native.descriptor

    def start(
        self,
        ticket: int,
        into: Sequence[memoryview],
        sources: Sequence[memoryview],
        threads: int = 0,
    ) -> None:
        """As `copy_and_hash`, but returns at once: the buffers are held until the ticket was
        collected. Each ticket is larger than the one before."""
        self._native.start(ticket, into, sources, threads)

    def collect(self) -> list[tuple[int, list[int]]]:
        """The tickets that have ended since the last call, with the checksums of their blocks."""
        return self._native.collect()

    def wait(self) -> None:
        """Returns when all that was started before has ended and can be collected."""
        self._native.wait()
