"""Removes hashes from GPU blocks that were never filled.

vLLM sets the hash of a block when it plans the step that fills the block. With priority scheduling
it may then preempt that request within the same step, to give its blocks to a more important one.
Blocks that are not reallocated at once stay in the prefix cache under hashes of tokens that were
never computed. A request that hits them reads old content and stores it in the tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StaleHashGuard:
    """Tracks which tokens of each request are really computed, and evicts hashed blocks beyond them
    when vLLM preempts the request. The scheduler half calls it in the scheduler's thread; only
    priority scheduling needs it."""

    def __init__(self, manager: KVCacheManager, groups: Sequence[int]) -> None:
        self._manager = manager
        self._groups = groups
        self._requests: dict[str, Request] = {}
        self._filled: dict[str, int] = {}
        """Tokens whose KV is computed once the planned steps have run, without drafts."""

    def admitted(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._filled.pop(request.request_id, None)

    def step_planned(self, output: SchedulerOutput) -> None:
        """Evicts unfilled blocks of preempted requests. Must run before anything else that checks
        block hashes in this step."""
        for request_id in output.preempted_req_ids or ():
            filled = self._filled.pop(request_id, None)
            if filled is not None:
                self._evict_unfilled(self._requests[request_id], filled)
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                computed = request.num_computed_tokens + scheduled
                self._filled[request_id] = min(computed, request.num_tokens)

    def _evict_unfilled(self, request: Request, filled: int) -> None:
        """Evicts the blocks after `filled` tokens of a preempted request. No request has hit them
        yet: vLLM admits no request in a step in which it preempts one."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool = self._manager.block_pool
        unfilled = request.block_hashes[filled // pool.hash_block_size :]
        if not any(pool.get_cached_block(each, [n]) for each in unfilled for n in self._groups):
            return
        hashes = {make_block_hash_with_group_id(each, n) for each in unfilled for n in self._groups}
        self._manager.evict_blocks(
            {
                block.block_id
                for block in pool.blocks
                if not block.ref_cnt and block.block_hash in hashes
            }
        )
