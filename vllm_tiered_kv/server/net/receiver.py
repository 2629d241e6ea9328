"""Messages as they come off a ROUTER socket, frame by frame.

zmq hands a message over only when all of it has arrived, and nothing bounds how many frames that
may be. So no more of them are taken at once than a turn of the loop should last, and of a message
with more frames than the protocol allows nothing is kept: it is dropped over as many turns as that
takes. Until then zmq gives out no other message of this socket.

Sockets take turns, and within a socket zmq lets its clients do so. For clients of a busy socket to
get as much as the only one of another, a turn is the longer the more clients were heard in the one
before.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import zmq

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.frames import peek_request_id
from vllm_tiered_kv.wire.limits import MAX_FRAMES

# Of one socket, before others get their turn.
_MESSAGES_OF_A_CLIENT = 4
_MESSAGES_A_TURN = 64
_FRAMES_A_TURN = 2048
_HEADER_BYTES_A_TURN = 1 << 20  # decoding takes time


@dataclass(slots=True)
class Message:
    """One that has arrived whole."""

    identity: bytes
    descriptor: int | None = None  # of the connection it came over
    frames: list[zmq.Frame] = field(default_factory=list)  # the header first
    count: int = 0  # of its frames
    nbytes: int = 0
    fault: ProtocolError | None = None  # why nothing of it was kept


class Receiver:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._current: Message | None = None  # what is being received
        self._dropped_id: int | None = None  # of the request that is being dropped
        self._heard: set[bytes] = set()  # in this turn, by identity
        self._messages_left = 0
        self._frames_left = 0
        self._header_bytes_left = 0

    def begin_turn(self) -> None:
        most = _MESSAGES_OF_A_CLIENT * max(1, len(self._heard))
        self._messages_left = min(most, _MESSAGES_A_TURN)
        self._heard.clear()
        self._frames_left = _FRAMES_A_TURN
        self._header_bytes_left = _HEADER_BYTES_A_TURN

    def next(self) -> Message | None:
        """The next message; None if there is none, or none in this turn."""
        receive = self._socket.recv
        message = self._current
        while self._messages_left > 0 and self._frames_left > 0 and self._header_bytes_left > 0:
            try:
                frame = receive(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            self._frames_left -= 1
            if message is None:
                message = self._current = Message(frame.bytes)
            else:
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
        """The header, or one frame too many."""
        if message.count == 1:
            message.frames.append(frame)
            with contextlib.suppress(zmq.ZMQError):  # not of one within this process
                message.descriptor = int(frame.get(zmq.SRCFD))
        elif message.frames:
            self._dropped_id = peek_request_id(message.frames[0].buffer)
            message.frames.clear()

    def _finish(self, message: Message) -> Message:
        self._current = None
        self._messages_left -= 1
        self._heard.add(message.identity)
        if message.frames:
            self._header_bytes_left -= len(message.frames[0])
        elif message.count:
            message.fault = ProtocolError(
                ErrorCode.TOO_LARGE,
                f"{message.count - 1} payload frames; at most {MAX_FRAMES} are allowed",
                self._dropped_id,
            )
        return message
