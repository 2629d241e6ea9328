"""The way up: blocks of slower tiers are read into memory and handed over from there.

Whoever asks for a block that is being read waits for it with the others. A block that finds no room
waits for some: all of the memory may be in use by clients that are about to take what was sent. One
that a backing store does not bring in time is a miss; its slot is kept for it until that ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from vllm_tiered_kv.core.store import BlockFacts, LowerStore, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)

Ready = Callable[[int, "PinnedSlot | None"], None]
"""Called once for each position of a fetch: the block, held for the receiver, or None."""

_READ_AT_ONCE = 8  # blocks: what keeps a disk busy, and the first to come do not wait for many
_WAIT_FOR_ROOM_S = 1.0  # while all of the memory is in use, and nobody finds any
_MAX_WAIT_S = 10.0  # others may find room for ever, but none for this block's kind or quota
_LOOK_FOR_ROOM_S = 0.01  # between two looks
_LOOK_AGAIN_FAR_S = 0.1  # of blocks in a backing store, which is asked again for each


class Promotion:
    def __init__(
        self,
        memory: MemoryStore,
        slower: Sequence[tuple[str, LowerStore]],
        ssd: LowerStore | None,
        backing: LowerStore | None,
        recorder: Recorder,
        pool: StoreExecutor,
        backing_executor: StoreExecutor | None,
    ) -> None:
        """`slower` has the tiers below memory with their names, fastest first. The
        backing store has an executor of its own, all else runs in the pool."""
        self._memory = memory
        self._slower = slower
        self._ssd = ssd
        self._backing = backing
        self._recorder = recorder
        self._pool = pool
        self._backing_executor = backing_executor
        self._reading: dict[StoreKey, list[tuple[int, Ready]]] = {}
        self._barred: Counter[StoreKey] = Counter()
        self._lock = threading.Lock()
        self._room_at = 0.0  # when a read found some
        self._refused_at = 0.0  # when a read from the backing store last found none
        self._full_at = 0.0  # when the first of the latest such reads did

    def fetch(
        self, wanted: Sequence[tuple[int, StoreKey]], ready: Ready, client: Hashable = ""
    ) -> None:
        """Brings (position, key) into memory and hands each to `ready`, in no particular order.
        Reads of the backing store are fair-queued per client."""
        may_be_here = self._may_be_slower([key for _, key in wanted])
        to_read: list[StoreKey] = []
        misses: list[int] = []
        for (n, key), may_be in zip(wanted, may_be_here, strict=True):
            if not may_be:
                misses.append(n)
                continue
            with self._lock:
                waiters = self._reading.setdefault(key, [])
                waiters.append((n, ready))
                if len(waiters) == 1:
                    to_read.append(key)
        self._read_from(0, to_read, client)
        for n in misses:
            self._tell(n, None, ready)

    @contextmanager
    def barring(self, keys: Sequence[StoreKey]) -> Iterator[None]:
        """Meanwhile these do not come into memory. One that is being deleted could leave it again
        for the tier that has just deleted it."""
        with self._lock:
            self._barred.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._barred -= Counter(keys)

    def _read_from(self, number: int, keys: Sequence[StoreKey], client: Hashable) -> None:
        """Has the pool read blocks from one of the slower tiers."""
        if number == len(self._slower):
            self._answer(keys)
            return
        # The threads of the disk gain from a batch. What lies behind may hang, and is asked for
        # each block by itself, so that none waits for another.
        most = _READ_AT_ONCE if self._slower[number][1] is self._ssd else 1
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            self._read_soon(number, some, client)

    def _read_soon(
        self,
        number: int,
        keys: Sequence[StoreKey],
        client: Hashable,
        refused_at: float | None = None,
    ) -> None:
        read = partial(self._read, number, keys, client, refused_at)
        is_far = self._slower[number][1] is self._backing
        executor = self._backing_executor if is_far else None
        (executor or self._pool).submit(read, failed=partial(self._answer, keys), client=client)

    def _may_be_slower(self, keys: Sequence[StoreKey]) -> list[bool]:
        """What is worth a look in the pool: the SSD's index is in memory, a backing store's not."""
        if self._ssd is None or self._backing is not None:
            return [bool(self._slower)] * len(keys)
        return self._ssd.contains(keys) if keys else []

    def _tell(self, position: int, block: PinnedSlot | None, ready: Ready) -> None:
        """One who fails to listen keeps no other from its answer."""
        if block is None:
            self._recorder.add(names.MISSES, 1)
        try:
            ready(position, block)
        except Exception:
            logger.exception("a block could not be handed over")

    def _read(
        self, number: int, keys: Sequence[StoreKey], client: Hashable, refused_at: float | None
    ) -> None:
        """Reads blocks into memory, in the pool, and answers everybody who waits for those that the
        tier has; the others are sought further on. What finds no room is tried again for a while:
        clients take what was sent to them."""
        missing: list[StoreKey] = []
        waiting: list[StoreKey] = []
        held: list[PinnedSlot] = []  # so that they are still there to be handed over
        is_full = False
        try:
            is_full = self._promote(number, keys, missing, waiting, held)
        except Exception:  # a bug here must not leave the waiters without an answer
            logger.exception("blocks could not be read; they count as misses")
        now = time.monotonic()
        if held:
            self._room_at = now
        is_far = self._slower[number][1] is self._backing
        if waiting:
            if refused_at is None:
                refused_at = self._full_since(now) if is_far and is_full else now
            until = max(refused_at, self._room_at) + _WAIT_FOR_ROOM_S
            if now >= min(until, refused_at + _MAX_WAIT_S):
                self._recorder.add(names.NOT_PROMOTED, len(waiting), self._slower[number][0])
                waiting.clear()
        unanswered = {*missing, *waiting}
        self._answer([key for key in keys if key not in unanswered])
        self._memory.let_go(held)
        self._read_from(number + 1, missing, client)
        if waiting:
            time.sleep(_LOOK_AGAIN_FAR_S if is_far else _LOOK_FOR_ROOM_S)
            self._read_soon(number, waiting, client, refused_at)

    def _full_since(self, now: float) -> float:
        """Since when reads from the backing store find no room. It has few threads: of thousands
        of blocks that wait for their turn each would wait for room, one after the other."""
        if now > self._refused_at + _WAIT_FOR_ROOM_S or self._room_at > self._full_at:
            self._full_at = now
        self._refused_at = now
        return self._full_at

    def _answer(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            waiting = [(key, *waiter) for key in keys for waiter in self._reading.pop(key, [])]
        held = self._memory.hold([key for key, _, _ in waiting])
        for (_, position, ready), block in zip(waiting, held, strict=True):
            self._tell(position, block, ready)

    def _promote(
        self,
        number: int,
        keys: Sequence[StoreKey],
        missing: list[StoreKey],
        waiting: list[StoreKey],
        held: list[PinnedSlot],
    ) -> bool:
        """Brings blocks into memory, where they are `held`; fills the empty lists with these, with
        those that this tier does not have whole, and with those that have to wait: for whoever
        writes them just now, or for room, if there is none for some (True)."""
        tier, store = self._slower[number]
        slots: list[PinnedSlot] = []  # reserved and neither committed nor given back
        try:
            facts: list[BlockFacts] = []
            is_full = False
            for key, known in zip(keys, store.describe(keys), strict=True):
                if known is None:
                    missing.append(key)
                    continue
                slot = (
                    PutResult.DROPPED
                    if is_full  # looking for room takes time, and others wait for the memory
                    else self._memory.reserve(key, known.parent, known.nbytes)
                )
                if (
                    isinstance(slot, PinnedSlot) and key in self._barred
                ):  # asked with the slot at hand
                    self._memory.abort(slot)
                    missing.append(key)
                elif isinstance(slot, PinnedSlot):
                    slots.append(slot)
                    facts.append(known)
                elif slot is not PutResult.PRESENT or self._memory.lookup(key) is not Lookup.HIT:
                    waiting.append(key)
                    is_full = is_full or slot is PutResult.DROPPED
                # else it came by another way meanwhile
            if not slots:
                return is_full
            found = store.get([slot.key for slot in slots], [slot.view for slot in slots])
            for good, known in zip(found, facts, strict=True):
                slot = slots.pop(0)
                if not good:
                    self._memory.abort(slot)
                    missing.append(slot.key)
                elif self._memory.commit(slot, known.checksum, hold=True):
                    held.append(slot)
            self._recorder.add(names.HITS, len(held), tier)
            self._recorder.add(names.PROMOTED, len(held), tier)
            return is_full
        finally:
            for slot in slots:
                self._memory.abort(slot)
