"""Which of several daemons holds a block.

Rendezvous hashing: every address gets a score for every anchor, the highest wins. All engines with
the same addresses agree without talking to each other, and a daemon that is added or removed moves
only its own share.

Blocks of a chain lie together, so that one query answers for many of them. But chains share heads:
if the first block alone decided, a system prompt would put everybody's blocks on one daemon. The
anchors in between let conversations part again, at positions few enough that a lookup rarely needs
more than two or three queries.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.store import RemoteStore

_Key = TypeVar("_Key", bound=bytes)

ANCHORS = (0, 64, 512, 4096)
"""Positions in a chain at which the daemon is chosen anew, by the key there."""


@functools.lru_cache(maxsize=1 << 16)  # asked for each block whose store is put off
def anchor_position(position: int) -> int:
    """The position whose key decides where the block at `position` lies."""
    if position < 0:
        raise ValueError(f"a chain has no position {position}")
    return ANCHORS[bisect.bisect_right(ANCHORS, position) - 1]


def spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(anchor, start, stop) of the runs of positions in [start, stop) that lie together."""
    while start < stop:
        anchor = anchor_position(start)
        after = bisect.bisect_right(ANCHORS, start)
        end = min(stop, ANCHORS[after]) if after < len(ANCHORS) else stop
        yield anchor, start, end
        start = end


def anchors_of(keys: Sequence[_Key], positions: Sequence[int]) -> list[tuple[_Key, int]]:
    """The anchors' keys of blocks at these positions, which rise, and how many belong to each."""
    found = []
    for anchor, start, stop in spans(positions[0], positions[-1] + 1) if positions else ():
        count = bisect.bisect_left(positions, stop) - bisect.bisect_left(positions, start)
        if count:
            found.append((keys[anchor], count))
    return found


class Placement:
    """The order of preference among addresses, a pure function of them and the anchor's key."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = [str(ServerAddress.parse(address)) for address in addresses]
        if not self.addresses:
            raise ConfigError("remote", "expected at least one address")
        if len(set(self.addresses)) != len(self.addresses):
            raise ConfigError("remote", "an address is there twice")
        self._encoded = {address: address.encode() + b"\0" for address in self.addresses}

    def order(self, anchor: bytes) -> list[str]:
        """All addresses, best first."""
        if len(self.addresses) == 1:
            return list(self.addresses)

        def score(address: str) -> tuple[int, str]:
            return xxh3_64(self._encoded[address] + anchor), address

        return sorted(self.addresses, key=score, reverse=True)


class Cluster:
    """Several daemons as one tier. A dead one costs only its share, until it is back."""

    def __init__(
        self,
        addresses: Sequence[str],
        identity: EngineIdentity,
        *,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 0.5,
        curve: CurveKeys | None = None,
        max_connections: int = 8,
    ) -> None:
        self.placement = Placement(addresses)
        self.stores = {
            address: RemoteStore(
                address,
                identity,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
                curve=curve,
                max_connections=max_connections,
            )
            for address in self.placement.addresses
        }

    def server_for(self, anchor_key: bytes) -> RemoteStore | None:
        """The daemon for the blocks of this anchor: the best one that is not known to be down."""
        for address in self.placement.order(anchor_key):
            store = self.stores[address]
            if store.available:
                return store
        return None

    @property
    def available(self) -> bool:
        return any(store.available for store in self.stores.values())

    @property
    def is_up(self) -> bool:
        """Whether any of them answered when it was last asked."""
        return any(store.is_up for store in self.stores.values())

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def placed_runs(
    cluster: Cluster, keys: Sequence[bytes], first: int
) -> Iterator[tuple[int, int, RemoteStore]]:
    """Runs of positions from `first` on that lie on one daemon; ends where none is available."""
    run: tuple[int, int, RemoteStore] | None = None
    for anchor, start, stop in spans(first, len(keys)):
        server = cluster.server_for(keys[anchor])
        if run is not None and run[2] is server:
            run = (run[0], stop, server)
            continue
        if run is not None:
            yield run
        if server is None:
            return
        run = (start, stop, server)
    if run is not None:
        yield run
