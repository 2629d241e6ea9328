"""The shard of a block that one worker holds, and the key of that shard in daemons.

Ranks may hold the same bytes, as replicas: with MLA, every tensor-parallel rank computes and keeps
the whole latent KV. Daemons see such ranks as one. For each put job one of the replicas sends the
blocks, and all of them load from these. On one host they also share the CPU tier
(`device/replica_arena.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import StoreKey, store_key

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Holding:
    """The shard that a rank holds, and which of its replicas the rank is."""

    tag: RankTag
    replica: int = 0
    replicas: int = 1

    @property
    def tensor_rank(self) -> int:
        return self.tag.tp * self.replicas + self.replica

    def sends(self, first: BlockKey) -> bool:
        """Whether this replica sends the put job with this first block. Keys are hashes, so that
        the replicas share the work evenly without communication."""
        return first[0] % self.replicas == self.replica


def holding_of(rank: int, tensor_parallel_size: int, replicas: int = 1) -> Holding:
    """Returns what a rank holds. In vLLM's numbering the tensor-parallel rank varies fastest, and
    `replicas` consecutive ones hold the same bytes."""
    pipeline, tensor = divmod(rank, tensor_parallel_size)
    shard, replica = divmod(tensor, replicas)
    return Holding(RankTag(tp=shard, pp=pipeline), replica, replicas)


def distinct_tags(parallel: ParallelConfig, replicas: int) -> list[RankTag]:
    """Returns the tags of all shards of a block, each once, in rank order."""
    holdings = (
        holding_of(rank, parallel.tensor_parallel_size, replicas)
        for rank in range(parallel.world_size)
    )
    return list(dict.fromkeys(holding.tag for holding in holdings))


def replicas_of(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> int:
    """Returns how many consecutive tensor-parallel ranks hold the same KV, from vLLM's config.

    All ranks and the scheduler must get the same number. With pipeline parallelism each stage sees
    only its own layers, and the scheduler those of the first stage; so no ranks count as replicas.
    """
    return int(kv_cache_config.kv_tp_replicas) if parallel.pipeline_parallel_size == 1 else 1


@dataclass(frozen=True)
class Shard:
    """Makes the daemon's keys of one rank's shard of each block."""

    namespace: bytes
    rank: RankTag
    block_bytes: Mapping[int, int]  # per group

    def key(self, key: BlockKey) -> StoreKey:
        return store_key(self.namespace, key, self.rank)

    def keys(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        return [self.key(key) for key in keys]
