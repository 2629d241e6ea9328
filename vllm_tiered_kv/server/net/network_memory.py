"""What messages of clients take up beside the memory tier, in total and by client.

Counted are messages that zmq has begun to receive, payloads not yet copied, requests that wait for
their answer, and replies that clients do not take, without the blocks of the memory tier they refer
to. Together they have one limit. Whoever takes up the most gives way: it is refused, or
`Connections` cuts it off, so that clients that take up little are served.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.net.sessions import Peer
from vllm_tiered_kv.wire.messages import Request

_PER_HEADER_BYTE = 5  # of objects made of it: a number of 8 bytes is one of 40
_PER_KEY = 128


def request_cost(header_bytes: int, request: Request) -> int:
    """What a request takes up while it is under way: its keys are objects then."""
    return _PER_HEADER_BYTE * header_bytes + _PER_KEY * len(getattr(request, "keys", ()))


class NetworkMemory:
    """Used on the reactor's thread only; the total is read by others."""

    def __init__(self, most: int, most_requests: int) -> None:
        """`most_requests` is what requests of one client may take up together."""
        self.most = most
        self._most_requests = most_requests
        self._held: dict[Peer, int] = {}
        self._requests: dict[Peer, int] = {}  # a part of that
        self._leaving: set[Peer] = set()  # cut off; what they hold is on its way back
        self._total = 0
        self.unfinished = 0  # bytes of messages inside zmq, as of the last look
        self.on_excess: Callable[[], None] = lambda: None
        """Told when there is too much: somebody is to be cut off, soon."""

    @property
    def total(self) -> int:
        return self._total + self.unfinished

    def held_by(self, peer: Peer) -> int:
        """What would come back if it were cut off."""
        return 0 if peer in self._leaving else self._held.get(peer, 0)

    def hold(self, peer: Peer, nbytes: int) -> None:
        self._held[peer] = self._held.get(peer, 0) + nbytes
        if peer not in self._leaving:
            self._total += nbytes
            if self.total > self.most:
                self.on_excess()

    def release(self, peer: Peer, nbytes: int) -> None:
        left = self._held[peer] - nbytes
        if peer not in self._leaving:
            self._total -= nbytes
        if left:
            self._held[peer] = left
        else:
            del self._held[peer]
            self._leaving.discard(peer)

    def leave(self, peer: Peer) -> None:
        """Its connection is cut off."""
        if peer in self._held and peer not in self._leaving:
            self._leaving.add(peer)
            self._total -= self._held[peer]

    def come_back(self, peer: Peer) -> None:
        """It has connected again, under the same name."""
        if peer in self._leaving:
            self._leaving.discard(peer)
            self._total += self._held[peer]

    def take(self, peer: Peer, nbytes: int) -> None:
        """For a request, until `give_back`. ProtocolError where there is no room, and nobody that
        takes up more."""
        mine = self._requests.get(peer, 0)
        if mine and mine + nbytes > self._most_requests:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"requests that take up {mine} bytes of this session are under way already",
            )
        if self.total + nbytes > self.most:
            largest = max((self.held_by(one) for one in self._held), default=0)
            mine = self._held.get(peer, 0)
            if nbytes > largest or (mine and mine + nbytes >= largest):
                raise ProtocolError(
                    ErrorCode.UNAVAILABLE,
                    f"requests and replies under way take up {self.total} of {self.most} bytes",
                )
        self._requests[peer] = self._requests.get(peer, 0) + nbytes
        self.hold(peer, nbytes)

    def give_back(self, peer: Peer, nbytes: int) -> None:
        left = self._requests[peer] - nbytes
        if left:
            self._requests[peer] = left
        else:
            del self._requests[peer]
        self.release(peer, nbytes)
