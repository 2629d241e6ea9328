"""A bounded queue of blocks on their way from memory to a slower store.

A block waits pinned where it lies, so nothing is copied and nothing can change under the writer.
A full queue takes no more; what it refused stays in memory and may be offered again. While the
store keeps nothing (a full disk), the queue takes a block at a time: whoever makes room in memory
must not offer half of it in vain.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_tiered_kv.core.store import BlockStore, Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.stores.held import Held
from vllm_tiered_kv.stores.memory import MemoryStore

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
    block: Held
    durability: Durability
    written: list[Written]
    has_ended: bool = False


class WriteBehind:
    """Writers that move held blocks into `target`. Blocks it takes are let go when written."""

    def __init__(
        self,
        memory: MemoryStore,
        target: BlockStore,
        capacity_bytes: int,
        threads: int,
        name: str,
        unkept: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
        patience_s: float = math.inf,
    ) -> None:
        """`unkept` is told what the target failed to write or had no room for, while the block is
        still held. A target that ends no write for `patience_s` hangs: it is not waited for, and
        those who wait for a write hear that it failed."""
        self._memory = memory
        self._target = target
        self._capacity = capacity_bytes
        self._unkept = unkept
        self._patience_s = patience_s
        self._moved_at = 0.0  # when a write ended, or the first block came
        self._queue: deque[_Waiting] = deque()
        # Queued or being written, oldest first: a block that must be durable is written once more.
        self._by_key: dict[StoreKey, list[_Waiting]] = {}
        self._bytes = 0
        self._closing = False
        self._in_vain = False  # of the last blocks the target kept none
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._run, name=f"tiered-kv-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._closed = threading.Event()
        if patience_s < math.inf:
            threading.Thread(target=self._watch, name=f"tiered-kv-{name}-w", daemon=True).start()

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    @property
    def pending_blocks(self) -> int:
        return len(self._by_key)

    def offer(self, block: Held, durability: Durability, written: Written | None = None) -> bool:
        """Takes over the caller's hold on `block`, unless the queue is full (False). A queue that
        is empty takes any block.

        `written` is called from a writer with the outcome.
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
                if not self._bytes:
                    self._moved_at = time.monotonic()
                self._bytes += block.nbytes
                self._work.notify()
        if duplicate:
            self._memory.let_go([block])
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
        """Returns when a block has left the queue, or none is in it; False when it is closed, or
        hangs."""
        with self._lock:
            if self._bytes and not self._closing:
                self._ended.wait(min(self._patience_left_s(), threading.TIMEOUT_MAX))
            return not (self._closing or self._hangs())

    def _patience_left_s(self) -> float:
        return max(0.0, self._moved_at + self._patience_s - time.monotonic())

    def _hangs(self) -> bool:
        return self._bytes > 0 and not self._patience_left_s()

    def drain(self, progress: Callable[[int], None] | None = None) -> bool:
        """Returns when all that waits now is written, whatever comes meanwhile; tells how many
        blocks are left, about once a second. False when the target hangs."""
        pace = Pace()
        with self._lock:
            ahead = [waiting for each in self._by_key.values() for waiting in each]
            while ahead:
                if ahead[-1].has_ended:
                    ahead.pop()
                    continue
                if self._hangs():
                    return False
                self._ended.wait(timeout=pace.left_s)
                if pace.is_due() and progress is not None:
                    progress(len(self._by_key))
        return True

    def close(self, progress: Callable[[int], None] | None = None) -> bool:
        """Writes what is queued, then stops. False when the target hangs: then the writers stay
        with it. Idempotent."""
        has_written = self.drain(progress)
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._ended.notify_all()
        self._closed.set()
        for thread in self._threads if has_written else []:
            thread.join(min(self._patience_s, threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while batch := self._next_batch():
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

    def _watch(self) -> None:
        """Answers for a target that hangs. Its writes go on, and may yet be made."""
        while not self._closed.wait(self._patience_s / 4):
            with self._lock:
                waiting = self._by_key.values() if self._hangs() else []
                unanswered = [w for each in waiting for w in each if w.written]
                answers = [written for w in unanswered for written in w.written]
                for w in unanswered:
                    w.written = []
            for written in answers:
                with _surviving():
                    written(PutResult.FAILED)

    def _next_batch(self) -> list[_Waiting]:
        """What to write together: consecutive blocks of equal durability. Empty at the end."""
        with self._lock:
            while not self._queue:
                if self._closing:
                    return []
                self._work.wait()
            batch = [self._queue.popleft()]
            nbytes = batch[0].block.nbytes
            while (
                self._queue
                and self._queue[0].durability is batch[0].durability
                and nbytes + self._queue[0].block.nbytes <= _BATCH_BYTES
            ):
                batch.append(self._queue.popleft())
                nbytes += batch[-1].block.nbytes
            return batch

    def _finish(
        self,
        batch: list[_Waiting],
        results: list[PutResult],
        unkept: Callable[[StoreKey, PutResult], None] = lambda key, result: None,
    ) -> None:
        with self._lock:
            for waiting, result in zip(batch, results, strict=True):
                waiting.has_ended = True
                self._forget(waiting)
                self._bytes -= waiting.block.nbytes
                self._moved_at = time.monotonic()
                # In one step: whoever offers it again in between would be told that it waits.
                if result not in _KEPT:
                    with _surviving():
                        unkept(waiting.block.key, result)
            self._ended.notify_all()
        with _surviving():
            self._memory.let_go([waiting.block for waiting in batch])
        for waiting, result in zip(batch, results, strict=True):
            for written in waiting.written:
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
