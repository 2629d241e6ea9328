"""A transfer as plain data: which GPU blocks and which slots, in one direction.

Plans are made by pure code (`cache`), executed elsewhere (`device`); nothing here moves a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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


def int64_array(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True)
class StoreJob:
    """Blocks of one sequence and group to copy out; reported as "the first n arrived"."""

    job_id: int
    transfer: GroupTransfer


@dataclass(frozen=True)
class LoadJob:
    """All blocks a waiting request needs; it arrives whole or fails whole."""

    request_id: str
    transfers: tuple[GroupTransfer, ...]
