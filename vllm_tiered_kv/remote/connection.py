"""One session with a daemon: a DEALER socket, used by one thread at a time.

Every call has a deadline and keeps it, whatever the daemon does: sockets never block, nothing
lingers, and a monitor tells at once when the peer is gone. After a call that failed the socket is
closed and the next call makes a new one; replies that come too late thus find nobody, and no byte
of a caller's memory is read after the call has returned.

Each connection has a zmq context of its own: its I/O thread is another connection's no bottleneck,
and only the end of a context proves that zmq is done with everything. Trackers do not: libzmq loses
sight of the leading frames of a message when the peer goes away while it is being sent. So a call
that fails while its payload is being sent ends the context, too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_tiered_kv.errors import (
    ConnectionLost,
    ErrorCode,
    ProtocolError,
    RemoteRefusal,
    RemoteTimeout,
    SessionForgotten,
)
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.zero_copy_send import ZeroCopySend
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
    decode_reply,
    encode_request,
)

logger = logging.getLogger(__name__)

_SLICE_S = 0.1  # how often a waiting call looks whether its store is being closed
_TERM_S = 10.0  # how long a context gets to end; it takes milliseconds
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_RECONNECT_MS = 86_400_000
"""About never. A call that finds its peer gone makes a fresh socket; one that nobody uses would try
again and again, and tell its monitor of it. Nobody listens: after some thousand attempts zmq's
thread waits for that, and so does whoever closes the socket. Not -1: where there is no connection
to close, as with a name that does not resolve, word of a next attempt is all that a call hears."""
_QUEUE = 64  # messages; what a connection has under way is limited far below

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
    """What all connections to one daemon have in common."""

    address: ServerAddress
    connect_timeout_s: float = 0.5
    curve: CurveKeys | None = None
    largest_block: int = 1 << 30
    heartbeat: bool = True


@dataclass(frozen=True, slots=True)
class Incoming:
    """A reply to one of the requests under way. Payload frames live as long as they are held."""

    request_id: int
    reply: Reply
    payload: list[memoryview]


@dataclass(slots=True)
class _Resources:
    """What zmq holds for a connection.

    Kept apart from it, for a connection that is dropped without `close`: the collector of garbage
    would end the context ahead of its sockets, and wait for them forever.
    """

    context: zmq.Context[zmq.SyncSocket] | None = None
    socket: zmq.SyncSocket | None = None
    monitor: zmq.SyncSocket | None = None

    def give_back(self) -> None:
        for socket in (self.socket, self.monitor):
            if socket is not None:
                socket.close(linger=0)
        if self.context is not None:
            self.context.term()
        self.context = self.socket = self.monitor = None


class Connection:
    """Connects and says hello when it is first used, and again whenever it has to."""

    def __init__(
        self,
        settings: Settings,
        hello: Hello,
        *,
        closing: threading.Event | None = None,
        on_late: Callable[[Reply], None] | None = None,
        on_hello: Callable[[HelloReply], None] | None = None,
    ) -> None:
        """`closing` ends waiting calls early. With `on_late` a call that times out leaves the
        socket open, and replies that come too late are handed over: they may carry leases."""
        self._zmq = _Resources()
        weakref.finalize(self, self._zmq.give_back).atexit = False
        self._settings = settings
        self._hello = hello
        self._closing = closing
        self._on_late = on_late
        self._on_hello = on_hello
        self._ids = itertools.count(1)
        self._under_way: dict[int, str] = {}
        self._given_up: set[int] = set()
        self._sending: list[ZeroCopySend] = []
        self.greeting: HelloReply | None = None
        self.answered = 0  # requests that were not refused, replies of a stream one by one
        self.progress = 0
        """Replies so far that moved blocks: a transfer that times out after some met a daemon that
        is slow, not dead."""

    # ---- calls ----------------------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        """Makes sure that the session is there."""
        with self._intact():
            self._ensure_open(deadline)

    @property
    def limits(self) -> Limits:
        """What the daemon accepts in one message, as far as it is known yet."""
        return Limits() if self.greeting is None else self.greeting.limits

    def call(
        self,
        request: Request,
        expected: type[_R],
        payload: Sequence[memoryview] = (),
        *,
        deadline: float,
    ) -> _R:
        """The one reply to a request. An error reply is raised as RemoteRefusal."""
        self._give_up()  # what was interrupted: its reply must not pass for this one's
        try:
            self.send(request, payload, deadline=deadline)
            reply = self.receive(deadline=deadline).reply
            self.settle(deadline=deadline)
        finally:
            self._give_up()
        assert isinstance(reply, expected)
        return reply

    def send(self, request: Request, payload: Sequence[memoryview] = (), *, deadline: float) -> int:
        """Puts a request under way and says its id. The payload must not change until `settle`."""
        with self._intact():
            self._ensure_open(deadline)
            return self._post(request, payload, deadline)

    def receive(self, *, deadline: float) -> Incoming:
        """The next reply to any request under way."""
        with self._intact():
            incoming = self._next_reply(deadline)
            if isinstance(incoming.reply, ErrorReply):
                if incoming.reply.code is ErrorCode.NO_HELLO:
                    raise SessionForgotten("the daemon has forgotten the session")
                if self._under_way:
                    self.drop()
                raise RemoteRefusal(incoming.reply.code, incoming.reply.message)
            return incoming

    def settle(self, *, deadline: float) -> None:
        """Returns when no payload is read any more; at the latest when the socket is closed."""
        with self._intact():
            for sending in self._sending:
                try:
                    sending.wait(deadline)
                except zmq.NotDone:
                    raise RemoteTimeout("the daemon takes the bytes too slowly") from None
            self._sending.clear()

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self.drop()
        self._end_context()

    @property
    def awaits_late_replies(self) -> bool:
        """Whether replies may still come that nobody waits for any more."""
        return bool(self._given_up)

    @property
    def is_open(self) -> bool:
        """Whether there is a socket; its peer may be gone."""
        return self._zmq.socket is not None

    @property
    def idle(self) -> bool:
        return not self._under_way and not self._sending

    # ---- inside ---------------------------------------------------------------------------------

    def _intact(self) -> contextlib.AbstractContextManager[None]:
        return _Guard(self)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RemoteRefusal):
            return
        is_whole = self._on_late is not None and not self._sending
        if is_whole and (isinstance(error, RemoteTimeout) or not isinstance(error, Exception)):
            self._give_up()  # an interrupt by the user is none of the connection's, either
        else:
            self.drop()

    def _give_up(self) -> None:
        """Replies to what is under way come too late, if there is somebody to take them."""
        if self._on_late is not None:
            self._given_up.update(self._under_way)
            self._under_way.clear()

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
        try:  # from the first on: a process may be out of descriptors for a while
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
            if "[" in settings.address.endpoint:  # otherwise localhost might mean ::1 alone
                socket.setsockopt(zmq.IPV6, 1)
            if settings.heartbeat:
                socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
                socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            if settings.curve is not None and settings.address.socket_path is None:
                settings.curve.apply(socket)  # daemons have local sockets without keys
            name = f"inproc://tiered-kv-monitor-{next(_monitors)}"
            self._zmq.monitor = socket.get_monitor_socket(_EVENTS, name)
            socket.connect(settings.address.endpoint)
        except BaseException as error:
            self.drop()
            if isinstance(error, zmq.ZMQError):
                raise ConnectionLost(f"no connection can be made: {error}") from None
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
                self._sending.append(sending)  # whether or not all of it is taken
                sending.send(self._zmq.socket)
        except zmq.ZMQError as error:
            raise ConnectionLost(f"the connection broke while sending: {error}") from None
        self._under_way[request_id] = request.op
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
            op = self._under_way.get(request_id)
            if op is None:
                self._given_up.discard(request_id)
                if self._on_late is not None:
                    self._on_late(reply)
                continue
            if not isinstance(reply, ErrorReply) and reply.op != op:
                raise ConnectionLost(f"the daemon answered {op} with {reply.op}")
            if not (isinstance(reply, GetReply) and reply.more):
                del self._under_way[request_id]
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
                    raise ConnectionLost("half a message arrived") from None
                self._wait(zmq.POLLIN, deadline)
                continue
            except zmq.ZMQError as error:
                raise ConnectionLost(f"the connection broke: {error}") from None
            frames.append(frame.buffer)
            if not frame.more:
                return frames
            if len(frames) > MAX_FRAMES:
                raise ConnectionLost(f"the daemon sent more than {MAX_FRAMES} frames at once")

    def _wait(self, flag: int, deadline: float) -> None:
        """Returns when the socket is ready. What has arrived goes before news of its end."""
        assert self._zmq.socket is not None
        assert self._zmq.monitor is not None
        watched = [(self._zmq.socket, flag), (self._zmq.monitor, zmq.POLLIN)]
        while True:
            left = deadline - time.monotonic()
            slice_ms = math.ceil(max(0.0, min(left, _SLICE_S)) * 1000)
            ready = dict(zmq.zmq_poll(watched, slice_ms))
            if ready.get(self._zmq.socket, 0) & flag:
                return
            if self._zmq.monitor in ready and (reason := self._peer_event()) is not None:
                raise reason
            if self._closing is not None and self._closing.is_set():
                raise ConnectionLost("this client is being closed")
            if left <= 0:
                raise RemoteTimeout("no answer in time")

    def _peer_event(self) -> ConnectionLost | RemoteRefusal | None:
        """What became of the peer, if anything."""
        assert self._zmq.monitor is not None
        try:
            event = recv_monitor_message(self._zmq.monitor, zmq.NOBLOCK)["event"]
        except zmq.ZMQError:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return RemoteRefusal(ErrorCode.UNAUTHORIZED, "its key is not allowed there", True)
        if event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CLOSED):
            return ConnectionLost(self._settings.address.why_not_connected())
        if event == zmq.EVENT_DISCONNECTED:
            return ConnectionLost("the connection was closed")
        return ConnectionLost("the handshake failed; do both ends use CURVE keys that fit?")

    def drop(self) -> None:
        """Forgets what is under way. The next call starts with a fresh socket."""
        socket, monitor = self._zmq.socket, self._zmq.monitor
        self._zmq.socket = self._zmq.monitor = self.greeting = None
        self._under_way.clear()
        self._given_up.clear()
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
        """After this zmq reads nobody's memory."""
        context, self._zmq.context = self._zmq.context, None
        if context is None:
            return
        # Its sockets are closed, so it ends at once, unless libzmq is resolving a host's name.
        ending = threading.Thread(
            target=_term, args=(context, sending), name="tiered-kv-term", daemon=True
        )
        try:
            ending.start()
        except RuntimeError:  # no more threads can be had, or Python is ending
            _term(context, sending)
            return
        ending.join(_TERM_S)
        if ending.is_alive():
            logger.error("zmq does not end a connection to %s", self._settings.address)


def _term(context: zmq.Context[zmq.SyncSocket], sending: Sequence[ZeroCopySend]) -> None:
    """Keeps what is sent, however long it takes."""
    context.term()


class _Guard:
    """Closes the socket when a step of a call fails: nothing half done is ever used again."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._connection._failed(error)
