"""Where to cut a chain of blocks that could not leave otherwise.

The end of a chain leaves first. Where the ends of all chains are in use, nothing can: a chain that
is longer than its tier could not even be read through it. Over a slower tier that has the block a
chain may be cut anywhere, and what was before the cut has an end again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm_tiered_kv.cache.index_entry import Entry, State

MOST_TAILS = 16  # chains to look at
_MOST_STEPS = 512  # blocks of them altogether: others wait for the index


def block_to_cut_at(
    entries: Mapping[int, Entry],
    tails: Sequence[int],
    size_class: int,
    is_below: Callable[[bytes], bool],
    may_evict: Callable[[bytes], bool],
) -> int | None:
    """The slot of the nearest block before one of the tails that nobody uses and a slower tier has;
    of this size class, as another's would make no room.

    Blocks on the way that it has not are offered to it, so that it has them another time.
    """
    steps = _MOST_STEPS
    for tail in tails:
        slot: int | None = tail
        while slot is not None and steps:
            entry = entries[slot]
            is_idle = not entry.pins and entry.state is State.COMMITTED
            if is_idle and entry.size_class == size_class:
                if is_below(entry.key):
                    return slot
                if may_evict(entry.key):
                    return None  # the slower tier takes no more: it would be lost
            slot = entry.parent
            steps -= 1
    return None
