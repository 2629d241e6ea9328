"""Watches client connections and closes those that misbehave.

zmq limits neither the number of connections nor how much unfinished data one of them may send. Its
socket monitor reports every accepted connection, and for tcp the kernel reports how many bytes zmq
has read. Bytes that were read but not delivered belong to an unfinished message, which zmq buffers
in full. The daemon closes a connection if
- the unfinished message is larger than any allowed message, stalls, or takes too long,
- it has had no session for a while,
- too many connections are open,
- messages exceed the network memory limit and this client uses the most,
- over ipc, it has delivered no message for as long as one may take and has nothing in flight.
A well-behaved client reconnects and sends `hello` again.

`unfinished_memory.py` estimates what unfinished messages need. The kernel counts no bytes of ipc
connections, and nothing tells a client that stopped in the middle of a message from an idle one, so
idle ones are closed, too, if they lose nothing.

A listener may also have complete messages waiting. zmq fair-queues over connections, so after a
full round of messages each connection that had one waiting has delivered it.
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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq

from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.receiver import Message
from vllm_tiered_kv.server.net.sessions import Listener, Peer
from vllm_tiered_kv.server.net.unfinished_memory import (
    NEGLIGIBLE_BYTES,
    HeapTrimmer,
    UnfinishedMemory,
    UnfinishedMessage,
)
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
# As zmq_socket_monitor writes it; pyzmq's own reader would import asyncio.
_MONITOR_EVENT = struct.Struct("=Hi")
_CHECK_INTERVAL_S = 0.1
_CHECK_COST_FACTOR = 10  # pause between checks, in multiples of the duration of the last check
_MAX_ELAPSED_S = 1.0  # a busy loop must not count against clients: it delays their messages, too
_EXTRA_MESSAGES = 256  # slack on top of a full round: zmq notices new messages with a delay
_HELLO_TIMEOUT_S = 10.0  # for a connection without a session
_MAX_MESSAGE_STALLS = 10  # a message may take this many stall timeouts, even if it progresses
_LEASES_FACTOR = 10  # a process that holds leases may be silent for longer: it may be stopped
_FRAME_BYTES = 64  # upper bound for the overhead of a frame on the wire, also with encryption
_HEARTBEAT_BYTES = 64  # per second
_RECEIVED = struct.Struct("=Q")  # tcpi_bytes_received of struct tcp_info; since Linux 4.1
_RECEIVED_AT = 128
_INFO_BYTES = _RECEIVED_AT + _RECEIVED.size
_UNREAD = struct.Struct("=i")


@dataclass(slots=True, eq=False)
class _Connection:
    listener: Listener
    inode: int  # tells a reused descriptor number apart
    message: UnfinishedMessage
    identity: bytes | None = None  # routing id in zmq, known from the first message on
    without_session_s: float = 0.0
    stalled_s: float = 0.0  # since the unfinished message last grew
    delivered: int = 0  # bytes of messages that zmq has delivered
    last_unfinished: int = 0  # bytes of the unfinished message, as of the last check
    had_message: bool = False  # over tcp: delivered one since the last check
    idle_s: float = 0.0  # over ipc, since it delivered a message or had something in flight


class Connections:
    """Tracks the connections of all listeners and closes those that break a limit. The daemon
    creates one; the gateway reports every message to it. Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        context: zmq.Context[zmq.Socket[bytes]],
        limits: ClientLimits,
        network: NetworkMemory,
        max_connections: int,
        stall_s: float,
        recorder: Recorder,
        has_session: Callable[[Peer], bool] = lambda peer: True,
        has_in_flight: Callable[[Peer], bool] = lambda peer: False,
        has_leases: Callable[[Peer], bool] = lambda peer: False,
        on_client_idle: Callable[[Peer], None] = lambda peer: None,
        on_client_shed: Callable[[Peer, str], None] = lambda peer, why: None,
        on_closed: Callable[[Peer], None] = lambda peer: None,
        index_bytes: Callable[[], int | None] = lambda: 0,
    ) -> None:
        """`index_bytes` returns an upper bound of the memory of the tiers' indexes; None while it
        is unknown.
        `has_in_flight` says whether a client waits for an answer, `has_leases` whether its process
        may wait for one that brings leases;
        `on_client_idle` is called for a client whose connection is closed because it is idle.
        `on_client_shed` is called with the reason for a client that is disconnected because
        messages use too much memory; `on_closed` when the connection of a client has ended."""
        self._reactor = reactor
        self._network = network
        self._stall_s = stall_s
        self._context = context
        self._recorder = recorder
        self._max_connections = max_connections
        # Twice: a complete but undelivered message, and the beginning of the next one.
        self._max_unfinished = 2 * (limits.message + MAX_HEADER_BYTES)
        self._monitors: dict[Listener, zmq.Socket[bytes]] = {}
        self._messages_since_check: Counter[Listener] = Counter()
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._by_peer: dict[Peer, int] = {}  # descriptors
        self._too_many = 0  # closed since the last check because too many were open
        self._last_check = time.monotonic()
        self._is_shedding = False
        self._ending: dict[int, int] = {}  # descriptors that zmq has yet to close; their inodes
        self._shed_count = 0  # closed since the last log line about it
        self._last_shed_log = 0.0
        self._memory = UnfinishedMemory(network, index_bytes)
        self._trimmer = HeapTrimmer(network)
        self._has_session = has_session
        self._has_in_flight = has_in_flight
        self._has_leases = has_leases
        self._on_client_idle = on_client_idle
        self._on_client_shed = on_client_shed
        self._on_closed = on_closed
        reactor.after(_CHECK_INTERVAL_S, self._check)

    def watch(self, listener: Listener) -> None:
        address = f"inproc://connections-{len(self._monitors)}"
        listener.socket.monitor(address, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # with a limit, zmq's I/O thread would block until it is read
        monitor.linger = 0
        monitor.connect(address)
        self._monitors[listener] = monitor
        self._reactor.watch(monitor, lambda: self._read_monitor(listener))

    def close(self) -> None:
        """Stops monitoring. Call it before the listeners are closed."""
        for listener, monitor in self._monitors.items():
            self._reactor.unwatch(monitor)
            listener.socket.disable_monitor()
            monitor.close()
        self._monitors.clear()

    def message_received(self, peer: Peer, message: Message) -> None:
        """Must be called for every message received."""
        if message.descriptor is None:
            return
        connection = self._open.get(message.descriptor)
        if connection is None and peer.listener in self._monitors:
            self._read_monitor(peer.listener)
            connection = self._open.get(message.descriptor)
        if connection is not None:
            if connection.identity is None:
                connection.identity = message.identity
                self._by_peer[peer] = message.descriptor
                self._network.mark_reconnected(peer)
            connection.had_message = connection.message.is_after_another = True
            connection.idle_s = 0.0
            connection.delivered += message.nbytes + _FRAME_BYTES * message.count
            # At once, because it may be a while until a busy listener is checked.
            finished = min(connection.message.nbytes, message.nbytes)
            connection.message.nbytes -= finished
            self._network.unfinished = max(0, self._network.unfinished - finished)

    def turn_ended(self, listener: Listener, messages: int) -> None:
        """Must be called with the number of messages after each turn of receiving."""
        if listener in self._monitors:
            self._messages_since_check[listener] += messages

    def read_monitors(self) -> None:
        """Handles what zmq has reported about connections so far."""
        for listener in self._monitors:
            self._read_monitor(listener)

    def _read_monitor(self, listener: Listener) -> None:
        while True:
            try:
                event_frame, _ = self._monitors[listener].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, descriptor = _MONITOR_EVENT.unpack(event_frame)
            if event == zmq.EVENT_ACCEPTED:
                self._add(listener, descriptor)
                continue
            connection = self._open.get(descriptor)
            # Another listener may have reused the number, and its news be read first.
            if connection is not None and connection.listener is listener:
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None and connection.identity is not None:
            peer = Peer(connection.listener, connection.identity)
            if self._by_peer.get(peer) == descriptor:
                del self._by_peer[peer]
                self._network.mark_departed(peer)
                self._on_closed(peer)

    def _add(self, listener: Listener, descriptor: int) -> None:
        inode = _inode(descriptor)
        if inode is None:  # closed already
            return
        self._forget(descriptor)
        self._open[descriptor] = _Connection(listener, inode, self._memory.begin(listener.is_local))
        if len(self._open) > self._max_connections:
            self._too_many += 1
            self._disconnect(descriptor)

    def disconnect(self, peer: Peer) -> None:
        """Closes the connection of this client, if it has one."""
        descriptor = self._by_peer.get(peer)
        if descriptor is not None:
            self._disconnect(descriptor)

    def _check(self) -> None:
        began = time.monotonic()
        elapsed = min(began - self._last_check, _MAX_ELAPSED_S)
        self._last_check = began
        try:
            self._check_connections(elapsed)
        finally:
            took = time.monotonic() - began
            self._reactor.after(max(_CHECK_INTERVAL_S, _CHECK_COST_FACTOR * took), self._check)

    def _check_connections(self, elapsed: float) -> None:
        # If a listener has nothing to read, zmq has delivered every complete message.
        idle = {one for one in self._monitors if not one.socket.poll(0)}
        full_round = 2 * len(self._open) + _EXTRA_MESSAGES
        checked = idle | {
            one for one, count in self._messages_since_check.items() if count >= full_round
        }
        for listener in checked:
            del self._messages_since_check[listener]
        reasons: Counter[str] = Counter(
            {f"{self._max_connections} are open already": self._too_many}
        )
        self._too_many = 0
        for descriptor, connection in list(self._open.items()):
            listener = connection.listener
            if listener not in checked:
                continue
            if listener.is_local:
                if self._is_idle(connection, elapsed):
                    self._disconnect(descriptor)
                continue
            why = self._message_fault(descriptor, connection, listener in idle, elapsed)
            if why is not None:
                self._recorder.add(names.CLIENTS_DROPPED, 1)
            else:
                why = self._session_fault(connection, elapsed)
            if why is not None:
                reasons[why] += 1
                self._disconnect(descriptor)
        for why, count in (+reasons).items():
            logger.info("closed %d connections: %s", count, why)
        messages = [one.message for one in self._open.values()]
        self._memory.estimate(messages, elapsed, self._awaits_close())
        self._network.unfinished = sum(one.memory_bytes for one in messages)
        self._shed_suspects()
        self._shed()
        self._log_shed()
        self._trimmer.check(elapsed, self._awaits_close() or self._memory.is_freeing)

    def schedule_shed(self) -> None:
        """Must be called when network memory exceeds its limit."""
        if not self._is_shedding:
            self._is_shedding = True
            self._reactor.post(self._shed)

    def _shed(self) -> None:
        """Disconnects the clients that use the most network memory until the rest fits the limit.
        An unfinished message weighs more the older it is: honest ones end soon."""
        self._is_shedding = False
        network = self._network
        self._trimmer.watch_peak()
        if network.total <= network.limit:
            return
        weights: list[tuple[float, int, _Connection, Peer]] = []
        connected = 0
        for descriptor, one in self._open.items():
            peer = Peer(one.listener, one.identity or b"")
            held = network.held_by(peer)
            unfinished = one.message.memory_bytes
            connected += unfinished + held
            weight = unfinished * (1 + one.message.age_s) + held
            weights.append((weight, descriptor, one, peer))
        # What clients have left behind does not end with the connections of others: these keep
        # half of the limit, instead of being disconnected in vain.
        limit = max(network.limit, network.total - connected + network.limit // 2)
        for weight, descriptor, one, peer in sorted(weights, key=lambda entry: -entry[0]):
            if network.total <= limit or not weight:  # nothing would be gained
                break
            network.unfinished -= one.message.memory_bytes
            self._shed_client(descriptor, peer, "this client uses the most")
        self._trimmer.is_requested = True

    def _shed_client(self, descriptor: int, peer: Peer, why: str) -> None:
        self._network.mark_disconnected(peer)
        self._disconnect(descriptor)
        self._on_client_shed(peer, f"network memory is full and {why}")
        self._recorder.add(names.CLIENTS_DROPPED, 1)
        self._shed_count += 1

    def _shed_suspects(self) -> None:
        """Disconnects ipc clients that may have filled the memory with an unfinished message."""
        suspects = set(self._memory.suspects([one.message for one in self._open.values()]))
        for descriptor, one in list(self._open.items()):
            if one.message in suspects:
                peer = Peer(one.listener, one.identity or b"")
                why = "this client may be sending a message without end"
                self._shed_client(descriptor, peer, why)
                self._trimmer.is_requested = True

    def _log_shed(self) -> None:
        """Logs a summary instead of each client: there may be thousands."""
        if self._shed_count and self._last_check - self._last_shed_log > _MAX_ELAPSED_S:
            self._last_shed_log = self._last_check
            logger.warning(
                "closed %d connections: messages use more than network_memory (%d bytes)",
                self._shed_count,
                self._network.limit,
            )
            self._shed_count = 0

    def _awaits_close(self) -> bool:
        """Whether zmq has yet to close a connection that was shut down."""
        ending = self._ending.items()
        self._ending = {number: inode for number, inode in ending if _inode(number) == inode}
        return bool(self._ending)

    def _message_fault(
        self, descriptor: int, connection: _Connection, is_idle: bool, elapsed: float
    ) -> str | None:
        """Why the unfinished message of a tcp connection is not acceptable, or None."""
        message = connection.message
        taken = _bytes_read(descriptor)
        heartbeats = int(elapsed * _HEARTBEAT_BYTES) + 1
        connection.delivered = min(connection.delivered + heartbeats, taken)
        before, message.nbytes = message.nbytes, taken - connection.delivered
        if is_idle:
            before = message.nbytes
        elif connection.had_message:
            before = 0
        has_begun = connection.had_message  # the unfinished message, since the last check
        connection.had_message = False
        if before <= NEGLIGIBLE_BYTES or has_begun:
            message.age_s = connection.stalled_s = 0.0
        else:
            message.age_s += elapsed
            has_grown = message.nbytes > connection.last_unfinished
            connection.stalled_s = 0.0 if has_grown else connection.stalled_s + elapsed
        connection.last_unfinished = message.nbytes
        if connection.stalled_s > self._stall_s:
            return f"no more bytes of an unfinished message for {self._stall_s:g} s"
        if message.age_s > _MAX_MESSAGE_STALLS * self._stall_s:
            return f"a message took more than {_MAX_MESSAGE_STALLS * self._stall_s:g} s"
        if before > self._max_unfinished:
            return f"a message of more than {self._max_unfinished} bytes"
        return None

    def _is_idle(self, connection: _Connection, elapsed: float) -> bool:
        """Whether an ipc connection has delivered nothing for too long. It may be an honest one, so
        this is neither logged nor counted."""
        identity = connection.identity
        peer = None if identity is None else Peer(connection.listener, identity)
        if peer is not None and self._has_in_flight(peer):
            connection.idle_s = 0.0
            return False
        connection.idle_s += elapsed
        limit = _MAX_MESSAGE_STALLS * self._stall_s
        if peer is not None and self._has_leases(peer):
            limit *= _LEASES_FACTOR
        if connection.idle_s <= limit:
            return False
        if peer is not None:
            self._on_client_idle(peer)
        self._trimmer.is_requested = True  # the beginning of a message may have needed much memory
        return True

    def _session_fault(self, connection: _Connection, elapsed: float) -> str | None:
        identity = connection.identity
        if identity is not None and self._has_session(Peer(connection.listener, identity)):
            connection.without_session_s = 0.0
            return None
        connection.without_session_s += elapsed
        if connection.without_session_s > _HELLO_TIMEOUT_S:
            return f"no hello for {_HELLO_TIMEOUT_S:g} s"
        return None

    def _disconnect(self, descriptor: int) -> None:
        """Shuts the socket down; zmq notices and closes it."""
        try:
            own = os.dup(descriptor)  # zmq may close its own at any time, and the number be reused
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # then the next check tries again
                self._forget(descriptor)
            return
        connection = self._open[descriptor]
        self._ending[descriptor] = connection.inode
        self._forget(descriptor)
        try:
            if os.fstat(own).st_ino == connection.inode:
                with contextlib.suppress(OSError), _as_socket(own) as one:  # closed already
                    one.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(own)


def _inode(descriptor: int) -> int | None:
    """None if it is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


@contextlib.contextmanager
def _as_socket(descriptor: int) -> Iterator[socket.socket]:
    """A socket object that does not close the descriptor."""
    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield one
    finally:
        one.detach()


def _bytes_read(descriptor: int) -> int:
    """How many bytes zmq has read from this connection so far."""
    try:
        with _as_socket(descriptor) as one:
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_UNREAD.size))
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0] - _UNREAD.unpack(unread)[0])
    except (OSError, struct.error):  # closed, or a kernel that reports fewer fields
        return 0
