"""Which end of a prefix can be served, if windows of it lie with daemons.

Groups with full attention are asked from their heads: the answer says how far they reach. A window
is asked for where a hit would end, and that is only known then. So first the full groups answer,
then the windows at the end they reach. Mostly they are there: they were stored with the blocks of
the full groups. If one is not whole, the daemons say which blocks they have at all, and the windows
are asked for once more, at the last end that has them.

With a picture of the CPU tier taken when the lookup started. What may be loaded is decided by the
scheduler afterwards, by what is there then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from vllm_tiered_kv.cache.planner import Group, end_of_windows


class Found(Protocol):
    """Positions that a daemon has."""

    @property
    def stop(self) -> int: ...


@dataclass(frozen=True)
class WindowSearch:
    """What the scheduler knows when it asks."""

    groups: Sequence[Group]
    held: Sequence[Sequence[bool]]  # per group: positions the CPU tier has
    computed: int
    limit: int
    alignment: int

    @cached_property
    def windowed(self) -> list[Group]:
        return [group for group in self.groups if group.window is not None]

    def reach(self, firsts: Sequence[int], found: Sequence[Sequence[Found]]) -> int:
        """Tokens that all full groups have; `firsts` are the positions they were asked from."""
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
        """Positions to ask for, if a hit is to end there: from the first the CPU tier lacks."""
        held = self.held[group.group_id]
        absent = [n for n in group.needed(self.computed, end) if not held[n]]
        return range(absent[0], absent[-1] + 1) if absent else range(0)

    def longest(self, end: int, present: Mapping[int, Sequence[bool]]) -> int:
        """The last end, up to this one, whose windows are there; `present` says by group which
        positions daemons have."""

        def last_missing(group: Group, needed: range) -> int | None:
            held, there = self.held[group.group_id], present[group.group_id]
            return next((n for n in reversed(needed) if not held[n] and not there[n]), None)

        return end_of_windows(self.groups, self.computed, end, self.alignment, last_missing)
