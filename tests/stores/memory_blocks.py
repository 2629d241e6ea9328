"""The memory tier as a BlockStore. The daemon uses its slots in place, as these functions do."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.native.cpu import copy_and_hash, copy_bytes
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot


def put_into(memory: MemoryStore, items: Sequence[PutItem]) -> list[PutResult]:
    blocks = [(item.key, item.parent, item.payload.nbytes) for item in items]
    return fill(memory, memory.reserve_chain(blocks), items)


def fill(
    memory: MemoryStore, slots: Sequence[PinnedSlot | PutResult], items: Sequence[PutItem]
) -> list[PutResult]:
    with memory.giving_back(slots):
        checksums = copy_and_hash(*memory.copies(slots, items))
    return memory.filled(slots, items, checksums)


def get_from(
    memory: MemoryStore, keys: Sequence[StoreKey], into: Sequence[memoryview]
) -> list[bool]:
    found = []
    held = memory.hold(keys)
    try:
        for block, buffer in zip(held, into, strict=True):
            fits = block is not None and block.nbytes == buffer.nbytes
            if block is not None and fits:
                copy_bytes(buffer, block.view)
            found.append(fits)
    finally:
        memory.let_go([block for block in held if block is not None])
    return found


class MemoryBlocks(MemoryStore):
    def match(self, keys: Sequence[StoreKey]) -> int:
        found = self.contains(keys)
        count = found.index(False) if False in found else len(found)
        self.let_go([block for block in self.hold(keys[:count]) if block is not None])
        return count

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        return get_from(self, keys, into)

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        return put_into(self, items)

    def flush(self) -> bool:
        return True
