"""Moves blocks between a CUDA device and the pinned arena.

Out: one gather kernel on the compute stream copies the blocks into a staging ring in device
memory (a fraction of a millisecond; after it the source is free), then the store stream drains the
ring into the arena by whole-block DMA. A full ring drops the end of the sequence: the engine never
waits for PCIe.

In: one kernel with few thread blocks reads the slots through their mapping and scatters them, on
the load stream, behind the fence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import LoadDone, StoreDone
from vllm_tiered_kv.device.staging import StagingRing
from vllm_tiered_kv.errors import TieredKVError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import cuda as native
from vllm_tiered_kv.native.cpu import HostRegion

logger = logging.getLogger(__name__)

_LOAD_CTAS = 8  # enough to saturate PCIe; more would only take compute away


@dataclass
class _OpenStore:
    done: StoreDone
    event: native.Event | None
    staged: int  # ring units to give back


@dataclass
class _OpenLoad:
    request_id: str
    event: native.Event | None
    error: str | None = None


class CudaCopier:
    def __init__(
        self,
        runs: Mapping[int, BlockRuns],
        geometry: ArenaGeometry,
        arena: Arena,
        device: int,
        compute_stream: Callable[[], int],
        staging_bytes: int,
    ) -> None:
        """`compute_stream` tells the handle of the stream the model runs on right now."""
        self._device = device
        self._layouts = {
            group_id: native.CudaBlockLayout(device, *group_runs.arrays(), group_runs.num_blocks)
            for group_id, group_runs in runs.items()
        }
        self._block_bytes = {group_id: r.block_bytes for group_id, r in runs.items()}
        self._classes = {
            group_id: geometry.class_of_block(r.block_bytes) for group_id, r in runs.items()
        }
        self._geometry = geometry
        self._arena = arena
        self._compute_stream = compute_stream
        self._ring = StagingRing(StagingRing.units(staging_bytes, geometry))
        self._ring_unit = max(geometry.slot_bytes)
        self._staging = native.DeviceBuffer(device, self._ring.capacity * self._ring_unit)
        self._store_stream = native.Stream(device, low_priority=True)
        self._load_stream = native.Stream(device, low_priority=True)
        self._fence = native.Event(device)
        self._gathered = native.Event(device)
        self._stores: deque[_OpenStore] = deque()
        self._stores_done: list[StoreDone] = []
        self._loads: deque[_OpenLoad] = deque()
        self._spare_events: list[native.Event] = []
        self._closed = False

    def open_channel(self) -> CudaChannel:
        return CudaChannel(self._device, self._layouts, self._fence)

    def fence(self) -> None:
        self._fence.record(self._compute_stream())

    def settle_sources(self) -> None:
        self._gathered.synchronize()

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        self._reclaim()
        offsets = self._offsets(transfer)
        nbytes = self._block_bytes[transfer.group_id]
        pinned = int(np.count_nonzero(np.cumprod(offsets + nbytes <= self._arena.ready_bytes)))
        count = min(pinned, self._ring.free)
        reason = None
        if count < len(transfer):
            reason = DropReason.NOT_PINNED_YET if pinned == count else DropReason.STAGING_FULL
        event = None
        try:
            if count:
                event = self._enqueue_store(transfer.head(count), offsets[:count], nbytes)
        except TieredKVError:
            # Some of it may be under way: nothing of this job is used, and the ring units it
            # took come back behind whatever was enqueued.
            logger.exception("blocks could not be stored; they count as dropped")
            self._store_stream.synchronize()
            self._stores.append(
                _OpenStore(StoreDone(job_id, 0, DropReason.COPY_FAILED), None, count)
            )
            return
        self._stores.append(_OpenStore(StoreDone(job_id, count, reason), event, count))

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        try:
            # The fence lies behind every gather of earlier steps: all ran on the compute stream.
            self._load_stream.wait(self._fence)
            for transfer in transfers:
                native.scatter(
                    self._layouts[transfer.group_id],
                    transfer.block_ids,
                    self._arena.region.address,
                    self._arena.nbytes,
                    self._offsets(transfer),
                    self._load_stream.handle,
                    ctas=_LOAD_CTAS,
                )
            event = self._event()
            event.record(self._load_stream.handle)
            self._loads.append(_OpenLoad(request_id, event))
        except TieredKVError as failure:
            logger.exception("a load failed; the request is recomputed")
            # A kernel that did start must not write into blocks given to someone else.
            self._load_stream.synchronize()
            self._loads.append(_OpenLoad(request_id, None, str(failure)))

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        self._reclaim()
        stores, self._stores_done = self._stores_done, []
        loads: list[LoadDone] = []
        while self._loads and self._ended(self._loads[0].event):
            load = self._loads.popleft()
            loads.append(LoadDone(load.request_id, load.error))
        return stores, loads

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._store_stream.synchronize()
        self._load_stream.synchronize()
        self._staging.close()
        for stream in (self._store_stream, self._load_stream):
            stream.close()
        for event in (self._fence, self._gathered, *self._spare_events):
            event.close()

    def _enqueue_store(
        self, transfer: GroupTransfer, offsets: Int64Array, nbytes: int
    ) -> native.Event:
        units = self._ring.take(len(transfer)) * self._ring_unit
        compute = self._compute_stream()
        native.gather(
            self._layouts[transfer.group_id],
            transfer.block_ids,
            self._staging.address,
            self._staging.nbytes,
            units,
            compute,
        )
        self._gathered.record(compute)
        self._store_stream.wait(self._gathered)
        native.copy_to_host(
            self._staging.address,
            units,
            self._arena.region.address,
            offsets,
            nbytes,
            self._store_stream.handle,
            device=self._device,
            host_piece_bytes=self._arena.pin_chunk_bytes,
        )
        event = self._event()
        event.record(self._store_stream.handle)
        return event

    def _reclaim(self) -> None:
        """Notes ended stores, in order; their ring units are free again."""
        while self._stores and self._ended(self._stores[0].event):
            store = self._stores.popleft()
            self._ring.give_back(store.staged)
            self._stores_done.append(store.done)

    def _offsets(self, transfer: GroupTransfer) -> Int64Array:
        return self._geometry.offsets(transfer.slots, self._classes[transfer.group_id])

    def _event(self) -> native.Event:
        return self._spare_events.pop() if self._spare_events else native.Event(self._device)

    def _ended(self, event: native.Event | None) -> bool:
        if event is None:
            return True
        if not event.query():
            return False
        self._spare_events.append(event)
        return True


class CudaChannel:
    """Scatters on a stream of its own, behind the fence.

    The fence may be recorded anew by later steps meanwhile; it only ever moves forward on the
    compute stream, so waiting for a later one waits for the right one too.
    """

    def __init__(
        self, device: int, layouts: Mapping[int, native.CudaBlockLayout], fence: native.Event
    ) -> None:
        self._layouts = layouts
        self._fence = fence
        self._stream = native.Stream(device, low_priority=True)

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        self._stream.wait(self._fence)
        native.scatter(
            self._layouts[group_id],
            block_ids,
            region.address,
            region.nbytes,
            offsets,
            self._stream.handle,
            ctas=_LOAD_CTAS,
        )

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._stream.close()
