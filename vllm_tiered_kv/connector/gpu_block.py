"""A GPU block whose content we know, and how to tell that it still has it.

vLLM gives every full cached block a hash and takes it away when the block is given to someone
else. As long as the hash is there at scheduling time, nobody writes the block in that step, in use
or free: its content can be read without holding a reference to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.remote.placement import anchor_position

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


_BLOCK_ID = attrgetter("block_id")


def ids_of(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Their numbers; without a step of the interpreter for each."""
    return list(map(_BLOCK_ID, blocks))


@dataclass(frozen=True)
class KnownBlock:
    block_id: int
    vllm_hash: bytes  # of content and group, as vLLM writes it on the block
    key: BlockKey
    parent: BlockKey | None
    anchor: BlockKey  # decides which daemon it belongs to
    group: Group

    @classmethod
    def of(
        cls,
        request: Request,
        block_id: int,
        group: Group,
        position: int,
        keys: Sequence[BlockKey],
        hash_block_size: int,
    ) -> KnownBlock:
        """Block `position` of a request, full of confirmed tokens, lies in `block_id`."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        end = (position + 1) * group.block_size // hash_block_size
        return cls(
            block_id,
            make_block_hash_with_group_id(request.block_hashes[end - 1], group.group_id),
            keys[position],
            keys[position - 1] if position else None,
            keys[anchor_position(position)],
            group,
        )

    def still_there(self, pool: BlockPool) -> bool:
        return bool(pool.blocks[self.block_id].block_hash == self.vllm_hash)


@dataclass
class StoreBatch:
    """Blocks of one group with the slots reserved for them, heads of prefixes first."""

    group: Group
    block_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    anchors: list[tuple[BlockKey, int]] = field(default_factory=list)
    """Which daemon blocks belong to is decided by an anchor; with how many of them in a row do."""

    def add(self, block: KnownBlock, slot: int) -> None:
        self.block_ids.append(block.block_id)
        self.slots.append(slot)
        if self.anchors and self.anchors[-1][0] == block.anchor:
            self.anchors[-1] = block.anchor, self.anchors[-1][1] + 1
        else:
            self.anchors.append((block.anchor, 1))

    def reverse(self) -> None:
        for column in (self.block_ids, self.slots, self.anchors):
            column.reverse()
