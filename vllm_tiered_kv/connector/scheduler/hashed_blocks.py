"""A GPU block whose content we know, and how to tell that it still has it.

vLLM gives every full cached block a hash and takes it away when the block is given to someone
else. As long as the hash is there at scheduling time, nobody writes the block in that step, in use
or free: its content can be read without holding a reference to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, starmap
from operator import add, attrgetter, eq, itemgetter
from typing import TYPE_CHECKING, TypeAlias

from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import int64_array, pick
from vllm_tiered_kv.remote.placement import anchors_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


_BLOCK_ID = attrgetter("block_id")
_BLOCK_HASH = attrgetter("block_hash")


def ids_of(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Their numbers; without a step of the interpreter for each."""
    return list(map(_BLOCK_ID, blocks))


BlockRecord: TypeAlias = tuple[int, bytes, BlockKey, BlockKey | None, BlockKey, Group]
"""One block of a `HashedRun`, without it, since a run keeps its request: its number, what vLLM has
written on it, its key, that of the block before it, that of the anchor which decides the daemon it
belongs to, its group. A plain tuple: there is one for every block of the GPU."""


def still_hashed(pool: BlockPool, known: Sequence[BlockRecord]) -> list[bool]:
    """Whether each block still has what it had; without a step of the interpreter for each."""
    on_blocks = map(_BLOCK_HASH, map(pool.blocks.__getitem__, map(itemgetter(0), known)))
    return list(map(eq, on_blocks, map(itemgetter(1), known)))


@dataclass(frozen=True)
class HashedRun:
    """Many of them: a request's blocks from position `first` on, full of confirmed tokens."""

    request: Request
    group: Group
    keys: Sequence[BlockKey]
    first: int
    block_ids: Sequence[int]
    hash_block_size: int

    def ids(self, positions: Sequence[int]) -> list[int]:
        offsets = int64_array(positions) - self.first
        return list(pick(self.block_ids, offsets.tolist()))

    def still_hashed(self, pool: BlockPool, positions: range) -> list[bool]:
        """As the function; no step of the interpreter for each."""
        ids = self.block_ids[positions.start - self.first : positions.stop - self.first]
        on_blocks = map(_BLOCK_HASH, map(pool.blocks.__getitem__, ids))
        there = list(map(eq, on_blocks, self._hashes(positions)))
        return there + [False] * (len(positions) - len(there))

    def records(self, positions: range) -> Iterator[BlockRecord]:
        """Of each; no step of the interpreter for each."""
        start, stop = positions.start, positions.stop
        before: list[BlockKey | None] = [None if not start else self.keys[start - 1]]
        counted = anchors_of(self.keys, positions)
        return zip(
            self.block_ids[start - self.first : stop - self.first],
            self._hashes(positions),
            self.keys[start:stop],
            chain(before, self.keys[start : stop - 1]),
            chain.from_iterable(starmap(repeat, counted)),
            repeat(self.group),
            strict=False,
        )

    def _hashes(self, positions: range) -> Iterator[bytes]:
        """As vLLM writes them on the blocks."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        each = self.group.block_size // self.hash_block_size
        hashes = self.request.block_hashes[
            (positions.start + 1) * each - 1 : positions.stop * each : each
        ]
        of_group = make_block_hash_with_group_id(b"", self.group.group_id)
        return map(add, hashes, repeat(of_group))


@dataclass
class StoreBatch:
    """Blocks of one group with the slots reserved for them, heads of prefixes first."""

    group: Group
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    anchors: list[tuple[BlockKey, int]] = field(default_factory=list)
    """Which daemon blocks belong to is decided by an anchor; with how many of them in a row do."""

    def extend(self, run: HashedRun, positions: list[int], slots: list[int]) -> None:
        self.block_ids += run.ids(positions)
        self.slots += slots
        self.anchors += anchors_of(run.keys, positions)
