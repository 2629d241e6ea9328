"""Plans which GPU blocks are stored, and when: while a request runs, when it ends, or later.

- A running request's blocks are stored in the step whose forward fills them.
- With asynchronous scheduling or speculation, the tokens of the last block are confirmed only when
  the request ends. Its blocks return to the pool then, so their stores start before the next
  forward.
- Blocks behind a sliding window return to the pool while their request runs. vLLM puts its null
  block in their places, which is never stored. Nor are blocks that no hit needs: hits end at
  multiples of the largest block size, and a short window reaches few of the blocks between.
- vLLM keeps the state of recurrent layers at some block boundaries only, and uses other blocks as
  scratch. A block that has vLLM's hash of a boundary holds the state there; no others are stored.
  With drafts a step may pass a boundary by several tokens. vLLM then drops the block of the state
  from the request's table before the step is planned, but names it among those it has kept.
- A request whose blocks were all GPU hits rarely has anything to store. Its stores are not planned
  while it waits for its first token. If it ends before they are, they are deferred, and later
  planned for the blocks that still have vLLM's hash. Lazy stores check the same hash.

The planner never holds a reference to a GPU block: a step that writes a block which a store still
reads waits for that read (`cache/write_fence.py`).

After a reset of the cache, GPU blocks that vLLM kept are *stale*: they were computed before the
reset and must not be stored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, TypeVar

from vllm_tiered_kv.cache.index import Reservations
from vllm_tiered_kv.cache.planner import Group, plan_store
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.hashed_blocks import HashedRun, StoreBatch, ids_of
from vllm_tiered_kv.connector.scheduler.kv_events import TierEvents
from vllm_tiered_kv.connector.scheduler.lazy_store import LazyStore
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail
from vllm_tiered_kv.connector.scheduler.request_state import RequestState, StoreState
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob, int64_array
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.placement import anchors_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_T = TypeVar("_T")
_MAX_DEFERRED = 16  # deferred requests, while a client waits for a first token


@dataclass(frozen=True)
class _Planned:
    """A store with reserved slots, but without a job id yet."""

    batch: StoreBatch
    owner: RequestState | None = None
    is_reused_first: bool = False
    """vLLM reallocates these blocks before others, because they have no hash."""
    is_sent: bool = True  # to a daemon, once it is stored


class StorePlanner:
    """Reserves slots and builds store jobs. The scheduler half calls it in the scheduler's
    thread."""

    def __init__(
        self,
        tier: CpuTier,
        lazy: LazyStore | None,
        hash_block_size: int | None,
        has_daemons: bool,
        events: TierEvents | None = None,
    ) -> None:
        """`hash_block_size`: tokens per block hash of vLLM; None if its prefix cache is off.
        `has_daemons`: stored blocks are sent on, so they need anchors."""
        self._events = events
        self._groups = tier.groups
        self._alignment = tier.alignment
        self._index = tier.index
        self._ledger = tier.ledger
        self._lazy = lazy
        self._has_daemons = has_daemons
        self._planned: list[_Planned] = []
        # Finished requests whose stores are deferred, with their block tables and token counts.
        self._deferred: deque[tuple[RequestState, Sequence[list[int]], int]] = deque()
        self._hash_block_size = hash_block_size
        # GPU blocks from before a reset: id -> hash. Stale as long as the block has this hash.
        self._stale_blocks: dict[int, bytes] = {}
        self._stale_requests: set[str] = set()  # ran before the reset, or build on stale blocks
        self._manager: KVCacheManager | None = None

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager
        if self._hash_block_size is not None:
            self._hash_block_size = manager.block_pool.hash_block_size

    @property
    def has_stale_blocks(self) -> bool:
        """Whether a GPU hit may be from before a reset. It must be checked in a request's first
        step, because a window may move past the block and remove it from the request's table."""
        return bool(self._stale_blocks)

    @property
    def has_deferred(self) -> bool:
        """Whether finished requests have deferred stores."""
        return bool(self._deferred)

    def store_running(
        self, state: RequestState, tables: Sequence[Sequence[KVCacheBlock]], ready_tokens: int
    ) -> None:
        """Plans stores of the blocks that this step's forward fills. They start after it."""
        new = [ids_of(blocks) for blocks in self._unplanned_blocks(state, tables, ready_tokens)]
        self._store_next(state, new)

    def nothing_new(self, state: RequestState) -> None:
        """No store of this request can be planned before it has filled another block."""
        state.store.idle_until = state.next_to_plan(self._groups)

    def states_kept(self, state: RequestState, kept: Iterable[tuple[int, int, int]]) -> None:
        """vLLM has kept recurrent states of a request: group, GPU block and tokens of each."""
        for group_id, block_id, tokens in kept:
            position, rest = divmod(tokens, self._groups[group_id].block_size)
            if not rest and position > state.store.planned[group_id]:
                state.store.states[group_id, position - 1] = block_id

    def store_tail(self, state: RequestState, tail: Tail, table: Sequence[KVCacheBlock]) -> None:
        """Plans a store of the prompt's tail, once its tokens are computed. They do not change
        while the request runs, so the block may be read after later tokens were added to it."""
        group = self._groups[0]
        if self._stale_blocks:
            self._reject_stale(state, [ids_of(table[: tail.position + 1])])
        state.store.has_tail = True
        if state.closed is not None:
            self._ledger.drop(1, state.closed, first=tail.key)
            return
        plan = plan_store(self._index, group, tail.keys, tail.position, len(tail.keys))
        self._ledger.drop(plan.dropped, DropReason.TIER_FULL, first=tail.key)
        if not plan.slots:
            return
        anchors = anchors_of(tail.keys, plan.positions) if self._has_daemons else []
        block_ids = ids_of(table[tail.position : tail.position + 1])
        batch = StoreBatch(group, block_ids, plan.slots, [*anchors])
        self._planned.append(_Planned(batch, is_reused_first=True, is_sent=_sends(state)))

    def store_finished(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> None:
        """Plans stores of the last blocks of a finished request. They start before the next
        forward. A request that ends while preempted has no blocks."""
        last = [list(ids) for ids in self._unplanned_blocks(state, tables, ready_tokens)]
        self._store_next(state, last)
        self._stale_requests.discard(state.request.request_id)

    def defer_finished(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> bool:
        """Like `store_finished`, but deferred to a later step. Returns False if that is not
        possible."""
        if self._hash_block_size is None or self._lazy is not None or self._stale_blocks:
            return False
        self._deferred.append((state, tables, ready_tokens))
        return True

    def store_unowned(self, first_token_is_awaited: bool = False) -> None:
        """Plans stores of blocks that no request owns: deferred and lazy ones."""
        max_deferred = _MAX_DEFERRED if first_token_is_awaited else 0
        while len(self._deferred) > max_deferred:
            self._store_deferred(*self._deferred.popleft())
        if self._lazy is not None:
            batches, refused = self._lazy.plan(self._block_pool, self._index)
            self._ledger.drop(refused, DropReason.TIER_FULL)
            self._planned += map(_Planned, batches)

    def take_jobs(self) -> list[StoreJob]:
        """Returns the stores planned since the last call. Blocks that vLLM reallocates first are
        read first, so that a step which overwrites them waits only briefly."""
        planned, self._planned = self._planned, []
        planned.sort(key=lambda store: not store.is_reused_first)
        return [self._open(store) for store in planned]

    def skip(self, state: RequestState, ready_tokens: int) -> None:
        """Counts the full blocks of these tokens as stored."""
        state.store.planned = Counter(
            {group.group_id: ready_tokens // group.block_size for group in self._groups}
        )

    def preempted(self, state: RequestState) -> None:
        """The request has lost its blocks and stores again from its first block."""
        state.store = StoreState()
        self.remove_stale_request(state.request.request_id)

    def store_again(self, state: RequestState) -> None:
        """The tier may have lost blocks whose stores were planned: plans them again."""
        state.store.planned.clear()
        state.store.has_tail = False
        state.store.idle_until = 0

    def reset(self, states: Iterable[RequestState], uncached: Iterable[Request]) -> None:
        """Drops deferred and lazy stores, and marks all hashed GPU blocks as stale. Requests with
        computed tokens store nothing more.

        vLLM resets its own cache first, but cannot while requests run. `states` and `uncached` are
        all requests of the engine.
        """
        if self._lazy is not None:
            self._lazy.clear()
        self._deferred.clear()
        self._stale_blocks = {
            block.block_id: block.block_hash
            for block in self._block_pool.blocks
            if block.block_hash is not None
        }
        self._stale_requests = {each.request_id for each in uncached if each.num_computed_tokens}
        for state in states:
            if state.request.num_computed_tokens:
                self._stale_requests.add(state.request.request_id)
                state.store = StoreState(state.store.planned, closed=DropReason.RESET)
            else:
                state.store = StoreState()

    def mark_stale_blocks(self) -> None:
        """Marks new blocks of stale requests. vLLM may set the hash of a block some steps after the
        block was filled: when all groups have a full block there, or when the step's output has
        arrived."""
        for request_id in self._stale_requests:
            assert self._manager is not None, "vLLM did not bind its KV-cache manager"
            for table in self._manager.get_blocks(request_id).blocks:
                self._mark_stale(table)

    def remove_stale_request(self, request_id: str) -> None:
        """The request has finished, or was preempted and starts over."""
        if request_id in self._stale_requests:
            self.mark_stale_blocks()
            self._stale_requests.discard(request_id)

    def on_hashes_lost(self, states: Iterable[RequestState]) -> None:
        """vLLM is about to drop all block hashes, after which stale blocks cannot be recognised.
        Running requests may hold some, so they store nothing more."""
        if self._stale_blocks:
            for state in states:
                _close(state, DropReason.RESET)
            self._stale_blocks.clear()

    def _store_next(self, state: RequestState, tables: Sequence[list[int]]) -> None:
        """Plans stores of a request's next full blocks, per group."""
        self._reject_stale(state, tables)
        for group, ids in zip(self._groups, tables, strict=True):
            if group.is_recurrent:
                start = state.store.planned[group.group_id]
                ids = [
                    state.store.states.pop((group.group_id, position), block_id)
                    for position, block_id in enumerate(ids, start)
                ]
                for position in self._states(state, group, start, ids):
                    state.store.planned[group.group_id] = position
                    self._store_or_observe(state, group, [ids[position - start]])
                state.store.planned[group.group_id] = start + len(ids)
                continue
            if group.window is None:
                self._store_or_observe(state, group, ids)
                continue
            ids = self._still_in_window(state, group, ids)
            start = state.store.planned[group.group_id]
            for part in group.of_use(range(start, start + len(ids)), self._alignment):
                state.store.planned[group.group_id] = part.start
                self._store_or_observe(state, group, ids[part.start - start : part.stop - start])
            state.store.planned[group.group_id] = start + len(ids)

    def _store_or_observe(self, state: RequestState, group: Group, ids: list[int]) -> None:
        if self._lazy is not None:
            self._observe(self._lazy, state, group, ids)
        else:
            self._store_blocks(state, group, ids)

    def _states(
        self, state: RequestState, group: Group, start: int, ids: Sequence[int]
    ) -> list[int]:
        """Those positions of a recurrent group, from `start` on, whose blocks hold the state after
        their last token."""
        run = self._hashed_run(state, group, start, list(ids))
        positions = range(start, start + len(ids))
        return list(compress(positions, run.still_hashed(self._block_pool, positions)))

    def _still_in_window(self, state: RequestState, group: Group, ids: list[int]) -> list[int]:
        """Those of a request's next blocks that its window has not passed. The passed ones count as
        stored."""
        null = self._block_pool.null_block.block_id
        is_present = int64_array(ids) != null
        passed = int(is_present.argmax()) if is_present.any() else len(ids)
        state.store.planned[group.group_id] += passed
        ids = ids[passed:]
        return ids[: ids.index(null)] if null in ids else ids

    def _store_deferred(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> None:
        """Touches the blocks of a finished request, and plans stores of those the tier lacks."""
        state.keys.extend(state.request, ready_tokens)
        for group in self._groups:
            start, stop = state.store.planned[group.group_id], ready_tokens // group.block_size
            ids = tables[group.group_id][start:stop]
            if group.window is not None:
                ids = self._still_in_window(state, group, ids)
                start = state.store.planned[group.group_id]
            stop = start + len(ids)
            keys = state.keys.of_group[group.group_id]
            self._index.touch(keys[start:stop])
            wanted = state.stop_storing_at(group, start, stop)
            for part in group.of_use(range(start, wanted), self._alignment):
                missing = self._index.first_missing(keys, part.start, part.stop)
                if missing < part.stop and state.closed is None:
                    self._store_still_hashed(
                        self._hashed_run(state, group, start, ids), range(missing, part.stop), state
                    )

    def _store_still_hashed(self, run: HashedRun, positions: range, state: RequestState) -> None:
        """Plans stores of blocks that no request owns, if they still have their hashes."""
        group = run.group
        batch = StoreBatch(group)
        skip = state.remote.copies.get(group.group_id, range(0))
        for part in _without(skip, positions.start, positions.stop):
            there = run.still_hashed(self._block_pool, part)
            lost = there.count(False)
            first = run.keys[part.start + there.index(False)] if lost else None
            self._ledger.drop(lost, DropReason.REUSED, first=first)
            for intact in _true_runs(there, part.start):
                plan = plan_store(self._index, group, run.keys, intact.start, intact.stop)
                first = self._first_dropped(plan, run.keys, intact)
                self._ledger.drop(plan.dropped, DropReason.TIER_FULL, first=first)
                batch.extend(run, plan.positions, plan.slots)
                if self._events is not None:
                    self._events.planned(run.request, group, run.keys, plan.positions)
        if batch.slots:
            self._planned.append(_Planned(batch, is_sent=_sends(state)))

    def _store_blocks(self, state: RequestState, group: Group, ids: list[int]) -> None:
        """Plans stores of those of the next full blocks that the tier lacks."""
        start = state.store.planned[group.group_id]
        stop = start + len(ids)
        state.store.planned[group.group_id] = stop
        wanted = state.stop_storing_at(group, start, stop)
        keys = state.keys.of_group[group.group_id]
        if state.closed is not None:
            first = keys[start] if wanted > start else None
            self._ledger.drop(wanted - start, state.closed, first=first)
            return
        skip = state.remote.copies.get(group.group_id, range(0))
        plan = plan_store(self._index, group, keys, start, wanted, skip)
        if plan.dropped:
            state.store.closed = DropReason.TIER_FULL
            first = self._first_dropped(plan, keys, range(start, wanted), skip)
            self._ledger.drop(plan.dropped, DropReason.TIER_FULL, first=first)
        if (not start or group.window is not None) and len(plan.slots) < len(ids):
            self._index.touch(keys[start:stop])  # GPU hits count as used in the tier too
        if not plan.slots:
            return
        if self._events is not None:
            self._events.planned(state.request, group, keys, plan.positions)
        sources = ids
        if len(plan.slots) < len(ids):
            sources = int64_array(ids)[int64_array(plan.positions) - start].tolist()
        anchors = anchors_of(keys, plan.positions) if self._has_daemons else []
        batch = StoreBatch(group, sources, plan.slots, [*anchors])
        # The window may have passed these blocks when the next step is planned.
        self._planned.append(
            _Planned(batch, state, group.window is not None, is_sent=_sends(state))
        )

    def _first_dropped(
        self,
        plan: Reservations,
        keys: Sequence[BlockKey],
        positions: range,
        skip: range = range(0),
    ) -> BlockKey | None:
        """The key of the first block of these positions, except `skip`, that found no slot."""
        for part in _without(skip, positions.start, positions.stop) if plan.dropped else ():
            first = self._index.first_missing(keys, part.start, part.stop)
            if first < part.stop:
                return keys[first]
        return None

    def _observe(
        self, lazy: LazyStore, state: RequestState, group: Group, block_ids: list[int]
    ) -> None:
        """Remembers the next full blocks of a request for lazy stores."""
        start = state.store.planned[group.group_id]
        stop = state.store.planned[group.group_id] = start + len(block_ids)
        if state.closed is not None:
            return
        run = self._hashed_run(state, group, start, block_ids)
        skip = state.remote.copies.get(group.group_id, range(0))
        for positions in _without(skip, start, state.stop_storing_at(group, start, stop)):
            lazy.observe(run, positions)
            if self._events is not None:
                self._events.planned(state.request, group, run.keys, positions)

    def _hashed_run(
        self, state: RequestState, group: Group, start: int, block_ids: list[int]
    ) -> HashedRun:
        assert self._hash_block_size is not None
        keys = state.keys.of_group[group.group_id]
        return HashedRun(
            state.request, group, keys, start, block_ids, self._hash_block_size, _sends(state)
        )

    def _reject_stale(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Stops storing a request that builds on stale blocks, in any group.

        Its own blocks are stale too, and get their hashes after the reset: blocks whose load was in
        flight during the reset, and blocks computed since.
        """
        blocks = self._block_pool.blocks
        for block_id in chain.from_iterable(tables) if self._stale_blocks else ():
            vllm_hash = self._stale_blocks.get(block_id)
            if vllm_hash is None:
                continue
            if blocks[block_id].block_hash == vllm_hash:
                _close(state, DropReason.RESET)
                break
            del self._stale_blocks[block_id]
        if state.closed is DropReason.RESET:
            self._stale_requests.add(state.request.request_id)
            for table in tables:
                self._mark_stale([blocks[block_id] for block_id in table])

    def _mark_stale(self, table: Sequence[KVCacheBlock]) -> None:
        """Marks those of a request's blocks that have a hash, so that others may hit them."""
        for block in reversed(table):
            if block.block_hash is None:
                continue
            if self._stale_blocks.get(block.block_id) == block.block_hash:
                break  # earlier steps marked the blocks before it
            self._stale_blocks[block.block_id] = block.block_hash

    def _unplanned_blocks(
        self, state: RequestState, tables: Sequence[Sequence[_T]], ready_tokens: int
    ) -> list[Sequence[_T]]:
        """Per group: the next full blocks of a request whose stores are not planned."""
        return [
            tables[n][state.store.planned[n] : ready_tokens // group.block_size]
            for n, group in enumerate(self._groups)
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
            partial(_close, store.owner) if store.owner is not None else None,
            batch.anchors if self._has_daemons and store.is_sent else (),
        )
        transfer = GroupTransfer(batch.group.group_id, block_ids, int64_array(batch.slots))
        return StoreJob(job_id, transfer)


def _sends(state: RequestState) -> bool:
    """Whether blocks of the request go on to daemons."""
    return state.control.may_use(Tier.REMOTE)


def _close(state: RequestState, reason: DropReason) -> None:
    """Stops storing this request's blocks. The first reason stays."""
    state.store.closed = state.closed or reason


def _without(skip: range, start: int, stop: int) -> list[range]:
    """The positions from `start` to `stop` without `skip`: up to two ranges."""
    if not skip:
        return [range(start, stop)]
    parts = [range(start, min(stop, skip.start)), range(max(start, skip.stop), stop)]
    return [part for part in parts if part]


def _true_runs(flags: Sequence[bool], first: int) -> Iterator[range]:
    """The ranges of positions, counted from `first`, whose flags are true."""
    end = 0
    while True in flags[end:]:
        start = flags.index(True, end)
        end = flags.index(False, start) if False in flags[start:] else len(flags)
        yield range(first + start, first + end)
