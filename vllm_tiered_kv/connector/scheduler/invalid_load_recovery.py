"""Recovery after a step has read GPU blocks whose load failed.

The connector reports these invalid blocks to vLLM. vLLM discards the tokens that the step sampled
for requests that hold them, and lets the first holder of each block recompute it. This alone can
still produce wrong tokens:

- The invalid blocks, and those computed from them, stay in vLLM's prefix cache. A request that
  arrives before they are recomputed, or after the recomputing request was aborted, reads them.
- Other holders of the same block continue after it at once, before the first holder has
  recomputed it.
- Stores of what the step computed are in flight, also for requests that have finished since.

This is very rare, so nothing is tracked for it: everything that might be wrong is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.load_planner import LoadPlanner
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.store_planner import StorePlanner
from vllm_tiered_kv.connector.scheduler.verification import Verification

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


_LOADING = "WAITING_FOR_REMOTE_KVS"


class InvalidLoadRecovery:
    """Undoes the effects of one step that read invalid blocks. The scheduler half builds it, in the
    scheduler's thread, after vLLM has rewound its requests and before the step's store reports are
    processed: those reports make blocks readable and send them to daemons."""

    def __init__(
        self,
        manager: KVCacheManager,
        groups: Sequence[Group],
        invalid_blocks: set[int],
        states: Collection[RequestState],
        others: Iterable[Request],
    ) -> None:
        """`states` and `others` are all requests of the engine: the cached and the uncached."""
        self._manager = manager
        self._groups = groups
        self._invalid = invalid_blocks
        self._states = states
        self._first_invalid: dict[str, list[int | None]] = {}
        """By holder of invalid blocks, per group: the position of the first invalid block."""
        self._holders: list[Request] = []
        self._held_invalid: set[int] = set()
        for request in (*(state.request for state in states), *others):
            self._record_holder(request)

    def undo(
        self,
        tier: CpuTier,
        loads: LoadPlanner,
        stores: StorePlanner,
        verification: Verification | None,
    ) -> None:
        self._rewind_holders()
        for state in self._states:
            if self._still_awaits_load(state.request):
                loads.restart_after_failed_load(state)
        if not self._was_any_read:
            return
        if verification is not None:
            verification.void(self._states)
        stores.on_hashes_lost(self._states)
        self._evict_gpu_blocks()
        self._drop_tier_blocks(tier)
        for state in self._states:
            loads.forget_blocks(state)  # they have lost their hashes
            stores.store_again(state)

    def _still_awaits_load(self, request: Request) -> bool:
        """Whether a request holds invalid blocks that it has not read yet. This happens with
        another connector that loads asynchronously and reports failures by block."""
        return request.request_id in self._first_invalid and request.status.name == _LOADING

    @property
    def _was_any_read(self) -> bool:
        """False if every invalid block belongs to a request that still waits for its load, because
        such blocks are not shared. A block without a holder belonged to a request that has finished
        since."""
        blocks = self._manager.block_pool.blocks
        return (
            not self._invalid <= self._held_invalid
            or any(not self._still_awaits_load(request) for request in self._holders)
            or any(blocks[block_id].block_hash is not None for block_id in self._invalid)
        )

    def _rewind_holders(self) -> None:
        """Lets every holder recompute its invalid blocks. The holder that vLLM chose may need many
        steps to reach them, or be gone."""
        for request in self._holders:
            first_invalid = self._first_invalid[request.request_id]
            for group, position in zip(self._groups, first_invalid, strict=True):
                if position is not None:
                    sound = position * group.block_size
                    request.num_computed_tokens = min(request.num_computed_tokens, sound)

    def _evict_gpu_blocks(self) -> None:
        """Removes all blocks from vLLM's prefix cache. Deferred and lazy stores are dropped with
        it, because they require the hashes of their blocks."""
        self._manager.evict_blocks(set(range(len(self._manager.block_pool.blocks))))

    def _drop_tier_blocks(self, tier: CpuTier) -> None:
        """Removes everything from the tier that may have been computed from invalid blocks, stores
        in flight included. Blocks that were valid after all are stored again."""
        tier.ledger.spoil_stores()
        for state in self._states:
            first_invalid = self._first_invalid.get(state.request.request_id)
            if first_invalid is not None:
                state.keys.extend(state.request, state.request.num_tokens)
                for keys, position in zip(state.keys.of_group, first_invalid, strict=True):
                    for key in keys[position:] if position is not None else ():
                        tier.index.remove(key)
                tail = state.load.tail
                if tail is not None and any(each is not None for each in first_invalid):
                    tier.index.remove(tail.key)

    def _record_holder(self, request: Request) -> None:
        """Records where this request holds invalid blocks, if it holds any."""
        tables = self._manager.get_blocks(request.request_id).blocks
        ids = [[block.block_id for block in table] for table in tables]
        held = self._invalid.intersection(chain.from_iterable(ids))
        if held:
            self._held_invalid |= held
            self._holders.append(request)
            self._first_invalid[request.request_id] = [
                next((n for n, block_id in enumerate(table) if block_id in held), None)
                for table in ids
            ]
