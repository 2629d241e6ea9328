"""Which bytes of a block one worker holds, and under which keys daemons know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import StoreKey, store_key


def rank_tag(rank: int, tensor_parallel_size: int) -> RankTag:
    """vLLM numbers its ranks with the tensor-parallel one running fastest."""
    pipeline, tensor = divmod(rank, tensor_parallel_size)
    return RankTag(tp=tensor, pp=pipeline)


@dataclass(frozen=True)
class Shard:
    namespace: bytes
    rank: RankTag
    block_bytes: Mapping[int, int]  # per group

    def key(self, key: BlockKey) -> StoreKey:
        return store_key(self.namespace, key, self.rank)

    def keys(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        return [self.key(key) for key in keys]
