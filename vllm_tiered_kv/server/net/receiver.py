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

from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.native.zmq_messages import make_zmq_receiver
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES

_NOBLOCK = int(zmq.NOBLOCK)
# Limits of one socket per turn of the loop.
_MESSAGES_PER_CLIENT = 2
_MESSAGES_PER_TURN = 64
_FRAMES_PER_TURN = 2048
_DROPPED_FRAMES_PER_TURN = 1 << 14  # about a millisecond
_HEADER_BYTES_PER_TURN = 1 << 20  # bounds the time spent on decoding


@dataclass(slots=True)
class Message:
    """A complete message. If it was dropped, `fault` says why, and the rest is not meaningful."""

    identity: bytes
    header: bytes
    nbytes: int  # of all frames, without the identity
    descriptor: int | None  # of its connection
    user: str  # public key of an authenticated client; empty for others
    has_more: bool  # frames to receive
    count: int = 1  # frames, without the identity
    payload: list[zmq.Frame] = field(default_factory=list)
    fault: ProtocolError | None = None

    def drop(self, what: str, limit: int) -> None:
        self.fault = ProtocolError(
            ErrorCode.TOO_LARGE,
            f"{what}; at most {limit} are allowed",
            peek_request_id(self.header),
        )


class Receiver:
    """Reads one listener for the gateway, on the reactor's thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        receiver = make_zmq_receiver(socket.underlying)
        self._receive_header, self._drop_frames = receiver.receive, receiver.drop
        self._current: Message | None = None  # being received
        self._senders = 0  # clients that sent messages in the last turn

    def turn(self) -> Iterator[Message]:
        """Yields the messages there are, at most this turn's share. Use it up."""
        receive_header = self._receive_header
        senders: set[bytes] = set()
        messages_left = min(_MESSAGES_PER_CLIENT * max(1, self._senders), _MESSAGES_PER_TURN)
        frames_left = _FRAMES_PER_TURN
        header_bytes_left = _HEADER_BYTES_PER_TURN
        while messages_left > 0 and frames_left > 0 and header_bytes_left > 0:
            message = self._current
            if message is None:
                received = receive_header(MAX_HEADER_BYTES)
                if received is None:
                    break
                message = Message(*received)
                frames_left -= 1
                header_bytes_left -= message.nbytes
                if message.nbytes > MAX_HEADER_BYTES:
                    message.drop(f"the header has {message.nbytes} bytes", MAX_HEADER_BYTES)
            if message.has_more:
                frames_left -= self._receive_payload(message, frames_left)
            if message.has_more:
                self._current = message
                break
            self._current = None
            messages_left -= 1
            senders.add(message.identity)
            yield message
        self._senders = len(senders)

    def _receive_payload(self, message: Message, max_frames: int) -> int:
        """Receives the other frames of a message, at most `max_frames`, and returns how many."""
        before = message.count
        end = min(before + max_frames, 2 + MAX_FRAMES)
        while message.has_more and message.count < end:
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                break
            message.count += 1
            message.nbytes += len(frame)
            message.has_more = frame.more
            message.payload.append(frame)
        if message.count > 1 + MAX_FRAMES:
            if message.has_more:
                dropped, nbytes, message.has_more = self._drop_frames(_DROPPED_FRAMES_PER_TURN)
                message.count += dropped
                message.nbytes += nbytes
            message.payload.clear()
            message.drop(f"{message.count - 1} payload frames", MAX_FRAMES)
        return message.count - before
