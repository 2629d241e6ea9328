"""KV-cache groups of the toy model: full attention, sliding windows, several block sizes.

As in vLLM, all groups share one memory, and a block belongs to one group at a time. Each group has
its own KV, so the model detects a block of the wrong group too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from tests.engine.delayed_copier import LAYERS


class WrongRead(AssertionError):
    """The model would attend to KV that does not belong to its tokens."""


@dataclass(frozen=True)
class ToyGroup:
    """One KV-cache group of a toy engine, which builds it."""

    group_id: int
    window: int | None
    block_size: int  # tokens
    page: int  # bytes of a block in one layer, the same in all groups

    @property
    def layers(self) -> list[str]:
        return [f"g{self.group_id}.{name}" for name in LAYERS] if self.group_id else list(LAYERS)

    @property
    def spec(self) -> AttentionSpec:
        shape = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.page // self.block_size // 2,
            "head_size_v": 0,
            "dtype": torch.int16,
        }
        if self.window is None:
            spec: AttentionSpec = FullAttentionSpec(**shape)
        else:
            spec = SlidingWindowSpec(**shape, sliding_window=self.window)
        assert spec.page_size_bytes == self.page
        return spec

    def rows(self, blocks: np.ndarray) -> np.ndarray:
        """A view of shared blocks as rows of this group's tokens."""
        return blocks.view(np.int64 if self.page == 8 * self.block_size else np.int32)

    def kv(self, right: np.ndarray, layer: int) -> np.ndarray:
        """The right content of a layer, from the states of the tokens."""
        kv = right ^ layer ^ (self.group_id << 20)
        return kv if self.page == 8 * self.block_size else (kv & 0x7FFFFFFF).astype(np.int32)

    def table(self, blocks: Sequence[int], stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The block and the offset within it, for each of the first `stop` tokens."""
        at = np.arange(stop)
        return np.array(blocks)[at // self.block_size], at % self.block_size

    def forward(
        self,
        name: str,
        caches: Sequence[np.ndarray],
        blocks: Sequence[int],
        right: np.ndarray,
        span: range,
        before_layer: Callable[[int], None],
    ) -> None:
        """Checks the KV that the tokens of `span` attend to, and writes their own."""
        start, stop = span.start, span.stop
        table, place = self.table(blocks, stop)
        first = 0 if self.window is None else max(0, start - self.window + 1)
        if not table[first:stop].all():
            raise WrongRead(f"{name} has no block for a token it needs")
        for layer, cache in enumerate(caches):
            before_layer(layer)
            rows, kv = self.rows(cache), self.kv(right[:stop], layer)
            wrong = np.flatnonzero(rows[table[first:start], place[first:start]] != kv[first:start])
            if len(wrong):
                raise WrongRead(
                    f"{name} reads wrong KV at token {first + wrong[0]} of {start}, "
                    f"group {self.group_id}"
                )
            rows[table[start:], place[start:]] = kv[start:]


def kv_cache_config(groups: Sequence[ToyGroup], num_blocks: int) -> KVCacheConfig:
    page = groups[0].page
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page * num_blocks * len(LAYERS),
                layers=group.layers,
                layer_stride=page * num_blocks,
                block_stride=page,
            )
            for group in groups
        ],
        kv_cache_groups=[KVCacheGroupSpec(group.layers, group.spec) for group in groups],
        kv_cache_layout="LBHNC",
    )
    if hasattr(config, "hash_block_size"):  # not before 0.32
        config.hash_block_size = min(group.block_size for group in groups)
    return config
