"""Connections over tcp, watched from outside zmq, which bounds neither how many there are nor what
one of them may send.

zmq tells of each connection that it accepts, and the kernel how many bytes zmq has read from it.
What zmq has not handed over of these is a message that has no end yet, and zmq keeps all of it. A
connection is cut off when that is more than any message may have, when it has had no session for a
while, or when there are too many. A client in good faith connects again and says hello.

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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from vllm_tiered_kv.server.allowances import Allowances
from vllm_tiered_kv.server.intake import Message
from vllm_tiered_kv.server.reactor import Reactor
from vllm_tiered_kv.server.sessions import Listener, Peer
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_NEWS = struct.Struct("=Hi")  # as zmq_socket_monitor writes it; pyzmq's reader brings asyncio along
_LOOK_S = 0.5
_ROUND = 256  # messages, beside those of each connection, until zmq has noticed that there are any
_PATIENCE = 20  # looks at a connection without a session; time passes also where nobody can speak
_FRAME_BYTES = 64  # a frame takes less than so many more on the wire, also encrypted
_HEARTBEAT_BYTES = 128  # between two looks
_RECEIVED = struct.Struct("=Q")  # tcpi_bytes_received of struct tcp_info; since Linux 4.1
_RECEIVED_AT = 128
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size
_UNREAD = struct.Struct("=i")


@dataclass(slots=True, eq=False)
class _Connection:
    listener: Listener
    inode: int  # numbers of descriptors are used again
    identity: bytes | None = None  # what zmq calls it
    strange_for: int = 0  # looks, without a session
    delivered: int = 0  # bytes of messages that zmq has handed over
    unfinished: int = 0  # bytes that it had not at the last look
    was_heard: bool = False  # since then


class Connections:
    """Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        context: zmq.Context[zmq.Socket[bytes]],
        allowances: Allowances,
        most: int,
    ) -> None:
        self._reactor = reactor
        self._context = context
        self._most = most
        # Twice, for a message that is whole but not yet handed over, and the beginning of another.
        self._most_unfinished = 2 * (allowances.message + MAX_HEADER_BYTES)
        self._monitors: dict[Listener, zmq.Socket[bytes]] = {}
        self._heard: Counter[Listener] = Counter()  # messages, since the last look
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._too_many = 0  # cut off since the last look
        self.has_session: Callable[[Peer], bool] = lambda peer: True
        reactor.every(_LOOK_S, self._look)

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
            connection.identity = message.identity
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
                self._open.pop(descriptor, None)

    def _accepted(self, listener: Listener, descriptor: int) -> None:
        try:
            inode = os.fstat(descriptor).st_ino
        except OSError:  # closed again
            return
        self._open[descriptor] = _Connection(listener, inode)
        if len(self._open) > self._most:
            self._too_many += 1
            self._cut_off(descriptor)

    def _look(self) -> None:
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
            why = self._fault_of(descriptor, connection, connection.listener in idle)
            if why is not None:
                cut_off[why] += 1
                self._cut_off(descriptor)
        for why, count in (+cut_off).items():
            logger.info("%d connections are cut off: %s", count, why)

    def _fault_of(self, descriptor: int, connection: _Connection, is_idle: bool) -> str | None:
        taken = _bytes_taken(descriptor)
        connection.delivered = min(connection.delivered + _HEARTBEAT_BYTES, taken)
        before, connection.unfinished = connection.unfinished, taken - connection.delivered
        if is_idle:
            before = connection.unfinished
        elif connection.was_heard:
            before = 0
        connection.was_heard = False
        if before > self._most_unfinished:
            return f"a message of more than {self._most_unfinished} bytes"
        identity = connection.identity
        if identity is not None and self.has_session(Peer(connection.listener, identity)):
            connection.strange_for = 0
            return None
        connection.strange_for += 1
        if connection.strange_for > _PATIENCE:
            return f"no hello for {_PATIENCE * _LOOK_S:g} s"
        return None

    def _cut_off(self, descriptor: int) -> None:
        """zmq finds out, and closes it."""
        try:
            own = os.dup(descriptor)  # which does not become another's meanwhile
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # then at another look
                del self._open[descriptor]
            return
        connection = self._open.pop(descriptor)
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
