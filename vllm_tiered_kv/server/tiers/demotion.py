"""Demotion: blocks in memory are written behind to every slower tier.

A write-behind queue may be full, and a disk may fail or be full. Such a block stays in memory and
is offered again when it is about to be evicted, and at the latest by `flush`. The same holds for a
block that a disk accepted but lost before it was durable. A block that a disk has evicted is
written again only if it was used since (`Demotion.may_leave_memory`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.store import Durability, LowerStore, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor, StoreHungError
from vllm_tiered_kv.server.tiers.write_behind import ProgressTimer, WriteBehind, Written
from vllm_tiered_kv.stores.memory import HandoffResult, MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)

_WRITERS, _SSD_WRITERS = 4, 16  # threads; enough that an SSD always has the next batch

Progress = Callable[[str, int], None]
"""Called with a tier and the number of blocks left to write to it."""


@dataclass(frozen=True)
class Unwritten:
    """Blocks that exist only in memory although a tier should have them."""

    tier: str
    blocks: int  # 0: all are written, but may not survive a power failure
    has_failed: bool  # False: the tier was merely full
    gone: int = 0  # of these blocks: the tier has lost them, and memory has evicted them

    def __str__(self) -> str:
        if not self.blocks:
            return f"blocks in {self.tier} may not be durable"
        if self.has_failed:
            return f"{self.blocks} blocks could not be written to {self.tier}"
        return f"{self.blocks} blocks found no room in {self.tier}"


class Demotion:
    """Writes blocks to the tiers below memory, fastest first. `TieredStore` creates it. Calls may
    be made from any thread."""

    def __init__(
        self,
        memory: MemoryStore,
        tiers: Sequence[tuple[str, LowerStore]],
        backing: LowerStore | None,
        recorder: Recorder,
        queue_bytes: int,
        backing_timeout_s: float = math.inf,
    ) -> None:
        """`backing_timeout_s` limits how long anyone waits for a write to the backing store."""
        self._memory = memory
        self._tiers = tiers
        self._backing = backing
        self._recorder = recorder
        self._executors = {
            tier: StoreExecutor(
                f"{tier}-write",
                _WRITERS if store is backing else _SSD_WRITERS,
                backing_timeout_s if store is backing else math.inf,
                keeps_queue=True,
            )
            for tier, store in tiers
        }
        self._behind = {
            tier: WriteBehind(
                memory,
                store,
                queue_bytes,
                self._executors[tier],
                partial(self._record_unwritten, tier),
                partial(self._write_begun, tier, store),
            )
            for tier, store in tiers
        }
        self._unwritten: dict[str, dict[StoreKey, PutResult]] = {tier: {} for tier, _ in tiers}
        self._gone = dict.fromkeys(self._unwritten, 0)
        """Blocks that a tier failed to write or lost and memory evicted, since the last flush."""
        self._unwritten_lock = threading.Lock()
        self._flushing = threading.Lock()

    def write_behind(
        self,
        keys: Sequence[StoreKey],
        results: list[PutResult],
        durability: Durability,
        done: Callable[[list[PutResult]], None],
    ) -> None:
        """Queues blocks that memory has stored, with these results, for the slower tiers. Calls
        `done` when they are as durable as requested."""
        for result in PutResult:  # a Counter would call Python code for each block
            if result in results:
                self._recorder.add(names.PUTS, results.count(result), result.name.lower())
        if durability is not Durability.DISK:
            stored = [key for key, r in zip(keys, results, strict=True) if r is PutResult.STORED]
            for tier in self._behind:
                for key in stored:
                    self._offer(tier, key)
            done(results)
            return
        waiting = _Countdown(results, done)
        for n, key in enumerate(keys):
            if results[n] in (PutResult.STORED, PutResult.PRESENT):
                self._make_durable(key, waiting.expect(n))
                if results[n] is PutResult.STORED:
                    for tier, _ in self._tiers[1:]:
                        self._offer(tier, key)
        waiting.start()

    def _make_durable(self, key: StoreKey, written: Written) -> None:
        """Writes to the fastest tier that is a disk."""
        if not self._tiers:
            written(PutResult.DROPPED)  # there is no disk
            return
        tier, _ = self._tiers[0]
        if self._offer(tier, key, Durability.DISK, written) is not HandoffResult.TAKEN:
            written(PutResult.DROPPED)

    def _offer(
        self,
        tier: str,
        key: StoreKey,
        durability: Durability = Durability.MEMORY,
        written: Written | None = None,
    ) -> HandoffResult:
        """Offers a block to the queue of a tier and records a refusal. A block that has been
        evicted meanwhile is ignored."""

        def take(block: PinnedSlot) -> bool:
            is_taken = self._behind[tier].offer(block, durability, written)
            # Recorded before the handoff ends: until then it cannot be evicted and forgotten.
            if not is_taken:
                self._record_unwritten(tier, key, PutResult.DROPPED)
            return is_taken

        outcome = self._memory.hand_over(key, take)
        if outcome is HandoffResult.REFUSED:
            self._recorder.add(names.NOT_WRITTEN, 1, tier)
        return outcome

    def _offer_unrecorded(self, tier: str, key: StoreKey) -> HandoffResult:
        offer = self._behind[tier].offer
        return self._memory.hand_over(key, lambda block: offer(block, Durability.MEMORY))

    def _record_unwritten(self, tier: str, key: StoreKey, result: PutResult) -> None:
        """Remembers a block so that it is offered again."""
        with self._unwritten_lock:
            self._unwritten[tier][key] = result

    def _write_begun(self, tier: str, store: LowerStore, blocks: Sequence[PinnedSlot]) -> None:
        """From now on a disk may evict these blocks, which is no reason to write them again. If
        this write fails or is lost, they are recorded as unwritten after this."""
        if store is not self._backing:
            self._forget_unwritten(tier, store, [block.key for block in blocks])
            self._memory.mark_written(blocks)

    def _record_lost(self, tier: str, store: LowerStore) -> None:
        """Remembers blocks that a tier has lost. It does not check whether memory still has them:
        the next flush reports those that are gone."""
        with self._unwritten_lock:  # or a flush could miss blocks that another thread has taken
            self._unwritten[tier].update(dict.fromkeys(store.take_lost(), PutResult.FAILED))

    # ---- eviction from memory; memory calls these under its lock --------------------------------

    def may_leave_memory(self, key: StoreKey) -> bool:
        """False if a disk still has to write the block; it then stays in memory until written.

        A block that the disk has evicted is written again only if it was used since it was written:
        the disk does not see uses of blocks in memory. Otherwise a disk that holds fewer blocks
        than memory would write the same blocks over and over.
        """
        if not self._tiers:
            return True
        tier, store = self._tiers[0]
        if store is self._backing or store.contains([key])[0]:
            return True  # never asks a backing store here: it may be slow
        if self._memory.is_written(key):
            self._record_lost(tier, store)
            if key not in self._unwritten[tier]:
                return True
        return self._offer_unrecorded(tier, key) is not HandoffResult.TAKEN

    def left_memory(self, key: StoreKey) -> None:
        self._recorder.add(names.EVICTED, 1, Tier.MEMORY.value)
        for tier, store in self._tiers:
            self._record_lost(tier, store)
            if not self._unwritten[tier]:
                continue
            with self._unwritten_lock:
                result = self._unwritten[tier].pop(key, None)
            if result is PutResult.FAILED and (
                store is self._backing or not store.contains([key])[0]
            ):
                with self._unwritten_lock:
                    self._gone[tier] += 1

    def give_up(self, keys: Sequence[StoreKey]) -> None:
        """Blocks that are no longer in memory on purpose: no flush misses them in a slower tier."""
        for tier, store in self._tiers:
            self._forget_unwritten(tier, store, keys)

    def _forget_unwritten(self, tier: str, store: LowerStore, keys: Sequence[StoreKey]) -> None:
        self._record_lost(tier, store)
        if self._unwritten[tier]:
            with self._unwritten_lock:
                for key in keys:
                    self._unwritten[tier].pop(key, None)

    # ---- delete, flush, close -------------------------------------------------------------------

    def delete(self, tier: str, keys: Sequence[StoreKey]) -> None:
        """Deletes from one of the tiers, if it exists, and waits for it. NotDeletedError if that
        tier may still have some of the blocks."""
        for name, store in self._tiers:
            if name == tier:
                self._behind[tier].discard(keys)
                self._forget_unwritten(tier, store, keys)
                store.delete(keys)
                self._forget_unwritten(tier, store, keys)  # the store may have lost some meanwhile

    def flush(
        self, progress: Progress = lambda tier, left: None, is_last: bool = False
    ) -> list[Unwritten]:
        """Writes everything queued, refused or lost, makes it durable, and returns what could not
        be written. The last flush tries the SSD twice: if a sync fails, the SSD loses blocks that
        memory still has.

        Flushes run one at a time: each takes the list of unwritten blocks.
        """
        unwritten = []
        with self._flushing:
            for tier, store in self._tiers:
                left = self._flush(tier, store, progress)
                if left is not None and left.has_failed and is_last and store is not self._backing:
                    gone = left.gone  # no second attempt finds them
                    left = self._flush(tier, store, progress)
                    if gone:
                        blocks = gone if left is None else gone + left.blocks
                        left = Unwritten(tier, blocks, has_failed=True)
                if left is not None:
                    unwritten.append(left)
        return unwritten

    def _flush(self, tier: str, store: LowerStore, progress: Progress) -> Unwritten | None:
        behind = self._behind[tier]
        self._record_lost(tier, store)
        with self._unwritten_lock:
            refused, self._unwritten[tier] = self._unwritten[tier], {}
            gone, self._gone[tier] = self._gone[tier], 0
        if refused and store is not self._backing:
            store.retry()
        timer = ProgressTimer()
        for count, (key, result) in enumerate(refused.items()):
            # Not pinned while it waits for room: it may be deleted meanwhile, and must stay so.
            while (outcome := self._offer_unrecorded(tier, key)) is HandoffResult.REFUSED:
                if not behind.wait_for_room():
                    self._offer(tier, key)  # records it again
                    break
                if timer.is_due():
                    progress(tier, len(refused) - count + behind.pending_blocks)
            gone += outcome is HandoffResult.ABSENT and result is PutResult.FAILED
        has_ended = behind.drain(lambda left: progress(tier, left))
        is_durable = has_ended and self._sync(tier, store)
        self._record_lost(tier, store)
        with self._unwritten_lock:
            left = list(self._unwritten[tier].values())
        if not left and not gone and is_durable:
            return None
        blocks = len(left) + gone + (0 if has_ended else behind.pending_blocks)
        has_failed = bool(gone) or PutResult.FAILED in left or not is_durable
        return Unwritten(tier, blocks, has_failed, gone)

    def _sync(self, tier: str, store: LowerStore) -> bool:
        try:
            return self._executors[tier].call(store.flush)
        except StoreHungError:
            return False

    def pending(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes waiting to be written, by tier."""
        return {tier: (b.pending_blocks, b.pending_bytes) for tier, b in self._behind.items()}

    def close(self) -> bool:
        """Closes everything it can. False if threads are left that hang in the backing store."""
        has_ended = True
        for tier, store in self._tiers:
            executor = self._executors[tier]
            has_written = self._behind[tier].close()
            if has_written:
                try:
                    executor.call(store.close)
                except StoreHungError as error:
                    logger.warning("%s", error)
            has_ended = executor.close() and has_written and has_ended
        return has_ended


class _Countdown:
    """Collects results of writes from several threads and calls `done` once with all of them."""

    def __init__(self, results: list[PutResult], done: Callable[[list[PutResult]], None]) -> None:
        self._results = results
        self._done = done
        self._left = 1  # until `start`
        self._lock = threading.Lock()

    def expect(self, position: int) -> Callable[[PutResult], None]:
        with self._lock:
            self._left += 1

        def arrived(result: PutResult) -> None:
            if result is not PutResult.PRESENT:  # already on that disk, hence durable
                self._results[position] = result
            self._finish_one()

        return arrived

    def start(self) -> None:
        self._finish_one()

    def _finish_one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._done(self._results)
