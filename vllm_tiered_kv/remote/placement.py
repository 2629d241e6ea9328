"""Places blocks on one of several daemons.

Placement uses rendezvous hashing: every address gets a score for each anchor key, and the highest
score wins. All engines with the same addresses agree without communication, and adding or removing
a daemon moves only its own share of the blocks.

Runs of consecutive blocks are on one daemon. The first block of a run is its anchor, whose key
chooses the daemon.

Runs are short because chains share their first blocks. The run in which chains separate has one
anchor for all of them, and so one daemon: with a system prompt that all conversations share, it
holds the rest of this run of every conversation. If runs were long, that daemon would hold almost
all blocks that are not shared, and the others almost none. A lookup asks each daemon once for all
its runs, so that short runs do not cost a query each.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.store import RemoteStore

_Key = TypeVar("_Key", bound=bytes)
_Server = TypeVar("_Server", bound=BlockServer, covariant=True)

RUN_BLOCKS = 64
"""Blocks of a run. Only clients with runs of the same length find each other's blocks."""

_MAX_CACHED_ORDERS = 1024  # of 256 addresses each: 2 MiB


def anchor_position(position: int) -> int:
    """Returns the position of the anchor that places the block at `position`."""
    if position < 0:
        raise ValueError(f"the position of a block in its chain is negative: {position}")
    return position - position % RUN_BLOCKS


def spans(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Splits the positions [start, stop) by anchor; yields (anchor, start, stop) of each run."""
    while start < stop:
        anchor = anchor_position(start)
        end = min(stop, anchor + RUN_BLOCKS)
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
        self._sorted = sorted(self.addresses)  # equal scores would rank by name
        hashes = [xxh3_64(address.encode()) for address in self._sorted]
        self._hashes = np.array(hashes, dtype=np.uint64)
        self._orders: dict[bytes, tuple[str, ...]] = {}

    def order(self, anchor: bytes) -> tuple[str, ...]:
        """Returns all addresses, best first. Any thread may call it."""
        # Cached because the scheduler asks for every block that it sends, and the blocks of a run
        # have one anchor.
        order = self._orders.get(anchor)
        if order is None:
            if len(self.addresses) == 1:
                return tuple(self.addresses)
            scores = _mixed(self._hashes ^ np.uint64(xxh3_64(anchor)))
            order = tuple(self._sorted[n] for n in np.argsort(~scores, kind="stable").tolist())
            if len(self._orders) >= _MAX_CACHED_ORDERS:
                self._orders.clear()
            self._orders[anchor] = order
        return order


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns 64-bit integers in which every bit depends on all bits of the value (the finalizer of
    MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


class ServerGroup(Generic[_Server]):
    """Servers of blocks as one tier; while one is down, only its share of the blocks is lost. Each
    scheduler, worker and `TokenCache` has one. Any thread may call it."""

    def __init__(
        self,
        identity: EngineIdentity,
        stores: Mapping[str, _Server],
        order: Callable[[bytes], Sequence[str]],
    ) -> None:
        """`order` returns the addresses for an anchor, best first."""
        self.identity = identity
        self.stores = stores
        self._order = order

    def server_for(self, anchor_key: bytes) -> _Server | None:
        """Returns the best server for this anchor that is not down; None if all are down."""
        for address in self._order(anchor_key):
            store = self.stores[address]
            if store.available:
                return store
        return None

    @property
    def available(self) -> bool:
        return any(store.available for store in self.stores.values())

    @property
    def is_up(self) -> bool:
        """Whether the last call to any of the servers succeeded."""
        return any(store.is_up for store in self.stores.values())

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


class Cluster(ServerGroup[RemoteStore]):
    """Several daemons as one tier."""

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
        stores = {
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
        super().__init__(identity, stores, self.placement.order)


def placed_runs(
    cluster: ServerGroup[_Server], keys: Sequence[bytes], first: int
) -> Iterator[tuple[int, int, _Server]]:
    """Yields (start, stop, server) of the runs of positions from `first` on that are on one server;
    ends at the first run without an available server."""
    run: tuple[int, int, _Server] | None = None
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
