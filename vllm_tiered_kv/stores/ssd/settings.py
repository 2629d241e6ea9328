"""What can be chosen about a store on a disk, and what it counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FsyncPolicy(str, enum.Enum):
    """What a put acknowledged as DISK survives."""

    GROUP = "group"  # power loss: data, then record, are synced; puts at the same time share syncs
    NEVER = "never"  # death of the process: the system has the bytes and writes them in its time


@dataclass
class SsdCounters:
    """Events since the store was opened; blocks unless the name says otherwise."""

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    bad_blocks: int = 0  # read back with another checksum, and forgotten
    read_errors: int = 0  # could not be read, and forgotten
    failed_blocks: int = 0  # could not be written or made durable, or came with a wrong checksum
    dropped_blocks: int = 0  # no room, or a length or key that cannot be stored
    too_large_blocks: int = 0  # those of them that are larger than a slab
    retired_slots: int = 0  # could not be written, and are not used again before a restart
    syncs: int = 0
    compactions: int = 0


class Backoff:
    """When to try again after a failure: soon, then ever later."""

    def __init__(self, first_seconds: float) -> None:
        self._first = first_seconds
        self._next = first_seconds
        self.until = 0.0  # monotonic time

    def failed(self, now: float) -> float:
        """Seconds until the next try."""
        delay = self._next
        self.until = now + delay
        self._next = min(2 * delay, 16 * self._first)
        return delay

    def succeeded(self) -> None:
        self._next = self._first
        self.until = 0.0
