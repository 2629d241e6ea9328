"""Derives byte runs and block sizes from vLLM's KV-cache tensors and configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_tiered_kv.cache.planner import STATE_WINDOW
from vllm_tiered_kv.core.layout import BlockRuns, StridedView, block_runs, shard_layout
from vllm_tiered_kv.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def group_block_bytes(kv_cache_config: KVCacheConfig) -> list[int]:
    """Returns the bytes of one block on one rank, per group, from vLLM's configuration.

    Pages may be padded in memory; copies leave the padding out.
    """
    return [
        sum(
            _unpadded_bytes(_layer_spec(group.kv_cache_spec, name))
            for name in _own_layers(kv_cache_config, group.layer_names)
        )
        for group in kv_cache_config.kv_cache_groups
    ]


def group_block_sizes(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> list[int]:
    """Returns the tokens that a block stands for, per group. With decode context parallelism (DCP)
    these are more than a rank holds of it: the ranks of a DCP group divide its tokens."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    return [
        resolve_dcp_kv_block_size(group.kv_cache_spec, parallel.decode_context_parallel_size)
        for group in kv_cache_config.kv_cache_groups
    ]


def group_windows(kv_cache_config: KVCacheConfig) -> list[int | None]:
    """Returns the sliding window or chunk in tokens, per group; None for a group that keeps all
    blocks."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    def window_of(spec: KVCacheSpec) -> int | None:
        if _is_recurrent(spec):
            return STATE_WINDOW
        if isinstance(spec, SlidingWindowSpec):
            return int(spec.sliding_window + spec.extra_retained_tokens)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return int(spec.attention_chunk_size)
        return None

    windows: list[int | None] = []
    for group in kv_cache_config.kv_cache_groups:
        (window,) = {window_of(spec) for spec in iter_layer_specs(group.kv_cache_spec)}
        windows.append(window)
    return windows


def recurrent_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """Returns the groups whose layers keep a recurrent state (Mamba, linear attention)."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return _groups_of_kind(kv_cache_config, MambaSpec)


def chunked_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """Returns the groups whose layers have chunked local attention (Llama-4)."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return _groups_of_kind(kv_cache_config, ChunkedLocalAttentionSpec)


def _groups_of_kind(kv_cache_config: KVCacheConfig, kind: type[KVCacheSpec]) -> list[int]:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return [
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(isinstance(spec, kind) for spec in iter_layer_specs(group.kv_cache_spec))
    ]


class StatePart(NamedTuple):
    """A part of a recurrent layer's state: of its convolution, or of its recurrence."""

    nbytes: int
    dtype: str
    is_defined: bool = True  # in all its bytes


def state_parts(kv_cache_config: KVCacheConfig) -> dict[str, list[StatePart]]:
    """Returns the parts of each recurrent layer's state, as they follow each other in a block. vLLM
    registers the whole as bytes. With speculative decoding those of convolutions, all but the last,
    end with the inputs of drafts, which are undefined in a state that is cached."""
    parts: dict[str, list[StatePart]] = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in _own_layers(kv_cache_config, group.layer_names):
            spec = _layer_spec(group.kv_cache_spec, name)
            if _is_recurrent(spec):
                parts[name] = [
                    StatePart(
                        math.prod(shape) * dtype.itemsize,
                        str(dtype),
                        number == len(spec.shapes) or not spec.num_speculative_blocks,
                    )
                    for number, (shape, dtype) in enumerate(
                        zip(spec.shapes, spec.dtypes, strict=True), 1
                    )
                ]
    return parts


def first_forward_clears(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM's first forward writes to all blocks. With per-token-head quantization it sets
    all scales, which lie inside the blocks, to one."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return any(
        getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False)
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    )


def group_runs(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig, shards: int = 1
) -> dict[int, BlockRuns]:
    """Returns the byte runs of a block, per group, from the strides of the tensors.

    With several shards, the heads are divided evenly and a slot holds one shard after the other,
    each with all layers: its bytes are those of a rank that holds nothing else. The layout of each
    shard alone is returned too, under the number `shard_layout` gives it.
    """
    runs: dict[int, BlockRuns] = {}
    num_blocks = kv_cache_config.num_blocks
    expected = group_block_bytes(kv_cache_config)
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        names = _own_layers(kv_cache_config, group.layer_names)
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise UnsupportedError(
                f"vLLM registered no KV cache for layer {missing[0]}; this model is not supported"
            )
        views = [strided_view(name, kv_caches[name]) for name in names]
        if shards > 1:
            _require_heads(views, shards, num_blocks)
            divided = [[view.shard(n, shards) for view in views] for n in range(shards)]
            for number, of_shard in enumerate(divided):
                runs[shard_layout(group_id, number)] = block_runs(of_shard, num_blocks)
            views = [view for of_shard in divided for view in of_shard]
        runs[group_id] = block_runs(views, num_blocks)
        if runs[group_id].block_bytes != expected[group_id]:
            raise UnsupportedError(
                f"KV-cache group {group_id} has {runs[group_id].block_bytes} bytes per block, but "
                f"vLLM's configuration says {expected[group_id]}; this layout is not supported"
            )
    return runs


def _require_heads(views: list[StridedView], shards: int, num_blocks: int) -> None:
    """Raises unless the tensors have vLLM's shape of blocks, heads, tokens and values."""
    for view in views:
        shape = view.shape
        if len(shape) != 4 or shape[0] != num_blocks or shape[1] % shards:
            raise UnsupportedError(
                f"the KV cache of layer {view.name} has the shape {shape}, whose heads cannot be "
                f"divided into {shards} shards: remove the option portable_shards"
            )


def require_whole_blocks(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
) -> None:
    """Raises if the attention back-end splits a block into smaller ones with all heads each.

    The bytes of such a block have another order than those of other back-ends with the same layout
    name. That is harmless within one engine, but a daemon serves many engines, and the keys do not
    tell the two orders apart.
    """
    for name, cache in kv_caches.items():
        ratio = cache.shape[0] // kv_cache_config.num_blocks
        has_heads = cache.dim() > 2 and cache.shape[1] > 1
        if ratio > 1 and has_heads and cache.stride(1) > cache.stride(2):
            raise UnsupportedError(
                f"the attention back-end splits each block of layer {name} into {ratio} blocks, "
                "which engines with other back-ends cannot read from a daemon: divide "
                f"--block-size by {ratio}, or remove the option remote"
            )


def strided_view(name: str, tensor: torch.Tensor) -> StridedView:
    return StridedView(
        name=name,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
    )


def _own_layers(kv_cache_config: KVCacheConfig, layer_names: list[str]) -> list[str]:
    """Returns the layers of a group that have their own memory on this rank, in order."""
    placed = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    return [name for name in layer_names if name in placed]


def _unpadded_bytes(spec: Any) -> int:
    """Returns the bytes of one layer's block without the padding behind it."""
    if _is_recurrent(spec):
        return int(spec.state_content_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def _is_recurrent(spec: KVCacheSpec) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def _layer_spec(spec: Any, layer: str) -> Any:
    inner = getattr(spec, "kv_cache_specs", None)
    return inner[layer] if inner is not None else spec
