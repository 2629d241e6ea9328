"""Which blocks of a sequence to store or load. Pure: asks the index, reserves, moves nothing.

A group with full attention needs every block of a prefix. One with a sliding window needs only the
last ones: what lies before the window of the next token is never read again, and vLLM keeps no
blocks for it. So a hit may end wherever the full groups have all blocks and each window is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.cache.index import BlockIndex, Reservations
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey


@dataclass(frozen=True)
class Group:
    """A KV-cache group as the planner sees it."""

    group_id: int
    block_size: int  # tokens
    block_bytes: int  # per rank
    size_class: int
    window: int | None = None  # tokens a token attends to, itself included; None: all before it

    def needed(self, computed: int, end: int) -> range:
        """Positions that a request with `computed` tokens lacks to go on from token `end`."""
        first = computed // self.block_size
        if self.window is not None:
            first = max(first, (end - self.window + 1) // self.block_size)
        return range(first, end // self.block_size)


def groups_of(
    block_sizes: Sequence[int],
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    geometry: ArenaGeometry,
) -> list[Group]:
    """`windows`: none at all means that no group has one."""
    return [
        Group(group_id, size, nbytes, geometry.class_of_block(nbytes), window)
        for group_id, (size, nbytes, window) in enumerate(
            zip(block_sizes, block_bytes, windows or [None] * len(block_sizes), strict=True)
        )
    ]


def telling_group(groups: Sequence[Group]) -> Group:
    """The group whose blocks say best where the tokens of a prefix lie."""
    return next((group for group in groups if group.window is None), groups[0])


def plan_store(
    index: BlockIndex,
    group: Group,
    keys: Sequence[BlockKey],
    start: int,
    stop: int,
    skip: range = range(0),
) -> Reservations:
    """Reserves slots for the missing blocks among positions `start` … `stop`, but not `skip`.

    Each follows the one before it, also in a window: tails leave before heads in all groups alike,
    or what is left of the one would be of no use to the other.
    """
    return index.reserve_missing(keys, start, stop, group.size_class, skip)


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
    for group, group_keys in zip(groups, keys, strict=True):
        if end <= computed:
            return 0
        if group.window is not None:
            continue
        position, stop = computed // group.block_size, end // group.block_size
        position += index.match_prefix(group_keys, position, stop)
        if elsewhere is not None and position in elsewhere[group.group_id]:
            position = elsewhere[group.group_id].stop
            position += index.match_prefix(group_keys, position, stop)
        end = min(end, position * group.block_size)
        end -= end % alignment

    def last_missing(group: Group, needed: range) -> int | None:
        held = elsewhere[group.group_id] if elsewhere is not None else range(0)
        there = index.are_readable(keys[group.group_id][needed.start : needed.stop])
        first, stop = max(needed.start, held.start), min(needed.stop, held.stop)
        if first < stop:
            there[first - needed.start : stop - needed.start] = [True] * (stop - first)
        return None if all(there) else needed.stop - 1 - there[::-1].index(False)

    return max(0, end_of_windows(groups, computed, end, alignment, last_missing) - computed)


def end_of_windows(
    groups: Sequence[Group],
    computed: int,
    end: int,
    alignment: int,
    last_missing: Callable[[Group, range], int | None],
) -> int:
    """The longest prefix up to `end` whose windows are all there; `computed` or less: none.

    `last_missing` is asked for the last of some positions that is not there. No shorter prefix that
    still has it in its window can do, so the next one tried ends before it.
    """
    windowed = [group for group in groups if group.window is not None]
    settled = 0
    while settled < len(windowed) and end > computed:
        settled = 0
        for group in windowed:
            missing = last_missing(group, group.needed(computed, end))
            if missing is None:
                settled += 1
                continue
            end = missing * group.block_size
            end -= end % alignment
            break
    return end
