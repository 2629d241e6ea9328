"""Ghosts: what a tier remembers of blocks that it has evicted, or that were dropped on their way.

They tell why a block is missing, and what a larger tier would have held. It is the typed interface
of `csrc/index/ghosts.h`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import _cpu

FACTORS = (2, 4)
"""Ghosts tell what a tier with these multiples of the capacity would hold."""

_REACH = 2 * (FACTORS[-1] - 1)
"""Evictions are remembered until the tier's blocks have been evicted so often. Half of that is
enough while no block comes back, and all of it while half of them do."""
_MAX_GHOSTS = 1 << 19  # of about 70 bytes each
_REASONS = tuple(DropReason)


@dataclass(frozen=True)
class Ghost:
    """The last thing that happened to a block which the tier does not hold."""

    seconds_ago: float
    distance: int
    """How many bytes larger an LRU tier would have to be to hold the block still; 0 if it was
    dropped."""
    reason: DropReason | None = None  # why it was dropped; None: it was evicted
    was_sent: bool = False  # a lower tier had received it before it was evicted


class Ghosts:
    """Remembers the blocks that left one tier last. The tier's index reports what it evicts, and
    the ledger and the store planner what is dropped, in the scheduler's thread. Its memory is
    bounded: by `_REACH`, and to about 37 MB."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        """`block_bytes`: of the smallest block of the tier."""
        self.capacity_bytes = capacity_bytes
        self.max = min(_MAX_GHOSTS, _REACH * capacity_bytes // block_bytes)
        self.native = _cpu.Ghosts(self.max)

    def __len__(self) -> int:
        return len(self.native)

    def dropped(self, key: bytes, reason: DropReason) -> None:
        """The block was to be stored and was not, nor were those after it."""
        self.native.dropped(key, _REASONS.index(reason))

    def find(self, key: bytes) -> Ghost | None:
        """What became of a block that the tier does not hold; None if the tier does not know."""
        found = self.native.find(key)
        if found is None:
            return None
        at, distance, reason = found
        return Ghost(
            max(0.0, time.monotonic() - at),
            distance,
            _REASONS[reason] if reason >= 0 else None,
            was_sent=reason == _cpu.Ghosts.EVICTED_AFTER_SENT,
        )

    def evicted_run(self, keys: Sequence[bytes], start: int, stop: int) -> list[int]:
        """The distances of the evicted blocks from position `start` on, without a gap."""
        return self.native.evicted_run(keys, start, stop)
