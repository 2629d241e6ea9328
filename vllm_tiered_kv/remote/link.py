"""Questions over the connection that keeps a daemon's memory ours: one packet there, one back.

It spares a lookup the threads of zmq, which on both sides have to be woken up before anything is
said. Small questions only; whatever does not go this way is asked over zmq.

As there, a reply may carry leases and must not be lost: one that nobody waits for any more stays in
the socket until the next call, or `hear_late`, and is handed over then. What the daemon could not
send it takes back itself.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from vllm_tiered_kv.errors import (
    ConnectionLost,
    ErrorCode,
    ProtocolError,
    RemoteRefusal,
    RemoteTimeout,
)
from vllm_tiered_kv.wire.limits import MAX_LINK_BYTES
from vllm_tiered_kv.wire.messages import ErrorReply, Reply, Request, decode_reply, encode_request

LENT_AT_MOST = (MAX_LINK_BYTES - 1024) // 16
"""Blocks for whose places a reply has room: more are better asked for over zmq at once."""

_SLICE_S = 0.1  # how often a waiting call looks whether its memory is being closed
_LATE_S = 60.0  # how long to wait for a late reply: it may have found no room, and never come
_ELSEWHERE = (ErrorCode.TOO_LARGE, ErrorCode.NO_HELLO, ErrorCode.UNKNOWN_OP)
_R = TypeVar("_R", bound=Reply)


class Link:
    """Used by one thread at a time."""

    def __init__(
        self, link: socket.socket, closing: threading.Event, on_late: Callable[[Reply], None]
    ) -> None:
        """`closing` ends waiting calls early; `on_late` is given replies that came too late."""
        self._socket = link
        self._closing = closing
        self._on_late = on_late
        self._ids = itertools.count(1)
        self._given_up: dict[int, float] = {}  # and until when a reply is expected all the same
        self._is_usable = True
        self._packet = bytearray(MAX_LINK_BYTES + 1)
        self.answered = 0

    @property
    def awaits_late_replies(self) -> bool:
        """Whether replies may still come that nobody waits for any more."""
        return max(tuple(self._given_up.values()), default=-math.inf) > time.monotonic()

    def call(self, request: Request, expected: type[_R], deadline: float) -> _R | None:
        """The reply to a request; None where it has to be asked over zmq. An error reply is raised
        as RemoteRefusal."""
        self.hear_late()
        if not self._is_usable:
            return None
        request_id = next(self._ids)
        packet = encode_request(request_id, request)
        if len(packet) > MAX_LINK_BYTES or not self._send(packet):
            return None
        try:
            reply = self._reply_to(request_id, deadline)
        except RemoteTimeout:
            now = time.monotonic()
            awaited = {late: until for late, until in self._given_up.items() if until > now}
            self._given_up = {**awaited, request_id: now + _LATE_S}
            raise
        self.answered += 1
        if isinstance(reply, ErrorReply):
            if reply.code in _ELSEWHERE:
                return None
            raise RemoteRefusal(reply.code, reply.message)
        if not isinstance(reply, expected):
            self._on_late(reply)
            raise self._broken(f"it answered {request.op} with {reply.op}")
        return reply

    def distrust(self) -> None:
        """Asks nothing here any more; what still comes is heard."""
        self._is_usable = False

    def hear_late(self) -> None:
        """Hands over the replies that have come too late. Never waits."""
        with contextlib.suppress(ConnectionLost):  # whoever asks next will notice
            while (incoming := self._receive()) is not None:
                self._take_late(*incoming)

    def _send(self, packet: bytes) -> bool:
        try:
            self._socket.send(packet)
        except BlockingIOError:
            return False  # the daemon has not read for long: be it told by zmq's deadline
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
            raise ConnectionLost(f"the connection broke: {error.strerror}") from None
        return True

    def _reply_to(self, request_id: int, deadline: float) -> Reply:
        while True:
            self._wait(deadline)
            incoming = self._receive()
            if incoming is None:
                continue
            answered, reply = incoming
            if answered == request_id:
                return reply
            self._take_late(answered, reply)

    def _take_late(self, request_id: int, reply: Reply) -> None:
        self._given_up.pop(request_id, None)
        self._on_late(reply)

    def _receive(self) -> tuple[int, Reply] | None:
        """The next reply and the id of what it answers; None if none has come."""
        try:
            count = self._socket.recv_into(self._packet)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror}") from None
        if not count:
            raise ConnectionLost("the daemon is gone")
        try:
            return decode_reply(bytes(memoryview(self._packet)[:count]), ())
        except ProtocolError as error:
            raise self._broken(error.message) from None

    def _wait(self, deadline: float) -> None:
        """Returns when something has arrived, be it the end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(left, _SLICE_S))):
                return
            if self._closing.is_set():
                raise ConnectionLost("this client is being closed")
            if left <= 0:
                raise RemoteTimeout("no answer in time")

    def _broken(self, how: str) -> ConnectionLost:
        """There is no other connection of this kind to go on with."""
        self.distrust()
        self._given_up.clear()
        return ConnectionLost(f"the daemon broke the protocol: {how}")
