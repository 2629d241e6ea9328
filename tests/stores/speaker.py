"""A server that does not speak the protocol of a store."""

from __future__ import annotations

import socket
import threading


class Speaker:
    """A server that answers every connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        held = []
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            held.append(connection)
            connection.recv(1 << 16)
            connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.close()
