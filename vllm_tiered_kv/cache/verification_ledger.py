"""Tracks running verifications: the blocks they pin, the spare slots they use, and their results.

A verified block is pinned, and a spare slot for its recomputed copy reserved, only from the plan of
that copy to the last rank's report. Nothing is held while the request is being computed.
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
"""At most 1/8 of the slots serve as spare slots, so that verification does not evict the blocks it
verifies."""


@dataclass
class _OpenComparison:
    tier: Tier
    size_class: int
    keys: list[BlockKey]
    spare: list[int]
    pinned: list[int]
    is_void: bool = False
    reports: list[Sequence[BlockVerdict]] = field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """A comparison that all ranks have reported: its blocks, and the worst verdict on each."""

    tier: Tier
    blocks: tuple[tuple[BlockKey, BlockVerdict], ...]
    slots: tuple[int, ...] = ()  # slots of the held blocks in the CPU tier

    @property
    def different(self) -> list[tuple[BlockKey, BlockVerdict]]:
        return [block for block in self.blocks if block[1].verdict is Verdict.DIFFERENT]


class VerificationLedger:
    """Owns the pins and spare slots of verifications and collects the verdicts of all ranks.

    Only the scheduler half calls it, from its own thread.
    """

    def __init__(
        self, index: BlockIndex, ledger: TransferLedger, recorder: Recorder, num_ranks: int
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._recorder = recorder
        self._num_ranks = num_ranks
        self._open: dict[int, _OpenComparison] = {}
        self._overdue: set[int] = set()  # open comparisons whose reports were given up
        self._spare_in_use: dict[int, int] = {}  # by size class
        self._spare_keys = 0

    @property
    def has_open(self) -> bool:
        return len(self._open) > len(self._overdue)

    def pin(self, key: BlockKey) -> int | None:
        """Pins a block of the CPU tier and returns its slot; None if it was evicted."""
        if self._index.lookup(key) is not Lookup.HIT:
            return None
        return self._index.pin([key])[0]

    def unpin(self, slot: int) -> None:
        self._index.unpin([slot])

    def spare_slot(self, size_class: int) -> int | None:
        """Reserves a slot for a recomputed block; None if all spare slots are in use."""
        geometry = self._index.geometry
        limit = geometry.capacity_bytes // geometry.slot_bytes[size_class] // _SPARE_SHARE
        in_use = self._spare_in_use.get(size_class, 0)
        if in_use >= max(1, limit):
            return None
        # The key is longer than any block key, so no lookup ever finds it.
        self._spare_keys += 1
        key = b"recomputed block " + self._spare_keys.to_bytes(8, "big")
        slot = self._index.reserve(key, None, size_class)
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
        """Opens a comparison of these GPU blocks and returns its job id. Takes ownership of the
        pins and spare slots."""
        job_id = self._ledger.new_job()
        self._open[job_id] = _OpenComparison(
            tier, size_class, list(keys), list(spare), list(pinned)
        )
        self._ledger.fence.begin_read(job_id, block_ids)
        return job_id

    def void(self) -> None:
        """Ignores the verdicts of open comparisons, because the recomputed blocks do not match
        their keys."""
        for comparison in self._open.values():
            comparison.is_void = True

    def give_up_reports(self) -> int:
        """Like `TransferLedger.give_up_reports`."""
        overdue = self._open.keys() - self._overdue
        for job_id in overdue:
            self.skip(len(self._open[job_id].keys), self._open[job_id].tier)
        self._overdue |= overdue
        return len(overdue)

    def skip(self, blocks: int, tier: Tier) -> None:
        """Counts blocks that should have been compared but were not."""
        self._recorder.add(names.UNVERIFIED_BLOCKS, blocks, tier.value)

    def report(self, job_id: int, reports: Iterable[Sequence[BlockVerdict]]) -> Findings | None:
        """Adds verdicts of ranks; returns the findings after the last one, unless they are void."""
        comparison = self._open[job_id]
        comparison.reports.extend(reports)
        if len(comparison.reports) > self._num_ranks:
            raise InvariantError(
                f"job {job_id} has {len(comparison.reports)} reports from {self._num_ranks} ranks"
            )
        if len(comparison.reports) < self._num_ranks:
            return None
        del self._open[job_id]
        self._ledger.fence.end_read(job_id)
        self._release(comparison)
        if job_id in self._overdue:
            self._overdue.discard(job_id)
            return None
        if comparison.is_void:
            self.skip(len(comparison.keys), comparison.tier)
            return None
        worst = [
            max(verdicts, key=lambda verdict: verdict.verdict)
            for verdicts in zip(*comparison.reports, strict=True)
        ]
        self._count(comparison.tier, worst)
        blocks = tuple(zip(comparison.keys, worst, strict=True))
        return Findings(comparison.tier, blocks, tuple(comparison.pinned))

    def _release(self, comparison: _OpenComparison) -> None:
        self._index.unpin(comparison.pinned)
        for slot in comparison.spare:
            self._index.abort(slot)
        self._spare_in_use[comparison.size_class] -= len(comparison.spare)

    def _count(self, tier: Tier, verdicts: Sequence[BlockVerdict]) -> None:
        counts = {kind: sum(v.verdict is kind for v in verdicts) for kind in Verdict}
        skipped = counts[Verdict.NOT_COMPARED]
        self.skip(skipped, tier)
        self._recorder.add(names.VERIFIED_BLOCKS, len(verdicts) - skipped, tier.value)
        self._recorder.add(names.INEXACT_BLOCKS, counts[Verdict.CLOSE], tier.value)
        self._recorder.add(names.DIFFERING_BLOCKS, counts[Verdict.DIFFERENT], tier.value)
