"""Which GPU blocks are copied out, and when: while a request runs, when it ends, and afterwards.

- A running request's blocks are stored in the step whose forward fills them. What the workers'
  staging ring cannot take follows in later steps: as long as the request runs, its blocks stay
  what they are.
- With asynchronous scheduling or speculation, the tokens that fill the last block are confirmed
  only when the request ends. Its blocks are on their way back to the pool by then, so they are read
  before the next forward can touch them.
- What the ring had no room for at the end is deferred: stored as the ring drains, as long as vLLM's
  hash on the block says that it still holds it. Lazy stores work by the same hash.
- Blocks that a sliding window has passed go back to the pool while their request runs, and vLLM's
  null block takes their places. It is never stored; what the ring has no room for in the step that
  fills it is deferred at once.

- A request whose blocks the GPU had all along leaves nothing to store as a rule. Nothing is worked
  out for it while it waits for its first token; if it ends before that is done, it is done later.

No reference to a GPU block is ever held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group, plan_store
from vllm_tiered_kv.connector.deferred_store import DeferredStores
from vllm_tiered_kv.connector.gpu_block import KnownRun, StoreBatch, ids_of
from vllm_tiered_kv.connector.lazy_store import LazyStore
from vllm_tiered_kv.connector.partial_tail import Tail
from vllm_tiered_kv.connector.request_state import RequestState
from vllm_tiered_kv.core.tiers import Lookup, Tier
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
_UNLIMITED = 1 << 62
_MOST_UNSEEN = 16  # so many may wait until nobody waits for a first token


class StorePlanner:
    def __init__(
        self,
        groups: Sequence[Group],
        index: BlockIndex,
        ledger: TransferLedger,
        lazy: LazyStore | None,
        hash_block_size: int | None,
        max_blocks_in_flight: int | None,
    ) -> None:
        """`hash_block_size`: tokens per hash vLLM writes on cached blocks; None without its prefix
        cache. `max_blocks_in_flight`: what the workers' staging ring holds; None without one."""
        self._groups = groups
        self._index = index
        self._ledger = ledger
        self._lazy = lazy
        self._deferred = DeferredStores()
        # Finished requests whose blocks the GPU had all along, with those and their tokens.
        self._unseen: deque[tuple[RequestState, Sequence[list[int]], int]] = deque()
        self._hash_block_size = hash_block_size
        self.max_blocks_in_flight = max_blocks_in_flight
        self._rings: dict[int, int] = {}  # by rank
        # GPU blocks that outlived a reset of the cache: id -> hash, while it is still on them.
        self._outdated: dict[int, bytes] = {}
        self._outlived: set[str] = set()  # requests that go on from then, or build on those
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        if self._hash_block_size is not None:
            self._hash_block_size = manager.block_pool.hash_block_size

    def heard_rings(self, blocks: Mapping[int, int]) -> None:
        """What the staging rings of workers really hold, by rank: the smallest counts."""
        self._rings.update(blocks)
        self.max_blocks_in_flight = min(self._rings.values(), default=self.max_blocks_in_flight)

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    @property
    def has_outdated(self) -> bool:
        """Whether what requests find on the GPU may be from before a reset. That is seen in their
        first step: a window may pass it, and it is gone from their tables."""
        return bool(self._outdated)

    @property
    def has_unseen(self) -> bool:
        """Whether requests have ended that are looked at when nobody waits for a first token."""
        return bool(self._unseen)

    def store_running(
        self,
        state: RequestState,
        tables: Sequence[Sequence[KVCacheBlock]],
        ready_tokens: int,
        tail: Tail | None = None,
    ) -> list[StoreJob]:
        """Jobs for the blocks this step's forward completes; to be read after it. A `tail` that is
        to be stored as well has room left for it: it cannot wait until its request is over, when
        nobody knows its block."""
        jobs: list[StoreJob] = []
        leave = 0 if tail is None else 1
        new = [ids_of(blocks) for blocks in self._not_considered(state, tables, ready_tokens)]
        self._refuse_outdated(state, new)
        for group, ids in zip(self._groups, new, strict=True):
            if group.window is not None:
                ids = self._past_window(state, group, ids)
            if self._lazy is not None:
                self._observe(self._lazy, state, group, ids)
                continue
            room = max(0, self.ring_room() - leave)
            jobs += self._store_jobs(state, group, ids[:room])
            if group.window is not None:
                self._defer(state, group, ids[room:])
            else:
                self._ledger.delay(len(ids) - room)
        return jobs

    def store_tail(
        self, state: RequestState, tail: Tail, table: Sequence[KVCacheBlock]
    ) -> list[StoreJob]:
        """A job for the block in which the prompt ends, once its tokens are there. As long as the
        request runs they stay what they are: it may be read after later ones have joined them."""
        group = self._groups[0]
        if self._outdated:
            self._refuse_outdated(state, [ids_of(table[: tail.position + 1])])
        if state.closed is None and not self.ring_room():
            self._ledger.delay(1)
            return []
        state.has_tail = True
        if state.closed is not None:
            self._ledger.drop(1, state.closed)
            return []
        plan = plan_store(self._index, group, tail.keys, tail.position, len(tail.keys))
        self._ledger.drop(plan.dropped, DropReason.TIER_FULL)
        if not plan.slots:
            return []
        anchors = []
        if self._ledger.on_commit is not None:
            anchors = anchors_of(tail.keys, plan.positions)
        block_ids = ids_of(table[tail.position : tail.position + 1])
        return [self._store_job(StoreBatch(group, block_ids, plan.slots, anchors))]

    def lose_tail(self, state: RequestState, table: Sequence[int], ready_tokens: int) -> None:
        """The request is over; if the ring had no room for its tail so far, that is dropped."""
        tail = state.tail_to_store(ready_tokens)
        if tail is None or len(table) <= tail.position:
            return
        if self._index.lookup(tail.key) is Lookup.MISS:
            self._ledger.drop(1, state.closed or DropReason.STAGING_FULL)

    def store_finished(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> list[StoreJob]:
        """Jobs for what is left of a finished request; to be read before the next forward."""
        jobs: list[StoreJob] = []
        # A request that ends while preempted has no blocks left.
        last = [list(ids) for ids in self._not_considered(state, tables, ready_tokens)]
        self._refuse_outdated(state, last)
        self._outlived.discard(state.request.request_id)
        for group, ids in zip(self._groups, last, strict=True):
            if group.window is not None:
                ids = self._past_window(state, group, ids)
            if self._lazy is not None:
                self._observe(self._lazy, state, group, ids)
                continue
            room = self.ring_room()
            jobs += self._store_jobs(state, group, ids[:room])
            self._defer(state, group, ids[room:])
        return jobs

    def store_later(
        self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int
    ) -> bool:
        """As `store_finished`, at the next step; False where that would be too late."""
        if self._hash_block_size is None or self._lazy is not None or self._outdated:
            return False
        self._unseen.append((state, tables, ready_tokens))
        return True

    def store_unowned(self, first_token_is_awaited: bool = False) -> list[StoreJob]:
        """Jobs for blocks no request owns: deferred ones, or those about to be reused."""
        most = _MOST_UNSEEN if first_token_is_awaited else 0
        while len(self._unseen) > most:
            self._see(*self._unseen.popleft())
        if self._lazy is None and not self._deferred:
            return []
        pool = self._block_pool
        if self._lazy is not None:
            batches, refused = self._lazy.plan(pool, self._index, self.ring_room())
            self._ledger.drop(refused, DropReason.TIER_FULL)
        else:
            batches, dropped = self._deferred.plan(pool, self._index, self.ring_room())
            for reason, count in dropped.items():
                self._ledger.drop(count, reason)
            self._ledger.delay(len(self._deferred))
        return [self._store_job(batch) for batch in batches]

    def reset(self, requests: Iterable[Request]) -> None:
        """Forgets blocks seen before the cache was reset.

        vLLM resets its own cache first, but cannot while requests run. Blocks that it kept were
        computed before the reset and are not stored as long as they are what they were.
        `requests`: all that there are, also those that the cache has nothing else to do with.
        """
        if self._lazy is not None:
            self._lazy.clear()
        self._unseen.clear()
        self._ledger.drop(self._deferred.clear(), DropReason.RESET)
        self._outdated = {
            block.block_id: block.block_hash
            for block in self._block_pool.blocks
            if block.block_hash is not None
        }
        self._outlived = {each.request_id for each in requests if each.num_computed_tokens}

    def see_outlived(self) -> None:
        """What requests fill that go on from before a reset outlives it, too. vLLM may write the
        hash on such a block steps after it was filled: when all groups have full blocks there, or
        when the step's output has come."""
        for request_id in self._outlived:
            assert self._manager is not None, "vLLM did not bind its KV-cache manager"
            for table in self._manager.get_blocks(request_id).blocks:
                self._outdate(table)

    def forget_outlived(self, request_id: str) -> None:
        """The request is over, or has lost its blocks and starts over."""
        if request_id in self._outlived:
            self.see_outlived()
            self._outlived.discard(request_id)

    def lose_hashes(self, states: Iterable[RequestState]) -> None:
        """The hashes of all GPU blocks are about to go, and with them the knowledge which of them
        outlived a reset. Whoever runs now may hold such blocks."""
        if self._outdated:
            for state in states:
                state.close(DropReason.RESET)
            self._outdated.clear()

    def record(self, recorder: Recorder) -> None:
        """How full the way out is."""
        recorder.set(names.PENDING_STORES, self._ledger.pending_store_blocks, _CPU)
        recorder.set(names.RING_CAPACITY, self.max_blocks_in_flight or 0, _CPU)
        has_ring = self.max_blocks_in_flight is not None
        recorder.set(names.RING_USED, self._on_the_way if has_ring else 0, _CPU)
        recorder.set(names.PUT_OFF, len(self._deferred), _CPU)

    @property
    def _on_the_way(self) -> int:
        return self._ledger.pending_store_blocks + self._ledger.copies_to_compare

    def ring_room(self) -> int:
        """How many more blocks the workers' staging ring can take right now."""
        if self.max_blocks_in_flight is None:
            return _UNLIMITED
        return max(0, self.max_blocks_in_flight - self._on_the_way)

    def room_to_compare(self) -> int:
        """The same for blocks that leave the GPU to be compared: a share, since comparing may take
        long and stores of others must not wait for it."""
        if self.max_blocks_in_flight is None:
            return _UNLIMITED
        share = max(1, self.max_blocks_in_flight // 4)
        return max(0, min(self.ring_room(), share - self._ledger.copies_to_compare))

    def _past_window(self, state: RequestState, group: Group, ids: list[int]) -> list[int]:
        """Those of a request's next blocks that it still has; there is nothing to store of those
        before them."""
        null = self._block_pool.null_block.block_id
        has_it = int64_array(ids) != null
        gone = int(has_it.argmax()) if has_it.any() else len(ids)
        state.stored[group.group_id] += gone
        ids = ids[gone:]
        return ids[: ids.index(null)] if null in ids else ids

    def _see(self, state: RequestState, tables: Sequence[list[int]], ready_tokens: int) -> None:
        """Counts the blocks of a finished request as used, and defers those the tier lacks."""
        state.keys.extend(state.request, ready_tokens)
        for group in self._groups:
            start, stop = state.stored[group.group_id], ready_tokens // group.block_size
            ids = tables[group.group_id][start:stop]
            if group.window is not None:
                ids = self._past_window(state, group, ids)
                start = state.stored[group.group_id]
            stop = start + len(ids)
            keys = state.keys.of_group[group.group_id]
            self._index.touch(keys[start:stop])
            missing = self._index.first_missing(keys, start, stop)
            state.stored[group.group_id] = missing
            self._defer(state, group, ids[missing - start :])

    def _store_jobs(self, state: RequestState, group: Group, ids: list[int]) -> list[StoreJob]:
        """Reserves slots for those of the next full blocks that are missing in the tier."""
        start = state.stored[group.group_id]
        stop = start + len(ids)
        state.stored[group.group_id] = stop
        if state.closed is not None:
            self._ledger.drop(len(ids), state.closed)
            return []
        keys = state.keys.of_group[group.group_id]
        skip = state.held_elsewhere[group.group_id]
        plan = plan_store(self._index, group, keys, start, stop, skip)
        if plan.dropped:
            state.closed = DropReason.TIER_FULL
            self._ledger.drop(plan.dropped, DropReason.TIER_FULL)
        if (not start or group.window is not None) and len(plan.slots) < len(ids):
            self._index.touch(keys[start:stop])  # what the GPU still had counts as used here too
        if not plan.slots:
            return []
        sources = ids
        if len(plan.slots) < len(ids):
            sources = int64_array(ids)[int64_array(plan.positions) - start].tolist()
        anchors = []
        if self._ledger.on_commit is not None:
            anchors = anchors_of(keys, plan.positions)
        return [self._store_job(StoreBatch(group, sources, plan.slots, anchors), state)]

    def _observe(
        self, lazy: LazyStore, state: RequestState, group: Group, block_ids: list[int]
    ) -> None:
        """The next full blocks of a request lie in these GPU blocks."""
        start = state.stored[group.group_id]
        stop = state.stored[group.group_id] = start + len(block_ids)
        if state.closed is not None:
            return
        run = self._run(state, group, start, block_ids)
        for positions in _around(state.held_elsewhere[group.group_id], start, stop):
            lazy.observe(run, positions)

    def _defer(self, state: RequestState, group: Group, block_ids: list[int]) -> None:
        """The next blocks of a request found the ring full, and it will not keep them."""
        start = state.stored[group.group_id]
        stop = state.stored[group.group_id] = start + len(block_ids)
        if self._hash_block_size is None or state.closed is not None:
            self._ledger.drop(stop - start, state.closed or DropReason.STAGING_FULL)
            return
        self._ledger.delay(stop - start)
        run = self._run(state, group, start, block_ids)
        for positions in _around(state.held_elsewhere[group.group_id], start, stop):
            # One of them is vLLM's null block.
            given_up = self._deferred.add(positions, run, len(self._block_pool.blocks) - 1)
            self._ledger.drop(given_up, DropReason.STAGING_FULL)

    def _run(self, state: RequestState, group: Group, start: int, block_ids: list[int]) -> KnownRun:
        assert self._hash_block_size is not None
        keys = state.keys.of_group[group.group_id]
        return KnownRun(state.request, group, keys, start, block_ids, self._hash_block_size)

    def _refuse_outdated(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Stores nothing of a request that builds on what outlived a reset, in any group.

        What it builds outlives the reset too, and gets its hash later than that: blocks that were
        being loaded then, or are computed from now on.
        """
        blocks = self._block_pool.blocks
        for block_id in chain.from_iterable(tables) if self._outdated else ():
            vllm_hash = self._outdated.get(block_id)
            if vllm_hash is None:
                continue
            if blocks[block_id].block_hash == vllm_hash:
                state.close(DropReason.RESET)
                break
            del self._outdated[block_id]
        if state.closed is DropReason.RESET:
            self._outlived.add(state.request.request_id)
            for table in tables:
                self._outdate([blocks[block_id] for block_id in table])

    def _outdate(self, table: Sequence[KVCacheBlock]) -> None:
        """Those of a request's blocks that others may find by now."""
        for block in reversed(table):
            if block.block_hash is None:
                continue
            if self._outdated.get(block.block_id) == block.block_hash:
                break  # those before it were seen in earlier steps
            self._outdated[block.block_id] = block.block_hash

    def _not_considered(
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

    def _store_job(self, batch: StoreBatch, owner: RequestState | None = None) -> StoreJob:
        job_id = self._ledger.open_store(
            batch.slots,
            batch.group.block_bytes,
            owner.close if owner is not None else None,
            batch.anchors,
        )
        transfer = GroupTransfer(
            batch.group.group_id, int64_array(batch.block_ids), int64_array(batch.slots)
        )
        return StoreJob(job_id, transfer)


def _around(skip: range, start: int, stop: int) -> list[range]:
    """Positions without those a daemon holds, which are one run: a part before it, one behind."""
    if not skip:
        return [range(start, stop)]
    parts = [range(start, min(stop, skip.start)), range(max(start, skip.stop), stop)]
    return [part for part in parts if part]
