"""The part of Redis's protocol (RESP 2) that moves blocks without copying them.

redis-py connects, encrypts and authenticates; then this module uses the socket. redis-py itself
collects a reply in buffers of its own, which takes time (ADR 0022).
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Union

_BUFFER_BYTES = 64 << 10
_MAX_SMALL = 16 << 10  # smaller pieces are joined before they are sent
_MAX_DEPTH = 8
_MAX_VALUE = 1 << 20  # of values that are not blocks

Reply = Union[int, bytes, None, "ReplyError", list["Reply"]]
Piece = bytes | memoryview


class ReplyError(str):
    """An error that the server replied, like "OOM command not allowed …"."""

    __slots__ = ()

    @property
    def code(self) -> str:
        return self.partition(" ")[0]


def encode(*arguments: bytes) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def encode_set(key: bytes, value: Iterable[Piece], *options: bytes) -> list[Piece]:
    """`SET key value options`, where the pieces of the value are not copied."""
    pieces = list(value)
    nbytes = sum(len(piece) for piece in pieces)
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, nbytes)
    tail = b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
    return [head, *pieces, b"\r\n" + tail]


class RespConnection:
    """An open connection to one server, used by one thread at a time. After an error it must be
    closed. Errors of the network are OSErrors; so are replies that are not RESP."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """`timeout_s` limits how long the connection may stand still."""
        self._socket = sock
        self._timeout_s = timeout_s
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what is received and not yet used
        self.deadline = 0.0  # monotonic; of the current call

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    @property
    def has_received(self) -> bool:
        """Whether there are bytes that the descriptor no longer shows."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        return self._start < self._end

    def is_idle(self) -> bool:
        """False if the server has closed the connection or sent something unasked."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not self.has_received and not poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    # ---- sending --------------------------------------------------------------------------------

    def send(self, pieces: Iterable[Piece]) -> None:
        small: list[Piece] = []
        for piece in pieces:
            if len(piece) <= _MAX_SMALL:
                small.append(piece)
                continue
            self._send(b"".join(small))
            small.clear()
            self._send(piece)
        self._send(b"".join(small))

    def _send(self, piece: Piece) -> None:
        view = memoryview(piece)
        while view:
            self._socket.settimeout(self._wait_s())
            view = view[self._socket.send(view) :]

    def _wait_s(self) -> float:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        return min(left_s, self._timeout_s)

    # ---- receiving ------------------------------------------------------------------------------

    def reply(self, depth: int = 0) -> Reply:
        """The next reply of any type."""
        line = self._line()
        kind, text = line[:1], line[1:]
        if kind == b"*" and depth < _MAX_DEPTH:
            return [self.reply(depth + 1) for _ in range(_integer(text))]
        if kind == b"$":
            nbytes = _integer(text)
            if nbytes > _MAX_VALUE:
                raise ConnectionError(f"the server replied a value of {nbytes} bytes")
            return None if nbytes < 0 else self.value(nbytes)
        return _simple(kind, text)

    def bulk_length(self) -> int | ReplyError | None:
        """The length of the value that comes next, which `value`, `value_into` or `skip_value`
        must take; None if there is no value."""
        line = self._line()
        if line[:1] == b"$":
            nbytes = _integer(line[1:])
            return None if nbytes < 0 else nbytes
        reply = _simple(line[:1], line[1:])
        if isinstance(reply, ReplyError):
            return reply
        raise ConnectionError(f"the server replied {line[:20]!r} where a value was expected")

    def value(self, nbytes: int) -> bytes:
        if self._end - self._start >= nbytes + 2:  # all of it has arrived
            here = bytes(self._view[self._start : self._start + nbytes])
            self._start += nbytes
            self.end_value()
            return here
        content = bytearray(nbytes)
        self.read_into(memoryview(content))
        self.end_value()
        return bytes(content)

    def skip_value(self, nbytes: int) -> None:
        """Takes the rest of a value and drops it."""
        while nbytes:
            if self._start == self._end:
                self._fill()
            step = min(nbytes, self._end - self._start)
            self._start += step
            nbytes -= step
        self.end_value()

    def read_into(self, into: memoryview) -> None:
        """Takes the next bytes of a value, straight into `into` as far as they have not arrived."""
        here = min(len(into), self._end - self._start)
        into[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(into):
            here += self._receive(into[here:])

    def end_value(self) -> None:
        while self._end - self._start < 2:
            self._fill()
        if self._buffer[self._start : self._start + 2] != b"\r\n":
            raise ConnectionError("a value of the server does not end where it should")
        self._start += 2

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == len(self._buffer):
                raise ConnectionError("a line of the server is too long")
            self._fill()
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    def _fill(self) -> None:
        """Receives more, at least a byte."""
        if self._start:
            left = self._buffer[self._start : self._end]
            self._buffer[: len(left)] = left
            self._start, self._end = 0, len(left)
        self._end += self._receive(self._view[self._end :])

    def _receive(self, into: memoryview) -> int:
        self._socket.settimeout(self._wait_s())
        received = self._socket.recv_into(into)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        return received


def _integer(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"the server replied {text[:20]!r} where a number belongs") from None


def _simple(kind: bytes, text: bytes) -> int | bytes | ReplyError:
    if kind == b"+":
        return text
    if kind == b"-":
        return ReplyError(text.decode(errors="replace"))
    if kind == b":":
        return _integer(text)
    raise ConnectionError(f"the server replied {(kind + text)[:20]!r}, which is not RESP 2")
