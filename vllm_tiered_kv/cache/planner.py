"""Which blocks of a sequence to store or load. Pure: asks the index, reserves, moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup


@dataclass(frozen=True)
class Group:
    """A KV-cache group as the planner sees it."""

    group_id: int
    block_size: int  # tokens
    block_bytes: int  # per rank
    size_class: int


@dataclass(frozen=True)
class StorePlan:
    """Reserved slots for these positions of the sequence, and how many blocks found no room."""

    positions: list[int]
    slots: list[int]
    dropped: int


def plan_store(
    index: BlockIndex,
    group: Group,
    keys: Sequence[BlockKey],
    start: int,
    stop: int,
    skip: range = range(0),
) -> StorePlan:
    """Reserves slots for the missing blocks among positions `start` … `stop`, but not `skip`.

    In chain order: where room ends, the rest of the sequence is dropped, never its head.
    """
    positions: list[int] = []
    slots: list[int] = []
    for position in range(index.first_missing(keys, start, stop), stop):
        if position in skip or index.lookup(keys[position]) is not Lookup.MISS:
            continue
        parent = keys[position - 1] if position else None
        slot = index.reserve(keys[position], parent, group.size_class)
        if slot is None:
            return StorePlan(positions, slots, stop - position)
        positions.append(position)
        slots.append(slot)
    return StorePlan(positions, slots, 0)


def loadable_tokens(
    index: BlockIndex,
    groups: Sequence[Group],
    keys: Sequence[Sequence[BlockKey]],
    computed: int,
    limit: int,
    alignment: int,
    elsewhere: Sequence[range] | None = None,
) -> int:
    """Tokens after `computed` that every group can serve, ending at or before `limit`.

    A hit counts only as far as all groups reach, in whole units of `alignment`. `elsewhere` are
    the positions of each group that another tier holds.
    """
    end = limit - limit % alignment
    for number, (group, group_keys) in enumerate(zip(groups, keys, strict=True)):
        if end <= computed:
            return 0
        position, stop = computed // group.block_size, end // group.block_size
        position += index.match_prefix(group_keys, position, stop)
        if elsewhere is not None and position in elsewhere[number]:
            position = elsewhere[number].stop
            position += index.match_prefix(group_keys, position, stop)
        end = min(end, position * group.block_size)
        end -= end % alignment
    return max(0, end - computed)
