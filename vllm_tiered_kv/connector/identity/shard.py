"""Which bytes of a block one worker holds, and under which keys daemons know them.

Ranks may hold the same bytes: with MLA, every tensor-parallel rank computes and keeps the whole
latent KV. To daemons such ranks are one. Each job of blocks is sent by one of them, another one
from job to job, and all of them load what was sent. On one host they share the CPU tier, too
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
    """What a rank holds: a shard, as the `replica`-th of all that hold it."""

    tag: RankTag
    replica: int = 0
    replicas: int = 1

    @property
    def tensor_rank(self) -> int:
        return self.tag.tp * self.replicas + self.replica

    def sends(self, first: BlockKey) -> bool:
        """Whether it is this replica that sends the blocks from `first` on to a daemon. Keys are
        hashes: the replicas share the work evenly, and need not talk about it."""
        return first[0] % self.replicas == self.replica


def holding_of(rank: int, tensor_parallel_size: int, replicas: int = 1) -> Holding:
    """vLLM numbers its ranks with the tensor-parallel one running fastest; `replicas` neighbours
    among those hold the same."""
    pipeline, tensor = divmod(rank, tensor_parallel_size)
    shard, replica = divmod(tensor, replicas)
    return Holding(RankTag(tp=shard, pp=pipeline), replica, replicas)


def distinct_tags(parallel: ParallelConfig, replicas: int) -> list[RankTag]:
    """All shards of a block, each once, in the order of their ranks."""
    holdings = (
        holding_of(rank, parallel.tensor_parallel_size, replicas)
        for rank in range(parallel.world_size)
    )
    return list(dict.fromkeys(holding.tag for holding in holdings))


def replicas_of(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> int:
    """How many neighbouring tensor-parallel ranks hold the same KV, as vLLM has found out.

    All ranks and the scheduler must come to the same number. In a pipeline each stage looks at its
    own layers, and the scheduler at those of the first: there, each rank counts as different.
    """
    return int(kv_cache_config.kv_tp_replicas) if parallel.pipeline_parallel_size == 1 else 1


@dataclass(frozen=True)
class Shard:
    namespace: bytes
    rank: RankTag
    block_bytes: Mapping[int, int]  # per group

    def key(self, key: BlockKey) -> StoreKey:
        return store_key(self.namespace, key, self.rank)

    def keys(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        return [self.key(key) for key in keys]
