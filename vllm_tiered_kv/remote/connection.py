"""One session with a daemon: a DEALER socket, used by one thread at a time.

Every call keeps its deadline, whatever the daemon does: sockets never block, closing them never
lingers, and a socket monitor reports at once when the peer is gone. A failed call closes the
socket, and the next call opens a new one. Late replies are thus discarded, and zmq reads no byte of
a caller's memory after the call has returned.

Each connection has its own zmq context, for two reasons: connections do not share an I/O thread,
and only the end of a context proves that zmq no longer reads a caller's memory. Message trackers do
not prove it: libzmq loses track of the leading frames of a message if the peer disconnects while
the message is being sent. So a call that fails while its payload is being sent ends the context.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_tiered_kv.errors import (
    ConnectionLost,
    ErrorCode,
    HandshakeFailed,
    ProtocolError,
    RemoteRefusal,
    RemoteTimeout,
    SessionForgotten,
)
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.zero_copy_send import ZeroCopySend
from vllm_tiered_kv.wire.codec import decode_reply, encode_request
from vllm_tiered_kv.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES
from vllm_tiered_kv.wire.messages import (
    ErrorReply,
    GetReply,
    Hello,
    HelloReply,
    Limits,
    PutReply,
    Reply,
    Request,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting call checks whether its store is being closed
_TERM_S = 10.0  # most time for a context to end; it usually takes milliseconds
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_RECONNECT_MS = 86_400_000
"""A day, practically never. A call whose peer is gone opens a new socket anyway, while an idle
socket would retry for ever and send each attempt to its monitor. Nobody reads the monitor of an
idle socket: after some thousand events zmq's I/O thread blocks, and so does closing the socket. The
value is not -1 because the retry event is the only one for a host name that does not resolve."""
_QUEUE = 64  # messages; the requests in flight of a connection are far fewer

_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_monitors = itertools.count(1)
_R = TypeVar("_R", bound=Reply)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that all connections to one daemon share."""

    address: ServerAddress
    connect_timeout_s: float = 0.5
    curve: CurveKeys | None = None
    largest_block: int = 1 << 30
    heartbeat: bool = True


@dataclass(frozen=True, slots=True)
class Incoming:
    """A reply to one of the requests in flight. Its frames stay valid while they are referenced."""

    request_id: int
    reply: Reply
    payload: list[memoryview]


@dataclass(slots=True)
class _Resources:
    """The zmq objects of a connection.

    They are a separate object for a connection that is garbage-collected without `close`: the
    finalizer closes the sockets before the context, which would otherwise wait for them forever.
    """

    context: zmq.Context[zmq.SyncSocket] | None = None
    socket: zmq.SyncSocket | None = None
    monitor: zmq.SyncSocket | None = None

    def release(self) -> None:
        for socket in (self.socket, self.monitor):
            if socket is not None:
                socket.close(linger=0)
        if self.context is not None:
            self.context.term()
        self.context = self.socket = self.monitor = None


class Connection:
    """A connection that opens its session with the first call, and again after a failure. The
    threads of `ConnectionPool` and `SharedMemory` use it, one at a time."""

    def __init__(
        self,
        settings: Settings,
        hello: Hello,
        *,
        closing: threading.Event | None = None,
        on_late: Callable[[Reply], None] | None = None,
        on_hello: Callable[[HelloReply], None] | None = None,
    ) -> None:
        """`closing` ends waiting calls early. With `on_late` a call that times out keeps the socket
        open, and late replies are passed to `on_late`, because they may carry leases."""
        self._zmq = _Resources()
        weakref.finalize(self, self._zmq.release).atexit = False
        self._settings = settings
        self._hello = hello
        self._closing = closing
        self._on_late = on_late
        self._on_hello = on_hello
        self._ids = itertools.count(1)
        self._in_flight: dict[int, str] = {}
        self._abandoned: set[int] = set()
        self._sending: list[ZeroCopySend] = []
        self.greeting: HelloReply | None = None
        self.answered = 0  # replies so far that are not errors; a streamed reply counts each part
        self.progress = 0
        """Replies so far that moved blocks: a transfer that makes progress and then times out has a
        slow daemon, not a dead one."""

    # ---- calls ----------------------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        """Opens the session unless it is open."""
        with self._dropping_on_error():
            self._ensure_open(deadline)

    @property
    def limits(self) -> Limits:
        """The daemon's limits for one message; the protocol's before the session is open."""
        return Limits() if self.greeting is None else self.greeting.limits

    def call(
        self,
        request: Request,
        expected: type[_R],
        payload: Sequence[memoryview] = (),
        *,
        deadline: float,
    ) -> _R:
        """Sends a request and returns its reply. An error reply is raised as RemoteRefusal."""
        self._abandon()  # requests of an interrupted call: their replies are not for this one
        try:
            self.send(request, payload, deadline=deadline)
            reply = self.receive(deadline=deadline).reply
            self.settle(deadline=deadline)
        finally:
            self._abandon()
        assert isinstance(reply, expected)
        return reply

    def send(self, request: Request, payload: Sequence[memoryview] = (), *, deadline: float) -> int:
        """Sends a request and returns its id. The payload must not change until `settle`."""
        with self._dropping_on_error():
            self._ensure_open(deadline)
            return self._post(request, payload, deadline)

    def receive(self, *, deadline: float) -> Incoming:
        """Returns the next reply to any request in flight."""
        with self._dropping_on_error():
            incoming = self._next_reply(deadline)
            if isinstance(incoming.reply, ErrorReply):
                if incoming.reply.code is ErrorCode.NO_HELLO:
                    raise SessionForgotten("the daemon has forgotten the session")
                if self._in_flight:
                    self.drop()
                raise RemoteRefusal(incoming.reply.code, incoming.reply.message)
            return incoming

    def settle(self, *, deadline: float) -> None:
        """Waits until zmq has read all payload. On a timeout the socket and its context end."""
        with self._dropping_on_error():
            for sending in self._sending:
                try:
                    sending.wait(deadline)
                except zmq.NotDone:
                    raise RemoteTimeout("the daemon receives the payload too slowly") from None
            self._sending.clear()

    def close(self) -> None:
        """Closes the socket and ends the context. Idempotent."""
        self.drop()
        self._end_context()

    @property
    def awaits_late_replies(self) -> bool:
        """Whether replies to abandoned requests may still arrive."""
        return bool(self._abandoned)

    @property
    def is_open(self) -> bool:
        """Whether there is a socket; its peer may be gone."""
        return self._zmq.socket is not None

    @property
    def idle(self) -> bool:
        return not self._in_flight and not self._sending

    # ---- internals ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """Drops the socket when a step of a call fails, so that no later call uses a socket in an
        unknown state."""
        try:
            yield
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RemoteRefusal):
            return
        is_usable = self._on_late is not None and not self._sending
        if is_usable and (isinstance(error, RemoteTimeout) or not isinstance(error, Exception)):
            self._abandon()  # a KeyboardInterrupt does not break the connection either
        else:
            self.drop()

    def _abandon(self) -> None:
        """Marks the replies to requests in flight as late, if `on_late` takes late replies."""
        if self._on_late is not None:
            self._abandoned.update(self._in_flight)
            self._in_flight.clear()

    def _ensure_open(self, deadline: float) -> None:
        if self._zmq.socket is not None and self._peer_event() is not None:
            self.drop()
        if self._zmq.socket is not None:
            return
        connected = min(deadline, time.monotonic() + self._settings.connect_timeout_s)
        self._open_socket()
        try:
            self._wait(zmq.POLLOUT, connected)
            hello_id = self._post(self._hello, (), deadline)
            greeting = self._next_reply(deadline)
        except BaseException:
            self.drop()
            raise
        if isinstance(greeting.reply, ErrorReply):
            self.drop()
            raise RemoteRefusal(greeting.reply.code, greeting.reply.message, True)
        assert greeting.request_id == hello_id
        assert isinstance(greeting.reply, HelloReply)
        self.greeting = greeting.reply
        if self._on_hello is not None:
            self._on_hello(greeting.reply)

    def _open_socket(self) -> None:
        settings = self._settings
        try:  # each of these calls fails if the process is out of file descriptors
            if self._zmq.context is None:
                self._zmq.context = zmq.Context()
            socket = self._zmq.socket = self._zmq.context.socket(zmq.DEALER)
            for option, value in (
                (zmq.LINGER, 0),
                (zmq.IMMEDIATE, 1),
                (zmq.RECONNECT_IVL, _RECONNECT_MS),
                (zmq.CONNECT_TIMEOUT, max(1, math.ceil(settings.connect_timeout_s * 1000))),
                (zmq.HANDSHAKE_IVL, max(1, math.ceil(settings.connect_timeout_s * 1000))),
                (zmq.SNDHWM, _QUEUE),
                (zmq.RCVHWM, _QUEUE),
                (zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, settings.largest_block)),
            ):
                socket.setsockopt(option, value)
            if "[" in settings.address.endpoint:  # with IPV6 set, localhost may resolve to ::1 only
                socket.setsockopt(zmq.IPV6, 1)
            if settings.heartbeat:
                socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
                socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            if settings.curve is not None and settings.address.socket_path is None:
                settings.curve.apply(socket)  # a daemon's ipc sockets use no keys
            name = f"inproc://tiered-kv-monitor-{next(_monitors)}"
            self._zmq.monitor = socket.get_monitor_socket(_EVENTS, name)
            socket.connect(settings.address.endpoint)
        except BaseException as error:
            self.drop()
            if isinstance(error, zmq.ZMQError):
                raise ConnectionLost(f"cannot open a socket: {error}") from None
            raise

    def _post(self, request: Request, payload: Sequence[memoryview], deadline: float) -> int:
        assert self._zmq.socket is not None
        request_id = next(self._ids)
        header = encode_request(request_id, request)
        self._wait(zmq.POLLOUT, deadline)
        try:
            self._zmq.socket.send(header, zmq.NOBLOCK | (zmq.SNDMORE if payload else 0))
            if payload:
                sending = ZeroCopySend(payload)
                self._sending.append(sending)  # first: zmq may take a part and then fail
                sending.send(self._zmq.socket)
        except zmq.ZMQError as error:
            raise ConnectionLost(f"the connection broke while sending: {error}") from None
        self._in_flight[request_id] = request.op
        return request_id

    def _next_reply(self, deadline: float) -> Incoming:
        while True:
            frames = self._receive_frames(deadline)
            try:
                request_id, reply = decode_reply(frames[0], [len(f) for f in frames[1:]])
            except ProtocolError as error:
                if error.code is ErrorCode.UNSUPPORTED_VERSION:
                    self.drop()
                    raise RemoteRefusal(error.code, error.message, True) from None
                raise ConnectionLost(f"the daemon broke the protocol: {error.message}") from None
            op = self._in_flight.get(request_id)
            if op is None:
                self._abandoned.discard(request_id)
                if self._on_late is not None:
                    self._on_late(reply)
                continue
            if not isinstance(reply, ErrorReply) and reply.op != op:
                raise ConnectionLost(f"the daemon answered {op} with {reply.op}")
            if not (isinstance(reply, GetReply) and reply.more):
                del self._in_flight[request_id]
            self.answered += not isinstance(reply, ErrorReply)
            self.progress += isinstance(reply, (GetReply, PutReply))
            return Incoming(request_id, reply, frames[1:])

    def _receive_frames(self, deadline: float) -> list[memoryview]:
        assert self._zmq.socket is not None
        frames: list[memoryview] = []
        while True:
            try:
                frame = self._zmq.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                if frames:
                    raise ConnectionLost("the daemon sent an incomplete message") from None
                self._wait(zmq.POLLIN, deadline)
                continue
            except zmq.ZMQError as error:
                raise ConnectionLost(f"the connection broke: {error}") from None
            frames.append(frame.buffer)
            if not frame.more:
                return frames
            if len(frames) > MAX_FRAMES:
                raise ConnectionLost(f"the daemon sent a message of over {MAX_FRAMES} frames")

    def _wait(self, flag: int, deadline: float) -> None:
        """Waits until the socket is ready. Messages that have arrived are received before a
        disconnect is reported."""
        assert self._zmq.socket is not None
        assert self._zmq.monitor is not None
        watched = [(self._zmq.socket, flag), (self._zmq.monitor, zmq.POLLIN)]
        while True:
            left = deadline - time.monotonic()
            poll_ms = math.ceil(max(0.0, min(left, _POLL_S)) * 1000)
            ready = dict(zmq.zmq_poll(watched, poll_ms))
            if ready.get(self._zmq.socket, 0) & flag:
                return
            if self._zmq.monitor in ready and (reason := self._peer_event()) is not None:
                raise reason
            if self._closing is not None and self._closing.is_set():
                raise ConnectionLost("this client is being closed")
            if left <= 0:
                raise RemoteTimeout("no answer in time")

    def _peer_event(self) -> ConnectionLost | RemoteRefusal | None:
        """Returns why the peer is gone; None if the monitor has reported nothing."""
        assert self._zmq.monitor is not None
        try:
            event = recv_monitor_message(self._zmq.monitor, zmq.NOBLOCK)["event"]
        except zmq.ZMQError:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            message = "the daemon does not accept this client's CURVE key"
            return RemoteRefusal(ErrorCode.UNAUTHORIZED, message, True)
        if event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CLOSED):
            return ConnectionLost(self._settings.address.why_not_connected())
        if event == zmq.EVENT_DISCONNECTED:
            return ConnectionLost("the daemon closed the connection")
        return HandshakeFailed("the handshake failed; check the CURVE keys of client and daemon")

    def drop(self) -> None:
        """Closes the socket and forgets requests in flight. The next call opens a new socket."""
        socket, monitor = self._zmq.socket, self._zmq.monitor
        self._zmq.socket = self._zmq.monitor = self.greeting = None
        self._in_flight.clear()
        self._abandoned.clear()
        if socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            socket.close(linger=0)
        if monitor is not None:
            monitor.close(linger=0)
        sending, self._sending = self._sending, []
        if sending:
            self._end_context(sending)

    def _end_context(self, sending: Sequence[ZeroCopySend] = ()) -> None:
        """Ends the zmq context; after that zmq reads no caller's memory."""
        context, self._zmq.context = self._zmq.context, None
        if context is None:
            return
        # Its sockets are closed, so it ends at once, unless libzmq is resolving a host name.
        ending = threading.Thread(
            target=_term, args=(context, sending), name="tiered-kv-term", daemon=True
        )
        try:
            ending.start()
        except RuntimeError:  # the process is out of threads, or Python is shutting down
            _term(context, sending)
            return
        ending.join(_TERM_S)
        if ending.is_alive():
            logger.error(
                "zmq did not close its connection to daemon %s within %.0f s",
                self._settings.address,
                _TERM_S,
            )


def _term(context: zmq.Context[zmq.SyncSocket], sending: Sequence[ZeroCopySend]) -> None:
    """Ends a context, and references its payload until then."""
    context.term()
