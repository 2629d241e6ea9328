"""Transfers as plain data: which GPU blocks are copied from or to which slots.

`cache` plans transfers and `device` executes them; the code here moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.core.key import BlockKey, RankTag

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class GroupTransfer:
    """Block/slot pairs of one KV-cache group, in chain order (heads before tails)."""

    group_id: int
    block_ids: Int64Array
    slots: Int64Array

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.slots):
            raise ValueError(
                f"block_ids and slots differ in length: {len(self.block_ids)} and {len(self.slots)}"
            )

    def __len__(self) -> int:
        return len(self.block_ids)

    def head(self, count: int) -> GroupTransfer:
        """The first `count` pairs."""
        return GroupTransfer(self.group_id, self.block_ids[:count], self.slots[:count])


_T = TypeVar("_T")


def int64_array(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def pick(items: Sequence[_T], positions: Sequence[int]) -> Sequence[_T]:
    """Returns the items at these positions.

    Avoids a Python loop, because callers pass thousands of positions.
    """
    if isinstance(positions, range) and positions.step == 1:
        return items[positions.start : positions.stop]
    return list(map(items.__getitem__, positions))


@dataclass(frozen=True)
class StoreJob:
    """Blocks of one sequence and group to copy from the GPU to the arena.

    A worker reports how many leading blocks were stored.
    """

    job_id: int
    transfer: GroupTransfer


MAX_LEASE_AGE_S = 2.0
"""Step loads use leases of lookups up to this age. Workers keep the memory of a daemon that has
gone mapped for longer."""


@dataclass(frozen=True)
class LeasedBlocks:
    """Locations of leased blocks in a daemon's shared memory, valid until the load is reported.

    The arrays have a row per rank and a column per block. Offsets are meaningful only to a process
    that has mapped the arena with this id.
    """

    arena_id: bytes
    ranks: tuple[RankTag, ...]
    offsets: Int64Array
    generations: UInt64Array

    def at(self, columns: slice | Int64Array) -> LeasedBlocks:
        """Returns the entries of a subset of the blocks."""
        return LeasedBlocks(
            self.arena_id, self.ranks, self.offsets[:, columns], self.generations[:, columns]
        )

    def of_rank(self, rank: RankTag) -> tuple[Int64Array, UInt64Array] | None:
        """Returns the offsets and generations of one rank's blocks; None for an unknown rank."""
        if rank not in self.ranks:
            return None
        row = self.ranks.index(rank)
        return np.ascontiguousarray(self.offsets[row]), self.generations[row]


@dataclass(frozen=True)
class RemoteTransfer:
    """Blocks of one group to load from a daemon, and the GPU blocks that receive them."""

    group_id: int
    address: str
    block_ids: Int64Array
    keys: tuple[BlockKey, ...]
    leased: LeasedBlocks | None = None
    """Their locations, if the daemon leased them in its reply to the lookup."""

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.keys):
            raise ValueError(
                f"block_ids and keys differ in length: {len(self.block_ids)} and {len(self.keys)}"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, stop: int) -> RemoteTransfer:
        return RemoteTransfer(
            self.group_id,
            self.address,
            self.block_ids[start:stop],
            self.keys[start:stop],
            None if self.leased is None else self.leased.at(slice(start, stop)),
        )


@dataclass(frozen=True)
class ProbeJob:
    """A background probe: fetches blocks of one group from a daemon to measure the bandwidth.

    The fetched bytes are discarded.
    """

    name: str
    group_id: int
    address: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Fetched:
    """Result of a background probe: bytes and seconds; both are 0 if it was disturbed."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.nbytes and self.seconds > 0 else 0.0


@dataclass(frozen=True)
class LoadJob:
    """All blocks a request loads. The load succeeds or fails as a whole.

    It runs ahead of the step's forward pass if that already reads the blocks, otherwise
    concurrently with it.
    """

    request_id: str
    transfers: tuple[GroupTransfer, ...]
    remote: tuple[RemoteTransfer, ...] = ()
    step_load: int | None = None
    """Job id to report if the load runs ahead of the forward pass."""


@dataclass(frozen=True)
class PutJob:
    """Blocks in the arena to send to a daemon; each rank sends its own shards."""

    job_id: int
    address: str
    group_id: int
    slots: Int64Array
    keys: tuple[BlockKey, ...]
    parents: tuple[BlockKey | None, ...]


@dataclass(frozen=True)
class FetchJob:
    """Blocks to fetch from a daemon into reserved slots of the arena, ahead of a request; each rank
    fetches its own shards. A worker reports how many leading blocks it has."""

    job_id: int
    address: str
    group_id: int
    slots: Int64Array
    keys: tuple[BlockKey, ...]
