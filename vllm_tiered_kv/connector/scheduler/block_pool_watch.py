"""Reports every GPU block that vLLM allocates.

All blocks come from `BlockPool.get_new_blocks`, whether a request, a load or another connector
takes them. The scheduler output is no substitute: its list of new blocks includes prefix hits and
lacks the blocks of other connectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_kv.connector.scheduler.hashed_blocks import ids_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def watch_new_blocks(pool: BlockPool, on_allocated: Callable[[list[int]], None]) -> None:
    """Calls `on_allocated` with the ids of all blocks that this pool allocates from now on."""
    allocate = pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        blocks = allocate(num_blocks)
        on_allocated(ids_of(blocks))
        return blocks

    pool.get_new_blocks = get_new_blocks
