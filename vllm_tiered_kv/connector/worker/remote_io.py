"""A worker's access to the daemons: loads, puts, and shared memory of daemons on this host."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.direct_store import (
    DirectStore,
    is_direct,
    open_direct,
    require_known_schemes,
)
from vllm_tiered_kv.connector.identity.shard import Holding, Shard
from vllm_tiered_kv.connector.worker.remote_loader import RemoteLoader
from vllm_tiered_kv.connector.worker.shared_region import Resident, SharedRegions
from vllm_tiered_kv.connector.worker.slot_workers import FetchWorker, PutWorker
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import Int64Array, RemoteTransfer
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import Channel
from vllm_tiered_kv.device.pinning import Pin, Unpin
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.placement import Cluster, ServerGroup

_OTHER_CONNECTIONS = 4  # for puts and lookups, in addition to the connections of loads


def open_cluster(config: TieredKVConfig, identity: EngineIdentity) -> ServerGroup[BlockServer]:
    """The servers that `remote` names. Raises ConfigError."""
    require_known_schemes(config.remote)
    if any(map(is_direct, config.remote)):
        return open_direct(config, identity)
    keys = None
    if config.remote_key:
        keys = CurveKeys.load(config.remote_key, config.remote_server_key)
    return Cluster(
        config.remote,
        identity,
        timeout_s=config.remote_load_timeout,
        curve=keys,
        max_connections=config.remote_connections + _OTHER_CONNECTIONS,
    )


class RemoteIO:
    """Owns a worker's connections to all daemons. `WorkerHalf` opens it with the first step and
    calls it from the model's thread; `read` is called from the verifier's thread."""

    def __init__(
        self,
        config: TieredKVConfig,
        identity: EngineIdentity,
        holding: Holding,
        geometry: ArenaGeometry,
        arena: Arena,
        open_channel: Callable[[], Channel],
        pinning: Callable[[], tuple[Pin | None, Unpin | None]],
    ) -> None:
        lengths = {group: n * holding.shards for group, n in enumerate(identity.block_bytes)}
        shard = Shard(identity.namespace, holding.tag, lengths, holding.shards)
        self._shard = shard
        self._timeout_s = config.remote_load_timeout
        self._cluster = open_cluster(config, identity)
        stores = self._cluster.stores
        direct = [store for store in stores.values() if isinstance(store, DirectStore)]
        for store in direct:
            store.use_memory(arena.region)

        def open_landing(nbytes: int) -> Arena:
            # Pinned in one chunk before use: a GPU must not read memory that is not pinned.
            landing = Arena(nbytes, *pinning(), chunk_bytes=nbytes)
            for store in direct:
                store.use_memory(landing.region)
            return landing

        self.regions = SharedRegions(stores, *pinning())
        self.loader = RemoteLoader(
            stores,
            shard,
            self.regions,
            open_channel,
            open_landing,
            config.remote_landing,
            config.remote_connections,
            config.remote_load_timeout,
        )

        def offsets_of(group_id: int, slots: Int64Array) -> Int64Array:
            size_class = geometry.class_of_block(shard.block_bytes[group_id])
            return geometry.offsets(slots, size_class)

        self.writer = PutWorker(
            stores,
            shard,
            self.regions,
            arena,
            offsets_of,
            config.remote_load_timeout,
            holding.sends,
        )
        self.fetcher = FetchWorker(stores, shard, arena, offsets_of, config.remote_load_timeout, 1)

    def resident(self, transfer: RemoteTransfer) -> Resident | None:
        """Returns the leased blocks of a transfer if they can be copied now, without a request to
        the daemon."""
        return self.regions.resident(transfer, self._shard)

    def read(self, address: str, key: BlockKey, into: memoryview) -> bool:
        """Reads this rank's shards of a block like a load would; False if they are not there."""
        deadline = time.monotonic() + self._timeout_s
        region = self.regions.attached(address)
        nbytes = len(into) // self._shard.count
        parts = [into[n * nbytes : (n + 1) * nbytes] for n in range(self._shard.count)]
        keys = self._shard.keys([key])
        if region is not None:
            return all(
                region.read(one, part, deadline) for one, part in zip(keys, parts, strict=True)
            )
        return all(self._cluster.stores[address].get(keys, parts, deadline))

    def settle(self) -> None:
        """Ends all transfers; their results can still be polled. No new ones may follow."""
        self.loader.close()
        self.writer.close()
        self.fetcher.close()

    def close(self) -> None:
        self.settle()
        self.regions.close()
        self._cluster.close()
