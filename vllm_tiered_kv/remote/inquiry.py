"""Asks a daemon about itself, as a client that holds and wants no blocks: for people and tools."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any, TypeVar

from vllm_tiered_kv.errors import RemoteError, RemoteRefusal, TieredKVError
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.wire.limits import PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import (
    DELETE_NAMESPACE_CAPABILITY,
    DeleteNamespace,
    DeleteNamespaceReply,
    Flush,
    FlushReply,
    Hello,
    Info,
    InfoReply,
    Reply,
    Request,
    Stats,
    StatsReply,
)

_R = TypeVar("_R", bound=Reply)


class NoAnswerError(TieredKVError, RuntimeError):
    """The daemon did not answer, or refused to; the text says what to look at."""


class Inquiry:
    """A connection to one daemon. Every call has a deadline and raises `NoAnswerError` if there is
    no answer; the next call connects anew."""

    def __init__(
        self, address: ServerAddress, timeout_s: float, curve: CurveKeys | None = None
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        # A client that names no block lengths does not register a namespace.
        hello = Hello(PROTOCOL_VERSION, "status", secrets.token_bytes(32), 1, [], "", b"")
        self._closing = threading.Event()
        settings = Settings(address, timeout_s, curve)
        self._connection = Connection(settings, hello, closing=self._closing)

    def __enter__(self) -> Inquiry:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def info(self) -> dict[str, Any]:
        """Facts about the daemon: version, tiers, capacities, namespaces."""
        return self._call(Info(), InfoReply).facts

    def stats(self) -> dict[str, Any]:
        """Its metrics by name, and by label where one has labels."""
        return self._call(Stats(), StatsReply).facts

    def flush(self) -> None:
        """Returns when everything that the daemon acknowledged is as durable as it can be."""
        self._call(Flush(), FlushReply)

    def delete_namespace(self, namespace: bytes) -> int:
        """Deletes what the daemon's memory and SSD hold of a namespace, named by the first bytes of
        its keys; returns the number of blocks."""
        self.stats()  # opens the session, which tells what the daemon can do
        greeting = self._connection.greeting
        if greeting is None or DELETE_NAMESPACE_CAPABILITY not in greeting.capabilities:
            raise NoAnswerError(f"{self.address} cannot delete a namespace: update the daemon")
        return self._call(DeleteNamespace(namespace), DeleteNamespaceReply).count

    def interrupt(self) -> None:
        """Ends a call that another thread waits for."""
        self._closing.set()

    def close(self) -> None:
        self._connection.close()

    def _call(self, request: Request, expected: type[_R]) -> _R:
        absent = self.address.why_absent()
        if absent is not None:
            raise NoAnswerError(f"{self.address}: {absent}")
        try:
            return self._connection.call(
                request, expected, deadline=time.monotonic() + self._timeout_s
            )
        except RemoteRefusal as error:
            raise NoAnswerError(f"{self.address} refuses: {error.message}") from error
        except RemoteError as error:
            raise NoAnswerError(
                f"no answer from {self.address}: {error}; is it running, and do the keys match?"
            ) from error
