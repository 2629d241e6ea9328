"""A bounded queue of blocks on their way from memory to a slower store.

A block waits pinned where it lies, so nothing is copied and nothing can change under the writer.
A full queue takes no more; what it refused stays in memory and may be offered again. While the
store keeps nothing (a full disk), the queue takes a block at a time: whoever makes room in memory
must not offer half of it in vain.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.store import BlockStore, Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20

_KEPT = (PutResult.STORED, PutResult.PRESENT)
_TELL_EVERY_S = 1.0

Written = Callable[[PutResult], None]


class Pace:
    """When those who wait should hear of it again."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _TELL_EVERY_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def is_due(self) -> bool:
        if self.left_s:
            return False
        self._next = time.monotonic() + _TELL_EVERY_S
        return True


@dataclass(slots=True, eq=False)
class _Waiting:
    block: PinnedSlot
    durability: Durability
    written: list[Written]
    is_late: bool = False  # the write missed its deadline, and goes on
    has_ended: bool = False

    def take_written(self) -> list[Written]:
        """Those to be told of the outcome; each is told once."""
        written, self.written = self.written, []
        return written


class WriteBehind:
    """Moves held blocks into `target`, in batches that run on its executor. Blocks it takes are let
    go when written. Calls may be made from any thread."""

    def __init__(
        self,
        memory: MemoryStore,
        target: BlockStore,
        capacity_bytes: int,
        executor: StoreExecutor,
        unkept: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
    ) -> None:
        """`executor` keeps its queue while the target hangs. `unkept` is told what the target
        failed to write or had no room for, while the block is still held."""
        self._memory = memory
        self._target = target
        self._capacity = capacity_bytes
        self._executor = executor
        self._unkept = unkept
        self._queue: deque[_Waiting] = deque()
        # Queued or being written, oldest first: a block that must be durable is written once more.
        self._by_key: dict[StoreKey, list[_Waiting]] = {}
        self._bytes = 0
        self._closing = False
        self._in_vain = False  # of the last blocks the target kept none
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
        """Takes over the caller's hold on `block`, unless the queue is full (False). A queue that
        is empty takes any block.

        `written` is called with the outcome, from any thread: FAILED where the target misses its
        deadline, although the write goes on and may yet succeed.
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
                waiting = _Waiting(block, durability, [written] if written is not None else [])
                self._by_key[block.key] = [*before, waiting]
                self._queue.append(waiting)
                self._bytes += block.nbytes
        if duplicate:
            self._memory.let_go([block])
        else:  # a batch for each block: it may take more than that one, or find none left
            batch: list[_Waiting] = []
            self._executor.submit(
                partial(self._write, batch), failed=partial(self._late, batch), client=self
            )
        if written is not None and (waiting.is_late or self._executor.is_hung):
            self._answer_failed([waiting])
        return True

    def _has_room(self, nbytes: int, is_awaited: bool) -> bool:
        if not self._bytes:
            return True
        may_queue = is_awaited or not self._in_vain
        return may_queue and self._bytes + nbytes <= self._capacity

    def discard(self, keys: Iterable[StoreKey]) -> None:
        """Forgets what waits under these keys. Returns when none of them is being written."""
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
        """Returns when a block has left the queue, none is in it, or a second has passed; False
        when the queue is closed, or the target hangs."""
        with self._lock:
            if self._bytes and not self._closing and not self._is_stuck():
                self._ended.wait(_TELL_EVERY_S)
            return not (self._closing or self._is_stuck())

    def _is_stuck(self) -> bool:
        """Whether all that is left to write is past its deadline."""
        left = (waiting for each in self._by_key.values() for waiting in each)
        return bool(self._by_key) and (
            self._executor.is_hung or all(waiting.is_late for waiting in left)
        )

    def drain(self, progress: Callable[[int], None] | None = None) -> bool:
        """Returns when all that waits now is written, whatever comes meanwhile; tells how many
        blocks are left, about once a second. False when a write misses its deadline."""
        pace = Pace()
        with self._lock:
            ahead = [waiting for each in self._by_key.values() for waiting in each]
            while ahead:
                if ahead[-1].has_ended:
                    ahead.pop()
                    continue
                if ahead[-1].is_late or self._executor.is_hung:
                    return False
                self._ended.wait(timeout=pace.left_s)
                if pace.is_due() and progress is not None:
                    progress(len(self._by_key))
        return True

    def close(self, progress: Callable[[int], None] | None = None) -> bool:
        """Writes what is queued and takes no more. False when the target hangs. Idempotent."""
        has_written = self.drain(progress)
        with self._lock:
            self._closing = True
            self._ended.notify_all()
        return has_written

    # ---- on the executor ------------------------------------------------------------------------

    def _write(self, batch: list[_Waiting]) -> None:
        """Fills the batch from the queue and writes it."""
        self._take_batch(batch)
        if not batch:
            return
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
        except Exception:  # the queue must go on whatever the store did
            logger.exception("writing blocks behind failed; they stay in memory only")
            results = [PutResult.FAILED] * len(batch)
        self._in_vain = not any(r in _KEPT for r in results)
        self._finish(batch, results, self._unkept)

    def _take_batch(self, batch: list[_Waiting]) -> None:
        """What to write together: consecutive blocks of equal durability."""
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

    def _late(self, batch: list[_Waiting]) -> None:
        """The target misses its deadline. The write goes on, and its blocks stay held until it has
        ended."""
        with self._lock:
            for waiting in batch:
                waiting.is_late = True
            if self._executor.is_hung:  # nobody knows when the queued ones begin
                batch = [waiting for each in self._by_key.values() for waiting in each]
            self._ended.notify_all()
        self._answer_failed(batch)

    def _answer_failed(self, unwritten: list[_Waiting]) -> None:
        with self._lock:
            answers = [written for waiting in unwritten for written in waiting.take_written()]
        for written in answers:
            with _surviving():
                written(PutResult.FAILED)

    def _finish(
        self,
        batch: list[_Waiting],
        results: list[PutResult],
        unkept: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
    ) -> None:
        answers: list[tuple[Written, PutResult]] = []
        with self._lock:
            for waiting, result in zip(batch, results, strict=True):
                waiting.has_ended = True
                self._forget(waiting)
                self._bytes -= waiting.block.nbytes
                answers += [(written, result) for written in waiting.take_written()]
                # In one step: whoever offers it again in between would be told that it waits.
                if result not in _KEPT:
                    with _surviving():
                        unkept(waiting.block.key, result)
            self._ended.notify_all()
        with _surviving():
            self._memory.let_go([waiting.block for waiting in batch])
        for written, result in answers:
            with _surviving():
                written(result)

    def _forget(self, waiting: _Waiting) -> None:
        others = self._by_key.pop(waiting.block.key, [])
        if left := [other for other in others if other is not waiting]:
            self._by_key[waiting.block.key] = left


@contextmanager
def _surviving() -> Iterator[None]:
    """Whatever is wrong with one block, the writers go on and everybody else is answered."""
    try:
        yield
    except Exception:
        logger.exception("what became of a block could not be told")
