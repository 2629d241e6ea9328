"""Receives messages from a ROUTER socket, frame by frame.

zmq delivers a message only when all of it has arrived, and does not limit its number of frames. A
turn of the loop therefore receives a bounded number of frames. A message with more frames than the
protocol allows is dropped, over as many turns as that takes; until then zmq delivers no other
message of this socket.

The loop serves its sockets in turn, and zmq serves the clients of a socket in turn. So that clients
of a busy socket get as much as the only client of another one, a turn is longer the more clients
the socket had in the turn before. Turns are short: a client whose next requests come a little too
late for a turn misses no more than two.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import zmq

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.native.zmq_receive import routing_id_receiver
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.limits import MAX_FRAMES

_NOBLOCK = int(zmq.NOBLOCK)
_SRCFD = int(zmq.SRCFD)
# Limits of one socket per turn of the loop.
_MESSAGES_PER_CLIENT = 2
_MESSAGES_PER_TURN = 64
_FRAMES_PER_TURN = 2048
_HEADER_BYTES_PER_TURN = 1 << 20  # bounds the time spent on decoding


@dataclass(slots=True)
class Message:
    """A complete message; `frames` is empty if it was dropped, and `fault` says why."""

    identity: bytes
    descriptor: int | None = None  # of its connection
    frames: list[zmq.Frame] = field(default_factory=list)  # the header first
    count: int = 0  # frames, without the identity
    nbytes: int = 0
    fault: ProtocolError | None = None


class Receiver:
    """Reads one listener for the gateway, on the reactor's thread: `begin_turn`, then `next` until
    it returns None."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._receive_identity = routing_id_receiver(socket.underlying)
        self._current: Message | None = None  # being received
        self._dropped_id: int | None = None  # request id of the message being dropped
        self._senders: set[bytes] = set()  # identities in this turn
        self._messages_left = 0
        self._frames_left = 0
        self._header_bytes_left = 0

    def begin_turn(self) -> None:
        share = _MESSAGES_PER_CLIENT * max(1, len(self._senders))
        self._messages_left = min(share, _MESSAGES_PER_TURN)
        self._senders.clear()
        self._frames_left = _FRAMES_PER_TURN
        self._header_bytes_left = _HEADER_BYTES_PER_TURN

    def next(self) -> Message | None:
        """The next message; None if there is none, or this turn's share is used up."""
        receive = self._socket.recv
        message = self._current
        while self._messages_left > 0 and self._frames_left > 0 and self._header_bytes_left > 0:
            if message is None:
                identity = self._receive_identity()
                if identity is None:
                    return None
                message = self._current = Message(identity)
            try:  # a frame with the header always follows the identity
                frame = receive(_NOBLOCK, copy=False)
            except zmq.Again:
                return None
            self._frames_left -= 1
            message.count += 1
            message.nbytes += len(frame)
            if 1 < message.count <= 1 + MAX_FRAMES:
                message.frames.append(frame)
            else:
                self._add_other(message, frame)
            if not frame.more:
                return self._finish(message)
        return None

    def _add_other(self, message: Message, frame: zmq.Frame) -> None:
        """Handles the header, or a frame beyond the limit."""
        if message.count == 1:
            message.frames.append(frame)
            with contextlib.suppress(zmq.ZMQError):  # inproc connections have no descriptor
                message.descriptor = int(frame.get(_SRCFD))
        elif message.frames:
            self._dropped_id = peek_request_id(message.frames[0].buffer)
            message.frames.clear()

    def _finish(self, message: Message) -> Message:
        self._current = None
        self._messages_left -= 1
        self._senders.add(message.identity)
        if message.frames:
            self._header_bytes_left -= len(message.frames[0])
        elif message.count:
            message.fault = ProtocolError(
                ErrorCode.TOO_LARGE,
                f"{message.count - 1} payload frames; at most {MAX_FRAMES} are allowed",
                self._dropped_id,
            )
        return message
