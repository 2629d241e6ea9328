"""Comparisons under way: the blocks they pin, the spare slots they use, what they found.

A verified block is pinned, and the slot of its recomputed copy reserved, only from the plan of that
copy to the last rank's report; nothing is held while the request is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

_SPARE_SHARE = 8
"""One slot in so many may be lent to comparisons: they must not push out what they are about."""


@dataclass
class _Open:
    tier: Tier
    size_class: int
    keys: list[BlockKey]
    spare: list[int]
    pinned: list[int]
    is_void: bool = False
    reports: list[Sequence[BlockVerdict]] = field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """One comparison that all ranks have reported: its blocks, and the worst word on each."""

    tier: Tier
    blocks: tuple[tuple[BlockKey, BlockVerdict], ...]
    slots: tuple[int, ...] = ()  # where they lay in the CPU tier

    @property
    def different(self) -> list[tuple[BlockKey, BlockVerdict]]:
        return [block for block in self.blocks if block[1].verdict is Verdict.DIFFERENT]


class VerificationLedger:
    def __init__(
        self, index: BlockIndex, ledger: TransferLedger, recorder: Recorder, num_ranks: int
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._recorder = recorder
        self._num_ranks = num_ranks
        self._open: dict[int, _Open] = {}
        self._overdue: set[int] = set()  # those of them that nobody waits for any more
        self._spare_in_use: dict[int, int] = {}  # by size class
        self._spare_keys = 0

    @property
    def has_open(self) -> bool:
        return len(self._open) > len(self._overdue)

    def pin(self, key: BlockKey) -> int | None:
        """The slot of a block of the CPU tier, which stays; None if it has left."""
        if self._index.lookup(key) is not Lookup.HIT:
            return None
        return self._index.pin([key])[0]

    def unpin(self, slot: int) -> None:
        self._index.unpin([slot])

    def spare_slot(self, size_class: int) -> int | None:
        """A slot for a copy of a recomputed block; None if all that may be used are in use."""
        geometry = self._index.geometry
        most = geometry.capacity_bytes // geometry.slot_bytes[size_class] // _SPARE_SHARE
        in_use = self._spare_in_use.get(size_class, 0)
        if in_use >= max(1, most):
            return None
        # Longer than any key of a block, so nobody ever looks for it.
        self._spare_keys += 1
        name = b"recomputed block " + self._spare_keys.to_bytes(8, "big")
        slot = self._index.reserve(name, None, size_class)
        if slot is not None:
            self._spare_in_use[size_class] = in_use + 1
        return slot

    def open(
        self,
        tier: Tier,
        size_class: int,
        keys: Sequence[BlockKey],
        spare: Sequence[int],
        pinned: Sequence[int],
        block_ids: Int64Array,
    ) -> int:
        """A job id for a comparison of these GPU blocks; takes over the pins and spare slots."""
        job_id = self._ledger.new_job()
        self._open[job_id] = _Open(tier, size_class, list(keys), list(spare), list(pinned))
        self._ledger.fence.begin_read(job_id, block_ids)
        return job_id

    def void(self) -> None:
        """What is being compared turned out not to be what the keys say: reports tell nothing."""
        for comparison in self._open.values():
            comparison.is_void = True

    def give_up_reports(self) -> int:
        """As `TransferLedger.give_up_reports`."""
        overdue = self._open.keys() - self._overdue
        for job_id in overdue:
            self.skip(len(self._open[job_id].keys), self._open[job_id].tier)
        self._overdue |= overdue
        return len(overdue)

    def skip(self, blocks: int, tier: Tier) -> None:
        """Blocks that were to be compared and will not be."""
        self._recorder.add(names.UNVERIFIED_BLOCKS, blocks, tier.value)

    def report(self, job_id: int, reports: Iterable[Sequence[BlockVerdict]]) -> Findings | None:
        """What ranks say; the findings when the last one has, unless they are void."""
        comparison = self._open[job_id]
        comparison.reports.extend(reports)
        if len(comparison.reports) > self._num_ranks:
            raise InvariantError(f"job {job_id} was reported by more ranks than there are")
        if len(comparison.reports) < self._num_ranks:
            return None
        del self._open[job_id]
        self._ledger.fence.end_read(job_id)
        self._let_go(comparison)
        if job_id in self._overdue:
            self._overdue.discard(job_id)
            return None
        if comparison.is_void:
            self.skip(len(comparison.keys), comparison.tier)
            return None
        worst = [
            max(of_ranks, key=lambda verdict: verdict.verdict)
            for of_ranks in zip(*comparison.reports, strict=True)
        ]
        self._count(comparison.tier, worst)
        blocks = tuple(zip(comparison.keys, worst, strict=True))
        return Findings(comparison.tier, blocks, tuple(comparison.pinned))

    def _let_go(self, comparison: _Open) -> None:
        self._index.unpin(comparison.pinned)
        for slot in comparison.spare:
            self._index.abort(slot)
        self._spare_in_use[comparison.size_class] -= len(comparison.spare)

    def _count(self, tier: Tier, verdicts: Sequence[BlockVerdict]) -> None:
        of_kind = {kind: sum(v.verdict is kind for v in verdicts) for kind in Verdict}
        skipped = of_kind[Verdict.NOT_COMPARED]
        self.skip(skipped, tier)
        self._recorder.add(names.VERIFIED_BLOCKS, len(verdicts) - skipped, tier.value)
        self._recorder.add(names.INEXACT_BLOCKS, of_kind[Verdict.CLOSE], tier.value)
        self._recorder.add(names.DIFFERING_BLOCKS, of_kind[Verdict.DIFFERENT], tier.value)
