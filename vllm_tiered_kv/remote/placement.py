"""Places blocks on one of several daemons.

Placement uses rendezvous hashing: every address gets a score for each anchor key, and the highest
score wins. All engines with the same addresses agree without communication, and adding or removing
a daemon moves only its own share of the blocks.

Consecutive blocks of a chain go to the same daemon, so that one query covers many of them. But many
chains share their first blocks: if the first block alone chose the daemon, a common system prompt
would put all conversations on one. So the daemon is chosen again at a few later positions, the
anchors; a lookup rarely needs more than two or three queries.
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
"""Positions in a chain at which the key chooses the daemon for the blocks from there on."""


@functools.lru_cache(maxsize=1 << 16)  # called for each block whose store is deferred
def anchor_position(position: int) -> int:
    """Returns the position of the anchor that places the block at `position`."""
    if position < 0:
        raise ValueError(f"the position of a block in its chain is negative: {position}")
    return ANCHORS[bisect.bisect_right(ANCHORS, position) - 1]


def spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Splits the positions [start, stop) by anchor; yields (anchor, start, stop) of each run."""
    while start < stop:
        anchor = anchor_position(start)
        after = bisect.bisect_right(ANCHORS, start)
        end = min(stop, ANCHORS[after]) if after < len(ANCHORS) else stop
        yield anchor, start, end
        start = end


def anchors_of(keys: Sequence[_Key], positions: Sequence[int]) -> list[tuple[_Key, int]]:
    """Returns the anchor keys of the blocks at these ascending positions, with the number of blocks
    of each."""
    found = []
    for anchor, start, stop in spans(positions[0], positions[-1] + 1) if positions else ():
        count = bisect.bisect_left(positions, stop) - bisect.bisect_left(positions, start)
        if count:
            found.append((keys[anchor], count))
    return found


class Placement:
    """Ranks addresses for an anchor key: a pure function of the addresses and the key."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = [str(ServerAddress.parse(address)) for address in addresses]
        if not self.addresses:
            raise ConfigError("remote", "expected at least one address")
        if len(set(self.addresses)) != len(self.addresses):
            raise ConfigError("remote", "the same address is listed twice")
        self._encoded = {address: address.encode() + b"\0" for address in self.addresses}

    def order(self, anchor: bytes) -> list[str]:
        """Returns all addresses, best first."""
        if len(self.addresses) == 1:
            return list(self.addresses)

        def score(address: str) -> tuple[int, str]:
            return xxh3_64(self._encoded[address] + anchor), address

        return sorted(self.addresses, key=score, reverse=True)


class Cluster:
    """Several daemons as one tier; while one is down, only its share of the blocks is lost. Each
    scheduler, worker and `TokenCache` has one. Any thread may call it."""

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
        self.identity = identity
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
        """Returns the best daemon for this anchor that is not down; None if all are down."""
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
        """Whether the last call to any of the daemons succeeded."""
        return any(store.is_up for store in self.stores.values())

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


def placed_runs(
    cluster: Cluster, keys: Sequence[bytes], first: int
) -> Iterator[tuple[int, int, RemoteStore]]:
    """Yields (start, stop, daemon) of the runs of positions from `first` on that are on one daemon;
    ends at the first run without an available daemon."""
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
