"""The half of the connector that lives with a worker: arena, copies, remote I/O, reports.

vLLM calls it once a step, always in this order: `before_forward`, the forward, `start_loads`,
`after_forward`, `results`. Loads may also start before the forward when another connector loads
synchronously; the fence set in `before_forward` covers both.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.identity.shard import Holding
from vllm_tiered_kv.connector.metadata import TieredKVMetadata, TieredKVWorkerMetadata
from vllm_tiered_kv.connector.worker.block_verifier import BlockVerifier
from vllm_tiered_kv.connector.worker.kv_layout import group_runs, require_whole_blocks
from vllm_tiered_kv.connector.worker.load_times import LoadTimes
from vllm_tiered_kv.connector.worker.load_tracker import LoadTracker
from vllm_tiered_kv.connector.worker.number_formats import layer_numbers
from vllm_tiered_kv.connector.worker.remote_io import RemoteIO
from vllm_tiered_kv.connector.worker.replica_striping import ReplicaStriping
from vllm_tiered_kv.connector.worker.step_loads import StepLoads
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Fetched, GroupTransfer, LoadJob, StoreJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import Copier, StoreDone
from vllm_tiered_kv.device.pinning import Pin, Unpin
from vllm_tiered_kv.device.replica_arena import open_replica_arena
from vllm_tiered_kv.errors import TieredKVError, UnsupportedError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.address import EngineIdentity

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_STEPS_IN_FLIGHT = 2  # of an engine with a single worker


class WorkerHalf:
    def __init__(
        self,
        config: TieredKVConfig,
        geometry: ArenaGeometry,
        rank: int,
        holding: Holding,
        steps_can_be_discarded: bool = True,
        cache_dtype: str = "auto",
        shared_fd: int | None = None,
        steps_zero_blocks: bool = False,
        loads_overtake: bool = False,
    ) -> None:
        """`steps_can_be_discarded` is explained at `StepLoads`; `cache_dtype` is vLLM's option;
        `shared_fd` is of memory that all ranks with the same KV have, and is taken over;
        `steps_zero_blocks`: vLLM may clear new blocks ahead of any hook of ours; `loads_overtake`:
        it hands out no block that a step under way uses, so loads need not wait for that step."""
        self._verifier: BlockVerifier | None = None
        if config.verify_fraction:
            self._verifier = BlockVerifier(geometry, config.verify_tolerance)
        self._cache_dtype = cache_dtype
        self._step_loads = StepLoads(steps_can_be_discarded)
        self._config = config
        self._holding = holding
        self._shared_fd = shared_fd
        self._steps_zero_blocks = steps_zero_blocks
        self._loads_overtake = loads_overtake
        self._share = ReplicaStriping()
        self._remote: RemoteIO | None = None
        self._loads = LoadTracker()
        self._times = LoadTimes()
        self._measured_step: int | None = None
        self._step_thread: int | None = None
        self._put: dict[int, list[StoreReport]] = {}
        self._remote_failures: set[str] = set()
        self._probed: dict[str, Fetched] = {}
        self._told_arenas: dict[bytes, int] = {}
        self._layers_not_seen: set[str] = set()
        self._pinning: Callable[[], tuple[Pin | None, Unpin | None]] = lambda: (None, None)
        self._geometry = geometry
        self.rank = rank
        self._told_usable: int | None = None
        self.last_told: deque[TieredKVWorkerMetadata] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._due: list[StoreJob] = []  # stores of this step that its forward has to precede
        self.is_in_step = False
        """A forward is being enqueued; vLLM may deal with an earlier step's output meanwhile."""
        self._copier: Copier | None = None
        self.arena: Arena | None = None
        self._stored: dict[int, list[StoreReport]] = {}
        self.block_bytes: tuple[int, ...] = ()
        self.wait_for_sources = False
        """Set when other connectors write GPU blocks on streams of their own, before any hook of
        ours: the host waits until stores have read theirs."""
        self.tells_block_bytes = False
        """Set when the scheduler is still to be told of `block_bytes`, for want of a handshake."""

    def register_kv_caches(
        self, kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig
    ) -> None:
        if self._config.remote:
            require_whole_blocks(kv_caches, kv_cache_config)
        runs = group_runs(kv_caches, kv_cache_config)
        self.block_bytes = tuple(runs[group_id].block_bytes for group_id in sorted(runs))
        # vLLM calls us before a layer unless it runs a whole graph; better seen than assumed.
        self._layers_not_seen = {name for group in runs.values() for name, _ in group.layer_ends}
        device = next(iter(kv_caches.values())).device
        self._close_copies()
        is_fresh = self.arena is None
        if self.arena is None:
            # Kept if vLLM registers its caches anew: the scheduler's index speaks of this memory.
            self.arena = self._open_arena(device)
        # To measure copies takes memory that nobody else writes to.
        may_measure = is_fresh and self._share.is_first
        self._copier = _open_copier(
            device, runs, self._config, self._geometry, self.arena, may_measure
        )
        self._pinning = functools.partial(_pinning, device)
        if self._verifier is not None:
            self._verifier.describe(layer_numbers(kv_caches, runs, self._cache_dtype))
        logger.info(
            "CPU tier of %s on %s: %d slabs, %d byte runs a block",
            format_size(self.arena.nbytes),
            device,
            self._geometry.num_slabs,
            max(len(group.runs) for group in runs.values()),
        )

    def before_forward(self, metadata: TieredKVMetadata) -> None:
        """Lets the coming forward and loads wait until stores have read the blocks they write."""
        for job in self._due:
            # vLLM skipped `after_forward` of the last step (as it does on inner pipeline stages
            # with speculation): too late to read the blocks, but not to say so.
            self._report(job.job_id, StoreReport(0, DropReason.COPY_FAILED))
        self._due = metadata.stores_after
        self.is_in_step = True
        if self._verifier is not None:
            self._verifier.begin_step(metadata.verifications)
        self._measured_step = metadata.measured_step
        self._device.finish_step_loads()
        self._step_thread = threading.get_ident()
        if metadata.identity is not None and self._remote is None:
            self._remote = self._open_remote(metadata.identity)
        if self._remote is not None:
            # Not with the loads: those begin after the forward as a rule.
            self._remote.step_begins()
        self._store(metadata.stores_before)
        self._wait_for_stores(metadata.wait_for_stores)
        self._device.begin_step()
        if metadata.loads:
            self._device.fence()

    def start_early(
        self,
        stores: Sequence[StoreJob],
        loads: Sequence[LoadJob],
        wait_for_stores: int | None = None,
    ) -> bool:
        """Begins loads ahead of a step that is still being planned, see `early_loads`, behind the
        stores that read their blocks. False: nothing was done, and it is up to the step."""
        if (
            self._copier is None
            or self.wait_for_sources
            or self._step_thread != threading.get_ident()
            or not self._copier.can_load_early()
            or (self._remote is None and any(job.remote for job in loads))
        ):
            return False
        self._copier.finish_step_loads()
        self._store(stores)
        self._wait_for_stores(wait_for_stores)
        self._copier.fence()
        self._step_loads.start_early(self._copier, self._remote, loads)
        return True

    def start_loads(self, metadata: TieredKVMetadata, calls_each_layer: bool = False) -> None:
        """`calls_each_layer`: the coming forward calls `before_layer` as it comes to each."""
        ahead = [job for job in metadata.loads if job.step_load is not None]
        if ahead:
            overtakes = self._loads_overtake and not self.wait_for_sources
            if not overtakes:
                # vLLM may have cleared these very blocks since `before_forward`; this is still
                # ahead of the forward.
                self._device.fence()
            by_layer = calls_each_layer and not self._layers_not_seen
            self._step_loads.start(self._device, self._remote, ahead, by_layer, overtakes)
        for job in metadata.loads:
            if job.step_load is not None:
                continue
            self._loads.begin(job.request_id, bool(job.transfers) + bool(job.remote))
            if job.transfers:
                self._times.begin(job.request_id, Tier.CPU)
                self._device.load(job.request_id, job.transfers)
            if job.remote:
                assert self._remote is not None, "a load from a daemon that nobody configured"
                self._times.begin(job.request_id, Tier.REMOTE)
                self._remote.loader.load(job.request_id, job.remote)
        for put in metadata.puts:
            assert self._remote is not None, "a put to a daemon that nobody configured"
            self._remote.writer.write(put)
        for probe in metadata.probes:
            assert self._remote is not None, "a probe with a daemon that nobody configured"
            self._remote.loader.probe(probe)

    def before_layer(self, name: str) -> None:
        if self._layers_not_seen:
            self._layers_not_seen.discard(name)
        self._device.wait_for_layer(name)

    def finish_step_loads(self) -> None:
        """The layers of the model are enqueued; what follows may read any of them."""
        self._device.finish_step_loads()

    def after_forward(self) -> None:
        """The forward is enqueued: what it fills can be read behind it."""
        due, self._due = self._due, []
        self.is_in_step = False
        self._device.finish_step_loads()
        self._store(due)
        if self._verifier is not None:
            self._copy_out([(job.job_id, job.transfer) for job in self._verifier.take_copies()])

    def results(self) -> KVConnectorTransferResults:
        """Loads that ended since the last call, each reported exactly once."""
        results = KVConnectorTransferResults()
        if self._copier is None:
            return results
        self._collect(self._copier)
        if self._remote is not None:
            self._remote.step_ends()
        for request_id, failed in self._loads.take_finished():
            results.finished_recving.add(request_id)
            if failed is not None:
                results.failed_recving.add(request_id)
            if failed is Tier.REMOTE:
                self._remote_failures.add(request_id)
        return results

    def _collect(self, copier: Copier) -> None:
        """What has ended since the last call."""
        self._step_loads.poll(copier)
        stores, loads = copier.poll()
        for store in stores:
            if self._verifier is not None and self._take_to_verify(self._verifier, store):
                continue
            self._report(store.job_id, self._share.end(store))
        for load in loads:
            self._times.end(load.request_id, Tier.CPU, load.ended_at, load.error is None)
            self._loads.end(load.request_id, Tier.CPU if load.error is not None else None)
        if self._remote is not None:
            for load in self._remote.loader.poll():
                self._times.end(load.request_id, Tier.REMOTE, load.ended_at, load.error is None)
                self._loads.end(load.request_id, Tier.REMOTE if load.error is not None else None)
            self._probed |= self._remote.loader.take_probed()
            for put in self._remote.writer.poll():
                self._put.setdefault(put.job_id, []).append(put.report)
        self._times.asked()

    def _take_to_verify(self, verifier: BlockVerifier, store: StoreDone) -> bool:
        assert self.arena is not None, "a copy without an arena"
        return verifier.copied(store, self.arena, self._remote.read if self._remote else None)

    def take_invalid_blocks(self) -> set[int]:
        return self._step_loads.take_invalid_blocks()

    def worker_metadata(self) -> TieredKVWorkerMetadata | None:
        """Stores that ended since the last call, and how much memory is usable if that changed."""
        usable = self.arena.ready_bytes if self.arena is not None else None
        arenas = self._remote.ready_arenas if self._remote is not None else {}
        if (
            not self._stored
            and not self._put
            and not self._remote_failures
            and not self._probed
            and not self._step_loads
            and not self._times
            and not self._verifier
            and not self.tells_block_bytes
            and self._measured_step is None
            and usable == self._told_usable
            and arenas == self._told_arenas
        ):
            return None
        told = TieredKVWorkerMetadata(
            self._stored,
            {} if usable is None else {self.rank: usable},
            self._put,
            self._remote_failures,
            self._step_loads.take_ended(),
            self._times.take(),
            self._measured_step,
            {self.rank: arenas} if arenas != self._told_arenas else {},
            {} if self._verifier is None else self._verifier.take_verdicts(),
            {self.rank: self.block_bytes} if self.tells_block_bytes else {},
            {name: [fetched] for name, fetched in self._probed.items()},
        )
        self._measured_step = None
        self.tells_block_bytes = False
        self._stored, self._put, self._remote_failures, self._probed = {}, {}, set(), {}
        self._told_usable, self._told_arenas = usable, arenas
        self.last_told.append(told)
        return told

    def shutdown(self) -> None:
        """Gives everything back. On a GPU that has failed there may be nothing left to give."""
        try:
            self._close_copies()
            if self._verifier is not None:
                self._verifier.close()
            if self.arena is not None:
                self.arena.close()
            if self._shared_fd is not None:
                os.close(self._shared_fd)
        except TieredKVError as error:
            logger.warning("the CPU tier could not be closed in order: %s", error)
        self.arena = self._shared_fd = None
        self._share = ReplicaStriping()

    def _report(self, job_id: int, report: StoreReport) -> None:
        self._stored.setdefault(job_id, []).append(report)

    @property
    def _device(self) -> Copier:
        assert self._copier is not None, "vLLM did not register its KV caches"
        return self._copier

    def _store(self, jobs: Sequence[StoreJob]) -> None:
        self._copy_out([(job.job_id, self._share.begin(job, self._usable(job))) for job in jobs])

    def _usable(self, job: StoreJob) -> int:
        """How many first slots of a store lie in memory that a copy may touch already."""
        assert self.arena is not None, "a store without an arena"
        ready, transfer = self.arena.ready_bytes, job.transfer
        if ready >= self._geometry.capacity_bytes:
            return len(transfer)
        nbytes = self.block_bytes[transfer.group_id]
        offsets = self._geometry.offsets(transfer.slots, self._geometry.class_of_block(nbytes))
        beyond = np.flatnonzero(offsets + nbytes > ready)
        return int(beyond[0]) if len(beyond) else len(transfer)

    def _copy_out(self, copies: Sequence[tuple[int, GroupTransfer]]) -> None:
        for job_id, transfer in copies:
            self._device.store(job_id, transfer)
        if copies and self.wait_for_sources:
            self._device.settle_sources()
        elif copies and self._steps_zero_blocks:
            # The hook before the next forward would be too late.
            self._device.wait_for_stores(max(job_id for job_id, _ in copies))

    def _wait_for_stores(self, newest: int | None) -> None:
        if newest is not None:
            self._device.wait_for_stores(newest)

    def _open_arena(self, device: torch.device) -> Arena:
        pin, unpin = _pinning(device)
        nbytes, replicas = self._geometry.capacity_bytes, self._holding.replicas
        if replicas == 1:
            return Arena(nbytes, pin, unpin)
        fd, self._shared_fd = self._shared_fd, None
        arena = open_replica_arena(nbytes, replicas, fd, pin, unpin)
        if fd is not None:
            self._share_work()
        return arena

    def _share_work(self) -> None:
        """All replicas fill one arena: each block is copied there by one of them."""
        self._share = ReplicaStriping(self._holding.replica, self._holding.replicas)
        if self._verifier is not None:
            self._verifier.is_ours = self._holding.sends

    def _open_remote(self, identity: EngineIdentity) -> RemoteIO:
        assert self.arena is not None, "vLLM did not register its KV caches"
        if self.block_bytes:
            # Where no handshake has compared them (inside a MultiConnector), the daemon does.
            identity = dataclasses.replace(identity, block_bytes=self.block_bytes)
        return RemoteIO(
            self._config,
            identity,
            self._holding,
            self._geometry,
            self.arena,
            self._device.open_channel,
            self._pinning,
        )

    def _close_copies(self) -> None:
        """Ends what is under way: the scheduler must hear of all of it, and nothing may read memory
        that is given up."""
        if self._remote is not None:
            self._remote.settle()
        if self._copier is not None:
            self._copier.settle()
            self._collect(self._copier)
        self._step_loads.close()
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None


def _pinning(device: torch.device) -> tuple[Pin | None, Unpin | None]:
    """How memory is made fit for transfers to and from this device."""
    if device.type == "cpu":
        return None, None
    if device.type != "cuda":
        raise UnsupportedError(f"vllm-tiered-kv supports CPU and CUDA devices, not {device.type!r}")
    from vllm_tiered_kv.native import cuda

    reason = cuda.why_unavailable()
    if reason is not None:
        raise UnsupportedError(f"vllm-tiered-kv cannot use this GPU: {reason}")
    # Bound to the device: a thread of a later rank must not wake up the first GPU.
    index = _cuda_index(device)
    return (
        functools.partial(cuda.host_register, device=index),
        functools.partial(cuda.host_unregister, device=index),
    )


def _open_copier(
    device: torch.device,
    runs: dict[int, BlockRuns],
    config: TieredKVConfig,
    geometry: ArenaGeometry,
    arena: Arena,
    is_fresh: bool,
) -> Copier:
    if device.type == "cpu":
        from vllm_tiered_kv.device.cpu_copier import CpuCopier

        return CpuCopier(runs, geometry, arena, config.copy_threads)
    import torch

    from vllm_tiered_kv.device.cuda_copier import CudaCopier
    from vllm_tiered_kv.device.inbound_choice import TuningFile
    from vllm_tiered_kv.device.staging import affordable_staging

    index = _cuda_index(device)
    free, _ = torch.cuda.mem_get_info(index)
    return CudaCopier(
        runs,
        geometry,
        arena,
        index,
        lambda: int(torch.cuda.current_stream(index).cuda_stream),
        affordable_staging(free),
        TuningFile(
            f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}",
            config.copy_strategy,
            config.tuning_path(),
        ),
        is_fresh,
    )


def _cuda_index(device: torch.device) -> int:
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)
