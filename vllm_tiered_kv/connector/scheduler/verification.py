"""Verified hits: selects requests that compute what a tier holds, and handles the comparison.

A selected request is offered no load, so vLLM computes its prompt as if the tier were empty. In the
step whose forward fills a block, the workers copy the block to a spare slot, beside the stores, and
compare it in a thread with the tier's block. Between admission and that step only positions are
remembered. Nothing is pinned, so an abort or a preemption cannot leak anything.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.ledger import Comparison
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.request_state import Candidate, RequestState
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, int64_array
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.metrics import names

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = logging.getLogger(__name__)

_MAX_NAMED = 8  # keys in one log line


def is_chosen(request_id: str, fraction: float) -> bool:
    """Whether a request is verified. Depends on its id alone, because vLLM may ask repeatedly."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class Verification:
    """Plans verification jobs and evicts blocks that differ. The scheduler half and the load
    planner call it, in the scheduler's thread."""

    def __init__(
        self,
        fraction: float,
        tier: CpuTier,
        delete_at_daemons: Callable[[Sequence[BlockKey]], None] | None,
    ) -> None:
        self._fraction = fraction
        self._groups = tier.groups
        self._index = tier.index
        self._ledger = tier.ledger
        self._recorder = tier.recorder
        self._delete_at_daemons = delete_at_daemons

    def selects(self, state: RequestState) -> bool:
        """Whether to verify this request, at most once: a preempted request is late enough."""
        return not state.verification.has_begun and is_chosen(
            state.request.request_id, self._fraction
        )

    def begin(self, state: RequestState, computed: int, tokens: int) -> None:
        """vLLM has admitted the request, which computes the `tokens` after `computed` that tiers
        hold."""
        state.verification.has_begun = True
        state.verification.waiting = []
        for group in self._groups:
            span = range(computed // group.block_size, (computed + tokens) // group.block_size)
            state.verification.waiting.append(deque(self._candidates(state, group, span)))

    def plan(
        self,
        state: RequestState,
        tables: Sequence[Sequence[KVCacheBlock]],
        ready_tokens: int,
    ) -> list[VerifyJob]:
        """Returns jobs for the blocks that this step's forward fills, and for earlier ones that had
        no spare slot."""
        jobs: list[VerifyJob] = []
        for group, waiting in zip(self._groups, state.verification.waiting, strict=True):
            table = tables[group.group_id]
            stop = min(ready_tokens // group.block_size, len(table))
            batches: dict[str | None, Comparison] = {}  # by daemon
            while waiting and waiting[0].position < stop:
                candidate = waiting[0]
                key = state.keys.of_group[group.group_id][candidate.position]
                block = table[candidate.position]
                is_local = candidate.address is None
                is_computed = not block.is_null and _holds(group, block, candidate.position)
                pinned = self._ledger.pin(key) if is_local and is_computed else None
                if not is_computed or (is_local and pinned is None):
                    self._ledger.count_unverified(1, candidate.tier)
                    waiting.popleft()
                    continue
                spare = self._ledger.spare_slot(group.size_class)
                if spare is None:
                    if pinned is not None:
                        self._ledger.unpin(pinned)
                    break  # retry later: blocks of a running request do not change
                waiting.popleft()
                batch = batches.setdefault(
                    candidate.address, Comparison(candidate.tier, group.size_class)
                )
                batch.keys.append(key)
                batch.block_ids.append(block.block_id)
                batch.spare.append(spare)
                if pinned is not None:
                    batch.pinned.append(pinned)
            jobs += [self._job(group, address, batch) for address, batch in batches.items()]
        if not any(state.verification.waiting):
            state.verification.waiting = []
        return jobs

    def end(self, state: RequestState) -> None:
        """The request has lost its blocks: it finished, was preempted, or the cache was reset."""
        waiting, state.verification.waiting = state.verification.waiting, []
        for group in waiting:
            for candidate in group:
                self._ledger.count_unverified(1, candidate.tier)

    def void(self, states: Iterable[RequestState]) -> None:
        """Discards all open comparisons, because GPU blocks may not hold what they should."""
        self._ledger.void_comparisons()
        for state in states:
            self.end(state)

    def report(self, job_id: int, reports: Iterable[Sequence[BlockVerdict]]) -> None:
        """Adds verdicts of ranks. After the last one, evicts blocks that differ on any of them."""
        comparison = self._ledger.report_comparison(job_id, reports)
        if comparison is None:
            return
        worst = [
            max(verdicts, key=lambda verdict: verdict.verdict)
            for verdicts in zip(*comparison.reports, strict=True)
        ]
        self._count(comparison.tier, worst)
        if any(verdict.verdict is Verdict.DIFFERENT for verdict in worst):
            self._evict(comparison, worst)

    def _count(self, tier: Tier, verdicts: Sequence[BlockVerdict]) -> None:
        counts = Counter(verdict.verdict for verdict in verdicts)
        skipped = counts[Verdict.NOT_COMPARED]
        self._ledger.count_unverified(skipped, tier)
        self._recorder.add(names.VERIFIED_BLOCKS, len(verdicts) - skipped, tier.value)
        self._recorder.add(names.INEXACT_BLOCKS, counts[Verdict.CLOSE], tier.value)
        self._recorder.add(names.DIFFERING_BLOCKS, counts[Verdict.DIFFERENT], tier.value)

    def _evict(self, comparison: Comparison, verdicts: Sequence[BlockVerdict]) -> None:
        different: list[tuple[BlockKey, BlockVerdict]] = []
        for n, (key, verdict) in enumerate(zip(comparison.keys, verdicts, strict=True)):
            if verdict.verdict is not Verdict.DIFFERENT:
                continue
            different.append((key, verdict))
            if comparison.tier is Tier.CPU:
                self._index.remove(key, comparison.pinned[n])  # unless a good one was stored since
            else:
                self._index.remove(key)  # another request may have loaded it into the CPU tier
        if self._delete_at_daemons is not None:
            # Blocks of the CPU tier too: the same bytes may have been sent to a daemon.
            self._delete_at_daemons([key for key, _ in different])
        for start in range(0, len(different), _MAX_NAMED):
            some = different[start : start + _MAX_NAMED]
            logger.warning(
                "verification: %d block(s) of the %s tier differ from what the model computes; "
                "evicted: %s",
                len(some),
                comparison.tier.value,
                ", ".join(f"{key.hex()} ({_describe(verdict)})" for key, verdict in some),
            )

    def _candidates(self, state: RequestState, group: Group, span: range) -> Iterator[Candidate]:
        answer = state.remote.answer
        parts = answer.spans[group.group_id] if answer is not None else ()
        keys = state.keys.of_group[group.group_id]
        for position in span:
            if self._index.lookup(keys[position]) is Lookup.HIT:
                yield Candidate(position)
                continue
            part = next((part for part in parts if part.start <= position < part.stop), None)
            if part is not None:
                yield Candidate(position, part.address)

    def _job(self, group: Group, address: str | None, batch: Comparison) -> VerifyJob:
        block_ids = int64_array(batch.block_ids)
        return VerifyJob(
            self._ledger.open_comparison(batch),
            GroupTransfer(group.group_id, block_ids, int64_array(batch.spare)),
            tuple(batch.keys),
            group.block_bytes,
            int64_array(batch.pinned) if address is None else None,
            address,
        )


def _holds(group: Group, block: KVCacheBlock, position: int) -> bool:
    """Whether a block of a request's table holds what its position stands for. vLLM may use the
    block of a recurrent layer as scratch; one with a hash of so many tokens holds the state."""
    tokens = (position + 1) * group.block_size
    return not group.is_recurrent or block.block_hash_num_tokens == tokens


def _describe(verdict: BlockVerdict) -> str:
    at = f"{verdict.layer}: " if verdict.layer else ""
    if not math.isfinite(verdict.largest):
        return f"{at}other bytes"
    return f"{at}off by {verdict.largest:.3g} of its largest value, {verdict.overall:.3g} overall"
