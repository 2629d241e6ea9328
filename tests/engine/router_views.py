"""What cache-aware routers make of an engine's KV events: stand-ins for their published rules.

- llm-d keeps, by block hash, the media that hold it. It scores an engine by the longest prefix of a
  prompt, each block with the best weight of its media.
- Dynamo keeps a tree: a stored block hangs below its parent, which must be known. It accepts some
  media only, and no event that is `REMOTE` or has an owner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash

WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
_DYNAMO_MEDIA = {"GPU", "CPU", "CPU_PINNED", "CPU_TIER1", "DISK", "NVME", "STORAGE"}
_DYNAMO_MEDIA |= {"EXTERNAL", "REMOTE", "SHARED"}


class RouterViews:
    """Both views of one engine. Feed it every event in order; it fails on events that a router
    would reject."""

    def __init__(self, hash_size: int, salt_keys: bool = False) -> None:
        """`hash_size`: tokens of one of vLLM's hashes. `salt_keys`: hashes cover salts too."""
        self.held: dict[str, dict[Any, BlockStored]] = defaultdict(dict)  # medium -> hash
        self.ever: set[Any] = set()
        self.stored = self.removed = 0
        self._hash_size = hash_size
        self._full: dict[Any, Any] = {}
        self._has_extra_keys = salt_keys

    def feed(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.held["GPU"].clear()

    def _store(self, event: BlockStored) -> None:
        assert event.medium in _DYNAMO_MEDIA
        assert event.locality != "REMOTE"
        assert event.ownership is None
        is_ours = event.medium != "GPU"
        is_whole = len(event.token_ids) == event.block_size * len(event.block_hashes)
        assert is_whole or not is_ours  # vLLM leaves out null blocks, but not their tokens
        assert event.parent_block_hash is None or event.parent_block_hash in self.ever
        if is_whole and not self._has_extra_keys:
            self._check_hashes(event)
        for block_hash in event.block_hashes:
            if is_ours:
                assert (block_hash, event.group_idx) not in self.held[event.medium]
            self.held[event.medium][block_hash, event.group_idx] = event
            self.ever.add(block_hash)
            self.stored += 1

    def _check_hashes(self, event: BlockStored) -> None:
        """The hashes are those of the tokens. Events have only 64 bits of a hash."""
        assert event.extra_keys is None or not any(event.extra_keys)
        full = None
        if event.parent_block_hash is not None:
            full = self._full.get(event.parent_block_hash)
            assert full is not None or event.medium == "GPU"
            if full is None:
                return
        for at, block_hash in enumerate(event.block_hashes):
            first = at * event.block_size
            for start in range(first, first + event.block_size, self._hash_size):
                part = event.token_ids[start : start + self._hash_size]
                full = hash_block_tokens(sha256, full, part, None)
                self._full[maybe_convert_block_hash(full)] = full
            assert maybe_convert_block_hash(full) == block_hash

    def _remove(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            self.removed += 1
            removed = self.held[event.medium].pop((block_hash, event.group_idx), None)
            assert removed is not None or event.medium == "GPU", "a router never heard of it"

    def score(self, block_hashes: Sequence[Any], group: int = 0) -> float:
        """llm-d's score of the engine for a prompt with these block hashes."""
        total = 0.0
        for block_hash in block_hashes:
            weights = [
                WEIGHTS.get(medium.lower(), 1.0)
                for medium, blocks in self.held.items()
                if (block_hash, group) in blocks
            ]
            if not weights:
                break
            total += max(weights)
        return total
