"""Comparing held blocks with recomputed ones, as plain data: what to compare, what was found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array


class Verdict(enum.IntEnum):
    """What became of one block, mildest first: of several ranks the worst one counts."""

    EQUAL = 0
    CLOSE = 1  # other bytes, within the tolerance
    NOT_COMPARED = 2  # the tier had it no more, or there was no copy to compare it with
    DIFFERENT = 3


@dataclass(frozen=True)
class BlockVerdict:
    verdict: Verdict
    largest: float = 0.0  # as in `block_compare.Comparison`
    overall: float = 0.0
    layer: str = ""


@dataclass(frozen=True)
class VerifyJob:
    """Blocks of one group that a step has computed again, though a tier holds them.

    `copy` takes them from the GPU to spare slots of the arena. There they are compared with the
    blocks in `held_slots`, or with those of the daemon at `address`.
    """

    job_id: int
    copy: GroupTransfer
    keys: tuple[BlockKey, ...]
    block_bytes: int
    held_slots: Int64Array | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if (self.held_slots is None) == (self.address is None):
            raise ValueError("a block to verify lies in the CPU tier or in a daemon")
        if len(self.copy) != len(self.keys):
            raise ValueError(f"{len(self.copy)} copies of {len(self.keys)} blocks")

    @property
    def tier(self) -> Tier:
        return Tier.CPU if self.address is None else Tier.REMOTE
