"""The memory of a daemon on this host: mapped once, its blocks leased in place.

A process receives the memory as a memfd over an AF_UNIX socket, because zmq cannot pass file
descriptors. It sends one packet and receives one with the memfd; the socket then stays open while
the memory is used. When it closes, the daemon knows that this process is gone, and vice versa. All
replies of the daemon are validated.

A lease keeps a block in its slot until it is released, however long that takes. A reply with leases
must therefore never be lost: requests use a separate zmq connection that stays open when a call
times out, and the next call releases leases that arrived late or whose release was not confirmed.

When the daemon dies, the mapping stays: leased blocks remain readable, and nothing writes them any
more. The leases end with the daemon. The memory counts its readers, and after `retire` it is
unmapped when the last one has left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from vllm_tiered_kv.core.breaker import Breaker
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Int64Array, UInt64Array
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.errors import (
    ArenaError,
    ConnectionLost,
    ErrorCode,
    ProtocolError,
    RemoteError,
    RemoteRefusal,
)
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.calls import record_failure, retry_forgotten_session
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.wire.header import pack_map, unpack_map
from vllm_tiered_kv.wire.limits import MAX_KEYS, MAX_LOOKUPS, MAX_TEXT, PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import (
    BORROW_CAPABILITY,
    RESERVED,
    Borrow,
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

_MAX_PACKET = 4096
_ID_BYTES = 16
_MAX_CAPACITY = 1 << 50
_BUSY_S = 0.05  # most time a lookup waits for other calls; a daemon answers dozens in that time
_CLOSING_S = 0.5  # most time for the release of leases on close
_R = TypeVar("_R", bound=Reply)
_T = TypeVar("_T")


@dataclass(slots=True)
class Attachment:
    """A daemon's mapped memory and the socket that keeps it attached. `attach` makes it."""

    connection: socket.socket
    arena: SharedArena
    token: bytes  # names this attachment in `hello`
    instance: bytes  # of the daemon

    @property
    def alive(self) -> bool:
        """False once the daemon has closed its end or died."""
        descriptor = self.connection.fileno()  # read once: another thread may close it
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        self.connection.close()
        self.arena.close()


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot reserved for a new block, until it is sealed or abandoned."""

    key: StoreKey
    offset: int
    nbytes: int
    generation: int
    lease: int


@dataclass(slots=True)
class BlockLease:
    """Blocks that this process copies; they stay in their slots until `release`.

    `SharedMemory.lease` makes it. A prompt has hundreds of blocks, so the fields are columns.
    """

    leases: list[int]  # 0: a miss
    offsets: list[int]
    lengths: list[int]
    generations: list[int]
    _memory: SharedMemory | None = field(repr=False, default=None)

    @property
    def is_complete(self) -> bool:
        return 0 not in self.leases

    def release(self) -> None:
        """Ends the lease. No copy may read the blocks after that. Idempotent, does not raise."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.release(set(self.leases) - {0})


class LookupLease:
    """Leading blocks of a lookup that stay in their slots until `release`.

    `SharedMemory.lookup` makes it, in the scheduler. While the lease lasts, other processes that
    map the same memory, the workers, may copy from these slots.
    """

    def __init__(self, memory: SharedMemory, reply: BorrowReply, ranks: int) -> None:
        self._memory = memory
        self._lease = reply.lease
        self.blocks = reply.lent
        shape = (reply.lent, ranks)
        offsets = np.frombuffer(reply.offsets, "<u8").astype(np.int64)
        self.offsets: Int64Array = np.ascontiguousarray(offsets.reshape(shape).T)
        """Offsets in the arena: one row per rank, in the order of the request."""
        generations = np.frombuffer(reply.generations, "<u8").astype(np.uint64)
        self.generations: UInt64Array = np.ascontiguousarray(generations.reshape(shape).T)

    @property
    def arena_id(self) -> bytes:
        return self._memory.arena_id

    def release(self) -> None:
        """Ends the lease. No copy may read the blocks after that. Never waits; any thread may call
        it. Idempotent."""
        self._memory.release_lookup(self._lease)


@dataclass(frozen=True, slots=True)
class LeasedMatch:
    """A prefix hit whose leading blocks may be leased."""

    count: int
    lease: LookupLease | None
    by_tier: dict[Tier, int]
    """How many of the blocks have their fastest copy in each tier."""


class SharedMemory:
    """One daemon's memory and the leases of this process in it. `RemoteStore.attach` makes it. Any
    thread may call it. `on_error` is called with the error of a failed call; the other two as for
    `RemoteStore.attach`."""

    def __init__(
        self,
        attachment: Attachment,
        identity: EngineIdentity,
        settings: Settings,
        breaker: Breaker,
        timeout_s: float,
        on_error: Callable[[Exception], None],
        on_unsettled: Callable[[], None],
        on_unmap: Callable[[SharedMemory], None],
    ) -> None:
        self._attachment = attachment
        self._on_error = on_error
        self._on_unsettled = on_unsettled
        self._on_unmap = on_unmap
        self._address = settings.address
        self._identity = identity
        self._breaker = breaker
        self._timeout = timeout_s
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._lock = threading.Lock()  # guards the connection
        self._lookup_leases: set[int] = set()  # held by lookups of this process
        self._unreleased: set[int] = set()  # leases to release with the next call
        self._leases_lock = threading.Lock()
        self._is_replaced = False  # another daemon answers at the address
        self._can_lease_lookups = True  # until a daemon without that capability answers
        self._readers = 0
        self._is_retired = False
        self._readers_lock = threading.Lock()
        # A heartbeat would end the session of a process that was stopped for a while, and lose the
        # replies to its requests. The attachment tells more reliably that the daemon is gone.
        self._connection = Connection(
            replace(settings, heartbeat=False),
            identity.hello(attachment.token),
            closing=self._closing,
            on_late=self._release_late,
            on_hello=self._on_hello,
        )

    @property
    def arena(self) -> SharedArena:
        return self._attachment.arena

    @property
    def alive(self) -> bool:
        """False once the daemon is gone. The mapping stays valid until `close`."""
        return not self.closed and not self._is_replaced and self._attachment.alive

    @property
    def arena_id(self) -> bytes:
        """Identifies this memory in all processes that map it; each daemon process has another."""
        return self._attachment.instance

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    # ---- readers --------------------------------------------------------------------------------

    def enter(self) -> bool:
        """Keeps the memory mapped until `leave`; False once it is retired."""
        with self._readers_lock:
            if self._is_retired:
                return False
            self._readers += 1
            return True

    def leave(self) -> None:
        with self._readers_lock:
            self._readers -= 1
            is_last = self._is_retired and not self._readers
        if is_last:
            self.close()

    def retire(self) -> None:
        """Refuses new readers; closes the memory when the last one has left. Idempotent."""
        with self._readers_lock:
            self._is_retired = True
            has_readers = self._readers > 0
        if not has_readers:
            self.close()

    @property
    def is_retired(self) -> bool:
        return self._is_retired

    def wait_until_closed(self) -> None:
        """Waits until the readers of retired memory have left and it is closed."""
        self._closing.wait()

    def close(self) -> None:
        """Unmaps the memory. No copy may be in flight. Idempotent. Leases that cannot be released
        end when the attachment closes."""
        with self._close_lock:
            if self.closed:
                return
            self.release_lookups()
            self.settle(time.monotonic() + _CLOSING_S)
            self._closing.set()
            try:
                self._on_unmap(self)
            finally:
                with self._lock:
                    self._connection.close()
                    self._attachment.close()

    # ---- reading --------------------------------------------------------------------------------

    def lease(self, keys: Sequence[StoreKey], deadline: float | None = None) -> BlockLease:
        """Leases blocks; those that the daemon lacks, or all if it does not answer, are misses."""
        wire_keys = self._identity.wire_keys(keys)
        reply = None
        if wire_keys:
            reply = self._ask(
                Lend(self._identity.key_bytes, wire_keys),
                LendReply,
                deadline,
                lambda r: self._check(r, r.lengths, len(wire_keys)),
            )
        if reply is None:
            nothing = [0] * len(keys)
            return BlockLease(nothing, nothing, nothing, nothing, self)
        return BlockLease(reply.leases, reply.offsets, reply.lengths, reply.generations, self)

    def are_still_valid(self, lease: BlockLease) -> bool:
        """Whether the slots still hold the leased blocks. Call it after the copy."""
        return lease.is_complete and self.arena.have_generations(
            np.array(lease.offsets, np.int64), np.array(lease.generations, np.uint64)
        )

    def lookup(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], nbytes: int, deadline: float
    ) -> LeasedMatch | None:
        """Counts the leading blocks that the daemon has for all ranks and leases those in memory,
        in one round trip; None if the daemon does not support that or does not answer in time."""
        suffixes = [rank.encode() for rank in ranks]

        def ask(connection: Connection, end: float) -> LeasedMatch | None:
            connection.open(end)
            assert connection.greeting is not None
            if BORROW_CAPABILITY not in connection.greeting.capabilities:
                self._can_lease_lookups = False
                return None
            max_keys = max(1, min(MAX_KEYS, connection.limits.keys, MAX_LOOKUPS // len(suffixes)))
            request = Borrow(len(keys[0]), list(keys[:max_keys]), suffixes, nbytes)
            reply = connection.call(request, BorrowReply, deadline=end)
            capacity = self.arena.capacity_bytes
            self._validate(reply, lambda: _check_lookup(reply, request, capacity))
            by_tier = dict(zip((Tier.MEMORY, Tier.SSD, Tier.BACKING), reply.tiers, strict=True))
            if not reply.lease:
                return LeasedMatch(reply.count, None, by_tier)
            with self._leases_lock:
                self._lookup_leases.add(reply.lease)
            return LeasedMatch(reply.count, LookupLease(self, reply, len(ranks)), by_tier)

        if not keys or not ranks or not self._can_lease_lookups:
            return None
        found = self._call(ask, deadline, max_wait_s=_BUSY_S)
        if not self.is_settled:
            self._on_unsettled()
        return found

    def release_lookup(self, lease: int) -> None:
        """Releases a lookup's lease with the next `settle`. Never waits. Idempotent."""
        with self._leases_lock:
            if lease not in self._lookup_leases:
                return
            self._lookup_leases.remove(lease)
            self._unreleased.add(lease)
        self._on_unsettled()

    def release_lookups(self) -> None:
        """Requests the release of all lookup leases with the next `settle`. Never waits."""
        with self._leases_lock:
            self._unreleased |= self._lookup_leases
            self._lookup_leases.clear()

    # ---- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        items: Sequence[tuple[StoreKey, StoreKey | None, int]],
        deadline: float | None = None,
    ) -> list[Reservation | PutResult]:
        """Reserves slots for blocks given as (key, parent, length), parents first; returns for each
        block its reservation or why there is none."""
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
        """Makes written blocks readable. Nothing may write to their slots after that."""
        leases = [reservation.lease for reservation in reservations]
        if not leases:
            return []

        def check(reply: SealReply) -> None:
            if len(reply.results) != len(leases):
                raise ConnectionLost(f"{len(reply.results)} results for {len(leases)} leases")

        reply = self._ask(Seal(leases), SealReply, deadline, check)
        if reply is None:
            self._release_later(leases)  # no effect on blocks that the daemon has sealed
            return [PutResult.FAILED] * len(leases)
        return put_results(reply.results)

    def abandon(self, reservations: Iterable[Reservation]) -> None:
        """Returns reserved slots unused. Nothing may write to them after that."""
        self.release(reservation.lease for reservation in reservations)

    # ---- releasing ------------------------------------------------------------------------------

    def release(self, leases: Iterable[int]) -> None:
        """Releases leases, now or with the next call that reaches the daemon. Does not raise."""
        self._release_later(leases)
        if self._unreleased:
            self._ask(None, ReleaseReply, None, lambda reply: None)

    def settle(self, deadline: float | None = None) -> None:
        """Releases all leases that wait for it and takes late replies. Does not raise."""

        def ask(connection: Connection, end: float) -> None:
            self._flush_releases(end)
            # Also if another thread has settled everything: ping, so that success means the daemon
            # replied.
            if connection.awaits_late_replies or self.is_settled:
                connection.call(Release([]), ReleaseReply, deadline=end)
            self._flush_releases(end)

        if not self.is_settled:
            self._call(ask, deadline)

    @property
    def is_settled(self) -> bool:
        """Whether all releases are confirmed and no late reply may bring further leases."""
        return not self._unreleased and not self._connection.awaits_late_replies

    # ---- internals ------------------------------------------------------------------------------

    def _call(
        self,
        work: Callable[[Connection, float], _T],
        deadline: float | None,
        max_wait_s: float = math.inf,
    ) -> _T | None:
        """Runs `work` with the connection and returns its result, or None if it failed. Waits at
        most `max_wait_s` for other threads that use the connection."""
        attempt = self._breaker.begin() if self.alive else None
        if attempt is None:
            return None
        end = time.monotonic() + self._timeout if deadline is None else deadline
        if not self._lock.acquire(timeout=max(0.0, min(end - time.monotonic(), max_wait_s))):
            self._breaker.forget(attempt)
            return None
        try:
            if self.closed:  # during the wait: a connection opened now would never be closed
                return None
            allowed_s = end - time.monotonic()
            if allowed_s <= 0:  # says nothing about the daemon
                return None
            answer = retry_forgotten_session(self._connection, lambda: work(self._connection, end))
            self._breaker.succeed(attempt)
            return answer
        except (RemoteError, ProtocolError) as error:
            logger.debug("a lease call to daemon %s failed: %s", self._address, error)
            self._on_error(error)
            if isinstance(error, RemoteRefusal) and error.code is ErrorCode.NO_ARENA:
                self._is_replaced = True
                self._breaker.succeed(attempt)
            elif not self.closed:
                record_failure(self._breaker, attempt, error, allowed_s)
        finally:
            self._lock.release()  # first: an interrupt in between would leave it locked forever
            self._breaker.forget(attempt)
        return None

    def _ask(
        self,
        request: Request | None,
        kind: type[_R],
        deadline: float | None,
        check: Callable[[_R], None],
    ) -> _R | None:
        """Sends pending releases and the request, if any; returns its reply, or None if that
        failed."""

        def ask(connection: Connection, end: float) -> _R | None:
            answer = None
            if not self._flush_releases(end) and request is None:
                # Another thread has released them; ping so that success means the daemon replied.
                connection.call(Release([]), ReleaseReply, deadline=end)
            if request is not None:
                answer = connection.call(request, kind, deadline=end)
                self._validate(answer, lambda: check(answer))
            with contextlib.suppress(RemoteError):
                self._flush_releases(end)  # leases of late replies that arrived during this call
            return answer

        return self._call(ask, deadline)

    def _validate(self, reply: Reply, check: Callable[[], None]) -> None:
        """Runs `check`; if it raises, releases the reply's leases and drops the connection."""
        try:
            check()
        except BaseException as error:
            self._release_late(reply)
            if isinstance(error, ConnectionLost):  # a KeyboardInterrupt keeps the connection
                self._connection.drop()
            raise

    def _flush_releases(self, deadline: float) -> bool:
        """Sends pending releases; returns whether there were any. Raises if the daemon does not
        confirm them."""
        with self._leases_lock:
            leases = sorted(self._unreleased)[:MAX_KEYS]
        if leases:
            self._connection.call(Release(leases), ReleaseReply, deadline=deadline)
            with self._leases_lock:
                self._unreleased.difference_update(leases)
        return bool(leases)

    def _release_later(self, leases: Iterable[int]) -> None:
        with self._leases_lock:
            self._unreleased.update(leases)

    def _release_late(self, reply: Reply) -> None:
        """Releases the leases of a reply that no call waits for."""
        if isinstance(reply, (LendReply, ReserveReply)):
            self._release_later(lease for lease in reply.leases if lease)
        elif isinstance(reply, BorrowReply) and reply.lease:
            self._release_later([reply.lease])

    def _on_hello(self, reply: HelloReply) -> None:
        if reply.instance != self._attachment.instance:
            self._is_replaced = True
            raise ConnectionLost("the daemon was restarted; its old shared memory is not used")

    def _check(
        self, reply: LendReply | ReserveReply, lengths: Sequence[int], expected: int
    ) -> None:
        """Raises unless the reply matches the request and all its offsets lie in the arena."""
        if len(reply.leases) != expected:
            raise ConnectionLost(f"{len(reply.leases)} leases for {expected} blocks")
        capacity = self.arena.capacity_bytes
        for lease, offset, nbytes in zip(reply.leases, reply.offsets, lengths, strict=True):
            if lease and (offset % PAGE or nbytes == 0 or offset + nbytes > capacity):
                raise ConnectionLost("the daemon sent an offset outside its memory")


def _check_lookup(reply: BorrowReply, request: Borrow, capacity: int) -> None:
    """Raises unless the reply matches the request and all its offsets lie in the arena."""
    blocks = reply.lent * len(request.suffixes)
    if reply.count > len(request.keys) or len(reply.offsets) != 8 * blocks:
        raise ConnectionLost(f"{len(reply.offsets) // 8} offsets for {blocks} blocks")
    offsets = np.frombuffer(reply.offsets, "<u8")
    if blocks and (
        int(offsets.max()) + request.length > capacity or np.any(offsets % np.uint64(PAGE))
    ):
        raise ConnectionLost("the daemon sent an offset outside its memory")


def attach(path: str, client: str, timeout_s: float) -> Attachment:
    """Maps the memory of the daemon with this arena socket; raises ArenaError with the reason."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:  # the process is out of file descriptors
        raise ArenaError(str(error)) from None
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.send(pack_map({"protocol": PROTOCOL_VERSION, "client": client[:MAX_TEXT]}))
        packet, flags = _receive(connection, descriptors)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ArenaError("the daemon's answer is too long")
        if not packet:
            raise ArenaError("the daemon closed the connection")
        capacity, token, instance = _read_answer(unpack_map(packet))
        if len(descriptors) != 1:
            raise ArenaError("the daemon sent no memory")
        arena = SharedArena.attach(descriptors.pop(), capacity)
        connection.setblocking(False)
        return Attachment(connection, arena, token, instance)
    except (OSError, ProtocolError) as error:
        connection.close()
        raise ArenaError(str(error)) from None
    except BaseException:
        connection.close()
        raise
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _receive(connection: socket.socket, descriptors: list[int]) -> tuple[bytes, int]:
    """Receives one packet; returns it with its flags. `socket.recv_fds` does not set CLOEXEC, so
    that child processes would inherit the descriptors."""
    room = socket.CMSG_LEN(array("i").itemsize)
    packet, controls, flags, _ = connection.recvmsg(_MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array("i")
            received.frombytes(data[: len(data) // received.itemsize * received.itemsize])
            descriptors += received
    return packet, flags


def _read_answer(fields: dict[Any, Any]) -> tuple[int, bytes, bytes]:
    ok = fields.get("ok")
    if ok is False:
        code, message = fields.get("code"), fields.get("message")
        raise ArenaError(f"the daemon refused: {str(code)[:MAX_TEXT]}: {str(message)[:MAX_TEXT]}")
    protocol, capacity = fields.get("protocol"), fields.get("capacity")
    token, instance = fields.get("token"), fields.get("instance")
    if ok is not True or type(protocol) is not int:
        raise ArenaError("the daemon's answer is malformed")
    if protocol != PROTOCOL_VERSION:
        raise ArenaError(f"the daemon speaks version {protocol}, not {PROTOCOL_VERSION}")
    if type(capacity) is not int or not 0 < capacity <= _MAX_CAPACITY:
        raise ArenaError("the daemon reported an invalid capacity")
    for value in (token, instance):
        if type(value) is not bytes or len(value) != _ID_BYTES:
            raise ArenaError("the daemon's answer lacks its token or instance")
    assert isinstance(token, bytes)
    assert isinstance(instance, bytes)
    return capacity, token, instance
