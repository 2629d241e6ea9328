"""Replies on their way to clients, and the blocks they keep pinned.

Payloads are sent zero-copy: zmq references the memory of a block until its bytes are in the kernel,
and the block stays pinned until the sender reports the ticket of its message. Small payloads are
copied instead. A client that stops reading therefore pins the blocks it asked for. *Claims*, made
before a block is fetched, bound how many bytes those are, per client and in total. A client that
reads nothing for the stall timeout is disconnected (over tcp by the kernel, with TCP_USER_TIMEOUT),
which ends zmq's references.

If zmq loses a message together with its connection, its ticket is never reported. Once a client is
known to be disconnected, the outbox therefore releases its blocks after a grace period regardless:
zmq has no connection left over which it could send them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import zmq

from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.zmq_messages import make_zmq_sender
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Peer
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot
from vllm_tiered_kv.wire.codec import UNREADABLE_ID, encode_reply
from vllm_tiered_kv.wire.messages import ErrorReply

logger = logging.getLogger(__name__)

COPY_BYTES = 64 << 10
"""Payloads of at most this size are copied: tracking them would cost more."""
_TRACK_BYTES = 256 << 10  # after copying this much for a client, track whether it reads
_MESSAGE_BYTES = 512  # overhead of a message in memory
_MIN_POLL_S = 0.001
_MAX_POLL_S = 0.05
_PROBE = encode_reply(
    UNREADABLE_ID, ErrorReply(ErrorCode.UNAVAILABLE, "this client does not read its replies", "")
)
_GRACE_S = 10.0  # for zmq to drop what was being sent to a disconnected client


@dataclass(slots=True)
class _Message:
    """A reply that waits until zmq accepts it."""

    header: bytes
    payload: Sequence[PinnedSlot]
    on_unsent: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Memory the message itself takes, without the blocks it references."""
        return _MESSAGE_BYTES + len(self.header)


@dataclass(slots=True)
class _PeerQueue:
    """Replies on their way to one client."""

    claimed: int = 0  # bytes of blocks that are being fetched or sent
    waiting: deque[_Message] = field(default_factory=deque)  # not accepted by zmq yet
    in_zmq: dict[int, tuple[Sequence[PinnedSlot], int]] = field(default_factory=dict)
    """By ticket, in sending order: the blocks that zmq references, and the bytes copied for this
    client before, which zmq has sent, too, when it reports the ticket."""
    last_progress: float = field(default_factory=time.monotonic)
    last_probe: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.claimed and not self.waiting and not self.in_zmq


@dataclass(frozen=True, slots=True)
class _Orphan:
    """Blocks that zmq may still reference for a client that has disconnected."""

    blocks: Sequence[PinnedSlot]
    until: float


class Outbox:
    """Sends replies and releases their blocks when they are sent. The gateway and the request
    handlers call it. Used on the reactor's thread only."""

    def __init__(
        self,
        reactor: Reactor,
        memory: MemoryStore,
        limits: ClientLimits,
        recorder: Recorder,
        network: NetworkMemory,
        connections: Connections,
        stall_s: float,
        on_client_lost: Callable[[Peer, str], None],
        on_room_freed: Callable[[], None],
    ) -> None:
        """`on_client_lost` is called for a client that has disconnected or reads nothing, with the
        reason, and must call `drop`; `on_room_freed` after claims have become smaller."""
        self._network = network
        self._connections = connections
        self._on_client_lost = on_client_lost
        self._on_room_freed = on_room_freed
        self._sender = make_zmq_sender()
        self._copied: dict[Peer, int] = {}  # bytes copied into zmq since the last ticket
        self._last_ticket = 0
        self._tickets: dict[int, Peer] = {}  # receivers of messages in zmq
        self._sent_bytes = 0  # not yet recorded
        self._reactor = reactor
        self._memory = memory
        self._limits = limits
        self._recorder = recorder
        self._stall_s = stall_s
        self._queues: dict[Peer, _PeerQueue] = {}
        self._busy: set[Peer] = set()  # peers with replies that are waiting or in zmq
        self._orphans: dict[int, _Orphan] = {}  # by ticket
        self._claimed = 0
        self._has_freed_room = False  # since `_on_room_freed` was last called
        self._poll_delay_s = _MIN_POLL_S
        self._is_poll_scheduled = False
        reactor.each_turn(self._poll_sent)
        reactor.every(1.0, self._disconnect_stalled)

    @property
    def claimed_bytes(self) -> int:
        return self._claimed

    @property
    def is_empty(self) -> bool:
        return not self._busy

    # ---- claims ---------------------------------------------------------------------------------

    def has_replies(self, peer: Peer) -> bool:
        """Whether replies to this client are being made or sent."""
        return peer in self._queues

    def has_claims(self, peer: Peer) -> bool:
        queue = self._queues.get(peer)
        return queue is not None and queue.claimed > 0

    def claim(self, peer: Peer, nbytes: int, must: bool = False) -> bool:
        """Claims room for blocks to fetch and send. False if there is none; `must` overrides."""
        queue = self._queues.get(peer)
        mine = 0 if queue is None else queue.claimed
        fits = (
            mine + nbytes <= self._limits.replies_per_client
            and self._claimed + nbytes <= self._limits.replies
        )
        if not fits and not must:
            return False
        if queue is None:
            queue = self._queues[peer] = _PeerQueue()
        queue.claimed += nbytes
        self._claimed += nbytes
        return True

    def unclaim(self, peer: Peer, nbytes: int) -> None:
        if not nbytes:
            return
        queue = self._queues[peer]
        queue.claimed -= nbytes
        self._claimed -= nbytes
        self._has_freed_room = True
        if queue.is_idle:
            del self._queues[peer]

    def release_claimed(self, peer: Peer, blocks: Sequence[PinnedSlot]) -> None:
        """Releases blocks that were claimed and need not stay pinned for zmq."""
        if blocks:
            self._memory.let_go(blocks)
            self.unclaim(peer, sum(block.nbytes for block in blocks))

    # ---- sending --------------------------------------------------------------------------------

    def send(
        self,
        peer: Peer,
        header: bytes,
        payload: Sequence[PinnedSlot] = (),
        on_unsent: Callable[[], None] | None = None,
    ) -> None:
        """Sends a reply. Takes over the claimed blocks of `payload`. Calls `on_unsent` if the
        reply can never be sent."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _PeerQueue()
        if queue.waiting or not self._try_send(peer, queue, header, payload, on_unsent):
            message = _Message(header, payload, on_unsent)
            queue.waiting.append(message)
            self._network.hold(peer, message.nbytes)
            self._busy.add(peer)
            if len(queue.waiting) > self._limits.queued_replies_per_session:
                self._on_client_lost(peer, "it does not read its replies")
                return
        if queue.is_idle:
            self._queues.pop(peer, None)

    def drop(self, peer: Peer) -> None:
        """Discards replies that zmq has not accepted. Blocks in zmq stay pinned until sent."""
        queue = self._queues.get(peer)
        if queue is None:
            return
        waiting, queue.waiting = queue.waiting, deque()
        for message in waiting:
            self._network.release(peer, message.nbytes)
            self._discard(peer, message.payload, message.on_unsent)
        if queue.is_idle:
            self._queues.pop(peer, None)

    def connection_closed(self, peer: Peer) -> None:
        """Must be called when the connection of a client has ended."""
        self._copied.pop(peer, None)
        queue = self._queues.get(peer)
        if queue is not None and self._is_stalled(queue, time.monotonic()):
            self._recorder.add(names.CLIENTS_DROPPED, 1)

    def _is_stalled(self, queue: _PeerQueue, now: float) -> bool:
        has_unread = bool(queue.waiting or queue.in_zmq)
        return has_unread and queue.last_progress < now - self._stall_s

    def send_copies(
        self,
        peer: Peer,
        request_id: int,
        allowed: Set[int],
        max_bytes: int,
        blocks: list[PinnedSlot],
    ) -> bool:
        """Answers a `get` with copies of small blocks, which need neither a claim nor a pin; at
        most `max_bytes`. Returns False, and sends nothing, if the reply would have to wait, the
        client is gone, or a block has a length that is not allowed."""
        queue = self._queues.get(peer)
        if queue is not None and queue.waiting:
            return False
        copied = self._copied.get(peer, 0) + _MESSAGE_BYTES
        ticket = self._next_ticket() if copied + max_bytes > _TRACK_BYTES else 0
        sent = self._sender.send_get_reply(
            peer.listener.socket.underlying, peer.identity, request_id, blocks, allowed, ticket
        )
        if not sent:
            return False
        self._sent_bytes += sent
        if ticket:
            self._track(peer, ticket, (), copied + sent)
        else:
            self._copied[peer] = copied + sent
        return True

    def _try_send(
        self,
        peer: Peer,
        queue: _PeerQueue,
        header: bytes,
        payload: Sequence[PinnedSlot],
        on_unsent: Callable[[], None] | None,
    ) -> bool:
        """False if the client must read something first. Reports a client that is gone."""
        payload_bytes = sum([block.nbytes for block in payload])
        is_small = payload_bytes <= COPY_BYTES
        views = [block.view for block in payload]
        error = self._give_to_zmq(peer, header, views, payload_bytes, () if is_small else payload)
        if error == zmq.EAGAIN:
            return False
        if error:
            self._discard(peer, payload, on_unsent)
            if error == zmq.EHOSTUNREACH:
                self._orphan_sent(peer, queue)
                self._on_client_lost(peer, "it has disconnected")
            else:
                logger.warning("cannot send a reply: %s", zmq.strerror(error))
        elif is_small:
            self.release_claimed(peer, payload)  # last, because it forgets an idle queue
        return True

    def _give_to_zmq(
        self,
        peer: Peer,
        header: bytes,
        payload: Sequence[memoryview],
        payload_bytes: int,
        pinned: Sequence[PinnedSlot],
    ) -> int:
        """Sends a reply and returns 0, or zmq's error. The payload is copied, unless it is that of
        `pinned` blocks, which zmq then references."""
        copied = self._copied.get(peer, 0) + _MESSAGE_BYTES + len(header)
        if not pinned:
            copied += payload_bytes
        ticket = self._next_ticket() if pinned or copied > _TRACK_BYTES else 0
        error = self._sender.send(
            peer.listener.socket.underlying, peer.identity, header, payload, not pinned, ticket
        )
        if error:
            return error
        self._sent_bytes += len(header) + payload_bytes
        if ticket:
            self._track(peer, ticket, pinned, copied)
        else:
            self._copied[peer] = copied
        return 0

    def _next_ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def _track(self, peer: Peer, ticket: int, pinned: Sequence[PinnedSlot], copied: int) -> None:
        """Waits for zmq to report a message, and books what was copied until then."""
        self._copied[peer] = 0
        self._tickets[ticket] = peer
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _PeerQueue()
        queue.in_zmq[ticket] = (pinned, copied)
        self._network.hold(peer, copied)
        queue.last_progress = time.monotonic()
        self._busy.add(peer)
        self._poll_delay_s = _MIN_POLL_S

    def _discard(
        self, peer: Peer, payload: Sequence[PinnedSlot], on_unsent: Callable[[], None] | None
    ) -> None:
        self.release_claimed(peer, payload)
        if on_unsent is not None:
            on_unsent()

    # ---- releasing what was sent ----------------------------------------------------------------

    def _poll_sent(self) -> None:
        if self._sent_bytes:
            self._recorder.add(names.BYTES_OUT, self._sent_bytes)
            self._sent_bytes = 0
        if self._busy:
            self._release_sent()
        for peer in list(self._busy):
            queue = self._queues.get(peer)
            if queue is None:
                self._busy.discard(peer)
                continue
            while queue.waiting:
                message = queue.waiting.popleft()
                if not self._try_send(
                    peer, queue, message.header, message.payload, message.on_unsent
                ):
                    queue.waiting.appendleft(message)
                    break
                self._network.release(peer, message.nbytes)
                queue.last_progress = time.monotonic()
            if not queue.waiting and not queue.in_zmq:
                self._busy.discard(peer)
                if queue.is_idle:
                    self._queues.pop(peer, None)
        if self._has_freed_room:
            self._has_freed_room = False
            self._poll_delay_s = _MIN_POLL_S
            self._on_room_freed()
            if self._has_freed_room:  # freed again; let other work run before the next round
                self._reactor.post(lambda: None)
        if self._busy and not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            self._reactor.after(self._poll_delay_s, self._wake_up)
            self._poll_delay_s = min(2 * self._poll_delay_s, _MAX_POLL_S)

    def _wake_up(self) -> None:
        self._is_poll_scheduled = False

    def _release_sent(self) -> None:
        """Releases the blocks that zmq has finished sending."""
        done: list[PinnedSlot] = []
        now = time.monotonic()
        for ticket in self._sender.take_sent():
            peer = self._tickets.pop(ticket, None)
            if peer is None:
                orphan = self._orphans.pop(ticket, None)
                if orphan is not None:
                    done += orphan.blocks
                continue
            queue = self._queues[peer]
            if queue.last_progress < now - self._stall_s:
                # Sent at last, or dropped with the connection, whose end zmq has reported before.
                self._connections.read_monitors()
            blocks, copied = queue.in_zmq.pop(ticket)
            queue.last_progress = now
            self._network.release(peer, copied)
            for block in blocks:
                queue.claimed -= block.nbytes
            done += blocks
        self._release(done)

    def _release(self, blocks: Sequence[PinnedSlot]) -> None:
        """Unpins blocks whose clients do not count them any more."""
        if blocks:
            self._memory.let_go(blocks)
            self._claimed -= sum([block.nbytes for block in blocks])
            self._has_freed_room = True

    def _disconnect_stalled(self) -> None:
        """Disconnects local clients that read nothing, which ends zmq's references to their blocks.
        The kernel does that for tcp clients, unless replies are waiting outside of zmq."""
        now = time.monotonic()
        for peer in list(self._busy):
            queue = self._queues.get(peer)
            if queue is None or not self._is_stalled(queue, now):
                continue
            if queue.waiting or peer.listener.is_local:
                self._connections.disconnect(peer)
                self._on_client_lost(peer, f"it has read nothing for {self._stall_s:g} s")
            elif queue.last_probe < now - self._stall_s:
                queue.last_probe = now
                self.send(peer, _PROBE)  # fails if zmq has lost the connection
        self._release_orphans(now)

    def _orphan_sent(self, peer: Peer, queue: _PeerQueue) -> None:
        """Moves what zmq still references for a disconnected client to the orphans."""
        until = time.monotonic() + _GRACE_S
        for ticket, (blocks, copied) in queue.in_zmq.items():
            del self._tickets[ticket]
            self._network.release(peer, copied)
            if blocks:
                queue.claimed -= sum(block.nbytes for block in blocks)
                self._orphans[ticket] = _Orphan(blocks, until)
        queue.in_zmq.clear()

    def _release_orphans(self, now: float) -> None:
        self._release_sent()
        over = [ticket for ticket, orphan in self._orphans.items() if orphan.until <= now]
        self._release([block for ticket in over for block in self._orphans.pop(ticket).blocks])
