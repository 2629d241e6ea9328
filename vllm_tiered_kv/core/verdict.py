"""Verification of held blocks against recomputed ones, as plain data: jobs and verdicts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array


class Verdict(enum.IntEnum):
    """Verdict on one block, from best to worst. With several ranks the worst verdict counts."""

    EQUAL = 0  # byte by byte
    CLOSE = 1  # different bytes, within the tolerance
    NOT_COMPARED = 2  # the tier no longer had the block, or the recomputed copy was missing
    DIFFERENT = 3


@dataclass(frozen=True)
class BlockVerdict:
    """One rank's verdict on one block, with the differences of the worst layer."""

    verdict: Verdict
    largest: float = 0.0
    """Largest difference of an element relative to the largest value of its layer; infinite if it
    cannot be computed."""
    overall: float = 0.0
    """L2 norm of the differences relative to the L2 norm of the layer."""
    layer: str = ""  # name of the worst layer


@dataclass(frozen=True)
class VerifyJob:
    """Blocks of one group that a step recomputed although a tier holds them.

    `copy` moves them from the GPU to spare slots of the arena. The worker compares them there with
    the blocks in `held_slots`, or with those of the daemon at `address`.
    """

    job_id: int
    copy: GroupTransfer
    keys: tuple[BlockKey, ...]
    block_bytes: int
    held_slots: Int64Array | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if (self.held_slots is None) == (self.address is None):
            raise ValueError("a verify job needs either held_slots or address")
        if len(self.copy) != len(self.keys):
            raise ValueError(
                f"copy and keys differ in length: {len(self.copy)} and {len(self.keys)}"
            )

    @property
    def tier(self) -> Tier:
        return Tier.CPU if self.address is None else Tier.REMOTE
