"""Which GPU blocks are copied out, and when: while a request runs, when it ends, and afterwards.

- A running request's blocks are stored in the step whose forward fills them.
- With asynchronous scheduling or speculation, the tokens that fill the last block are confirmed
  only when the request ends. Its blocks are on their way back to the pool by then; their stores
  begin before the next forward.
- Blocks that a sliding window has passed go back to the pool while their request runs, and vLLM's
  null block takes their places. It is never stored.
- A request whose blocks the GPU had all along leaves nothing to store as a rule. Nothing is worked
  out for it while it waits for its first token; if it ends before that is done, it is done later,
  for blocks on which vLLM's hash says that they still hold what they held. Lazy stores work by the
  same hash.

No reference to a GPU block is ever held: whoever is given a block that a store still reads waits
for that read (`cache/write_fence.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group, plan_store
from vllm_tiered_kv.connector.scheduler.hashed_blocks import HashedRun, StoreBatch, ids_of
from vllm_tiered_kv.connector.scheduler.lazy_store import LazyStore
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob, int64_array
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.placement import anchors_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_T = TypeVar("_T")
_CPU = Tier.CPU.value
_MAX_DEFERRED = 16  # so many may wait until nobody waits for a first token


@dataclass(frozen=True)
class _Planned:
    """A store that has its slots and no number yet."""

    batch: StoreBatch
    owner: RequestState | None = None
    is_reused_first: bool = False
    """vLLM writes no hash on these blocks, and gives such blocks out before all others."""


class StorePlanner:
    def __init__(
        self,
        groups: Sequence[Group],
        index: BlockIndex,
        ledger: TransferLedger,
        lazy: LazyStore | None,
        hash_block_size: int | None,
    ) -> None:
        """`hash_block_size`: tokens per hash vLLM writes on cached blocks; None without its prefix
        cache."""
        self._groups = groups
        self._index = index
        self._ledger = ledger
        self._lazy = lazy
        self._planned: list[_Planned] = []
        # Finished requests whose blocks the GPU had all along, with those and their tokens.
        self._deferred: deque[tuple[RequestState, Sequence[list[int]], int]] = deque()
        self._hash_block_size = hash_block_size
        # GPU blocks that outlived a reset of the cache: id -> hash, while it is still on them.
        self._stale_blocks: dict[int, bytes] = {}
        self._stale_requests: set[str] = set()  # requests that go on from then, or build on those
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        if self._hash_block_size is not None:
            self._hash_block_size = manager.block_pool.hash_block_size

    @property
    def has_stale_blocks(self) -> bool:
        """Whether what requests find on the GPU may be from before a reset. That is seen in their
        first step: a window may pass it, and it is gone from their tables."""
        return bool(self._stale_blocks)

    @property
    def has_deferred(self) -> bool:
        """Whether requests have ended that are looked at when nobody waits for a first token."""
        return bool(self._deferred)

    def store_running(
        self, state: RequestState, tables: Sequence[Sequence[KVCacheBlock]], ready_tokens: int
    ) -> None:
        """Plans stores of the blocks this step's forward completes; to be read after it."""
        new = [ids_of(blocks) for blocks in self._unplanned_blocks(state, tables, ready_tokens)]
        self._store_next(state, new)

    def store_tail(self, state: RequestState, tail: Tail, table: Sequence[KVCacheBlock]) -> None:
        """Plans a store of the block in which the prompt ends, once its tokens are there. As long
        as the request runs they stay what they are: it may be read after later ones have joined
        them."""
        group = self._groups[0]
        if self._stale_blocks:
            self._reject_stale(state, [ids_of(table[: tail.position + 1])])
        state.has_tail = True
        if state.closed is not None:
            self._ledger.drop(1, state.closed)
            return
        plan = plan_store(self._index, group, tail.keys, tail.position, len(tail.keys))
        self._ledger.drop(plan.dropped, DropReason.TIER_FULL)
        if not plan.slots:
            return
        anchors = []
        if self._ledger.on_commit is not None:
            anchors = anchors_of(tail.keys, plan.positions)
        block_ids = ids_of(table[tail.position : tail.position + 1])
        batch = StoreBatch(group, block_ids, plan.slots, anchors)
        self._planned.append(_Planned(batch, is_reused_first=True))

    def store_finished(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> None:
        """Plans stores of what is left of a finished request; they begin before the next forward.
        One that ends while preempted has no blocks left."""
        last = [list(ids) for ids in self._unplanned_blocks(state, tables, ready_tokens)]
        self._store_next(state, last)
        self._stale_requests.discard(state.request.request_id)

    def defer_finished(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> bool:
        """As `store_finished`, at the next step; False where that would be too late."""
        if self._hash_block_size is None or self._lazy is not None or self._stale_blocks:
            return False
        self._deferred.append((state, tables, ready_tokens))
        return True

    def store_unowned(self, first_token_is_awaited: bool = False) -> None:
        """Plans stores of blocks that no request owns: those of requests that have ended, or those
        about to be reused."""
        most = _MAX_DEFERRED if first_token_is_awaited else 0
        while len(self._deferred) > most:
            self._store_deferred(*self._deferred.popleft())
        if self._lazy is not None:
            batches, refused = self._lazy.plan(self._block_pool, self._index)
            self._ledger.drop(refused, DropReason.TIER_FULL)
            self._planned += map(_Planned, batches)

    def take_jobs(self) -> list[StoreJob]:
        """The stores planned since the last call. Blocks that vLLM gives out first are read first,
        so that a step which writes them waits for little."""
        planned, self._planned = self._planned, []
        planned.sort(key=lambda store: not store.is_reused_first)
        return [self._open(store) for store in planned]

    def reset(self, requests: Iterable[Request]) -> None:
        """Forgets blocks seen before the cache was reset.

        vLLM resets its own cache first, but cannot while requests run. Blocks that it kept were
        computed before the reset and are not stored as long as they are what they were.
        `requests`: all that there are, also those that the cache has nothing else to do with.
        """
        if self._lazy is not None:
            self._lazy.clear()
        self._deferred.clear()
        self._stale_blocks = {
            block.block_id: block.block_hash
            for block in self._block_pool.blocks
            if block.block_hash is not None
        }
        self._stale_requests = {each.request_id for each in requests if each.num_computed_tokens}

    def mark_stale_blocks(self) -> None:
        """What requests fill that go on from before a reset outlives it, too. vLLM may write the
        hash on such a block steps after it was filled: when all groups have full blocks there, or
        when the step's output has come."""
        for request_id in self._stale_requests:
            assert self._manager is not None, "vLLM did not bind its KV-cache manager"
            for table in self._manager.get_blocks(request_id).blocks:
                self._mark_stale(table)

    def remove_stale_request(self, request_id: str) -> None:
        """The request is over, or has lost its blocks and starts over."""
        if request_id in self._stale_requests:
            self.mark_stale_blocks()
            self._stale_requests.discard(request_id)

    def on_hashes_lost(self, states: Iterable[RequestState]) -> None:
        """The hashes of all GPU blocks are about to go, and with them the knowledge which of them
        outlived a reset. Whoever runs now may hold such blocks."""
        if self._stale_blocks:
            for state in states:
                state.close(DropReason.RESET)
            self._stale_blocks.clear()

    def record(self, recorder: Recorder) -> None:
        """How full the way out is."""
        recorder.set(names.PENDING_STORES, self._ledger.pending_store_blocks, _CPU)

    def _store_next(self, state: RequestState, tables: Sequence[list[int]]) -> None:
        """Plans stores of a request's next full blocks, per group."""
        self._reject_stale(state, tables)
        for group, ids in zip(self._groups, tables, strict=True):
            if group.window is not None:
                ids = self._still_in_window(state, group, ids)
            if self._lazy is not None:
                self._observe(self._lazy, state, group, ids)
            else:
                self._store_blocks(state, group, ids)

    def _still_in_window(self, state: RequestState, group: Group, ids: list[int]) -> list[int]:
        """Those of a request's next blocks that it still has; there is nothing to store of those
        before them."""
        null = self._block_pool.null_block.block_id
        has_it = int64_array(ids) != null
        gone = int(has_it.argmax()) if has_it.any() else len(ids)
        state.stored[group.group_id] += gone
        ids = ids[gone:]
        return ids[: ids.index(null)] if null in ids else ids

    def _store_deferred(self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int) -> None:
        """Counts the blocks of a finished request as used, and stores those the tier lacks."""
        state.keys.extend(state.request, ready_tokens)
        for group in self._groups:
            start, stop = state.stored[group.group_id], ready_tokens // group.block_size
            ids = tables[group.group_id][start:stop]
            if group.window is not None:
                ids = self._still_in_window(state, group, ids)
                start = state.stored[group.group_id]
            stop = start + len(ids)
            keys = state.keys.of_group[group.group_id]
            self._index.touch(keys[start:stop])
            missing = self._index.first_missing(keys, start, stop)
            if missing < stop and state.closed is None:
                self._store_known(self._run(state, group, start, ids), range(missing, stop), state)

    def _store_known(self, run: HashedRun, positions: range, state: RequestState) -> None:
        """Plans stores of blocks that nobody owns any more, as far as they are what they were."""
        group = run.group
        batch = StoreBatch(group)
        for part in _without(state.daemon_copies[group.group_id], positions.start, positions.stop):
            there = run.still_hashed(self._block_pool, part)
            self._ledger.drop(there.count(False), DropReason.REUSED)
            for intact in _true_runs(there, part.start):
                plan = plan_store(self._index, group, run.keys, intact.start, intact.stop)
                self._ledger.drop(plan.dropped, DropReason.TIER_FULL)
                batch.extend(run, plan.positions, plan.slots)
        if batch.slots:
            self._planned.append(_Planned(batch))

    def _store_blocks(self, state: RequestState, group: Group, ids: list[int]) -> None:
        """Reserves slots for those of the next full blocks that are missing in the tier."""
        start = state.stored[group.group_id]
        stop = start + len(ids)
        state.stored[group.group_id] = stop
        if state.closed is not None:
            self._ledger.drop(len(ids), state.closed)
            return
        keys = state.keys.of_group[group.group_id]
        skip = state.daemon_copies[group.group_id]
        plan = plan_store(self._index, group, keys, start, stop, skip)
        if plan.dropped:
            state.closed = DropReason.TIER_FULL
            self._ledger.drop(plan.dropped, DropReason.TIER_FULL)
        if (not start or group.window is not None) and len(plan.slots) < len(ids):
            self._index.touch(keys[start:stop])  # what the GPU still had counts as used here too
        if not plan.slots:
            return
        sources = ids
        if len(plan.slots) < len(ids):
            sources = int64_array(ids)[int64_array(plan.positions) - start].tolist()
        anchors = []
        if self._ledger.on_commit is not None:
            anchors = anchors_of(keys, plan.positions)
        batch = StoreBatch(group, sources, plan.slots, anchors)
        # A window may have passed them before the next step is planned.
        self._planned.append(_Planned(batch, state, is_reused_first=group.window is not None))

    def _observe(
        self, lazy: LazyStore, state: RequestState, group: Group, block_ids: list[int]
    ) -> None:
        """The next full blocks of a request lie in these GPU blocks."""
        start = state.stored[group.group_id]
        stop = state.stored[group.group_id] = start + len(block_ids)
        if state.closed is not None:
            return
        run = self._run(state, group, start, block_ids)
        for positions in _without(state.daemon_copies[group.group_id], start, stop):
            lazy.observe(run, positions)

    def _run(
        self, state: RequestState, group: Group, start: int, block_ids: list[int]
    ) -> HashedRun:
        assert self._hash_block_size is not None
        keys = state.keys.of_group[group.group_id]
        return HashedRun(state.request, group, keys, start, block_ids, self._hash_block_size)

    def _reject_stale(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Stores nothing of a request that builds on what outlived a reset, in any group.

        What it builds outlives the reset too, and gets its hash later than that: blocks that were
        being loaded then, or are computed from now on.
        """
        blocks = self._block_pool.blocks
        for block_id in chain.from_iterable(tables) if self._stale_blocks else ():
            vllm_hash = self._stale_blocks.get(block_id)
            if vllm_hash is None:
                continue
            if blocks[block_id].block_hash == vllm_hash:
                state.close(DropReason.RESET)
                break
            del self._stale_blocks[block_id]
        if state.closed is DropReason.RESET:
            self._stale_requests.add(state.request.request_id)
            for table in tables:
                self._mark_stale([blocks[block_id] for block_id in table])

    def _mark_stale(self, table: Sequence[KVCacheBlock]) -> None:
        """Those of a request's blocks that others may find by now."""
        for block in reversed(table):
            if block.block_hash is None:
                continue
            if self._stale_blocks.get(block.block_id) == block.block_hash:
                break  # those before it were seen in earlier steps
            self._stale_blocks[block.block_id] = block.block_hash

    def _unplanned_blocks(
        self, state: RequestState, tables: Sequence[Sequence[_T]], ready_tokens: int
    ) -> list[Sequence[_T]]:
        """Per group: the next full blocks of a request."""
        return [
            tables[group.group_id][state.stored[group.group_id] : ready_tokens // group.block_size]
            for group in self._groups
        ]

    @property
    def _block_pool(self) -> BlockPool:
        assert self._manager is not None, "vLLM did not bind its KV-cache manager"
        return self._manager.block_pool

    def _open(self, store: _Planned) -> StoreJob:
        batch, block_ids = store.batch, int64_array(store.batch.block_ids)
        job_id = self._ledger.open_store(
            batch.slots,
            block_ids,
            batch.group.block_bytes,
            store.owner.close if store.owner is not None else None,
            batch.anchors,
        )
        transfer = GroupTransfer(batch.group.group_id, block_ids, int64_array(batch.slots))
        return StoreJob(job_id, transfer)


def _without(skip: range, start: int, stop: int) -> list[range]:
    """Positions without those a daemon holds, which are one run: a part before it, one behind."""
    if not skip:
        return [range(start, stop)]
    parts = [range(start, min(stop, skip.start)), range(max(start, skip.stop), stop)]
    return [part for part in parts if part]


def _true_runs(flags: Sequence[bool], first: int) -> Iterator[range]:
    """The runs of positions, counted from `first`, that are flagged."""
    end = 0
    while True in flags[end:]:
        start = flags.index(True, end)
        end = flags.index(False, start) if False in flags[start:] else len(flags)
        yield range(first + start, first + end)
