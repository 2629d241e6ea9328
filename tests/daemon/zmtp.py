"""A ZMTP 3.0 client over a plain socket, for bytes that no zmq socket would send."""

from __future__ import annotations

import select
import socket
from types import TracebackType

from tests.daemon.raw_client import TIMEOUT_S
from vllm_tiered_kv.wire.codec import decode_reply

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\x06DEALER"


def frame(data: bytes, more: bool) -> bytes:
    """A short frame."""
    return bytes([more, len(data)]) + data


class ZmtpClient:
    """Connects to an endpoint without keys, with a ZMTP handshake unless told otherwise."""

    def __init__(self, endpoint: str, shake_hands: bool = True) -> None:
        if endpoint.startswith("ipc://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(TIMEOUT_S)
            self.socket.connect(endpoint.removeprefix("ipc://"))
        else:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        if shake_hands:
            self.send(_GREETING + bytes([4, len(_READY)]) + _READY)
            self._receive(len(_GREETING))
            self._receive(self._receive(2)[1])

    def __enter__(self) -> ZmtpClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def has_reply(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])

    def receive(self) -> tuple[int, object]:
        """A reply of one frame."""
        flags, size = self._receive(2)
        if flags & 2:
            size = int.from_bytes(bytes([size]) + self._receive(7), "big")
        return decode_reply(self._receive(size), [])

    def is_closed(self) -> bool:
        """Whether the daemon has closed the connection."""
        try:
            return self.has_reply() and not self.socket.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def _receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            some = self.socket.recv(count - len(received))
            if not some:
                raise ConnectionError("the daemon has closed the connection")
            received += some
        return received
