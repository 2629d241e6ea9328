"""Finds the longest prefix whose sliding windows the CPU tier and the daemons hold.

Groups with full attention are looked up from their heads; the answer is how far they reach. A
window is needed only where the hit ends, which is known only after that. So the full groups are
looked up first, then the windows at the end that these reach. Mostly the windows are present,
because they were stored with the blocks of the full groups. If a window is incomplete, the daemons
list which of its blocks they hold, and the windows are looked up once more, at the last end where
all are complete.

The search uses a snapshot of the CPU tier from the start of the lookup. The scheduler decides later
what to load, from what the CPU tier holds then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from vllm_tiered_kv.cache.planner import Group, end_of_windows


class Found(Protocol):
    """Consecutive positions that a daemon holds."""

    @property
    def stop(self) -> int: ...


@dataclass(frozen=True)
class WindowSearch:
    """The scheduler's knowledge at the start of a lookup. The remote tier builds it in the
    scheduler's thread; a lookup thread uses it."""

    groups: Sequence[Group]
    held: Sequence[Sequence[bool]]  # per group and position: whether the CPU tier has the block
    computed: int
    limit: int
    alignment: int

    @cached_property
    def windowed(self) -> list[Group]:
        return [group for group in self.groups if group.window is not None]

    def reach(self, firsts: Sequence[int], found: Sequence[Sequence[Found]]) -> int:
        """Tokens that all full groups hold; their lookups started at the positions `firsts`."""
        end = self.limit
        for group in self.groups:
            if group.window is None:
                spans = found[group.group_id]
                held = self.held[group.group_id]
                position = spans[-1].stop if spans else firsts[group.group_id]
                while position < len(held) and held[position]:
                    position += 1
                end = min(end, position * group.block_size)
        return end - end % self.alignment

    def wanted(self, group: Group, end: int) -> range:
        """Positions to look up if a hit ends at `end`: from the first one that the CPU tier lacks
        to the last."""
        held = self.held[group.group_id]
        absent = [n for n in group.needed(self.computed, end) if not held[n]]
        return range(absent[0], absent[-1] + 1) if absent else range(0)

    def longest(self, end: int, present: Mapping[int, Sequence[bool]]) -> int:
        """The last end up to `end` whose windows are complete; `present` says by group which
        positions daemons hold."""

        def last_missing(group: Group, needed: range) -> int | None:
            held, there = self.held[group.group_id], present[group.group_id]
            return next((n for n in reversed(needed) if not held[n] and not there[n]), None)

        return end_of_windows(self.groups, self.computed, end, self.alignment, last_missing)
