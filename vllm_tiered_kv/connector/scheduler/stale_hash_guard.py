"""GPU blocks that vLLM takes for filled though no step fills them.

vLLM writes the hash on a block when it plans the step that fills it. With priorities it may take a
request out of the step it is planning, to give its blocks to a more important one. Those that are
not needed at once lie in the prefix cache then, under hashes of what was never computed: whoever
finds them reads what was there before, and hands it on to the tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StaleHashGuard:
    def __init__(self, manager: KVCacheManager, groups: Sequence[int]) -> None:
        self._manager = manager
        self._groups = groups
        self._requests: dict[str, Request] = {}
        self._filled: dict[str, int] = {}
        """Tokens whose KV is there when the steps planned so far have run; no drafts."""

    def admitted(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._filled.pop(request.request_id, None)

    def step_planned(self, output: SchedulerOutput) -> None:
        """Ahead of everything else that looks at the blocks of this step."""
        for request_id in output.preempted_req_ids or ():
            filled = self._filled.pop(request_id, None)
            if filled is not None:
                self._take_hashes(self._requests[request_id], filled)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                computed = request.num_computed_tokens + scheduled
                self._filled[request_id] = min(computed, request.num_tokens)

    def _take_hashes(self, request: Request, filled: int) -> None:
        """From the blocks behind so many tokens of a request that has lost its blocks. Nobody has
        found them so far: vLLM admits no request in a step in which it takes one out."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool = self._manager.block_pool
        behind = request.block_hashes[filled // pool.hash_block_size :]
        if not any(pool.get_cached_block(each, [n]) for each in behind for n in self._groups):
            return
        hashes = {make_block_hash_with_group_id(each, n) for each in behind for n in self._groups}
        self._manager.evict_blocks(
            {
                block.block_id
                for block in pool.blocks
                if not block.ref_cnt and block.block_hash in hashes
            }
        )
