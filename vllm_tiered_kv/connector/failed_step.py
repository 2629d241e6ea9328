"""What is done about a step that read GPU blocks whose load had failed.

vLLM is told which blocks these are. It throws away what the step sampled for requests that hold
them, and lets the first one of each block compute it anew. That is not enough to be right:

- It leaves them in its prefix cache, with what the step computed from them. Whoever comes before
  they are computed anew, or after the request that was to do it was aborted, would read them.
- Others that hold the same block go on after it at once, however many steps the first one takes.
- What the step filled is on its way to the tiers, also for requests that have ended since.

It happens about never, so nothing is kept track of for it: all that might be wrong is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class FailedStep:
    """To be dealt with when vLLM has seen to the requests it starts over, before any report of the
    step is believed: what becomes readable is sent on to daemons, for everybody."""

    def __init__(
        self, manager: KVCacheManager, groups: Sequence[Group], invalid_blocks: set[int]
    ) -> None:
        self._manager = manager
        self._groups = groups
        self._invalid = invalid_blocks

    def forget_on_gpu(self) -> None:
        """Nothing on the GPU is offered to other requests any more. By their missing hashes,
        whatever waits to be stored later is given up, too."""
        self._manager.evict_blocks(set(range(len(self._manager.block_pool.blocks))))

    def forget_in_tier(
        self, ledger: TransferLedger, index: BlockIndex, states: Iterable[RequestState]
    ) -> None:
        """Nothing that may have been read from such blocks becomes or stays readable. What is right
        after all is stored again."""
        ledger.spoil_stores()
        for state in states:
            for group, bad in zip(self._groups, self._first_bad(state.request), strict=True):
                if bad is not None:
                    state.keys.extend(state.request, state.request.num_tokens)
                    for key in state.keys.of_group[group.group_id][bad:]:
                        index.remove(key)
            state.stored = [0] * len(state.stored)

    def start_over(self, requests: Iterable[Request]) -> None:
        """Each request computes such blocks itself: the one that vLLM chose may take many steps to
        come to them, or be gone."""
        for request in requests:
            for group, bad in zip(self._groups, self._first_bad(request), strict=True):
                if bad is not None:
                    sound = bad * group.block_size
                    request.num_computed_tokens = min(request.num_computed_tokens, sound)

    def _first_bad(self, request: Request) -> list[int | None]:
        """Per group: where the first such block stands among those of a request."""
        tables = self._manager.get_blocks(request.request_id).blocks
        return [
            next((n for n, block in enumerate(table) if block.block_id in self._invalid), None)
            for table in tables
        ]
