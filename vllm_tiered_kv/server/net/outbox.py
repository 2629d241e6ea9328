"""Replies on their way to clients, and the blocks they keep pinned.

Payload is sent from where it lies: zmq refers to the memory until the bytes are in the kernel, and
a block is let go only when zmq has let go of the view of it that it was given. A weak reference
tells; a MessageTracker would, too, but costs more than the frame. Only very little of the payload
is copied instead. A client that stops reading therefore pins what it asked for. How much that can
be is bounded per client and in total by *claims*, which are made before a block is fetched. A
client that reads nothing for the stall timeout is disconnected, over tcp by the kernel
(TCP_USER_TIMEOUT), which ends zmq's references.

Should zmq lose a message together with a connection, it would never say that it is done. So once a
client is known to be gone, what was under way to it is let go after a while all the same: whatever
might still read the memory then has nobody to send it to.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Peer
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot
from vllm_tiered_kv.wire.messages import UNREADABLE_ID, ErrorReply, encode_reply

logger = logging.getLogger(__name__)

_COPY_BYTES = 64 << 10  # so little is copied: keeping track of it would cost more
_TRACK_BYTES = 256 << 10  # after so much was copied for a client, it is seen whether it is taken
_MESSAGE_BYTES = 512  # of a message, beside its bytes
_SOONEST_LOOK_S = 0.001
_LATEST_LOOK_S = 0.05
_PROBE = encode_reply(
    UNREADABLE_ID, ErrorReply(ErrorCode.UNAVAILABLE, "replies under way are not taken", "")
)
_GRACE_S = 10.0  # for zmq to be done with what was under way to a client that is gone


_View = weakref.ref[memoryview]
"""What zmq was given: dead when zmq is done with it."""


@dataclass(slots=True)
class _Message:
    header: bytes
    payload: Sequence[PinnedSlot]
    lost: Callable[[], None] | None

    @property
    def nbytes(self) -> int:
        """Without the blocks it refers to."""
        return _MESSAGE_BYTES + len(self.header)


@dataclass(slots=True)
class _Line:
    """What is on its way to one client."""

    claimed: int = 0  # bytes fetched, or to be, and not yet let go
    waiting: deque[_Message] = field(default_factory=deque)  # zmq does not take it yet
    in_zmq: deque[tuple[_View, PinnedSlot | None, int]] = field(default_factory=deque)
    """What zmq was given by reference; a block, or the header of a message; and what was copied for
    it since the one before, which zmq is done with when it is done with this one."""
    last_progress: float = field(default_factory=time.monotonic)
    last_probe: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.claimed and not self.waiting and not self.in_zmq


@dataclass(frozen=True, slots=True)
class _Leftover:
    """Something that was under way to a client that is gone."""

    view: _View
    block: PinnedSlot
    until: float


class Outbox:
    """Used on the reactor's thread only."""

    def __init__(
        self,
        reactor: Reactor,
        memory: MemoryStore,
        allowances: ClientLimits,
        recorder: Recorder,
        network: NetworkMemory,
        stall_s: float,
    ) -> None:
        self._network = network
        self._copied: dict[Peer, int] = {}  # bytes given to zmq since something was by reference
        self._reactor = reactor
        self._memory = memory
        self._allowances = allowances
        self._recorder = recorder
        self._stall_s = stall_s
        self._lines: dict[Peer, _Line] = {}
        self._busy: set[Peer] = set()  # with something waiting or in zmq
        self._leftovers: list[_Leftover] = []
        self._claimed = 0
        self._freed = False  # since those who wait for room were told
        self._look_after = _SOONEST_LOOK_S
        self._looking = False
        self.on_gone: Callable[[Peer, str], None] = lambda peer, why: None
        """Told of a client that has disconnected or takes nothing; `drop` is then called."""
        self.on_room: Callable[[], None] = lambda: None
        """Told when claims have become smaller."""
        self.cut_off: Callable[[Peer], None] = lambda peer: None
        """Ends the connection of a client, and with it zmq's references to blocks sent to it."""
        reactor.each_turn(self._look)
        reactor.every(1.0, self._find_stalled)

    @property
    def claimed_bytes(self) -> int:
        return self._claimed

    @property
    def is_empty(self) -> bool:
        return not self._busy

    # ---- claims ---------------------------------------------------------------------------------

    def has_claims(self, peer: Peer) -> bool:
        line = self._lines.get(peer)
        return line is not None and line.claimed > 0

    def claim(self, peer: Peer, nbytes: int, must: bool = False) -> bool:
        """Room for blocks to be fetched and sent; False when there is none, unless it must be."""
        line = self._lines.get(peer)
        mine = 0 if line is None else line.claimed
        fits = (
            mine + nbytes <= self._allowances.replies_per_client
            and self._claimed + nbytes <= self._allowances.replies
        )
        if not fits and not must:
            return False
        if line is None:
            line = self._lines[peer] = _Line()
        line.claimed += nbytes
        self._claimed += nbytes
        return True

    def unclaim(self, peer: Peer, nbytes: int) -> None:
        line = self._lines[peer]
        line.claimed -= nbytes
        self._claimed -= nbytes
        self._freed = True
        if line.is_idle:
            del self._lines[peer]

    def let_go(self, peer: Peer, blocks: Sequence[PinnedSlot]) -> None:
        """Of blocks that were claimed and will not be sent."""
        if blocks:
            self._memory.let_go(blocks)
            self.unclaim(peer, sum(block.nbytes for block in blocks))

    # ---- sending --------------------------------------------------------------------------------

    def send(
        self,
        peer: Peer,
        header: bytes,
        payload: Sequence[PinnedSlot] = (),
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Takes over the claimed blocks of `payload`. `lost` is called if it was never sent."""
        message = _Message(header, payload, lost)
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line()
        if line.waiting or not self._try(peer, line, message):
            line.waiting.append(message)
            self._network.hold(peer, message.nbytes)
            self._busy.add(peer)
            if len(line.waiting) > self._allowances.queued_replies_per_session:
                self.on_gone(peer, "it does not take its replies")
                return
        if line.is_idle:
            self._lines.pop(peer, None)

    def drop(self, peer: Peer) -> None:
        """Forgets what has not been sent. What zmq refers to stays pinned until it does not."""
        line = self._lines.get(peer)
        if line is None:
            return
        waiting, line.waiting = line.waiting, deque()
        for message in waiting:
            self._network.release(peer, message.nbytes)
            self._give_up(peer, message)
        if line.is_idle:
            self._lines.pop(peer, None)

    def forget(self, peer: Peer) -> None:
        """Its connection is closed."""
        self._copied.pop(peer, None)

    def _try(self, peer: Peer, line: _Line, message: _Message) -> bool:
        """False when the client must take something first. A client that is gone is told of."""
        socket = peer.listener.socket
        payload_bytes = sum(block.nbytes for block in message.payload)
        is_small = payload_bytes <= _COPY_BYTES
        views = [memoryview(block.view) for block in message.payload]
        frames = [zmq.Frame(view, copy=is_small, copy_threshold=0) for view in views]
        try:
            flags = zmq.NOBLOCK | zmq.SNDMORE
            socket.send(peer.identity, flags)  # the only frame that can be refused
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._give_up(peer, message)
            if error.errno == zmq.EHOSTUNREACH:
                self._leave_behind(peer, line)
                self.on_gone(peer, "it has disconnected")
            else:
                logger.warning("a reply could not be sent: %s", error)
            return True
        copied = self._copied.get(peer, 0) + message.nbytes + is_small * payload_bytes
        refers = not is_small or copied > _TRACK_BYTES
        if refers and is_small:  # zmq sends in order: with this one all before it are gone
            view = memoryview(message.header)
            line.in_zmq.append((weakref.ref(view), None, copied))
            header: zmq.Frame | bytes = zmq.Frame(view, copy=False, copy_threshold=0)
            del view
        else:
            header = message.header
        self._copied[peer] = 0 if refers else copied
        socket.send(header, zmq.SNDMORE if message.payload else 0, copy=header is message.header)
        del header
        for n, frame in enumerate(frames, 1):
            socket.send(frame, zmq.SNDMORE if n < len(frames) else 0, copy=False)
        if not is_small:
            counts = (copied, *[0] * (len(views) - 1))
            line.in_zmq.extend(zip(map(weakref.ref, views), message.payload, counts, strict=True))
        self._recorder.add(names.BYTES_OUT, len(message.header) + payload_bytes)
        if is_small:
            self.let_go(peer, message.payload)
        if refers:
            self._network.hold(peer, copied)
            line.last_progress = time.monotonic()
            self._busy.add(peer)
            self._look_after = _SOONEST_LOOK_S
        return True

    def _give_up(self, peer: Peer, message: _Message) -> None:
        self.let_go(peer, message.payload)
        if message.lost is not None:
            message.lost()

    # ---- looking after what was sent ------------------------------------------------------------

    def _look(self) -> None:
        for peer in list(self._busy):
            line = self._lines.get(peer)
            if line is None:
                self._busy.discard(peer)
                continue
            self._collect(peer, line)
            while line.waiting:
                message = line.waiting.popleft()
                if not self._try(peer, line, message):
                    line.waiting.appendleft(message)
                    break
                self._network.release(peer, message.nbytes)
                line.last_progress = time.monotonic()
            if not line.waiting and not line.in_zmq:
                self._busy.discard(peer)
                if line.is_idle:
                    self._lines.pop(peer, None)
        if self._freed:
            self._freed = False
            self._look_after = _SOONEST_LOOK_S
            self.on_room()
            if self._freed:  # again: others get their turn first
                self._reactor.post(lambda: None)
        if self._busy and not self._looking:
            self._looking = True
            self._reactor.after(self._look_after, self._looked)
            self._look_after = min(2 * self._look_after, _LATEST_LOOK_S)

    def _looked(self) -> None:
        self._looking = False

    def _collect(self, peer: Peer, line: _Line) -> None:
        """Lets go of what zmq is done with."""
        done: list[PinnedSlot] = []
        copied = 0
        while line.in_zmq and line.in_zmq[0][0]() is None:
            _, block, before = line.in_zmq.popleft()
            copied += before
            if block is not None:
                done.append(block)
        if copied:
            line.last_progress = time.monotonic()
            self._network.release(peer, copied)
        if done:
            line.last_progress = time.monotonic()
            self._memory.let_go(done)
            nbytes = sum(block.nbytes for block in done)
            line.claimed -= nbytes
            self._claimed -= nbytes
            self._freed = True

    def _find_stalled(self) -> None:
        """The kernel watches tcp clients, which may be slow; a local one that takes nothing is
        stopped. Without its connection it holds no blocks that were sent to it."""
        now = time.monotonic()
        limit = now - self._stall_s
        for peer in list(self._busy):
            line = self._lines.get(peer)
            if line is None or line.last_progress >= limit:
                continue
            if line.waiting or peer.listener.is_local:
                self.cut_off(peer)
                self.on_gone(peer, f"it has taken nothing for {self._stall_s:g} s")
            elif line.last_probe < limit:
                line.last_probe = now
                self.send(peer, _PROBE)  # only a client that is there can be sent something
        self._clear_leftovers(now)

    def _leave_behind(self, peer: Peer, line: _Line) -> None:
        """The client is gone: what zmq has is of no use to anybody."""
        until = time.monotonic() + _GRACE_S
        while line.in_zmq:
            view, block, copied = line.in_zmq.popleft()
            if copied:
                self._network.release(peer, copied)
            if block is not None:
                line.claimed -= block.nbytes
                self._leftovers.append(_Leftover(view, block, until))

    def _clear_leftovers(self, now: float) -> None:
        kept: list[_Leftover] = []
        over: list[PinnedSlot] = []
        for left in self._leftovers:
            if left.view() is None or left.until <= now:
                over.append(left.block)
            else:
                kept.append(left)
        if over:
            self._leftovers = kept
            self._memory.let_go(over)
            self._claimed -= sum(block.nbytes for block in over)
            self._freed = True
