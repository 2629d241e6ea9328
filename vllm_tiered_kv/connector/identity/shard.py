"""The shards of a block that one worker holds, and their keys in daemons.

A worker holds one shard of each block: its KV heads of all layers. With `portable_shards`, engines
of several tensor-parallel sizes divide blocks into the same number of shards; the workers of the
smaller engines hold several adjacent ones (ADR 0023).

Ranks may hold the same bytes, as replicas: with MLA, every tensor-parallel rank computes and keeps
the whole latent KV. So does every rank of prefill context parallelism (PCP), which computes a part
of a prompt's tokens and gathers the KV of the others. Daemons see such ranks as one. For each put
job one of the replicas sends the blocks, and all of them load from these. On one host they also
share the CPU tier (`device/replica_arena.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.layout import shard_layout
from vllm_tiered_kv.core.store import StoreKey, store_key
from vllm_tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Holding:
    """The shards that a rank holds, and which of its replicas the rank is."""

    tag: RankTag  # of the first shard
    replica: int = 0
    replicas: int = 1
    shards: int = 1

    @property
    def tags(self) -> list[RankTag]:
        return [dataclasses.replace(self.tag, tp=self.tag.tp + n) for n in range(self.shards)]

    @property
    def stage_rank(self) -> int:
        """The rank's number within its pipeline stage."""
        return self.tag.tp // self.shards * self.replicas + self.replica

    def sends(self, first: BlockKey) -> bool:
        """Whether this replica sends the put job with this first block. Keys are hashes, so that
        the replicas share the work evenly without communication."""
        return first[0] % self.replicas == self.replica


def ranks_of_stage(parallel: ParallelConfig) -> int:
    """Returns how many ranks run the same layers."""
    return parallel.tensor_parallel_size * parallel.prefill_context_parallel_size


def holding_of(rank: int, stage_ranks: int, replicas: int = 1, shards: int = 1) -> Holding:
    """Returns what a rank holds. In vLLM's numbering the tensor-parallel rank varies fastest, then
    that of prefill context parallelism, then the pipeline stage, which has `stage_ranks` ranks; of
    these, `replicas` consecutive ones hold the same bytes. Each rank holds `shards` shards."""
    pipeline, number = divmod(rank, stage_ranks)
    part, replica = divmod(number, replicas)
    return Holding(RankTag(tp=part * shards, pp=pipeline), replica, replicas, shards)


def distinct_tags(parallel: ParallelConfig, replicas: int, shards: int = 1) -> list[RankTag]:
    """Returns the tags of all shards of a block, each once, in rank order."""
    holdings = (
        holding_of(rank, ranks_of_stage(parallel), replicas, shards)
        for rank in range(parallel.world_size)
    )
    return list(dict.fromkeys(tag for holding in holdings for tag in holding.tags))


def replicas_of(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> int:
    """Returns how many consecutive ranks hold the same KV, from vLLM's config.

    All ranks and the scheduler must get the same number. With pipeline parallelism each stage sees
    only its own layers, and the scheduler those of the first stage; so no ranks count as replicas.
    """
    if parallel.pipeline_parallel_size > 1:
        return 1
    replicas = int(kv_cache_config.kv_tp_replicas)
    divides_tokens = parallel.decode_context_parallel_size > 1
    if replicas < parallel.tensor_parallel_size or divides_tokens:
        return replicas
    return replicas * parallel.prefill_context_parallel_size


def shards_per_rank(
    portable_shards: int, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> int:
    """Returns how many shards of each block a rank holds with this value of the option; 1 if the
    option is off. Raises `ConfigError` if the blocks of this engine cannot be divided so that
    engines of other tensor-parallel sizes find the same shards."""
    if not portable_shards:
        return 1
    from vllm import envs
    from vllm.v1.kv_cache_interface import AttentionSpec, iter_layer_specs

    def refuse(problem: str) -> ConfigError:
        return ConfigError("portable_shards", f"{problem}; remove it for this engine")

    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if parallel.world_size != ranks or parallel.decode_context_parallel_size > 1:
        raise refuse("is not possible with pipeline or context parallelism")
    if envs.VLLM_BATCH_INVARIANT:
        raise refuse(
            "is not possible with VLLM_BATCH_INVARIANT, because ranks of another number round "
            "differently"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        raise refuse("is not possible with draft layers")
    specs: list[Any] = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    if not all(isinstance(spec, AttentionSpec) for spec in specs):
        raise refuse("is not possible for recurrent layers")
    if all(_is_replicated(spec) for spec in specs):
        return 1  # all ranks hold whole blocks, as with MLA
    total = vllm_config.model_config.get_total_num_kv_heads()
    if any(_is_replicated(spec) or spec.num_heads * ranks != total for spec in specs):
        raise refuse(
            f"needs {total} KV heads in every layer, each on one of the {ranks} tensor-parallel "
            "rank(s)"
        )
    if total % portable_shards:
        raise ConfigError(
            "portable_shards", f"must divide the {total} KV heads of this model evenly"
        )
    if portable_shards % ranks:
        raise ConfigError(
            "portable_shards",
            f"must be a multiple of the tensor-parallel size, which is {ranks}",
        )
    return portable_shards // ranks


def whole_model_spec(spec: Any, tensor_parallel_size: int) -> Any:
    """Returns a description of vLLM's KV cache that does not depend on the tensor-parallel size:
    with the heads of all ranks."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        whole = {name: whole_model_spec(one, tensor_parallel_size) for name, one in inner.items()}
        return dataclasses.replace(spec, kv_cache_specs=whole)
    if _is_replicated(spec):
        return spec
    return dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * tensor_parallel_size)


def _is_replicated(spec: Any) -> bool:
    return getattr(spec, "max_tp_shards", None) == 1


@dataclass(frozen=True)
class Shard:
    """Makes the daemon's keys of the shards of each block that one rank holds: `count` adjacent
    ones, and `rank` is the tag of the first. In a slot they follow each other."""

    namespace: bytes
    rank: RankTag
    block_bytes: Mapping[int, int]  # of all shards together, per group
    count: int = 1

    @cached_property
    def ranks(self) -> tuple[RankTag, ...]:
        return tuple(Holding(self.rank, shards=self.count).tags)

    def shard_bytes(self, group_id: int) -> int:
        return self.block_bytes[group_id] // self.count

    def layouts(self, group_id: int) -> list[int]:
        """Returns the number of each shard's layout at the copier."""
        if self.count == 1:
            return [group_id]
        return [shard_layout(group_id, number) for number in range(self.count)]

    def key(self, key: BlockKey, number: int = 0) -> StoreKey:
        return store_key(self.namespace, key, self.ranks[number])

    def keys(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        """Returns the keys of all shards, block by block."""
        return [store_key(self.namespace, key, rank) for key in keys for rank in self.ranks]
