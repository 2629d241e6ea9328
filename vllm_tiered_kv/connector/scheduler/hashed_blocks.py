"""GPU blocks identified by vLLM's block hash, and the check that they still hold that content.

vLLM sets a hash on every full cached block and clears it when it reallocates the block. If the hash
is present at scheduling time, nobody writes the block in that step, whether it is in use or free.
Its content can then be read without a reference to the block.

The functions here process thousands of blocks per step, so they use `map`, `zip` and `compress`
instead of loops in the interpreter.
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
    return list(map(_BLOCK_ID, blocks))


BlockRecord: TypeAlias = "tuple[int, bytes, BlockKey, BlockKey | None, BlockKey | None, Group]"
"""One block of a `HashedRun`: block id, vLLM's block hash, key, key of the previous block, key of
the anchor (which decides the daemon; None: sent to none), group. It does not refer to the run,
because a run keeps its request alive. It is a plain tuple because there may be one per GPU
block."""


def still_hashed(pool: BlockPool, known: Sequence[BlockRecord]) -> list[bool]:
    """For each block, whether vLLM's hash is still the recorded one."""
    on_blocks = map(_BLOCK_HASH, map(pool.blocks.__getitem__, map(itemgetter(0), known)))
    return list(map(eq, on_blocks, map(itemgetter(1), known)))


@dataclass(frozen=True)
class HashedRun:
    """Consecutive full blocks of one request, from position `first` on, with confirmed tokens
    only. The store planner builds it in the scheduler's thread."""

    request: Request
    group: Group
    keys: Sequence[BlockKey]
    first: int
    block_ids: Sequence[int]
    hash_block_size: int
    is_sent: bool = True  # to a daemon, once it is stored

    def ids(self, positions: Sequence[int]) -> list[int]:
        offsets = int64_array(positions) - self.first
        return list(pick(self.block_ids, offsets.tolist()))

    def still_hashed(self, pool: BlockPool, positions: range) -> list[bool]:
        """For each position, whether its block still has the hash of these tokens."""
        ids = self.block_ids[positions.start - self.first : positions.stop - self.first]
        on_blocks = map(_BLOCK_HASH, map(pool.blocks.__getitem__, ids))
        there = list(map(eq, on_blocks, self._hashes(positions)))
        return there + [False] * (len(positions) - len(there))

    def records(self, positions: range) -> Iterator[BlockRecord]:
        """The record of each block at these positions."""
        start, stop = positions.start, positions.stop
        before: list[BlockKey | None] = [None if not start else self.keys[start - 1]]
        counted = anchors_of(self.keys, positions)
        return zip(
            self.block_ids[start - self.first : stop - self.first],
            self._hashes(positions),
            self.keys[start:stop],
            chain(before, self.keys[start : stop - 1]),
            chain.from_iterable(starmap(repeat, counted)) if self.is_sent else repeat(None),
            repeat(self.group),
            strict=False,
        )

    def _hashes(self, positions: range) -> Iterator[bytes]:
        """The hashes as vLLM sets them on blocks, with the group id appended."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        each = self.group.block_size // self.hash_block_size
        hashes = self.request.block_hashes[
            (positions.start + 1) * each - 1 : positions.stop * each : each
        ]
        of_group = make_block_hash_with_group_id(b"", self.group.group_id)
        return map(add, hashes, repeat(of_group))


@dataclass
class StoreBatch:
    """Blocks of one group with the slots reserved for them, heads of prefixes first. The store
    planner and `LazyStore` build it."""

    group: Group
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    anchors: list[tuple[BlockKey | None, int]] = field(default_factory=list)
    """An anchor decides which daemon blocks belong to; None: they are sent to none. Each entry has
    an anchor and the number of consecutive blocks it covers."""

    def extend(self, run: HashedRun, positions: list[int], slots: list[int]) -> None:
        self.block_ids += run.ids(positions)
        self.slots += slots
        self.anchors += anchors_of(run.keys, positions)
