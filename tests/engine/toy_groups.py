"""KV-cache groups of the toy model: full attention, sliding windows, recurrent states, several
block sizes.

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
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from tests.engine.delayed_copier import LAYERS

STATE = -1
"""In place of a window: the group has recurrent layers, with vLLM's "align" mode."""
EXPORTED_STATE = -2
"""Like `STATE`, and a forward can also write the state at a boundary inside its tokens, as Mamba 2
does."""


@dataclass(frozen=True)
class Chunks:
    """In place of a window: chunked local attention. A token attends to those of its own chunk."""

    tokens: int


def is_state(window: int | Chunks | None) -> bool:
    return window in (STATE, EXPORTED_STATE)


class WrongRead(AssertionError):
    """The model would attend to KV that does not belong to its tokens."""


@dataclass(frozen=True)
class ToyGroup:
    """One KV-cache group of a toy engine, which builds it."""

    group_id: int
    window: int | Chunks | None
    block_size: int  # tokens that one rank holds of a block
    page: int  # bytes of a block in one layer, the same in all groups
    ranks: int = 1  # that divide the tokens of each block: decode context parallelism
    interleave: int = 1  # tokens of one of them before those of the next
    rank: int = 0  # whose caches the group works on
    is_latent: bool = False  # full attention is MLA
    drafts: int = 0  # further states that a step of recurrent layers leaves, one for each draft

    @property
    def span(self) -> int:
        """The tokens of a block on all ranks."""
        return self.block_size * self.ranks

    def own(self, first: int, stop: int) -> np.ndarray:
        """Those of these tokens that the rank holds."""
        at = np.arange(first, stop)
        return at[at % self.span // self.interleave % self.ranks == self.rank]

    @property
    def layers(self) -> list[str]:
        return [f"g{self.group_id}.{name}" for name in LAYERS] if self.group_id else list(LAYERS)

    @property
    def is_recurrent(self) -> bool:
        return is_state(self.window)

    def first_read(self, end: int) -> int:
        """The first token that the token after the first `end` ones attends to, by definition."""
        if self.window is None:
            return 0
        if isinstance(self.window, Chunks):
            return end - end % self.window.tokens
        return max(0, end - self.window + 1)

    @property
    def spec(self) -> KVCacheSpec:
        if self.is_recurrent:
            exports = int(self.window == EXPORTED_STATE)
            return MambaSpec(
                block_size=self.block_size,
                shapes=((self.page // 8,), (self.page // 4,)),
                dtypes=(torch.int32, torch.int16),
                mamba_cache_mode="align",
                num_speculative_blocks=self.drafts,
                num_prefill_checkpoint_blocks=exports,
                prefill_checkpoint_alignment=exports or None,
            )
        shape = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.page // self.block_size // 2,
            "head_size_v": 0,
            "dtype": torch.int16,
        }
        if self.window is None:
            kind = MLAAttentionSpec if self.is_latent else FullAttentionSpec
            spec: AttentionSpec = kind(**shape)
        elif isinstance(self.window, Chunks):
            spec = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.window.tokens)
        elif self._width > 1:
            del shape["head_size_v"]
            spec = SlidingWindowMLASpec(**shape, sliding_window=self.window)
        else:
            spec = SlidingWindowSpec(**shape, sliding_window=self.window)
        assert spec.page_size_bytes == self.page
        return spec

    @property
    def _width(self) -> int:
        """How many numbers a token has. The tokens of small blocks are wide, as in DeepSeek-V4."""
        return 1 if self.is_recurrent else max(1, self.page // (8 * self.block_size))

    def rows(self, blocks: np.ndarray) -> np.ndarray:
        """A view of shared blocks as rows of this group's tokens."""
        if self._width > 1:
            return blocks.reshape(*blocks.shape[:-1], self.block_size, self._width)
        return blocks.view(np.int64 if self.page == 8 * self.block_size else np.int32)

    def kv(self, right: np.ndarray, layer: int) -> np.ndarray:
        """The right content of a layer, from the states of the tokens."""
        kv = right ^ layer ^ (self.group_id << 20)
        if self._width > 1:
            return kv[:, None] + np.arange(self._width)
        return kv if self.page == 8 * self.block_size else (kv & 0x7FFFFFFF).astype(np.int32)

    def state(self, right: np.ndarray, stop: int, layer: int) -> np.ndarray:
        """The right block of a recurrent layer after `stop` tokens."""
        kv = self.kv(right[stop - 1 : stop], layer)
        return kv + np.arange(self.page // kv.itemsize, dtype=kv.dtype)

    def block(self, right: np.ndarray, position: int, layer: int) -> np.ndarray:
        """The right content of a full block."""
        first, stop = position * self.span, (position + 1) * self.span
        if self.is_recurrent:
            return self.state(right, stop, layer)
        return self.kv(right[self.own(first, stop)], layer)

    def table(self, blocks: Sequence[int], stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The block and the offset within it, on the rank that holds it, for each of the first
        `stop` tokens."""
        at = np.arange(stop)
        turns, place = np.divmod(at % self.span, self.interleave)
        return np.array(blocks)[at // self.span], turns // self.ranks * self.interleave + place

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
        if self.is_recurrent:
            self._advance_state(name, caches, blocks, right, span, before_layer)
            return
        table, place = self.table(blocks, stop)
        first = self.first_read(start)
        if not table[first:stop].all():
            raise WrongRead(f"{name} has no block for a token it needs")
        read, written = self.own(first, start), self.own(start, stop)
        for layer, cache in enumerate(caches):
            before_layer(layer)
            rows, kv = self.rows(cache), self.kv(right[:stop], layer)
            differs = rows[table[read], place[read]] != kv[read]
            wrong = np.flatnonzero(differs.any(axis=1) if differs.ndim > 1 else differs)
            if len(wrong):
                raise WrongRead(
                    f"{name} reads wrong KV at token {read[wrong[0]]} of {start}, "
                    f"group {self.group_id}"
                )
            rows[table[written], place[written]] = kv[written]

    def _advance_state(
        self,
        name: str,
        caches: Sequence[np.ndarray],
        blocks: Sequence[int],
        right: np.ndarray,
        span: range,
        before_layer: Callable[[int], None],
    ) -> None:
        block = blocks[(span.stop - 1) // self.block_size]
        if not block:
            raise WrongRead(f"{name} has no block for its state")
        for layer, cache in enumerate(caches):
            before_layer(layer)
            row = self.rows(cache)[block]
            if span.start and (row != self.state(right, span.start, layer)).any():
                raise WrongRead(
                    f"{name} reads a wrong state at token {span.start}, group {self.group_id}"
                )
            row[:] = self.state(right, span.stop, layer)


def kv_cache_config(groups: Sequence[ToyGroup], num_blocks: int, hash_size: int) -> KVCacheConfig:
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
        config.hash_block_size = hash_size
    return config
