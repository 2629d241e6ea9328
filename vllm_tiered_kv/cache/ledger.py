"""Tracks running transfers: the slots and pins they hold, and how their reports release these.

A store is complete when every rank has reported it. Blocks that all ranks stored are committed; the
others are aborted. A load holds its pins until it is reported as finished or failed. So does a put,
which sends blocks to a daemon, and a comparison, which verifies blocks: it holds them and spare
slots for their recomputed copies from the plan of these copies on, not while they are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TypeVar

import numpy as np

from vllm_tiered_kv.cache.ghosts import Ghosts
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.write_fence import WriteFence
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import Int64Array, int64_array
from vllm_tiered_kv.core.verdict import BlockVerdict
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder

_SPARE_SHARE = 8
"""At most 1/8 of the slots serve as spare slots, so that verification does not evict the blocks it
verifies."""

_Report = TypeVar("_Report")


@dataclass(frozen=True)
class StoreReport:
    """One rank's report of a store or put: how many blocks were stored, and why others were not.

    The stored blocks of a store are always the first ones.
    """

    stored: int
    reason: DropReason | None = None


@dataclass
class _OpenStore:
    slots: list[int]
    block_ids: Int64Array
    block_bytes: int
    on_drop: Callable[[DropReason], None] | None
    anchors: list[tuple[BlockKey | None, int]]
    opened_at: float
    reports: list[StoreReport] = field(default_factory=list)
    reused: int = 0  # blocks discarded because their GPU blocks were allocated again


@dataclass(frozen=True)
class _OpenLoad:
    keys: list[BlockKey]
    slots: list[int]
    nbytes: int
    remote_blocks: int
    remote_bytes: int
    opened_at: float
    on_end: Callable[[], None] | None = None


@dataclass
class _OpenStepLoad:
    request_id: str
    load: _OpenLoad
    reports: list[bool] = field(default_factory=list)


@dataclass
class _OpenPut:
    slots: list[int]
    block_bytes: int
    opened_at: float
    reports: list[StoreReport] = field(default_factory=list)


@dataclass
class _OpenFetch:
    slots: list[int]
    reports: list[StoreReport] = field(default_factory=list)


@dataclass
class Comparison:
    """Blocks of one group that are verified together: those of `tier`, if it is that of this engine
    pinned, and spare slots for their recomputed copies."""

    tier: Tier
    size_class: int
    keys: list[BlockKey] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)  # of the GPU
    spare: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    is_void: bool = False
    reports: list[Sequence[BlockVerdict]] = field(default_factory=list)


class TransferLedger:
    """Owns every pin and reservation from the plan of a transfer to its last report.

    Only the scheduler half calls it, from its own thread.
    """

    def __init__(
        self,
        index: BlockIndex,
        recorder: Recorder,
        num_ranks: int,
        ghosts: Ghosts | None = None,
        on_committed: Sequence[Callable[[Sequence[int]], None]] = (),
        on_sent: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`ghosts` remembers blocks that are not stored. `on_committed` are called with the slots
        of blocks that have just become readable, `on_sent` with those of blocks that a daemon has
        received from all ranks."""
        self._index = index
        self._ghosts = ghosts
        self._recorder = recorder
        self._num_ranks = num_ranks
        self._next_job_id = 0
        self._stores: dict[int, _OpenStore] = {}
        self._loads: dict[str, _OpenLoad] = {}
        self._step_loads: dict[int, _OpenStepLoad] = {}
        self._puts: dict[int, _OpenPut] = {}
        self._fetches: dict[int, _OpenFetch] = {}
        self._comparisons: dict[int, Comparison] = {}
        self._spare_in_use: dict[int, int] = {}  # by size class
        self._spare_keys = 0
        self._overdue: set[int | str] = set()  # open transfers whose reports were given up
        self.pending_put_bytes = 0
        self.fence = WriteFence()
        self._on_committed = on_committed
        self._on_sent = on_sent

    @property
    def has_open_puts(self) -> bool:
        return bool(self._puts)

    @property
    def has_open_stores(self) -> bool:
        return bool(self._stores)

    @property
    def pending_store_blocks(self) -> int:
        return sum(len(store.slots) for store in self._stores.values())

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loads

    def open_store(
        self,
        slots: Sequence[int],
        block_ids: Int64Array,
        block_bytes: int,
        on_drop: Callable[[DropReason], None] | None = None,
        anchors: Sequence[tuple[BlockKey | None, int]] = (),
    ) -> int:
        """Opens a store of GPU blocks to reserved slots and returns its job id.

        `on_drop` is called if not all blocks are stored. `anchors` are the keys that decide to
        which daemon the blocks belong, each with the number of slots it applies to; blocks
        with None are not sent.
        """
        job_id = self.new_job()
        self._stores[job_id] = _OpenStore(
            list(slots), block_ids, block_bytes, on_drop, list(anchors), time.monotonic()
        )
        self.fence.begin_read(job_id, block_ids)
        return job_id

    def spoil_stores(self) -> None:
        """Discards all blocks of open stores, because they may not match their keys."""
        for store in self._stores.values():
            for slot in store.slots:
                key, _ = self._index.block_in(slot)
                self._index.remove(key, slot)

    def spoil_reads_of(self, block_ids: Sequence[int]) -> None:
        """Like `spoil_stores`, but only for blocks that are copied from these GPU blocks."""
        for store in self._stores.values():
            for at in np.flatnonzero(np.isin(store.block_ids, block_ids)).tolist():
                key, _ = self._index.block_in(store.slots[at])
                store.reused += self._index.remove(key, store.slots[at])

    def report_store(
        self, job_id: int, reports: Iterable[StoreReport]
    ) -> list[tuple[BlockKey, list[int]]]:
        """Adds reports of ranks. With the last one, returns the slots that became readable, grouped
        by the anchors of their store."""
        store = self._stores[job_id]
        if not self._is_complete(job_id, store.reports, reports):
            return []
        del self._stores[job_id]
        self.fence.end_read(job_id)
        return self._finish_store(store, self._was_overdue(job_id))

    def open_put(self, slots: Sequence[int], keys: Sequence[BlockKey], block_bytes: int) -> int:
        """Pins readable blocks that are sent to a daemon and returns the job id."""
        job_id = self.new_job()
        self._index.pin(keys)
        self._puts[job_id] = _OpenPut(list(slots), block_bytes, time.monotonic())
        self.pending_put_bytes += len(slots) * block_bytes
        return job_id

    def report_put(self, job_id: int, reports: Iterable[StoreReport]) -> None:
        put = self._puts[job_id]
        if not self._is_complete(job_id, put.reports, reports):
            return
        del self._puts[job_id]
        least = min(put.reports, key=lambda report: report.stored)
        sent = put.slots[: least.stored]  # still pinned, so they hold what was sent
        self._index.mark_sent(sent)
        if self._on_sent is not None:
            self._on_sent(sent)
        self._index.unpin(put.slots)
        self.pending_put_bytes -= len(put.slots) * put.block_bytes
        if self._was_overdue(job_id):
            return
        tier = Tier.REMOTE.value
        self._recorder.observe(names.STORE_SECONDS, time.monotonic() - put.opened_at, tier)
        self._recorder.add(names.STORED_BLOCKS, least.stored, tier)
        self._recorder.add(names.STORED_BYTES, least.stored * put.block_bytes, tier)
        self.drop(len(put.slots) - least.stored, least.reason or DropReason.REFUSED, Tier.REMOTE)

    @property
    def open_fetches(self) -> int:
        return len(self._fetches)

    def open_fetch(self, slots: Sequence[int]) -> int:
        """Opens a fetch of a daemon's blocks into reserved slots and returns its job id."""
        job_id = self.new_job()
        self._fetches[job_id] = _OpenFetch(list(slots))
        return job_id

    def report_fetch(self, job_id: int, reports: Iterable[StoreReport]) -> None:
        """Adds reports of ranks. With the last one, blocks that all ranks have become readable."""
        fetch = self._fetches[job_id]
        if not self._is_complete(job_id, fetch.reports, reports):
            return
        del self._fetches[job_id]
        self._overdue.discard(job_id)
        fetched = min(report.stored for report in fetch.reports)
        slots = list(compress(fetch.slots, self._make_readable(fetch.slots, fetched)))
        self._index.mark_sent(slots)  # they came from there
        self._recorder.add(names.PREFETCHED_BLOCKS, len(slots), Tier.CPU.value)

    def open_load(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        nbytes: int,
        remote_blocks: int = 0,
        remote_bytes: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> list[int]:
        """Pins the blocks of a load and returns their slots.

        Blocks of a daemon are only counted. `on_end` is called when the load no longer reads them.
        """
        if request_id in self._loads:
            raise InvariantError(f"request {request_id} is already loading")
        slots = self._index.pin(keys)
        self._loads[request_id] = _OpenLoad(
            list(keys), slots, nbytes, remote_blocks, remote_bytes, time.monotonic(), on_end
        )
        return slots

    @property
    def has_open_loads(self) -> bool:
        """Whether asynchronous loads are open, which run concurrently with steps."""
        return bool(self._loads)

    @property
    def has_open_remote_loads(self) -> bool:
        """Whether requests load from daemons."""
        step_loads = (one.load for one in self._step_loads.values())
        return any(load.remote_blocks for load in (*self._loads.values(), *step_loads))

    @property
    def has_open(self) -> bool:
        """Whether a transfer is open whose reports are still awaited."""
        to_tier = len(self._stores) + len(self._fetches)
        from_tier = len(self._loads) + len(self._step_loads) + len(self._puts)
        return to_tier + from_tier + len(self._comparisons) > len(self._overdue)

    def give_up_reports(self) -> int:
        """Stops waiting for the reports of open transfers; returns how many were given up.

        Blocks of open stores never become readable. Slots and pins are still held until all ranks
        have reported, because a copy to or from them may still be running.
        """
        self.spoil_stores()
        for job_id, store in self._stores.items():
            if job_id not in self._overdue:
                self.drop(len(store.slots), DropReason.UNREPORTED)
        for job_id, put in self._puts.items():
            if job_id not in self._overdue:
                self.drop(len(put.slots), DropReason.UNREPORTED, Tier.REMOTE)
        for job_id in self._comparisons.keys() - self._overdue:
            comparison = self._comparisons[job_id]
            self.count_unverified(len(comparison.keys), comparison.tier)
        before = len(self._overdue)
        self._overdue.update(self._stores, self._loads, self._step_loads, self._puts, self._fetches)
        self._overdue.update(self._comparisons)
        return len(self._overdue) - before

    def _was_overdue(self, job: int | str) -> bool:
        """Whether a transfer that just finished was given up, and therefore counted already."""
        was_overdue = job in self._overdue
        self._overdue.discard(job)
        return was_overdue

    def to_step_load(self, request_id: str) -> int:
        """Turns an open load into one that ranks report by job id instead of by request id.

        vLLM does not report the end of a load that a step waits for, and the request may have been
        restarted by then.
        """
        job_id = self.new_job()
        self._step_loads[job_id] = _OpenStepLoad(request_id, self._loads.pop(request_id))
        return job_id

    def report_step_load(self, job_id: int, reports: Iterable[bool]) -> str | None:
        """Adds reports of ranks; returns the request id if the load is complete and failed."""
        ahead = self._step_loads[job_id]
        if not self._is_complete(job_id, ahead.reports, reports):
            return None
        del self._step_loads[job_id]
        self._overdue.discard(job_id)
        failed = None
        if not all(ahead.reports):
            failed = Tier.CPU if ahead.load.keys else Tier.REMOTE
        self._finish_load(ahead.load, failed)
        return ahead.request_id if failed is not None else None

    def close_load(self, request_id: str, failed: Tier | None = None) -> None:
        """Completes a load that finished on all ranks. `failed` is the tier that failed, if any;
        its blocks are removed from the index."""
        self._overdue.discard(request_id)
        self._finish_load(self._loads.pop(request_id), failed)

    def _finish_load(self, load: _OpenLoad, failed: Tier | None) -> None:
        if failed is Tier.CPU:
            # Ranks report one by one. After the first failure vLLM may have recomputed a block and
            # stored it again, so remove it only from the slot that was loaded.
            for key, slot in zip(load.keys, load.slots, strict=True):
                self._index.remove(key, slot)
        if failed is not None:
            self._recorder.add(names.LOAD_FAILURES, 1, failed.value)
        else:
            self._recorder.add(names.LOADED_BLOCKS, len(load.keys), Tier.CPU.value)
            self._recorder.add(names.LOADED_BYTES, load.nbytes, Tier.CPU.value)
            self._recorder.add(names.LOADED_BLOCKS, load.remote_blocks, Tier.REMOTE.value)
            self._recorder.add(names.LOADED_BYTES, load.remote_bytes, Tier.REMOTE.value)
            slowest = Tier.REMOTE if load.remote_blocks else Tier.CPU
            taken = time.monotonic() - load.opened_at
            self._recorder.observe(names.LOAD_SECONDS, taken, slowest.value)
        self._index.unpin(load.slots)
        if load.on_end is not None:
            load.on_end()

    # ---- comparisons ----------------------------------------------------------------------------

    @property
    def has_open_comparisons(self) -> bool:
        """Whether a comparison is open whose reports are still awaited."""
        return bool(self._comparisons.keys() - self._overdue)

    def pin(self, key: BlockKey) -> int | None:
        """Pins a block to compare and returns its slot; None if it was evicted."""
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

    def open_comparison(self, comparison: Comparison) -> int:
        """Opens a comparison and returns its job id. Takes ownership of the pins and spare
        slots."""
        job_id = self.new_job()
        self._comparisons[job_id] = comparison
        self.fence.begin_read(job_id, int64_array(comparison.block_ids))
        return job_id

    def void_comparisons(self) -> None:
        """Ignores the verdicts of open comparisons, because the recomputed blocks do not match
        their keys."""
        for comparison in self._comparisons.values():
            comparison.is_void = True

    def report_comparison(
        self, job_id: int, reports: Iterable[Sequence[BlockVerdict]]
    ) -> Comparison | None:
        """Adds verdicts of ranks; returns the comparison after the last one, unless it is void."""
        comparison = self._comparisons[job_id]
        if not self._is_complete(job_id, comparison.reports, reports):
            return None
        del self._comparisons[job_id]
        self.fence.end_read(job_id)
        self._index.unpin(comparison.pinned)
        for slot in comparison.spare:
            self._index.abort(slot)
        self._spare_in_use[comparison.size_class] -= len(comparison.spare)
        if self._was_overdue(job_id):
            return None
        if comparison.is_void:
            self.count_unverified(len(comparison.keys), comparison.tier)
            return None
        return comparison

    def count_unverified(self, blocks: int, tier: Tier) -> None:
        """Counts blocks that should have been compared but were not."""
        self._recorder.add(names.UNVERIFIED_BLOCKS, blocks, tier.value)

    # ---- all transfers --------------------------------------------------------------------------

    def _is_complete(self, job_id: int, reports: list[_Report], new: Iterable[_Report]) -> bool:
        """Adds reports of ranks; returns whether they are all there."""
        reports.extend(new)
        if len(reports) > self._num_ranks:
            raise InvariantError(
                f"job {job_id} has {len(reports)} reports from {self._num_ranks} ranks"
            )
        return len(reports) == self._num_ranks

    def drop(
        self,
        blocks: int,
        reason: DropReason,
        tier: Tier = Tier.CPU,
        first: bytes | None = None,
    ) -> None:
        """Counts blocks that are not stored. `first`: the key of the first one, after which a later
        request will find nothing."""
        if blocks and first is not None and self._ghosts is not None:
            self._ghosts.dropped(first, reason)
        self._recorder.add(names.DROPPED_BLOCKS, blocks, tier.value, reason.value)

    def new_job(self) -> int:
        """Returns a new job id."""
        self._next_job_id += 1
        return self._next_job_id - 1

    def _make_readable(self, slots: Sequence[int], count: int) -> list[bool]:
        """Commits the first `count` of these reserved slots and frees the others. Returns which of
        the first are readable: blocks may have been removed in the meantime."""
        readable = self._index.commit_all(slots[:count])
        if any(readable) and self._on_committed:
            committed = list(compress(slots, readable))
            for notify in self._on_committed:
                notify(committed)
        for slot in slots[count:]:
            self._index.abort(slot)
        return readable

    def _finish_store(
        self, store: _OpenStore, is_counted: bool
    ) -> list[tuple[BlockKey, list[int]]]:
        least = min(store.reports, key=lambda report: report.stored)
        first = None
        if least.stored < len(store.slots):
            first, _ = self._index.block_in(store.slots[least.stored])
        readable = self._make_readable(store.slots, least.stored)
        committed = sum(readable)
        if is_counted:
            return []
        tier = Tier.CPU.value
        self._recorder.observe(names.STORE_SECONDS, time.monotonic() - store.opened_at, tier)
        self._recorder.add(names.STORED_BLOCKS, committed, tier)
        self._recorder.add(names.STORED_BYTES, committed * store.block_bytes, tier)
        lost = least.stored - committed
        reused = min(store.reused, lost)
        self.drop(reused, DropReason.REUSED)
        self.drop(lost - reused, DropReason.RESET)
        if least.stored < len(store.slots):
            reason = least.reason or DropReason.COPY_FAILED
            self.drop(len(store.slots) - least.stored, reason, first=first)
            if store.on_drop is not None:
                store.on_drop(reason)
        return _by_anchor(store, readable)


def _by_anchor(store: _OpenStore, readable: Sequence[bool]) -> list[tuple[BlockKey, list[int]]]:
    """Returns the readable slots of each anchor that has any."""
    grouped = []
    start = 0
    for anchor, count in store.anchors:
        part = slice(start, start + count)
        if anchor is not None:
            grouped.append((anchor, list(compress(store.slots[part], readable[part]))))
        start += count
    return [(anchor, slots) for anchor, slots in grouped if slots]
