"""Write-behind: a bounded queue of blocks that are written from memory to a slower store.

A queued block stays pinned in its slot, so it is not copied and cannot change. A full queue refuses
blocks; they stay in memory and may be offered again. While the store rejects everything (a full
disk), the queue holds a single block, so that eviction does not pin half of the memory in vain.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.store import BlockStore, Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20

_KEPT = (PutResult.STORED, PutResult.PRESENT)
_PROGRESS_INTERVAL_S = 1.0

Written = Callable[[PutResult], None]


class ProgressTimer:
    """Tells about once a second that progress should be reported."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PROGRESS_INTERVAL_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        if self.left_s:
            return False
        self._next = time.monotonic() + _PROGRESS_INTERVAL_S
        return True


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """A block that is queued or being written."""

    block: PinnedSlot
    durability: Durability
    written: list[Written]
    is_late: bool = False  # the write missed its deadline and is still running
    has_ended: bool = False

    def take_written(self) -> list[Written]:
        """The callbacks to call with the outcome; each is returned once."""
        written, self.written = self.written, []
        return written


class WriteBehind:
    """The write-behind queue of one tier: writes pinned blocks to `target`, in batches that run on
    its executor, and releases them. `Demotion` creates it. Calls may be made from any thread."""

    def __init__(
        self,
        memory: MemoryStore,
        target: BlockStore,
        capacity_bytes: int,
        executor: StoreExecutor,
        on_failed: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
        on_begun: Callable[[Sequence[PinnedSlot]], None] = lambda blocks: None,
    ) -> None:
        """`executor` keeps its queue while the target hangs. `on_begun` is called with the blocks
        of each write before it, `on_failed` for each block that the target did not store, while
        the block is still pinned."""
        self._memory = memory
        self._target = target
        self._capacity = capacity_bytes
        self._executor = executor
        self._on_failed = on_failed
        self._on_begun = on_begun
        self._queue: deque[_PendingWrite] = deque()
        # Oldest first; a key has two entries if a block in the queue must also become durable.
        self._by_key: dict[StoreKey, list[_PendingWrite]] = {}
        self._bytes = 0
        self._closing = False
        self._target_keeps_nothing = False  # it stored no block of the last batch
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    @property
    def pending_blocks(self) -> int:
        return len(self._by_key)

    def offer(
        self, block: PinnedSlot, durability: Durability, written: Written | None = None
    ) -> bool:
        """Takes over the caller's hold on `block`, unless the queue is full (False). An empty queue
        accepts any block.

        `written` is called with the outcome, from any thread. FAILED may also mean that the target
        missed its deadline; the write then continues and may still succeed.
        """
        with self._lock:
            before = self._by_key.get(block.key, [])
            waiting = before[-1] if before else None
            if waiting is not None and (written is None or durability is waiting.durability):
                if written is not None:
                    waiting.written.append(written)
                duplicate = True
            elif self._closing or not self._has_room(block.nbytes, written is not None):
                return False
            else:
                duplicate = False
                waiting = _PendingWrite(block, durability, [written] if written is not None else [])
                self._by_key[block.key] = [*before, waiting]
                self._queue.append(waiting)
                self._bytes += block.nbytes
        if duplicate:
            self._memory.let_go([block])
        else:  # one batch per block; a batch may write several blocks and leave none to the next
            batch: list[_PendingWrite] = []
            self._executor.submit(
                partial(self._write, batch), failed=partial(self._on_deadline, batch), client=self
            )
        if written is not None and (waiting.is_late or self._executor.is_hung):
            self._answer_failed([waiting])
        return True

    def _has_room(self, nbytes: int, is_awaited: bool) -> bool:
        if not self._bytes:
            return True
        may_queue = is_awaited or not self._target_keeps_nothing
        return may_queue and self._bytes + nbytes <= self._capacity

    def discard(self, keys: Iterable[StoreKey]) -> None:
        """Removes these keys from the queue and waits until none of them is being written."""
        wanted = set(keys)
        with self._lock:
            unwritten = [w for w in self._queue if w.block.key in wanted]
            if unwritten:
                self._queue = deque(w for w in self._queue if w.block.key not in wanted)
        self._finish(unwritten, [PutResult.DROPPED] * len(unwritten))
        with self._lock:
            while not wanted.isdisjoint(self._by_key):
                self._ended.wait()

    def wait_for_room(self) -> bool:
        """Returns when a block has left the queue, the queue is empty or a second has passed. False
        if the queue is closed or the target hangs."""
        with self._lock:
            if self._bytes and not self._closing and not self._is_stuck():
                self._ended.wait(_PROGRESS_INTERVAL_S)
            return not (self._closing or self._is_stuck())

    def _is_stuck(self) -> bool:
        """Whether everything left to write is past its deadline."""
        left = (waiting for each in self._by_key.values() for waiting in each)
        return bool(self._by_key) and (
            self._executor.is_hung or all(waiting.is_late for waiting in left)
        )

    def drain(self, progress: Callable[[int], None] | None = None) -> bool:
        """Returns when everything that is queued now is written. Calls `progress` about once a
        second with the number of blocks left. False if a write misses its deadline."""
        timer = ProgressTimer()
        with self._lock:
            unfinished = [write for writes in self._by_key.values() for write in writes]
            while unfinished:
                if unfinished[-1].has_ended:
                    unfinished.pop()
                    continue
                if unfinished[-1].is_late or self._executor.is_hung:
                    return False
                self._ended.wait(timeout=timer.left_s)
                if timer.is_due() and progress is not None:
                    progress(len(self._by_key))
        return True

    def close(self, progress: Callable[[int], None] | None = None) -> bool:
        """Writes what is queued and accepts no more. False if the target hangs. Idempotent."""
        has_written = self.drain(progress)
        with self._lock:
            self._closing = True
            self._ended.notify_all()
        return has_written

    # ---- on the executor ------------------------------------------------------------------------

    def _write(self, batch: list[_PendingWrite]) -> None:
        """Fills the batch from the queue and writes it."""
        self._take_batch(batch)
        if not batch:
            return
        with _logging_errors():
            self._on_begun([waiting.block for waiting in batch])
        results: list[PutResult]
        try:
            results = self._target.put(
                [
                    PutItem(w.block.key, w.block.parent, w.block.view, w.block.checksum)
                    for w in batch
                ],
                batch[0].durability,
            )
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results for {len(batch)} blocks")
        except Exception:  # the queue must continue whatever the store did
            logger.exception("cannot write blocks to a slower tier; they stay in memory only")
            results = [PutResult.FAILED] * len(batch)
        self._target_keeps_nothing = not any(r in _KEPT for r in results)
        self._finish(batch, results, self._on_failed)

    def _take_batch(self, batch: list[_PendingWrite]) -> None:
        """Takes consecutive blocks of equal durability from the queue."""
        nbytes = 0
        with self._lock:
            while self._queue:
                following = self._queue[0]
                nbytes += following.block.nbytes
                if batch and (
                    following.durability is not batch[0].durability or nbytes > _BATCH_BYTES
                ):
                    return
                batch.append(self._queue.popleft())

    def _on_deadline(self, batch: list[_PendingWrite]) -> None:
        """The target has missed its deadline. The write continues, and its blocks stay pinned until
        it has ended."""
        with self._lock:
            for waiting in batch:
                waiting.is_late = True
            if self._executor.is_hung:  # it is unknown when queued writes will start
                batch = [waiting for each in self._by_key.values() for waiting in each]
            self._ended.notify_all()
        self._answer_failed(batch)

    def _answer_failed(self, unwritten: list[_PendingWrite]) -> None:
        with self._lock:
            answers = [written for waiting in unwritten for written in waiting.take_written()]
        for written in answers:
            with _logging_errors():
                written(PutResult.FAILED)

    def _finish(
        self,
        batch: list[_PendingWrite],
        results: list[PutResult],
        on_failed: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
    ) -> None:
        answers: list[tuple[Written, PutResult]] = []
        with self._lock:
            for waiting, result in zip(batch, results, strict=True):
                waiting.has_ended = True
                self._forget(waiting)
                self._bytes -= waiting.block.nbytes
                answers += [(written, result) for written in waiting.take_written()]
                # Under the same lock as `_forget`: otherwise a retry of this block in between would
                # be accepted as a duplicate of the write that has just failed.
                if result not in _KEPT:
                    with _logging_errors():
                        on_failed(waiting.block.key, result)
            self._ended.notify_all()
        with _logging_errors():
            self._memory.let_go([waiting.block for waiting in batch])
        for written, result in answers:
            with _logging_errors():
                written(result)

    def _forget(self, waiting: _PendingWrite) -> None:
        others = self._by_key.pop(waiting.block.key, [])
        if left := [other for other in others if other is not waiting]:
            self._by_key[waiting.block.key] = left


@contextmanager
def _logging_errors() -> Iterator[None]:
    """An error in one callback must not stop the writers or keep others from their answers."""
    try:
        yield
    except Exception:
        logger.exception("a callback of a write to a slower tier failed")
