"""Plans which blocks of a sequence to store or load. It queries the index and reserves slots, but
moves no bytes.

A group with full attention needs every block of a prefix. A group with a sliding window needs only
the last ones: tokens before the window of the next token are never read again, and vLLM keeps no
blocks for them. So a hit can end wherever the full-attention groups have all blocks and the windows
of the other groups are complete. Chunked local attention is a window that begins at the last
multiple of its size: a hit that ends there needs no block of the group.

A group of recurrent layers needs one block, with the state after the last token of the hit. vLLM
keeps that state only at some block boundaries, so a hit can end only there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered_kv.cache.index import BlockIndex, Reservations
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey

STATE_WINDOW = 2
"""The window of recurrent layers: a token reads the state after the token before it."""


class HeldBlocks(Protocol):
    """What the plan of a load asks a tier. `BlockIndex` is one."""

    def match_prefix(
        self, keys: Sequence[bytes], start: int = 0, stop: int | None = None
    ) -> int: ...

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]: ...


class NoBlocks:
    """A tier that a request may not use: to its plan the tier is empty."""

    def match_prefix(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        return 0

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)


@dataclass(frozen=True)
class Group:
    """The properties of a KV-cache group that plans depend on."""

    group_id: int
    block_size: int  # tokens
    block_bytes: int  # per rank
    size_class: int
    window: int | None = None  # tokens a token attends to, including itself; None: full attention
    is_recurrent: bool = False
    """A block holds the state after its last token. The window is `STATE_WINDOW`."""
    is_chunked: bool = False
    """The window begins at the last multiple of its size."""

    def needed(self, computed: int, end: int) -> range:
        """Returns the block positions that a request with `computed` tokens must load to continue
        at token `end`."""
        first = computed // self.block_size
        if self.window is not None:
            passed = end // self.window * self.window if self.is_chunked else end - self.window + 1
            first = max(first, passed // self.block_size)
        return range(first, end // self.block_size)

    def of_use(self, positions: range, alignment: int) -> list[range]:
        """Those of these positions whose blocks some hit needs. Hits end at multiples of
        `alignment`: a short window there reaches few of the blocks between two of them."""
        if self.window is None or (self.window >= alignment and not self.is_chunked):
            return [positions]
        found: list[range] = []
        first = positions.start
        while first < positions.stop:
            end = -(-(first + 1) * self.block_size // alignment) * alignment
            needed = self.needed(first * self.block_size, end)
            start, stop = needed.start, min(needed.stop, positions.stop)
            if start < stop:
                if found and found[-1].stop == start:
                    start = found.pop().start
                found.append(range(start, stop))
            first = end // self.block_size
        return found


def groups_of(
    block_sizes: Sequence[int],
    block_bytes: Sequence[int],
    windows: Sequence[int | None],
    geometry: ArenaGeometry,
    recurrent: Collection[int] = (),
    chunked: Collection[int] = (),
) -> list[Group]:
    """Returns the groups of an engine. An empty `windows` means full attention everywhere;
    `recurrent` are the groups of recurrent layers, `chunked` those of chunked local attention."""
    return [
        Group(
            group_id,
            size,
            nbytes,
            geometry.class_of_block(nbytes),
            window,
            group_id in recurrent,
            group_id in chunked,
        )
        for group_id, (size, nbytes, window) in enumerate(
            zip(block_sizes, block_bytes, windows or [None] * len(block_sizes), strict=True)
        )
    ]


def representative_group(groups: Sequence[Group]) -> Group:
    """Returns the group whose blocks best represent which tiers hold a prefix: the first one with
    full attention."""
    return next((group for group in groups if group.window is None), groups[0])


def plan_store(
    index: BlockIndex,
    group: Group,
    keys: Sequence[BlockKey],
    start: int,
    stop: int,
    skip: range = range(0),
) -> Reservations:
    """Reserves slots for the missing blocks at positions `start` to `stop`, except `skip`.

    Each block is the parent of the next one, also in a group with a window. Thus eviction removes
    tails before heads in all groups alike; otherwise the blocks left in one group would be useless
    without those of another.
    """
    return index.reserve_missing(keys, start, stop, group.size_class, skip)


def loadable_tokens(
    index: HeldBlocks,
    groups: Sequence[Group],
    keys: Sequence[Sequence[BlockKey]],
    computed: int,
    limit: int,
    alignment: int,
    elsewhere: Sequence[range] | None = None,
) -> int:
    """Returns how many tokens after `computed` all groups can load, up to token `limit`.

    A hit ends where the first group ends, at a multiple of `alignment`. `elsewhere` gives the
    positions of each group that another tier holds.
    """
    end = end_of_full_groups(index, groups, keys, computed, limit, alignment, elsewhere)
    if end <= computed:
        return 0

    def last_missing(group: Group, needed: range) -> int | None:
        held = elsewhere[group.group_id] if elsewhere is not None else range(0)
        there = index.are_readable(keys[group.group_id][needed.start : needed.stop])
        first, stop = max(needed.start, held.start), min(needed.stop, held.stop)
        if first < stop:
            there[first - needed.start : stop - needed.start] = [True] * (stop - first)
        return None if all(there) else needed.stop - 1 - there[::-1].index(False)

    return max(0, end_of_windows(groups, computed, end, alignment, last_missing) - computed)


def end_of_full_groups(
    index: HeldBlocks,
    groups: Sequence[Group],
    keys: Sequence[Sequence[BlockKey]],
    computed: int,
    limit: int,
    alignment: int,
    elsewhere: Sequence[range] | None = None,
) -> int:
    """Returns the end of the prefix that all groups with full attention can load, up to `limit`. A
    result of `computed` or less means that they can load nothing."""
    end = limit - limit % alignment
    for group, group_keys in zip(groups, keys, strict=True):
        if end <= computed:
            break
        if group.window is not None:
            continue
        position, stop = computed // group.block_size, end // group.block_size
        position += index.match_prefix(group_keys, position, stop)
        if elsewhere is not None and position in elsewhere[group.group_id]:
            position = elsewhere[group.group_id].stop
            position += index.match_prefix(group_keys, position, stop)
        end = min(end, position * group.block_size)
        end -= end % alignment
    return end


def end_of_windows(
    groups: Sequence[Group],
    computed: int,
    end: int,
    alignment: int,
    last_missing: Callable[[Group, range], int | None],
) -> int:
    """Returns the end of the longest prefix up to `end` whose windows are complete in all groups.

    A result of `computed` or less means that there is none. `last_missing` returns the last missing
    position of a range, or None. Every prefix with that position in its window is incomplete, so
    the next candidate ends before it.
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
