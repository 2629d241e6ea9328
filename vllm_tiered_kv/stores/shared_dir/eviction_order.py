"""Which blocks a collection removes, and in which order: tails before heads. Pure.

A block is as recent as the most recent of its descendants: removing it makes them useless. Ordered
by that recency, and by depth where it is equal, no block comes before one that follows it.

Only the coldest part of the directory is looked at (`coldest_part`). A descendant outside that part
is warmer than all of it, and `recency.py` sees to it that its ancestors are too, but for an
interval. That is why the part reaches one interval further than what is to be removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.tree import Identity


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that may be removed."""

    key: StoreKey
    mtime_ns: int
    nbytes: int
    inode: int

    @property
    def seen(self) -> Identity:
        return Identity(self.inode, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Ranked:
    block: Candidate
    parent: StoreKey | None
    recency_ns: int


def coldest_part(
    blocks: Sequence[Candidate], free_bytes: int, expire_before_ns: int, margin_ns: int
) -> list[Candidate]:
    """The oldest blocks that hold `free_bytes`, all expired ones, and a margin of younger ones."""
    ordered = sorted(blocks, key=lambda block: (block.mtime_ns, block.key))
    limit_ns: int | None = None
    for at, block in enumerate(ordered):
        if free_bytes <= 0 and block.mtime_ns >= expire_before_ns:
            if limit_ns is None or block.mtime_ns > limit_ns:
                return ordered[:at]
        else:
            free_bytes -= block.nbytes
            limit_ns = block.mtime_ns + margin_ns
    return ordered


def removal_order(
    blocks: Sequence[Candidate], parents: Mapping[StoreKey, StoreKey | None]
) -> list[Ranked]:
    """Coldest first, and every block after all of its descendants among `blocks`."""
    by_key = {block.key: block for block in blocks}
    depth = _depths(by_key.keys(), parents)
    recency = {key: block.mtime_ns for key, block in by_key.items()}
    for key in sorted(by_key, key=lambda key: -depth[key]):
        parent = parents.get(key)
        if parent is not None and parent in recency and depth[parent] < depth[key]:
            recency[parent] = max(recency[parent], recency[key])
    order = sorted(by_key, key=lambda key: (recency[key], -depth[key], key))
    return [Ranked(by_key[key], parents.get(key), recency[key]) for key in order]


def _depths(
    keys: Iterable[StoreKey], parents: Mapping[StoreKey, StoreKey | None]
) -> dict[StoreKey, int]:
    """Steps to the topmost ancestor among `keys`. A circle, which no real chain is, is cut."""
    known = set(keys)
    depth: dict[StoreKey, int] = {}
    for start in known:
        path: list[StoreKey] = []
        on_path: set[StoreKey] = set()
        key: StoreKey | None = start
        while key is not None and key in known and key not in depth and key not in on_path:
            path.append(key)
            on_path.add(key)
            key = parents.get(key)
        below = depth[key] if key is not None and key in depth else -1
        depth.update((passed, below + steps) for steps, passed in enumerate(reversed(path), 1))
    return depth
