"""Copies blocks between a CUDA device and the pinned arena.

Stores run on the store stream, after the forward pass that filled the blocks, and read the blocks
in place (`outbound`). No block is dropped because a step was large. The next writer of a block
waits on the device until the store has read it (`wait_for_stores`).

Loads run on the load stream, after the fence, with the fastest strategy for their size (`inbound`).
The compute stream waits for blocks that the next forward pass reads. If vLLM calls the connector
before each layer, it waits only for the blocks' parts of the layers reached so far.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.config import CopyStrategy
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import LoadDone, PinnedBlocks, StoreDone
from vllm_tiered_kv.device.inbound import Direct, Pages
from vllm_tiered_kv.device.inbound_choice import ChosenInbound
from vllm_tiered_kv.device.layer_parts import LayerParts
from vllm_tiered_kv.device.outbound import open_outbound
from vllm_tiered_kv.errors import TieredKVError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import cuda as native
from vllm_tiered_kv.native.cpu import HostRegion

logger = logging.getLogger(__name__)

_BY_LAYER_BYTES = 512 << 20  # 10 ms of PCIe 5: the duration of a forward pass over few tokens
_MAX_BACKLOG_BYTES = 2 << 30
"""Limit of unfinished stores when a forward pass begins; more than the largest step fills. It
bounds how long a step waits before it overwrites a block that is still being stored, and how far
the device can run ahead of a slow bus."""


@dataclass
class _OpenStore:
    done: StoreDone
    event: native.Event | None
    nbytes: int = 0


@dataclass
class _OpenLoad:
    request_id: str
    event: native.Event | None
    error: str | None = None


@dataclass
class _OpenStepLoad:
    job_ids: Sequence[int]
    event: native.Event


class CudaCopier:
    """The `Copier` of CUDA devices. The worker's main thread calls it."""

    def __init__(
        self,
        runs: Mapping[int, BlockRuns],
        geometry: ArenaGeometry,
        arena: Arena,
        device: int,
        compute_stream: Callable[[], int],
        staging_bytes: int,
        strategy: CopyStrategy,
    ) -> None:
        """`compute_stream` returns the handle of the stream the model currently runs on.
        `staging_bytes` is the size of the staging buffer of each direction."""
        self._device = device
        self._layouts = {
            group_id: native.CudaBlockLayout(device, *group_runs.arrays(), group_runs.num_blocks)
            for group_id, group_runs in runs.items()
        }
        self._block_bytes = {group_id: r.block_bytes for group_id, r in runs.items()}
        self._geometry = geometry
        self._arena = arena
        self._compute_stream = compute_stream
        self._store_stream = native.Stream(device, low_priority=True)
        self._outbound = open_outbound(device, runs, self._layouts, staging_bytes)
        self._load_stream = native.Stream(device, low_priority=True)
        self._inbound = ChosenInbound(device, runs, self._layouts, staging_bytes, strategy)
        self._fallback = Pages(device, runs)
        self._fence = native.Event(device)
        self._filled = native.Event(device)
        self._stores: deque[_OpenStore] = deque()
        self._loads: deque[_OpenLoad] = deque()
        self._parts = {group_id: LayerParts.of(r) for group_id, r in runs.items()}
        self._part_events = [native.Event(device) for _ in self._parts[min(self._parts)].ends]
        self._parts_waited: int | None = None  # None: no load by layer is running
        self._step_loads: deque[_OpenStepLoad] = deque()
        self._early: native.Event | None = None  # newest early load that no step waits for yet
        self._step_stream: int | None = None  # compute stream of the last step
        self._spare_events: list[native.Event] = []
        self._closed = False
        self.fence()
        self._load_stream.wait(self._fence)  # vLLM may still be initializing its cache

    def open_channel(self) -> CudaChannel:
        return CudaChannel(self._device, self._layouts, self._fence)

    def fence(self) -> None:
        self._fence.record(self._compute_stream())

    def settle_sources(self) -> None:
        self._outbound.synchronize()
        self._store_stream.synchronize()

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        nbytes = self._block_bytes[transfer.group_id]
        ends = self._offsets(transfer) + nbytes
        count = int(np.count_nonzero(np.cumprod(ends <= self._arena.ready_bytes)))
        reason = None if count == len(transfer) else DropReason.NOT_PINNED_YET
        event = None
        try:
            if count:
                event = self._enqueue_store(self.locate(transfer.head(count)))
        except TieredKVError:
            # Some copies may be running already; wait for them and use no block of this job.
            logger.exception("storing %d blocks failed; they are dropped", len(transfer))
            self.settle_sources()
            self._stores.append(_OpenStore(StoreDone(job_id, 0, DropReason.COPY_FAILED), None))
            return
        self._stores.append(_OpenStore(StoreDone(job_id, count, reason), event, count * nbytes))

    def wait_for_stores(self, newest: int) -> None:
        last = None
        for store in self._stores:
            if store.done.job_id <= newest and store.event is not None:
                last = store.event
        if last is not None:
            # Waiting for the last store is enough, because the store stream runs in order.
            last.wait_in(self._compute_stream())
            self._load_stream.wait(last)  # loads may overtake the compute stream

    def locate(self, transfer: GroupTransfer) -> PinnedBlocks:
        return PinnedBlocks(
            transfer.group_id, transfer.block_ids, self._arena.region, self._offsets(transfer)
        )

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        try:
            self._load_stream.wait(self._fence)
            for transfer in transfers:
                self._inbound.enqueue(self.locate(transfer), self._load_stream)
            event = self._mark(self._load_stream)
            self._loads.append(_OpenLoad(request_id, event))
        except TieredKVError as failure:
            logger.exception("the load of request %s failed; it is recomputed", request_id)
            # A started copy must not write into blocks that vLLM gives to another request.
            self._settle_loads()
            self._loads.append(_OpenLoad(request_id, None, str(failure)))

    def step_load(
        self,
        job_ids: Sequence[int],
        blocks: Sequence[PinnedBlocks],
        by_layer: bool,
        overtakes: bool = False,
    ) -> None:
        event = self._enqueue_step_load(blocks, by_layer, overtakes)
        if self._parts_waited is None:
            event.wait_in(self._compute_stream())
        self._step_loads.append(_OpenStepLoad(job_ids, event))

    def can_load_early(self) -> bool:
        return self._step_stream == self._compute_stream()

    def load_early(self, job_ids: Sequence[int], blocks: Sequence[PinnedBlocks]) -> None:
        self._early = self._enqueue_step_load(blocks, by_layer=False, overtakes=False)
        self._step_loads.append(_OpenStepLoad(job_ids, self._early))

    def _enqueue_step_load(
        self, blocks: Sequence[PinnedBlocks], by_layer: bool, overtakes: bool
    ) -> native.Event:
        try:
            if not overtakes:
                self._load_stream.wait(self._fence)
            by_layer = by_layer and len(self._parts) == 1
            whole = self._count_whole_loads(blocks) if by_layer else len(blocks)
            for part in blocks[:whole]:
                self._inbound.enqueue(part, self._load_stream)
            if by_layer:
                self._enqueue_parts(blocks[whole:])
            return self._mark(self._load_stream)
        except TieredKVError:
            logger.exception("a load failed; retrying with plain copies")
            self._parts_waited = None
            return self._load_with_fallback(blocks)

    def begin_step(self) -> None:
        self._step_stream = self._compute_stream()
        self._bound_backlog()
        if self._early is not None:
            self._early.wait_in(self._step_stream)  # covers earlier ones: the stream runs in order
            self._early = None

    def wait_for_layer(self, name: str) -> None:
        if self._parts_waited is None:
            return
        part = self._parts[min(self._parts)].part_of_layer.get(name, len(self._part_events) - 1)
        if part >= self._parts_waited:
            self._part_events[part].wait_in(self._compute_stream())
            self._parts_waited = part + 1

    def finish_step_loads(self) -> None:
        if self._parts_waited is None:
            return
        if self._parts_waited < len(self._part_events):  # layers without attention do not wait
            self._part_events[-1].wait_in(self._compute_stream())
        self._parts_waited = None

    def settle(self) -> None:
        self.settle_sources()
        self._settle_loads()

    def poll_step_loads(self) -> list[int]:
        done: list[int] = []
        while self._step_loads and self._ended(self._step_loads[0].event):
            done += self._step_loads.popleft().job_ids
        return done

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        stores: list[StoreDone] = []
        while self._stores and self._ended(self._stores[0].event):
            stores.append(self._stores.popleft().done)
        loads: list[LoadDone] = []
        while self._loads and self._ended(self._loads[0].event):
            load = self._loads.popleft()
            loads.append(LoadDone(load.request_id, load.error))
        return stores, loads

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.settle()
        self._inbound.close()
        self._outbound.close()
        for stream in (self._store_stream, self._load_stream):
            stream.close()
        for event in (self._fence, self._filled, *self._part_events, *self._spare_events):
            event.close()

    def _enqueue_store(self, blocks: PinnedBlocks) -> native.Event:
        self._filled.record(self._compute_stream())
        self._store_stream.wait(self._filled)
        self._outbound.enqueue(blocks, self._store_stream)
        return self._mark(self._store_stream)

    def _bound_backlog(self) -> None:
        """Makes the next forward pass wait for the oldest stores if the backlog is too large."""
        backlog = sum(store.nbytes for store in self._stores)
        last = None
        for store in self._stores:
            if backlog <= _MAX_BACKLOG_BYTES:
                break
            backlog -= store.nbytes
            last = store.event or last
        if last is not None:
            last.wait_in(self._compute_stream())

    def _enqueue_parts(self, blocks: Sequence[PinnedBlocks]) -> None:
        """Enqueues all blocks layer by layer, in the order in which the forward pass reads."""
        begin = 0
        for end, event in zip(self._parts[min(self._parts)].ends, self._part_events, strict=True):
            for part in blocks:
                self._inbound.enqueue_part(part, self._load_stream, begin, end)
            event.record(self._load_stream.handle)
            begin = end
        self._parts_waited = 0

    def _count_whole_loads(self, blocks: Sequence[PinnedBlocks]) -> int:
        """Returns how many leading entries to load whole, which is slightly faster.

        Only the last `_BY_LAYER_BYTES` are loaded by layer: a forward pass is not long enough to
        overlap with more.
        """
        left = sum(len(b.block_ids) * self._block_bytes[b.group_id] for b in blocks)
        for number, part in enumerate(blocks):
            left -= len(part.block_ids) * self._block_bytes[part.group_id]
            if left < _BY_LAYER_BYTES:
                return number
        return len(blocks)

    def _load_with_fallback(self, blocks: Sequence[PinnedBlocks]) -> native.Event:
        """Loads with plain copies, without a kernel. If this fails, no other strategy works."""
        self._settle_loads()
        try:
            self._load_stream.wait(self._fence)
            for part in blocks:
                self._fallback.enqueue(part, self._load_stream)
            event = self._mark(self._load_stream)
        except TieredKVError:
            self._settle_loads()  # some copies may be running already
            raise
        return event

    def _settle_loads(self) -> None:
        self._inbound.synchronize()
        self._load_stream.synchronize()

    def _offsets(self, transfer: GroupTransfer) -> Int64Array:
        size_class = self._geometry.class_of_block(self._block_bytes[transfer.group_id])
        return self._geometry.offsets(transfer.slots, size_class)

    def _mark(self, stream: native.Stream) -> native.Event:
        """Records an event behind the current work of the stream."""
        event = self._spare_events.pop() if self._spare_events else native.Event(self._device)
        event.record(stream.handle)
        return event

    def _ended(self, event: native.Event | None) -> bool:
        if event is None:
            return True
        if not event.query():
            return False
        self._spare_events.append(event)
        return True


class CudaChannel:
    """The `Channel` of `CudaCopier`: scatters on its own stream, after the fence.

    The thread that loads from daemons uses it. Later steps may record the fence again meanwhile.
    The fence only moves forward on the compute stream, so waiting for a later one is correct too.
    """

    def __init__(
        self, device: int, layouts: Mapping[int, native.CudaBlockLayout], fence: native.Event
    ) -> None:
        self._direct = Direct(layouts)
        self._fence = fence
        self._stream = native.Stream(device, low_priority=True)

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        self._stream.wait(self._fence)
        self._direct.enqueue(PinnedBlocks(group_id, block_ids, region, offsets), self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._stream.close()
