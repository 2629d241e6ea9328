"""Transfers under way: what they hold, and what becomes of it when they are reported.

A store is final when every rank has reported it; what all ranks stored is committed, the rest is
aborted. A load holds pins until it is reported finished, well or badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.metrics.recorder import Recorder


@dataclass(frozen=True)
class StoreReport:
    """One rank's word on a store: the first `stored` blocks arrived; why the others did not."""

    stored: int
    reason: DropReason | None = None


@dataclass
class _OpenStore:
    slots: list[int]
    block_bytes: int
    on_drop: Callable[[DropReason], None] | None
    reports: list[StoreReport] = field(default_factory=list)


@dataclass(frozen=True)
class _OpenLoad:
    keys: list[BlockKey]
    slots: list[int]
    nbytes: int


class TransferLedger:
    """Owns every pin and reservation between planning and report."""

    def __init__(self, index: BlockIndex, recorder: Recorder, num_ranks: int) -> None:
        self._index = index
        self._recorder = recorder
        self._num_ranks = num_ranks
        self._next_job_id = 0
        self._stores: dict[int, _OpenStore] = {}
        self._loads: dict[str, _OpenLoad] = {}

    @property
    def has_open_stores(self) -> bool:
        return bool(self._stores)

    @property
    def pending_store_blocks(self) -> int:
        return sum(len(store.slots) for store in self._stores.values())

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loads

    def open_store(
        self,
        slots: Sequence[int],
        block_bytes: int,
        on_drop: Callable[[DropReason], None] | None = None,
    ) -> int:
        """A job id for reserved slots. `on_drop` is called if not all of them arrive."""
        job_id = self._next_job_id
        self._next_job_id += 1
        self._stores[job_id] = _OpenStore(list(slots), block_bytes, on_drop)
        return job_id

    def report_store(self, job_id: int, reports: Iterable[StoreReport]) -> None:
        store = self._stores[job_id]
        store.reports.extend(reports)
        if len(store.reports) > self._num_ranks:
            raise InvariantError(f"store {job_id} was reported by more ranks than there are")
        if len(store.reports) == self._num_ranks:
            del self._stores[job_id]
            self._settle(store)

    def open_load(self, request_id: str, keys: Sequence[BlockKey], nbytes: int) -> list[int]:
        """Pins the blocks of a load and returns their slots."""
        if request_id in self._loads:
            raise InvariantError(f"request {request_id} is already loading")
        slots = self._index.pin(keys)
        self._loads[request_id] = _OpenLoad(list(keys), slots, nbytes)
        return slots

    def close_load(self, request_id: str, failed: bool) -> None:
        """The load is over on all ranks. Blocks of a failed one are not offered again."""
        load = self._loads.pop(request_id)
        tier = Tier.CPU.value
        if failed:
            for key in load.keys:
                self._index.remove(key)
            self._recorder.add(names.LOAD_FAILURES, 1, tier)
        else:
            self._recorder.add(names.LOADED_BLOCKS, len(load.keys), tier)
            self._recorder.add(names.LOADED_BYTES, load.nbytes, tier)
        self._index.unpin(load.slots)

    def drop(self, blocks: int, reason: DropReason) -> None:
        self._recorder.add(names.DROPPED_BLOCKS, blocks, Tier.CPU.value, reason.value)

    def _settle(self, store: _OpenStore) -> None:
        least = min(store.reports, key=lambda report: report.stored)
        committed = sum(self._index.commit(slot) for slot in store.slots[: least.stored])
        for slot in store.slots[least.stored :]:
            self._index.abort(slot)
        tier = Tier.CPU.value
        self._recorder.add(names.STORED_BLOCKS, committed, tier)
        self._recorder.add(names.STORED_BYTES, committed * store.block_bytes, tier)
        self.drop(least.stored - committed, DropReason.RESET)
        if least.stored < len(store.slots):
            reason = least.reason or DropReason.COPY_FAILED
            self.drop(len(store.slots) - least.stored, reason)
            if store.on_drop is not None:
                store.on_drop(reason)
