"""The memory of a daemon on this host: blocks are lent where they lie instead of being sent.

A lease keeps a block's place until it is released, however long that takes, so a reply with leases
must never be lost: calls go over connections of their own that stay open when a call times out,
and leases that arrive too late, or whose release was not confirmed, are given back with the next
call.

When the daemon dies the mapping stays: what was lent can still be read, and nobody writes there any
more. Leases die with the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.errors import (
    ConnectionLost,
    ErrorCode,
    ProtocolError,
    RemoteError,
    RemoteRefusal,
)
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.attachment import Attachment, attach
from vllm_tiered_kv.remote.calls import in_session, judge
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.health import Breaker
from vllm_tiered_kv.remote.link import Link
from vllm_tiered_kv.wire.limits import MAX_KEYS
from vllm_tiered_kv.wire.messages import (
    RESERVED,
    BorrowReply,
    HelloReply,
    Lend,
    LendReply,
    Release,
    ReleaseReply,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    put_results,
)

logger = logging.getLogger(__name__)

_CLOSING_S = 0.5  # what giving leases back may take when the memory is closed
_R = TypeVar("_R", bound=Reply)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LentBlock:
    """Where a block lies, to be read."""

    offset: int
    nbytes: int
    generation: int
    lease: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a new block may be written, until it is sealed or abandoned."""

    key: StoreKey
    offset: int
    nbytes: int
    generation: int
    lease: int


@dataclass(slots=True)
class Lent:
    """Blocks that stay where they are until `release`. A prompt has hundreds: they are columns."""

    leases: list[int]  # 0: a miss
    offsets: list[int]
    lengths: list[int]
    generations: list[int]
    _memory: SharedMemory | None = field(repr=False, default=None)

    @property
    def blocks(self) -> list[LentBlock | None]:
        """One by one; None for each that is a miss."""
        rows = zip(self.offsets, self.lengths, self.generations, self.leases, strict=True)
        return [LentBlock(*row) if row[3] else None for row in rows]

    @property
    def is_complete(self) -> bool:
        return 0 not in self.leases

    def release(self) -> None:
        """Call it when no copy reads the blocks any more. Idempotent, does not raise."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.give_back(set(self.leases) - {0})


class SharedMemory:
    """From `RemoteStore.attach`. All calls may be made from any thread."""

    def __init__(
        self,
        attachment: Attachment,
        identity: EngineIdentity,
        settings: Settings,
        breaker: Breaker,
        timeout_s: float,
    ) -> None:
        self._attachment = attachment
        self._address = settings.address
        self._identity = identity
        self._breaker = breaker
        self._timeout = timeout_s
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the connection and the link
        self._owed: set[int] = set()  # leases to give back
        self._owed_lock = threading.Lock()
        self._replaced = False  # the daemon there now does not know us
        self._connection = Connection(
            settings,
            identity.hello(attachment.token),
            closing=self._closing,
            on_late=self._late,
            on_hello=self._greeted,
        )
        self.link = Link(attachment.link, self._closing, self._late)
        """For the `work` of `call`."""
        self.on_error: Callable[[Exception], None] = lambda error: None
        """Told what ended a call."""

    @classmethod
    def attach(
        cls,
        path: str,
        identity: EngineIdentity,
        settings: Settings,
        breaker: Breaker,
        timeout_s: float,
    ) -> SharedMemory:
        """Raises ArenaError when the daemon has no memory to share."""
        attachment = attach(path, identity.client, settings.connect_timeout_s)
        # A heartbeat would end the session of a process that was stopped for a while, and with it
        # the replies to what it asked; the link tells more reliably that the daemon is gone.
        settings = replace(settings, heartbeat=False)
        return cls(attachment, identity, settings, breaker, timeout_s)

    @property
    def arena(self) -> SharedArena:
        return self._attachment.arena

    @property
    def alive(self) -> bool:
        """False once the daemon is gone. The mapping stays valid until `close`."""
        return not self.closed and not self._replaced and self._attachment.alive

    @property
    def arena_id(self) -> bytes:
        """Names this memory in all processes that map it; another daemon's has another."""
        return self._attachment.instance

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    # ---- reading --------------------------------------------------------------------------------

    def lend(self, keys: Sequence[StoreKey], deadline: float | None = None) -> Lent:
        """Blocks in place; misses where the daemon has none, or did not answer in time."""
        wire_keys = self._identity.wire_keys(keys)
        if not wire_keys:
            nothing = [0] * len(keys)
            return Lent(nothing, nothing, nothing, nothing, self)
        reply = self._ask(
            Lend(self._identity.key_bytes, wire_keys),
            LendReply,
            deadline,
            lambda r: self._check(r, r.lengths, len(wire_keys)),
        )
        if reply is None:
            nothing = [0] * len(keys)
            return Lent(nothing, nothing, nothing, nothing, self)
        return Lent(reply.leases, reply.offsets, reply.lengths, reply.generations, self)

    def are_still_valid(self, lent: Lent) -> bool:
        """Whether what was copied from the blocks is those blocks. To be asked after the copy."""
        return lent.is_complete and self.arena.have_generations(
            np.array(lent.offsets, np.int64), np.array(lent.generations, np.uint64)
        )

    def still_valid(self, lent: Lent) -> list[bool]:
        """As `are_still_valid`, of each block."""
        return [
            block is not None and self.arena.generation(block.offset) == block.generation
            for block in lent.blocks
        ]

    # ---- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        items: Sequence[tuple[StoreKey, StoreKey | None, int]],
        deadline: float | None = None,
    ) -> list[Reservation | PutResult]:
        """Room for blocks given as (key, parent, length), heads first; or why there is none."""
        outcome: list[Reservation | PutResult] = [PutResult.FAILED] * len(items)
        wire_keys = {
            index: wire
            for index, (key, _, nbytes) in enumerate(items)
            if (wire := self._identity.wire_key(key)) is not None and nbytes > 0
        }
        if not wire_keys:
            return outcome
        parents = [items[index][1] for index in wire_keys]
        lengths = [items[index][2] for index in wire_keys]
        request = Reserve(
            self._identity.key_bytes,
            list(wire_keys.values()),
            [None if parent is None else self._identity.wire_key(parent) for parent in parents],
            lengths,
        )
        reply = self._ask(
            request, ReserveReply, deadline, lambda r: self._check(r, lengths, len(lengths))
        )
        if reply is None:
            return outcome
        for position, index in enumerate(wire_keys):
            code = reply.results[position]
            if code != RESERVED:
                outcome[index] = put_results(bytes([code]))[0]
                continue
            outcome[index] = Reservation(
                items[index][0],
                reply.offsets[position],
                lengths[position],
                reply.generations[position],
                reply.leases[position],
            )
        return outcome

    def seal(
        self, reservations: Sequence[Reservation], deadline: float | None = None
    ) -> list[PutResult]:
        """Makes written blocks readable. Nothing may be written to them from here on."""
        leases = [reservation.lease for reservation in reservations]
        if not leases:
            return []

        def check(reply: SealReply) -> None:
            if len(reply.results) != len(leases):
                raise ConnectionLost(f"{len(reply.results)} results for {len(leases)} leases")

        reply = self._ask(Seal(leases), SealReply, deadline, check)
        if reply is None:
            self.owe(leases)  # of no effect on those that were sealed after all
            return [PutResult.FAILED] * len(leases)
        return put_results(reply.results)

    def abandon(self, reservations: Iterable[Reservation]) -> None:
        """Gives room back unused. Nothing may write to it any more."""
        self.give_back(reservation.lease for reservation in reservations)

    # ---- the rest -------------------------------------------------------------------------------

    def give_back(self, leases: Iterable[int]) -> None:
        """Ends leases, now or with the next call that reaches the daemon. Does not raise."""
        self.owe(leases)
        if self._owed:
            self._ask(None, ReleaseReply, None, lambda reply: None)

    def owe(self, leases: Iterable[int]) -> None:
        """Leases to be given back with the next call. Does not wait."""
        with self._owed_lock:
            self._owed.update(leases)

    def settle(self, deadline: float | None = None) -> None:
        """Gives back what is owed and listens for what came too late. Does not raise."""

        def ask(connection: Connection, end: float) -> None:
            self._pay(end)
            # Also where it has settled meanwhile: what asks nobody must not pass for an answer.
            if connection.awaits_late_replies or self.is_settled:
                connection.call(Release([]), ReleaseReply, deadline=end)
            if self.link.awaits_late_replies and not self.link.call(Release([]), ReleaseReply, end):
                connection.call(Release([]), ReleaseReply, deadline=end)  # is it there at all?
            self._pay(end)

        if not self.is_settled:
            self.call(ask, deadline)

    def hear_late(self) -> None:
        """Takes in what came too late, if nobody is asking just now. Never waits."""
        if not self.closed and self._lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self.link.hear_late()
            finally:
                self._lock.release()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is owed, and no reply may still come that brings leases."""
        awaits_late = self._connection.awaits_late_replies or self.link.awaits_late_replies
        return not self._owed and not awaits_late

    def close(self) -> None:
        """Unmaps the memory. No copy may be under way. Idempotent. Leases that were not given back
        end with this process."""
        if self.closed:
            return
        self.settle(time.monotonic() + _CLOSING_S)
        self._closing.set()
        with self._lock:
            self._connection.close()
            self._attachment.close()

    # ---- for those who ask more than this -------------------------------------------------------

    def call(
        self,
        work: Callable[[Connection, float], _T],
        deadline: float | None,
        patience: float = math.inf,
    ) -> _T | None:
        """What comes of `work` with the connection, or None. Waits no longer than `patience` for
        others who use it."""
        attempt = self._breaker.begin() if self.alive else None
        if attempt is None:
            return None
        end = time.monotonic() + self._timeout if deadline is None else deadline
        if not self._lock.acquire(timeout=max(0.0, min(end - time.monotonic(), patience))):
            self._breaker.forget(attempt)
            return None
        try:
            if self.closed:  # while this waited: what it opened now nobody would close
                return None
            allowed_s = end - time.monotonic()
            if allowed_s <= 0:  # which says nothing about the daemon
                return None
            answer = in_session(self._connection, lambda: work(self._connection, end))
            self._breaker.succeed(attempt)
            return answer
        except (RemoteError, ProtocolError) as error:
            logger.debug("daemon %s did not lend: %s", self._address, error)
            self.on_error(error)
            if isinstance(error, RemoteRefusal) and error.code is ErrorCode.NO_ARENA:
                self._replaced = True
                self._breaker.succeed(attempt)
            elif not self.closed:
                judge(self._breaker, attempt, error, allowed_s)
        finally:
            self._lock.release()  # ahead of all else: an interrupt there would keep it for good
            self._breaker.forget(attempt)
        return None

    def believe(self, reply: Reply, check: Callable[[], None], over_link: bool = False) -> None:
        """Raises, and what it came over is not used any more, where `check` raises
        ConnectionLost."""
        try:
            check()
        except BaseException as error:
            self._late(reply)
            if not isinstance(error, ConnectionLost):  # an interrupt, for one
                raise
            if over_link:
                self.link.distrust()
            else:
                self._connection.drop()
            raise

    # ---- inside ---------------------------------------------------------------------------------

    def _ask(
        self,
        request: Request | None,
        kind: type[_R],
        deadline: float | None,
        check: Callable[[_R], None],
    ) -> _R | None:
        """The reply to a request, or None. Leases that are owed go back ahead of it, or alone."""

        def ask(connection: Connection, end: float) -> _R | None:
            answer = None
            if not self._pay(end) and request is None:
                # Another thread has paid. What asks nobody must not pass for an answer.
                connection.call(Release([]), ReleaseReply, deadline=end)
            if request is not None:
                answer = connection.call(request, kind, deadline=end)
                self.believe(answer, lambda: check(answer))
            with contextlib.suppress(RemoteError):
                self._pay(end)  # leases that came too late came during this call
            return answer

        return self.call(ask, deadline)

    def _pay(self, deadline: float) -> bool:
        """Whether anything was owed, and the daemon has heard of it."""
        with self._owed_lock:
            owed = sorted(self._owed)[:MAX_KEYS]
        if owed:
            self._connection.call(Release(owed), ReleaseReply, deadline=deadline)
            with self._owed_lock:
                self._owed.difference_update(owed)
        return bool(owed)

    def _late(self, reply: Reply) -> None:
        """Nobody waits for these leases any more."""
        if isinstance(reply, (LendReply, ReserveReply)):
            self.owe(lease for lease in reply.leases if lease)
        elif isinstance(reply, BorrowReply) and reply.lease:
            self.owe([reply.lease])

    def _greeted(self, greeting: HelloReply) -> None:
        if greeting.instance != self._attachment.instance:
            self._replaced = True
            raise ConnectionLost("another daemon answers than the one whose memory this is")

    def _check(
        self, reply: LendReply | ReserveReply, lengths: Sequence[int], expected: int
    ) -> None:
        """Raises unless the reply fits the request and all that it names lies in the arena."""
        if len(reply.leases) != expected:
            raise ConnectionLost(f"{len(reply.leases)} leases for {expected} blocks")
        capacity = self.arena.capacity_bytes
        for lease, offset, nbytes in zip(reply.leases, reply.offsets, lengths, strict=True):
            if lease and (offset % PAGE or nbytes == 0 or offset + nbytes > capacity):
                raise ConnectionLost("the daemon named a place outside its memory")
