"""What a daemon on this host holds of a prompt, lent in the moment it is asked for.

A lookup alone would cost a second round trip before the blocks can be read, as they may leave until
then. So one question does both: the daemon counts the leading blocks it has, and lends those that
lie in its memory. Whoever asks need not be the one who reads: workers that have mapped the same
memory copy from the places named here, as long as the loan lasts.

A loan lasts until it is released, by a thread nobody waits for. When the daemon dies its memory
stays as it is for those who map it. When this process dies the daemon takes everything back; the
workers of an engine do not outlive their scheduler with anything they read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Int64Array, UInt64Array
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.remote.connection import Connection
from vllm_tiered_kv.remote.link import LENT_AT_MOST
from vllm_tiered_kv.remote.shared_memory import SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.limits import MAX_KEYS, MAX_LOOKUPS
from vllm_tiered_kv.wire.messages import BORROW_CAPABILITY, LINK_CAPABILITY, Borrow, BorrowReply

logger = logging.getLogger(__name__)

_BUSY_S = 0.05  # how long to wait for others who ask: the daemon answers dozens in that time
_RETRY_S = 0.5
_LOOK_S = 5.0  # how often to see whether the daemon has gone, when nobody asks
_CLOSING_S = 0.5  # for a daemon to take everything back


class Loan:
    """Leading blocks of a lookup that stay where they are until `release`."""

    def __init__(
        self, desk: LoanDesk, memory: SharedMemory, reply: BorrowReply, ranks: int
    ) -> None:
        self._desk = desk
        self._memory = memory
        self._lease = reply.lease
        self.blocks = reply.lent
        shape = (reply.lent, ranks)
        offsets = np.frombuffer(reply.offsets, "<u8").astype(np.int64)
        self.offsets: Int64Array = np.ascontiguousarray(offsets.reshape(shape).T)
        """Places in the arena: a row for each rank, in the order they were asked for."""
        generations = np.frombuffer(reply.generations, "<u8").astype(np.uint64)
        self.generations: UInt64Array = np.ascontiguousarray(generations.reshape(shape).T)

    @property
    def arena_id(self) -> bytes:
        return self._memory.arena_id

    def release(self) -> None:
        """No copy reads the blocks any more. Never waits; from any thread. Idempotent."""
        self._desk.take_back(self._memory, self._lease)


@dataclass(frozen=True, slots=True)
class LentMatch:
    """A match whose first blocks may be lent."""

    count: int
    loan: Loan | None
    by_tier: dict[Tier, int]
    """Where the fastest copies of all of them lie."""


class LoanDesk:
    """Asks one daemon on this host, and gives back what it lent. From any thread."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._lends = True  # until a daemon says that it cannot
        self._open: dict[SharedMemory, set[int]] = {}  # leases
        self._unsettled: set[SharedMemory] = set()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def match(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], nbytes: int, deadline: float
    ) -> LentMatch | None:
        """How many leading blocks are there for all ranks, and a loan of those in memory; None:
        unknown. Where nothing can be lent it is an ordinary lookup."""
        memory = self._attached()
        if memory is not None and keys and ranks:
            reply = self._borrow(memory, keys, ranks, nbytes, deadline)
            if reply is not None:
                by_tier = dict(zip((Tier.MEMORY, Tier.SSD, Tier.BACKING), reply.tiers, strict=True))
                return LentMatch(reply.count, self._lent(memory, reply, len(ranks)), by_tier)
        match = self._store.match_all(keys, ranks, 0, deadline)
        return None if match is None else LentMatch(match.count, None, match.by_tier)

    def take_back(self, memory: SharedMemory, lease: int) -> None:
        with self._lock:
            leases = self._open.get(memory, set())
            if lease in leases:
                leases.remove(lease)
                memory.owe([lease])
                self._settle_later(memory)

    @property
    def open_loans(self) -> int:
        """How many are neither given back nor about to be."""
        with self._lock:
            return sum(map(len, self._open.values()))

    def close(self) -> None:
        """Gives everything back, as far as the daemon takes it. No copy may be under way."""
        with self._lock:
            self._closing = True
            for memory, leases in self._open.items():
                memory.owe(leases)
                self._settle_later(memory)
            self._open.clear()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
        if self._memory is not None:
            self._memory.close()  # ends what the thread may be waiting for
        if self._thread is not None:
            self._thread.join()

    # ---- asking ---------------------------------------------------------------------------------

    def _attached(self) -> SharedMemory | None:
        """The memory of the daemon that is there now, where it lends on a lookup."""
        memory = self._memory
        if memory is not None and memory.alive:
            return memory if self._lends else None
        self._leave(memory)
        found = self._store.attach()
        if found is None:
            return None
        with self._lock:
            other = self._memory
            if other is not None and other.alive:
                gone = found if other is not found else None  # another thread was faster
            else:
                gone = other  # as before, but its daemon has gone meanwhile
                other = self._memory = found
                self._lends = True
        if gone is not None:
            self._leave(gone)
        return other if self._lends else None

    def _leave(self, memory: SharedMemory | None) -> None:
        """Gives up the memory of a daemon that has gone. Nothing here reads it, and its leases died
        with its daemon; kept, it would hold all of that memory."""
        if memory is None:
            return
        with self._lock:
            if self._memory is memory:
                self._memory = None
            self._open.pop(memory, None)
        memory.close()

    def _borrow(
        self,
        memory: SharedMemory,
        keys: Sequence[BlockKey],
        ranks: Sequence[RankTag],
        nbytes: int,
        deadline: float,
    ) -> BorrowReply | None:
        suffixes = [rank.encode() for rank in ranks]

        def ask(connection: Connection, end: float) -> BorrowReply | None:
            connection.open(end)
            assert connection.greeting is not None
            if BORROW_CAPABILITY not in connection.greeting.capabilities:
                self._lends = False
                return None
            most = max(1, min(MAX_KEYS, connection.limits.keys, MAX_LOOKUPS // len(suffixes)))
            request = Borrow(len(keys[0]), list(keys[:most]), suffixes, nbytes)
            reply = None
            is_short = len(request.keys) * len(suffixes) <= LENT_AT_MOST
            if is_short and LINK_CAPABILITY in connection.greeting.capabilities:
                reply = memory.link.call(request, BorrowReply, end)
            over_link = reply is not None
            if reply is None:
                reply = connection.call(request, BorrowReply, deadline=end)
            found, capacity = reply, memory.arena.capacity_bytes
            memory.believe(found, lambda: _check(found, request, capacity), over_link)
            return found

        reply = memory.call(ask, deadline, patience=_BUSY_S)
        if not memory.is_settled:
            with self._lock:
                self._settle_later(memory)
        return reply

    def _lent(self, memory: SharedMemory, reply: BorrowReply, ranks: int) -> Loan | None:
        if not reply.lease:
            return None
        loan = Loan(self, memory, reply, ranks)
        with self._lock:
            self._open.setdefault(memory, set()).add(reply.lease)
        return loan

    # ---- giving back ----------------------------------------------------------------------------

    def _settle_later(self, memory: SharedMemory) -> None:
        """Under the lock."""
        self._unsettled.add(memory)
        if self._thread is None:
            thread = threading.Thread(target=self._settle, name="tiered-kv-return", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # with the next loan, or at the end
                logger.debug("no thread to give loans back: %s", error)
                return
            self._thread = thread
        self._wake.set()

    def _settle(self) -> None:
        while True:
            # What a daemon did not take, being stopped for example, is offered again.
            self._wake.wait(_RETRY_S if self._unsettled else _LOOK_S)
            self._wake.clear()
            try:
                self._look()
            except Exception:  # a thread that ends would leave every later loan with the daemon
                logger.exception("loans of %s could not be given back", self._store.address)
            with self._lock:
                self._unsettled = {m for m in self._unsettled if m.alive and not m.is_settled}
                if self._closing and not self._unsettled:
                    return

    def _look(self) -> None:
        """Once around: is the daemon there, did replies come too late, is anything owed?"""
        memory = self._memory
        if memory is not None and not memory.alive:
            self._leave(memory)
        elif memory is not None:
            memory.hear_late()
        with self._lock:
            if memory is not None and memory.alive and not memory.is_settled:
                self._unsettled.add(memory)
            unsettled = list(self._unsettled)
        for memory in unsettled:
            memory.settle()


def _check(reply: BorrowReply, request: Borrow, capacity: int) -> None:
    """Raises unless the reply fits the request and all that it names lies in the arena."""
    blocks = reply.lent * len(request.suffixes)
    if reply.count > len(request.keys) or len(reply.offsets) != 8 * blocks:
        raise ConnectionLost(f"{len(reply.offsets) // 8} places for {blocks} blocks")
    offsets = np.frombuffer(reply.offsets, "<u8")
    if blocks and (
        int(offsets.max()) + request.length > capacity or np.any(offsets % np.uint64(PAGE))
    ):
        raise ConnectionLost("the daemon named a place outside its memory")
