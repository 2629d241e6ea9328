"""Tells which GPU blocks vLLM hands out.

Every block of a request, of a load and of other connectors comes from `BlockPool.get_new_blocks`.
What a step is told about new blocks says less: it lists prefix hits too, and not what others take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_kv.connector.scheduler.hashed_blocks import ids_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def watch_new_blocks(pool: BlockPool, tell: Callable[[list[int]], None]) -> None:
    """Has this pool report every block that it hands out from now on."""
    hand_out = pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        blocks = hand_out(num_blocks)
        tell(ids_of(blocks))
        return blocks

    pool.get_new_blocks = get_new_blocks
