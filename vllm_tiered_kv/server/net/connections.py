"""Connections, watched from outside zmq, which bounds neither how many there are nor what one of
them may send.

zmq tells of each connection that it accepts, and the kernel how many bytes zmq has read from one
over tcp. What zmq has not handed over of these is a message that has no end yet, and zmq keeps all
of it. A connection is cut off when that is more than any message may have or does not go on, when
it has had no session for a while, when there are too many, or when it takes up the most where
messages take up too much. A client in good faith connects again and says hello.

Messages that are whole may also wait, where a listener has more of them than are taken. zmq takes
turns, so a connection with such a message is heard before the others are for a second time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from vllm_tiered_kv.native.memory import trim
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.receiver import Message
from vllm_tiered_kv.server.net.sessions import Listener, Peer
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_NEWS = struct.Struct("=Hi")  # as zmq_socket_monitor writes it; pyzmq's reader brings asyncio along
_LOOK_S = 0.1
_LOOKING_SHARE = 10  # a look lasts at most one part in so many of the time between two
_MAX_TURN_S = 1.0  # counted between two looks: time passes also where nobody can speak
_ROUND = 256  # messages, beside those of each connection, until zmq has noticed that there are any
_PATIENCE_S = 10.0  # with a connection without a session
_SOME_BYTES = 4096  # of a message; one that has fewer may wait for its end
_MAX_MESSAGE = 10  # times the stall timeout: the longest one takes, however it goes on
_CALM_S = 10.0  # after much memory was in use, before it is given back to the system
_MUCH_BYTES = 256 << 20
_FRAME_BYTES = 64  # a frame takes less than so many more on the wire, also encrypted
_HEARTBEAT_BYTES = 64  # a second
_RECEIVED = struct.Struct("=Q")  # tcpi_bytes_received of struct tcp_info; since Linux 4.1
_RECEIVED_AT = 128
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size
_UNREAD = struct.Struct("=i")


@dataclass(slots=True, eq=False)
class _Connection:
    listener: Listener
    inode: int  # numbers of descriptors are used again
    identity: bytes | None = None  # what zmq calls it
    strange_for: float = 0.0  # seconds, without a session
    unfinished_for: float = 0.0  # since it began a message
    stuck_for: float = 0.0  # since anything came of that
    delivered: int = 0  # bytes of messages that zmq has handed over
    unfinished: int = 0  # bytes that it had not at the last look
    last_unfinished: int = 0  # at the one before
    was_heard: bool = False  # since then


class Connections:
    """Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        context: zmq.Context[zmq.Socket[bytes]],
        allowances: ClientLimits,
        network: NetworkMemory,
        most: int,
        stall_s: float,
    ) -> None:
        self._reactor = reactor
        self._network = network
        self._stall_s = stall_s
        self._context = context
        self._most = most
        # Twice, for a message that is whole but not yet handed over, and the beginning of another.
        self._most_unfinished = 2 * (allowances.message + MAX_HEADER_BYTES)
        self._monitors: dict[Listener, zmq.Socket[bytes]] = {}
        self._heard: Counter[Listener] = Counter()  # messages, since the last look
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._by_peer: dict[Peer, int] = {}  # descriptors
        self._too_many = 0  # cut off since the last look
        self._looked = time.monotonic()
        self._is_shedding = False
        self._has_shed = False
        self._too_large = 0  # cut off since that was told
        self._told = 0.0
        self._peak = 0  # of what messages took up
        self._calm_for = 0.0
        self.has_session: Callable[[Peer], bool] = lambda peer: True
        self.on_cut_off: Callable[[Peer, str], None] = lambda peer, why: None
        """Told of a client that is cut off for what it takes up."""
        self.on_closed: Callable[[Peer], None] = lambda peer: None
        network.on_excess = self._shed_soon
        reactor.after(_LOOK_S, self._look)

    def watch(self, listener: Listener) -> None:
        address = f"inproc://connections-{len(self._monitors)}"
        listener.socket.monitor(address, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # or zmq would stop until it is read
        monitor.linger = 0
        monitor.connect(address)
        self._monitors[listener] = monitor
        self._reactor.watch(monitor, lambda: self._take_news(listener))

    def close(self) -> None:
        """Before the listeners are."""
        for listener, monitor in self._monitors.items():
            self._reactor.forget(monitor)
            listener.socket.disable_monitor()
            monitor.close()
        self._monitors.clear()

    def heard(self, listener: Listener, message: Message) -> None:
        """To be told of every message."""
        if listener not in self._monitors or message.descriptor is None:
            return
        self._heard[listener] += 1
        if message.descriptor not in self._open:
            self._take_news(listener)
        connection = self._open.get(message.descriptor)
        if connection is not None:
            if connection.identity is None:
                connection.identity = message.identity
                peer = Peer(listener, message.identity)
                self._by_peer[peer] = message.descriptor
                self._network.come_back(peer)
            connection.was_heard = True
            connection.delivered += message.nbytes + _FRAME_BYTES * message.count

    def _take_news(self, listener: Listener) -> None:
        while True:
            try:
                news, _ = self._monitors[listener].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = _NEWS.unpack(news)
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(listener, descriptor)
            else:
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None and connection.identity is not None:
            peer = Peer(connection.listener, connection.identity)
            if self._by_peer.get(peer) == descriptor:
                del self._by_peer[peer]
                self.on_closed(peer)

    def _accepted(self, listener: Listener, descriptor: int) -> None:
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:  # closed again
            return
        self._forget(descriptor)
        self._open[descriptor] = _Connection(listener, inode)
        if len(self._open) > self._most:
            self._too_many += 1
            self._cut_off(descriptor)

    def cut_off(self, peer: Peer) -> None:
        """Ends the connection of this client, if it has one."""
        descriptor = self._by_peer.get(peer)
        if descriptor is not None:
            self._cut_off(descriptor)

    def _look(self) -> None:
        began = time.monotonic()
        elapsed = min(began - self._looked, _MAX_TURN_S)
        self._looked = began
        try:
            self._look_at_all(elapsed)
        finally:
            took = time.monotonic() - began
            self._reactor.after(max(_LOOK_S, _LOOKING_SHARE * took), self._look)

    def _look_at_all(self, elapsed: float) -> None:
        # Where a listener has nothing to read, every message that has come whole is handed over.
        idle = {one for one in self._monitors if not one.socket.poll(0)}
        a_round = 2 * len(self._open) + _ROUND
        judged = idle | {one for one, count in self._heard.items() if count >= a_round}
        for listener in judged:
            del self._heard[listener]
        cut_off: Counter[str] = Counter({f"{self._most} are open already": self._too_many})
        self._too_many = 0
        for descriptor, connection in list(self._open.items()):
            if connection.listener not in judged:
                continue
            why = self._fault_of(descriptor, connection, connection.listener in idle, elapsed)
            if why is not None:
                cut_off[why] += 1
                self._cut_off(descriptor)
        for why, count in (+cut_off).items():
            logger.info("%d connections are cut off: %s", count, why)
        self._network.unfinished = sum(one.unfinished for one in self._open.values())
        self._shed()
        self._tell_of_shed()
        self._give_memory_back(elapsed)

    def _shed_soon(self) -> None:
        if not self._is_shedding:
            self._is_shedding = True
            self._reactor.post(self._shed)

    def _shed(self) -> None:
        """Cuts off those that take up the most until it is little enough. Messages without an end
        count for more the older they are: one in good faith ends soon."""
        self._is_shedding = False
        network = self._network
        self._peak = max(self._peak, network.total)
        if network.total <= network.most:
            return
        weights: list[tuple[float, int, _Connection, Peer]] = []
        for descriptor, one in self._open.items():
            peer = Peer(one.listener, one.identity or b"")
            weight = one.unfinished * (1 + one.unfinished_for) + network.held_by(peer)
            weights.append((weight, descriptor, one, peer))
        for _, descriptor, one, peer in sorted(weights, key=lambda entry: -entry[0]):
            if network.total <= network.most:
                break
            network.unfinished -= one.unfinished
            network.leave(peer)
            self._cut_off(descriptor)
            self.on_cut_off(peer, "messages take up too much, and its the most")
            self._too_large += 1
        self._has_shed = True

    def _tell_of_shed(self) -> None:
        """Not of each: there may be very many."""
        if self._too_large and self._looked - self._told > _MAX_TURN_S:
            self._told = self._looked
            logger.warning(
                "%d connections are cut off: messages take up more than network_memory (%d bytes)",
                self._too_large,
                self._network.most,
            )
            self._too_large = 0

    def _give_memory_back(self, elapsed: float) -> None:
        """The C library keeps what was freed, which is right while messages come and go."""
        is_calm = self._peak > _MUCH_BYTES and self._network.total < _MUCH_BYTES // 4
        is_due = is_calm or self._has_shed
        self._calm_for = self._calm_for + elapsed if is_due else 0.0
        if self._calm_for > (_MAX_TURN_S if self._has_shed else _CALM_S):
            self._peak = 0
            self._calm_for = 0.0
            self._has_shed = False
            with contextlib.suppress(RuntimeError):  # no thread is to be had
                threading.Thread(target=trim, name="tiered-kv-trim", daemon=True).start()

    def _fault_of(
        self, descriptor: int, connection: _Connection, is_idle: bool, elapsed: float
    ) -> str | None:
        if connection.listener.is_local:
            return None
        taken = _bytes_taken(descriptor)
        heartbeats = int(elapsed * _HEARTBEAT_BYTES) + 1
        connection.delivered = min(connection.delivered + heartbeats, taken)
        before, connection.unfinished = connection.unfinished, taken - connection.delivered
        if is_idle:
            before = connection.unfinished
        elif connection.was_heard:
            before = 0
        connection.was_heard = False
        if before <= _SOME_BYTES:
            connection.unfinished_for = connection.stuck_for = 0.0
        else:
            connection.unfinished_for += elapsed
            has_grown = connection.unfinished > connection.last_unfinished
            connection.stuck_for = 0.0 if has_grown else connection.stuck_for + elapsed
        connection.last_unfinished = connection.unfinished
        if connection.stuck_for > self._stall_s:
            return f"nothing more of a message for {self._stall_s:g} s"
        if connection.unfinished_for > _MAX_MESSAGE * self._stall_s:
            return f"a message that takes more than {_MAX_MESSAGE * self._stall_s:g} s"
        if before > self._most_unfinished:
            return f"a message of more than {self._most_unfinished} bytes"
        identity = connection.identity
        if identity is not None and self.has_session(Peer(connection.listener, identity)):
            connection.strange_for = 0.0
            return None
        connection.strange_for += elapsed
        if connection.strange_for > _PATIENCE_S:
            return f"no hello for {_PATIENCE_S:g} s"
        return None

    def _cut_off(self, descriptor: int) -> None:
        """zmq finds out, and closes it."""
        try:
            own = os.dup(descriptor)  # which does not become another's meanwhile
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # then at another look
                self._forget(descriptor)
            return
        connection = self._open[descriptor]
        self._forget(descriptor)
        try:
            if os.fstat(own).st_ino == connection.inode:
                with contextlib.suppress(OSError), _as_socket(own) as one:  # closed already
                    one.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(own)


@contextlib.contextmanager
def _as_socket(descriptor: int) -> Iterator[socket.socket]:
    """Of which it stays the owner's."""
    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield one
    finally:
        one.detach()


def _bytes_taken(descriptor: int) -> int:
    """How many zmq has read so far."""
    try:
        with _as_socket(descriptor) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_UNREAD.size))
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0] - _UNREAD.unpack(unread)[0])
    except (OSError, struct.error):  # it is closed; or an older kernel, which tells less
        return 0
