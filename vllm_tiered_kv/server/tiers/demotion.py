"""The way down: what is in memory is written behind to every slower tier.

A queue that is full refuses, and a disk may fail or have no room. Such a block stays in memory, is
offered again when it is about to be evicted, and at the latest by `flush`. So is one that a disk
had taken and lost before it was durable.
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
from vllm_tiered_kv.server.tiers.write_behind import Pace, WriteBehind, Written
from vllm_tiered_kv.stores.memory import HandoffResult, MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)

_WRITERS, _SSD_WRITERS = 4, 16  # a call waits for its last block, and a disk must not

Progress = Callable[[str, int], None]
"""Told of a tier and how many blocks are left to write to it."""


@dataclass(frozen=True)
class Unwritten:
    """What is in memory alone although a tier was to have it."""

    tier: str
    blocks: int  # 0: all are written, but they may not outlive a power cut
    has_failed: bool  # not just for want of room

    def __str__(self) -> str:
        if not self.blocks:
            return f"what {self.tier} has may not be durable"
        if self.has_failed:
            return f"{self.blocks} blocks could not be written to {self.tier}"
        return f"{self.blocks} blocks found no room in {self.tier}"


class Demotion:
    """The tiers below memory, fastest first. Calls may be made from any thread."""

    def __init__(
        self,
        memory: MemoryStore,
        tiers: Sequence[tuple[str, LowerStore]],
        backing: LowerStore | None,
        recorder: Recorder,
        queue_bytes: int,
        backing_timeout_s: float = math.inf,
    ) -> None:
        """A write to the backing store is waited for no longer than `backing_timeout_s`."""
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
                memory, store, queue_bytes, self._executors[tier], partial(self._remember, tier)
            )
            for tier, store in tiers
        }
        self._refused: dict[str, dict[StoreKey, PutResult]] = {tier: {} for tier, _ in tiers}
        self._refused_lock = threading.Lock()
        self._flushing = threading.Lock()
        for tier, store in tiers:
            store.on_lost = partial(self._remember_lost, tier)

    def write_behind(
        self,
        keys: Sequence[StoreKey],
        results: list[PutResult],
        durability: Durability,
        done: Callable[[list[PutResult]], None],
    ) -> None:
        """Goes on with blocks that memory has taken, with these results. `done` is called when
        they are as durable as was asked for."""
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
        """In the fastest tier that is a disk."""
        if not self._tiers:
            written(PutResult.DROPPED)  # in memory, and no disk to be had
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
        """What is refused is remembered. A block that has left memory is nobody's concern."""

        def take(block: PinnedSlot) -> bool:
            is_taken = self._behind[tier].offer(block, durability, written)
            if not is_taken:  # while it cannot leave memory, which would be told before
                self._remember(tier, key, PutResult.DROPPED)
            return is_taken

        handed = self._memory.hand_over(key, take)
        if handed is HandoffResult.REFUSED:
            self._recorder.add(names.NOT_WRITTEN, 1, tier)
        return handed

    def _hand_to(self, tier: str, key: StoreKey) -> HandoffResult:
        offer = self._behind[tier].offer
        return self._memory.hand_over(key, lambda block: offer(block, Durability.MEMORY))

    def _remember(self, tier: str, key: StoreKey, result: PutResult) -> None:
        """To be offered again."""
        with self._refused_lock:
            self._refused[tier][key] = result

    def _remember_lost(self, tier: str, keys: Sequence[StoreKey]) -> None:
        """Not asked here whether memory has them: the caller may hold locks. What it does not have
        any more is told by the next flush, and then forgotten."""
        with self._refused_lock:
            self._refused[tier].update(dict.fromkeys(keys, PutResult.FAILED))

    # ---- eviction from memory, asked under its lock ---------------------------------------------

    def may_leave_memory(self, key: StoreKey) -> bool:
        """A block that no disk has yet may stay until one has it."""
        if not self._tiers:
            return True
        tier, store = self._tiers[0]
        if store is self._backing or store.contains([key])[0]:
            return True  # a backing store is never asked here: it may be slow
        return self._hand_to(tier, key) is not HandoffResult.TAKEN

    def left_memory(self, key: StoreKey) -> None:
        self._recorder.add(names.EVICTED, 1, Tier.MEMORY.value)
        for tier in self._refused:
            self._forget_refused(tier, [key])

    def _forget_refused(self, tier: str, keys: Sequence[StoreKey]) -> None:
        if self._refused[tier]:
            with self._refused_lock:
                for key in keys:
                    self._refused[tier].pop(key, None)

    # ---- the rest -------------------------------------------------------------------------------

    def delete(self, tier: str, keys: Sequence[StoreKey]) -> None:
        """From one of the tiers, where there is such a one. Takes as long as that takes.
        NotDeletedError where that tier may still have some."""
        for name, store in self._tiers:
            if name == tier:
                self._behind[tier].discard(keys)
                self._forget_refused(tier, keys)
                store.delete(keys)
                self._forget_refused(tier, keys)  # lost meanwhile

    def flush(
        self, progress: Progress = lambda tier, left: None, is_last: bool = False
    ) -> list[Unwritten]:
        """Writes all that waits and all that was refused or lost, and makes it durable; what could
        not. The last one tries the SSD twice: a sync that fails loses what memory still has.

        One at a time: what one of them has taken upon itself the other would not know of.
        """
        unwritten = []
        with self._flushing:
            for tier, store in self._tiers:
                left = self._flush(tier, store, progress)
                if left is not None and left.has_failed and is_last and store is not self._backing:
                    left = self._flush(tier, store, progress)
                if left is not None:
                    unwritten.append(left)
        return unwritten

    def _flush(self, tier: str, store: LowerStore, progress: Progress) -> Unwritten | None:
        behind = self._behind[tier]
        with self._refused_lock:
            refused, self._refused[tier] = self._refused[tier], {}
        if refused and store is not self._backing:
            store.retry()
        pace = Pace()
        gone = 0
        for count, (key, result) in enumerate(refused.items()):
            # Not held while it waits: it may be deleted meanwhile, and must stay so.
            while (handed := self._hand_to(tier, key)) is HandoffResult.REFUSED:
                if not behind.wait_for_room():
                    self._offer(tier, key)  # remembered again
                    break
                if pace.is_due():
                    progress(tier, len(refused) - count + behind.pending_blocks)
            gone += handed is HandoffResult.ABSENT and result is PutResult.FAILED
        has_ended = behind.drain(lambda left: progress(tier, left))
        is_durable = has_ended and self._sync(tier, store)
        with self._refused_lock:
            left = list(self._refused[tier].values())
        if not left and not gone and is_durable:
            return None
        blocks = len(left) + gone + (0 if has_ended else behind.pending_blocks)
        return Unwritten(tier, blocks, bool(gone) or PutResult.FAILED in left or not is_durable)

    def _sync(self, tier: str, store: LowerStore) -> bool:
        try:
            return self._executors[tier].call(store.flush)
        except StoreHungError:
            return False

    def pending(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes waiting to be written, by tier."""
        return {tier: (b.pending_blocks, b.pending_bytes) for tier, b in self._behind.items()}

    def close(self) -> bool:
        """False where the backing store hangs: some threads stay with it. All others are closed."""
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
    """Collects the outcomes of writes that several threads end, and reports them once."""

    def __init__(self, results: list[PutResult], done: Callable[[list[PutResult]], None]) -> None:
        self._results = results
        self._done = done
        self._left = 1  # until `start`
        self._lock = threading.Lock()

    def expect(self, position: int) -> Callable[[PutResult], None]:
        with self._lock:
            self._left += 1

        def arrived(result: PutResult) -> None:
            if result is not PutResult.PRESENT:  # present there: as durable as asked for
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
