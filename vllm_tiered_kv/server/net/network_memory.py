"""Accounts for the memory that messages use outside of the memory tier, per client and in total.

It counts messages that zmq is receiving, payloads not yet copied, requests waiting for an answer,
and replies that clients have not read, without the blocks these reference in the memory tier. One
limit covers all of them. When it is exceeded, the clients that use the most are refused or
disconnected by `Connections`, so that clients that use little are still served.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.net.sessions import Peer
from vllm_tiered_kv.wire.messages import Request

_PER_HEADER_BYTE = 5  # decoded objects are larger: an 8-byte number becomes an object of 40 bytes
_PER_KEY = 128


def request_cost(header_bytes: int, request: Request) -> int:
    """Estimated memory of a request while it is in flight; most of it are the key objects."""
    return _PER_HEADER_BYTE * header_bytes + _PER_KEY * len(getattr(request, "keys", ()))


class NetworkMemory:
    """The account of network memory. Gateway, outbox and handlers book on it, on the reactor's
    thread only; other threads may read the total."""

    def __init__(
        self,
        limit: int,
        max_request_bytes: int,
        on_excess: Callable[[], None] = lambda: None,
    ) -> None:
        """Both in bytes. `max_request_bytes` limits the requests of one client in flight.
        `on_excess` is called when `limit` is exceeded: a client has to be disconnected soon."""
        self.limit = limit
        self._max_request_bytes = max_request_bytes
        self._held: dict[Peer, int] = {}
        self._requests: dict[Peer, int] = {}  # included in `_held`
        self._disconnected: set[Peer] = set()  # not counted: their memory is about to be freed
        # Counted until their requests end, which may take as long as a slower tier does.
        self._departed: set[Peer] = set()
        self._total = 0
        self.unfinished = 0  # bytes of unfinished messages inside zmq, as of the last check
        self.buffers = 0  # of payloads and replies, also those of disconnected clients
        self._on_excess = on_excess

    @property
    def total(self) -> int:
        return self._total + self.unfinished

    def held_by(self, peer: Peer) -> int:
        """How much memory disconnecting this client would free."""
        return 0 if peer in self._disconnected else self._held.get(peer, 0)

    def has_room(self, nbytes: int) -> bool:
        return self._total + self.unfinished + nbytes <= self.limit

    def hold(self, peer: Peer, nbytes: int) -> None:
        """Books a buffer until `release`."""
        self.buffers += nbytes
        self._hold(peer, nbytes)

    def release(self, peer: Peer, nbytes: int) -> None:
        self.buffers -= nbytes
        self._release(peer, nbytes)

    def _hold(self, peer: Peer, nbytes: int) -> None:
        self._held[peer] = self._held.get(peer, 0) + nbytes
        if peer not in self._disconnected:
            self._total += nbytes
            if self._total + self.unfinished > self.limit:
                self._on_excess()

    def _release(self, peer: Peer, nbytes: int) -> None:
        left = self._held[peer] - nbytes
        if peer not in self._disconnected:
            self._total -= nbytes
        if left:
            self._held[peer] = left
        else:
            del self._held[peer]
            self._disconnected.discard(peer)
            self._departed.discard(peer)

    def mark_departed(self, peer: Peer) -> None:
        """The client has closed its connection by itself."""
        if peer in self._held:
            self._departed.add(peer)

    def mark_disconnected(self, peer: Peer) -> None:
        """The client's connection has been closed."""
        if peer in self._held and peer not in self._disconnected:
            self._disconnected.add(peer)
            self._total -= self._held[peer]

    def mark_reconnected(self, peer: Peer) -> None:
        """The client has connected again with the same identity."""
        self._departed.discard(peer)
        if peer in self._disconnected:
            self._disconnected.discard(peer)
            self._total += self._held[peer]

    def admit_request(self, peer: Peer, nbytes: int) -> None:
        """Books a request until `end_request`. ProtocolError if there is no room for it and no
        client that uses more."""
        mine = self._requests.get(peer, 0)
        if mine and mine + nbytes > self._max_request_bytes:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"requests in flight of this session use {mine} bytes already; wait for replies",
            )
        if self._total + self.unfinished + nbytes > self.limit:
            # Clients that have left cannot be disconnected, so they make no room for this one.
            connected = self._held.keys() - self._departed
            largest = max(map(self.held_by, connected), default=0)
            held = self._held.get(peer, 0)
            if nbytes > largest or (held and held + nbytes >= largest):
                raise ProtocolError(
                    ErrorCode.UNAVAILABLE,
                    f"requests and replies in flight use {self.total} of {self.limit} bytes; "
                    "try again later",
                )
        self._requests[peer] = mine + nbytes
        self._hold(peer, nbytes)

    def end_request(self, peer: Peer, nbytes: int) -> None:
        left = self._requests[peer] - nbytes
        if left:
            self._requests[peer] = left
        else:
            del self._requests[peer]
        self._release(peer, nbytes)
