"""A server that does not speak the protocol of a store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.stores.contract import assert_lacks, item, store_key
from tests.stores.traffic import LATE_S
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.errors import ConfigError


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


def assert_refused_or_missing(answer: bytes, open_at: Callable[[str], Any]) -> None:
    """The store at the address of a server with this answer cannot be opened, or has no blocks."""
    speaker = Speaker(answer)
    begin = time.monotonic()
    try:
        store = open_at(speaker.address)
    except ConfigError:
        pass
    else:
        assert_lacks(store, store_key("a"))
        assert store.put([item(store_key("a"))]) == [PutResult.FAILED]
        store.close()
    assert time.monotonic() - begin < LATE_S
    speaker.close()
