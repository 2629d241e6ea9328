"""A transfer as plain data: which GPU blocks and which slots, in one direction.

Plans are made by pure code (`cache`), executed elsewhere (`device`); nothing here moves a byte.
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
    """The items at these positions; no step of the interpreter for each, as they are thousands."""
    if isinstance(positions, range) and positions.step == 1:
        return items[positions.start : positions.stop]
    return list(map(items.__getitem__, positions))


@dataclass(frozen=True)
class StoreJob:
    """Blocks of one sequence and group to copy out; reported as "the first n arrived"."""

    job_id: int
    transfer: GroupTransfer


@dataclass(frozen=True)
class LeasedBlocks:
    """Where leased blocks lie in a daemon's memory, and stay until the load is reported.

    A row for each rank, a column for each block. The places mean something only to a process that
    has mapped the memory of this name.
    """

    arena_id: bytes
    ranks: tuple[RankTag, ...]
    offsets: Int64Array
    generations: UInt64Array

    def at(self, columns: slice | Int64Array) -> LeasedBlocks:
        """Some of the blocks."""
        return LeasedBlocks(
            self.arena_id, self.ranks, self.offsets[:, columns], self.generations[:, columns]
        )

    def of_rank(self, rank: RankTag) -> tuple[Int64Array, UInt64Array] | None:
        """Offsets and generations of one rank's blocks."""
        if rank not in self.ranks:
            return None
        row = self.ranks.index(rank)
        return np.ascontiguousarray(self.offsets[row]), self.generations[row]


@dataclass(frozen=True)
class RemoteTransfer:
    """Blocks of one group that a daemon has, and the GPU blocks they go to."""

    group_id: int
    address: str
    block_ids: Int64Array
    keys: tuple[BlockKey, ...]
    leased: LeasedBlocks | None = None
    """Where they lie, if the daemon leased them when it was asked for them."""

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
class Rehearsal:
    """Blocks of one group that a daemon has, to be fetched for nobody: how long that takes tells
    what a load would take."""

    name: str
    group_id: int
    address: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Fetched:
    """What a rehearsal has brought, and how long that took; nothing if it was disturbed."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.nbytes and self.seconds > 0 else 0.0


@dataclass(frozen=True)
class LoadJob:
    """All blocks a waiting request needs; it arrives whole or fails whole.

    Ahead of the step's forward if that reads them already, else beside it.
    """

    request_id: str
    transfers: tuple[GroupTransfer, ...]
    remote: tuple[RemoteTransfer, ...] = ()
    ahead: int | None = None
    """The job to report, of a load ahead of the forward."""


@dataclass(frozen=True)
class PutJob:
    """Blocks in slots of the arena to be sent to a daemon; each rank sends its own shards."""

    job_id: int
    address: str
    group_id: int
    slots: Int64Array
    keys: tuple[BlockKey, ...]
    parents: tuple[BlockKey | None, ...]
