"""Copies blocks if the "device" is host memory (vLLM's CPU back-end).

A store runs synchronously: there is no stream to order it, and the next forward pass may overwrite
its source. A load runs in a background thread, concurrently with the compute of other requests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence

from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import LoadDone, PinnedBlocks, StoreDone
from vllm_tiered_kv.errors import TieredKVError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import cpu as native

logger = logging.getLogger(__name__)


class CpuCopier:
    """The `Copier` of vLLM's CPU back-end. The worker's main thread calls it."""

    def __init__(
        self,
        runs: Mapping[int, BlockRuns],
        geometry: ArenaGeometry,
        arena: Arena,
        threads: int = 0,
    ) -> None:
        self._layouts = {
            group_id: native.BlockLayout(*group_runs.arrays(), group_runs.num_blocks)
            for group_id, group_runs in runs.items()
        }
        self._block_bytes = {group_id: r.block_bytes for group_id, r in runs.items()}
        self._geometry = geometry
        self._arena = arena
        self._threads = threads
        self._stores_done: list[StoreDone] = []
        self._step_loads_done: list[int] = []
        self._loads_done: queue.SimpleQueue[LoadDone] = queue.SimpleQueue()
        self._requests: queue.Queue[tuple[str, Sequence[GroupTransfer]] | None] = queue.Queue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve_loads, name="tiered-kv-load", daemon=True
        )
        self._thread.start()

    def open_channel(self) -> CpuChannel:
        return CpuChannel(self._layouts, self._threads)

    def fence(self) -> None:
        pass  # a forward pass on the CPU has finished when its call returns

    def settle_sources(self) -> None:
        pass  # stores are synchronous

    def wait_for_stores(self, newest: int) -> None:
        pass  # stores are synchronous

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        try:
            native.gather(
                self._layouts[transfer.group_id],
                transfer.block_ids,
                self._arena.region,
                self._offsets(transfer),
                self._threads,
            )
            self._stores_done.append(StoreDone(job_id, len(transfer)))
        except TieredKVError:
            logger.exception("storing %d blocks failed; they are dropped", len(transfer))
            self._stores_done.append(StoreDone(job_id, 0, DropReason.COPY_FAILED))

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        self._requests.put((request_id, transfers))

    def locate(self, transfer: GroupTransfer) -> PinnedBlocks:
        return PinnedBlocks(
            transfer.group_id, transfer.block_ids, self._arena.region, self._offsets(transfer)
        )

    def step_load(
        self,
        job_ids: Sequence[int],
        blocks: Sequence[PinnedBlocks],
        by_layer: bool,
        overtakes: bool = False,
    ) -> None:
        for part in blocks:
            native.scatter(
                self._layouts[part.group_id],
                part.block_ids,
                part.region,
                part.offsets,
                self._threads,
            )
        self._step_loads_done += job_ids

    def can_load_early(self) -> bool:
        return True

    def load_early(self, job_ids: Sequence[int], blocks: Sequence[PinnedBlocks]) -> None:
        self.step_load(job_ids, blocks, False)

    def begin_step(self) -> None:
        pass

    def wait_for_layer(self, name: str) -> None:
        pass  # `step_load` is synchronous

    def finish_step_loads(self) -> None:
        pass

    def settle(self) -> None:
        self._requests.join()

    def poll_step_loads(self) -> list[int]:
        done, self._step_loads_done = self._step_loads_done, []
        return done

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        stores, self._stores_done = self._stores_done, []
        loads = []
        while not self._loads_done.empty():
            loads.append(self._loads_done.get())
        return stores, loads

    def close(self) -> None:
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def _offsets(self, transfer: GroupTransfer) -> Int64Array:
        size_class = self._geometry.class_of_block(self._block_bytes[transfer.group_id])
        return self._geometry.offsets(transfer.slots, size_class)

    def _serve_loads(self) -> None:
        while (request := self._requests.get()) is not None:
            request_id, transfers = request
            error = None
            try:
                for transfer in transfers:
                    native.scatter(
                        self._layouts[transfer.group_id],
                        transfer.block_ids,
                        self._arena.region,
                        self._offsets(transfer),
                        self._threads,
                    )
            except Exception as failure:  # any failure must be reported, or the request would hang
                logger.exception("the load of request %s failed; it is recomputed", request_id)
                error = str(failure)
            self._loads_done.put(LoadDone(request_id, error, time.monotonic()))
            self._requests.task_done()
        self._requests.task_done()  # for the None that ends the loop


class CpuChannel:
    """The `Channel` of `CpuCopier`. Copies synchronously, in the calling thread."""

    def __init__(self, layouts: Mapping[int, native.BlockLayout], threads: int) -> None:
        self._layouts = layouts
        self._threads = threads

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: native.HostRegion, offsets: Int64Array
    ) -> None:
        native.scatter(self._layouts[group_id], block_ids, region, offsets, self._threads)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
