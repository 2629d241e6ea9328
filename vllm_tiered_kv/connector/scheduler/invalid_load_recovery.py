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

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.store_planner import StorePlanner
from vllm_tiered_kv.connector.scheduler.verification import Verification

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


_LOADING = "WAITING_FOR_REMOTE_KVS"


class InvalidLoadRecovery:
    """To be dealt with when vLLM has seen to the requests it starts over, before any report of the
    step is believed: what becomes readable is sent on to daemons, for everybody."""

    def __init__(
        self,
        manager: KVCacheManager,
        groups: Sequence[Group],
        invalid_blocks: set[int],
        states: Collection[RequestState],
        others: Iterable[Request],
    ) -> None:
        """`states`, `others`: of all requests that there are, those we have to do with and those we
        leave alone."""
        self._manager = manager
        self._groups = groups
        self._invalid = invalid_blocks
        self._states = states
        self._bad: dict[str, list[int | None]] = {}
        """Of those who hold such blocks, per group: where the first of them stands."""
        self._holders: list[Request] = []
        self._held: set[int] = set()
        for request in (*(state.request for state in states), *others):
            self._record_holder(request)

    def undo(
        self,
        ledger: TransferLedger,
        index: BlockIndex,
        stores: StorePlanner,
        verification: Verification | None,
    ) -> None:
        self._start_over()
        for state in self._states:
            if self._is_waiting(state.request):
                state.restart_after_failed_load()
        if not self._was_read:
            return
        if verification is not None:
            verification.void(self._states)
        stores.on_hashes_lost(self._states)
        self._forget_on_gpu()
        self._forget_in_tier(ledger, index)

    def _is_waiting(self, request: Request) -> bool:
        """Whether a request holds such blocks that it has not read yet: another connector loads
        beside the steps, and tells of failures by block."""
        return request.request_id in self._bad and request.status.name == _LOADING

    @property
    def _was_read(self) -> bool:
        """False if all such blocks belong to requests that still wait for their load: these are
        theirs alone. Blocks of nobody are those of a request that has ended meanwhile."""
        blocks = self._manager.block_pool.blocks
        return (
            not self._invalid <= self._held
            or any(not self._is_waiting(request) for request in self._holders)
            or any(blocks[block_id].block_hash is not None for block_id in self._invalid)
        )

    def _start_over(self) -> None:
        """Each request computes such blocks itself: the one that vLLM chose may take many steps to
        come to them, or be gone."""
        for request in self._holders:
            for group, bad in zip(self._groups, self._bad[request.request_id], strict=True):
                if bad is not None:
                    sound = bad * group.block_size
                    request.num_computed_tokens = min(request.num_computed_tokens, sound)

    def _forget_on_gpu(self) -> None:
        """Nothing on the GPU is offered to other requests any more. By their missing hashes,
        whatever waits to be stored later is given up, too."""
        self._manager.evict_blocks(set(range(len(self._manager.block_pool.blocks))))

    def _forget_in_tier(self, ledger: TransferLedger, index: BlockIndex) -> None:
        """Nothing that may have been read from such blocks becomes or stays readable. What is right
        after all is stored again."""
        ledger.spoil_stores()
        for state in self._states:
            bad_positions = self._bad.get(state.request.request_id)
            if bad_positions is not None:
                state.keys.extend(state.request, state.request.num_tokens)
                for keys, bad in zip(state.keys.of_group, bad_positions, strict=True):
                    for key in keys[bad:] if bad is not None else ():
                        index.remove(key)
                if state.tail is not None and any(bad is not None for bad in bad_positions):
                    index.remove(state.tail.key)
            state.stored = [0] * len(state.stored)
            state.has_tail = False
            state.on_gpu = state.computed_again = 0  # what was there has lost its hash

    def _record_holder(self, request: Request) -> None:
        tables = self._manager.get_blocks(request.request_id).blocks
        ids = [[block.block_id for block in table] for table in tables]
        held = self._invalid.intersection(chain.from_iterable(ids))
        if held:
            self._held |= held
            self._holders.append(request)
            self._bad[request.request_id] = [
                next((n for n, block_id in enumerate(table) if block_id in held), None)
                for table in ids
            ]
