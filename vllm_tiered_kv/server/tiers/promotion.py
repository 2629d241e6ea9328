"""Promotion: reads blocks of slower tiers into memory, from where they are served.

Concurrent requests for a block share one read. A block that finds no room in memory waits for some,
because clients may be about to read the replies that pin it all. A block that the backing store
does not deliver in time is a miss; its slot stays reserved until the read ends.
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
"""Called once for each position of a fetch with the block, pinned for the receiver, or None."""

_BACKING_CALL_BYTES = 8 << 20  # of a call with several blocks: they have one deadline
_WAIT_FOR_ROOM_S = 1.0  # how long to wait while no read finds any room
_MAX_WAIT_S = 10.0  # limit if other reads find room, but not for this block's size or quota
_RETRY_S = 0.01  # between attempts to find room
_BACKING_RETRY_S = 0.1  # longer, because each attempt asks the backing store again


class Promotion:
    """Reads blocks of the slower tiers into memory. `TieredStore` creates it. Calls may be made
    from any thread."""

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
        """`slower` has the tiers below memory with their names, fastest first. The backing store
        has an executor of its own, everything else runs in the pool."""
        self._memory = memory
        self._slower = slower
        self._ssd = ssd
        self._backing = backing
        self._recorder = recorder
        self._pool = pool
        self._backing_executor = backing_executor
        self._reading: dict[StoreKey, list[tuple[int, Ready]]] = {}
        self._blocked: Counter[StoreKey] = Counter()
        self._lock = threading.Lock()
        self._last_room = 0.0  # when a read last found room
        self._last_refused = 0.0  # when a read of the backing store last found no room
        self._first_refused = 0.0  # when the latest series of such reads began

    def fetch(
        self, wanted: Sequence[tuple[int, StoreKey]], ready: Ready, client: Hashable = ""
    ) -> None:
        """Promotes blocks given as (position, key) and passes each to `ready`, in any order. Reads
        of the backing store are fair-queued per client."""
        may_be_here = self._may_be_in_slower([key for _, key in wanted])
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
            self._deliver(n, None, ready)

    @contextmanager
    def promotion_blocked(self, keys: Sequence[StoreKey]) -> Iterator[None]:
        """Keeps these keys from being promoted. A block promoted during its deletion could be
        demoted again to the tier that has just deleted it."""
        with self._lock:
            self._blocked.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._blocked -= Counter(keys)

    def _read_from(self, tier_index: int, keys: Sequence[StoreKey], client: Hashable) -> None:
        """Submits reads of blocks from one of the slower tiers."""
        if tier_index == len(self._slower):
            self._answer_waiters(keys)
            return
        batch = self._slower[tier_index][1].read_batch
        for start in range(0, len(keys), batch):
            some = keys[start : start + batch]
            self._submit_read(tier_index, some, client)

    def _submit_read(
        self,
        tier_index: int,
        keys: Sequence[StoreKey],
        client: Hashable,
        refused_at: float | None = None,
    ) -> None:
        read = partial(self._read, tier_index, keys, client, refused_at)
        is_backing = self._slower[tier_index][1] is self._backing
        executor = self._backing_executor if is_backing else None
        (executor or self._pool).submit(
            read, failed=partial(self._answer_waiters, keys), client=client
        )

    def _may_be_in_slower(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Which keys to search for: the SSD's index is in memory, a backing store has none."""
        if self._ssd is None or self._backing is not None:
            return [bool(self._slower)] * len(keys)
        return self._ssd.contains(keys) if keys else []

    def _deliver(self, position: int, block: PinnedSlot | None, ready: Ready) -> None:
        """An error in one receiver must not keep others from their answers."""
        if block is None:
            self._recorder.add(names.MISSES, 1)
        try:
            ready(position, block)
        except Exception:
            logger.exception("cannot deliver a promoted block to a request")

    def _read(
        self, tier_index: int, keys: Sequence[StoreKey], client: Hashable, refused_at: float | None
    ) -> None:
        """Runs in an executor: promotes blocks of one tier and answers the requests that wait for
        them. Blocks that this tier does not have are read from the next one. Blocks that find no
        room are retried for a while, because clients release memory as they read replies."""
        store = self._slower[tier_index][1]
        is_backing = store is self._backing
        missing: list[StoreKey] = []
        waiting: list[StoreKey] = []
        held: list[PinnedSlot] = []  # pinned so that they are not evicted before they are delivered
        is_full = False
        try:
            known = store.describe(keys)
            count = _count_within(known, _BACKING_CALL_BYTES) if is_backing else len(keys)
            rest, keys, known = keys[count:], keys[:count], known[:count]
            self._read_from(tier_index, rest, client)  # in a call of its own, beside this one
            is_full = self._promote(tier_index, keys, known, missing, waiting, held)
        except Exception:  # the waiters must get an answer even if there is a bug here
            logger.exception("cannot read blocks from a slower tier; they count as misses")
        now = time.monotonic()
        if held:
            self._last_room = now
        if waiting:
            if refused_at is None:
                refused_at = self._full_since(now) if is_backing and is_full else now
            until = max(refused_at, self._last_room) + _WAIT_FOR_ROOM_S
            if now >= min(until, refused_at + _MAX_WAIT_S):
                self._recorder.add(names.NOT_PROMOTED, len(waiting), self._slower[tier_index][0])
                waiting.clear()
        unanswered = {*missing, *waiting}
        self._answer_waiters([key for key in keys if key not in unanswered])
        self._memory.let_go(held)
        self._read_from(tier_index + 1, missing, client)
        if waiting:
            time.sleep(_BACKING_RETRY_S if is_backing else _RETRY_S)
            self._submit_read(tier_index, waiting, client, refused_at)

    def _full_since(self, now: float) -> float:
        """Since when reads of the backing store have found no room. The store has few threads: if
        each of thousands of queued blocks waited for room by itself, one would wait for another."""
        if now > self._last_refused + _WAIT_FOR_ROOM_S or self._last_room > self._first_refused:
            self._first_refused = now
        self._last_refused = now
        return self._first_refused

    def _answer_waiters(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            waiting = [(key, *waiter) for key in keys for waiter in self._reading.pop(key, [])]
        held = self._memory.hold([key for key, _, _ in waiting])
        for (_, position, ready), block in zip(waiting, held, strict=True):
            self._deliver(position, block, ready)

    def _promote(
        self,
        tier_index: int,
        keys: Sequence[StoreKey],
        described: Sequence[BlockFacts | None],
        missing: list[StoreKey],
        waiting: list[StoreKey],
        held: list[PinnedSlot],
    ) -> bool:
        """Promotes blocks and sorts the keys into the given lists: `held` are in memory and pinned,
        `missing` are not intact in this tier, `waiting` must be retried, because another thread is
        writing them or there is no room. Returns whether some found no room."""
        tier, store = self._slower[tier_index]
        slots: list[PinnedSlot] = []  # reserved, neither committed nor aborted
        try:
            facts: list[BlockFacts] = []
            is_full = False
            for key, known in zip(keys, described, strict=True):
                if known is None:
                    missing.append(key)
                    continue
                slot = (
                    PutResult.DROPPED
                    if is_full  # searching for room again would hold the memory's lock for nothing
                    else self._memory.reserve(key, known.parent, known.nbytes)
                )
                # Checked with the slot reserved: a delete that begins later finds that slot.
                if isinstance(slot, PinnedSlot) and key in self._blocked:
                    self._memory.abort(slot)
                    missing.append(key)
                elif isinstance(slot, PinnedSlot):
                    slots.append(slot)
                    facts.append(known)
                elif slot is not PutResult.PRESENT or self._memory.lookup(key) is not Lookup.HIT:
                    waiting.append(key)
                    is_full = is_full or slot is PutResult.DROPPED
                # Otherwise another thread has stored the block meanwhile.
            if not slots:
                return is_full
            found = store.get([slot.key for slot in slots], [slot.view for slot in slots])
            for is_read, known in zip(found, facts, strict=True):
                slot = slots.pop(0)
                if not is_read:
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


def _count_within(blocks: Sequence[BlockFacts | None], nbytes: int) -> int:
    """How many of these blocks have that many bytes together; at least one."""
    for count, known in enumerate(blocks):
        nbytes -= known.nbytes if known is not None else 0
        if nbytes < 0 and count:
            return count
    return len(blocks)
