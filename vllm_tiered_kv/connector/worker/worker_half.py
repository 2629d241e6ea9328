"""The half of the connector in a worker process: arena, copies, remote I/O, reports.

vLLM calls it in each step, always in this order: `before_forward`, the forward, `start_loads`,
`after_forward`, `results`. If another connector loads synchronously, `start_loads` comes before the
forward; the fence of `before_forward` covers both cases.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.identity.shard import Holding
from vllm_tiered_kv.connector.metadata import TieredKVMetadata, TieredKVWorkerMetadata
from vllm_tiered_kv.connector.worker.block_verifier import BlockVerifier
from vllm_tiered_kv.connector.worker.kv_layout import (
    group_runs,
    require_whole_blocks,
    state_parts,
)
from vllm_tiered_kv.connector.worker.load_times import LoadTimes
from vllm_tiered_kv.connector.worker.load_tracker import LoadTracker
from vllm_tiered_kv.connector.worker.number_formats import layer_numbers
from vllm_tiered_kv.connector.worker.remote_io import RemoteIO
from vllm_tiered_kv.connector.worker.replica_striping import ReplicaStriping
from vllm_tiered_kv.connector.worker.step_loads import StepLoads
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import (
    FetchJob,
    GroupTransfer,
    Int64Array,
    LoadJob,
    StoreJob,
)
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import Copier
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

_STEPS_IN_FLIGHT = 2  # most that vLLM runs with a single worker


@dataclass(frozen=True)
class StepFacts:
    """How vLLM runs the steps of a worker. The assembly reads it from vLLM's configuration."""

    can_be_discarded: bool = True  # see `StepLoads`
    zero_blocks: bool = False  # vLLM may clear new blocks before it calls any hook of a step
    let_loads_overtake: bool = False
    """vLLM hands out no block that a step in flight uses, so that loads need not wait for it."""
    have_other_connectors: bool = False  # beside this one, inside a MultiConnector


class WorkerHalf:
    """Executes the copies that the scheduler half plans, and reports their results.
    The assembly builds it in each worker; `TieredKVConnector` calls it from the model's thread."""

    def __init__(
        self,
        config: TieredKVConfig,
        geometry: ArenaGeometry,
        rank: int,
        holding: Holding,
        steps: StepFacts,
        cache_dtype: str = "auto",
        shared_fd: int | None = None,
        is_verified_layer: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`cache_dtype`: vLLM's --kv-cache-dtype. `shared_fd`: memory that all ranks with the same
        KV share; the worker half closes it."""
        self._verifier: BlockVerifier | None = None
        if config.verify_fraction:
            self._verifier = BlockVerifier(geometry, config.verify_tolerance)
        self._cache_dtype = cache_dtype
        self._step_loads = StepLoads(steps.can_be_discarded)
        self._config = config
        self._holding = holding
        self._shared_fd = shared_fd
        self._steps_zero_blocks = steps.zero_blocks
        self._loads_overtake = steps.let_loads_overtake
        self._striping = ReplicaStriping()
        self._remote: RemoteIO | None = None
        self._loads = LoadTracker()
        self._times = LoadTimes()
        self._step_thread: int | None = None
        self._next = TieredKVWorkerMetadata()  # the next report
        self._reported_arenas: dict[bytes, int] = {}
        self._layers_not_seen: set[str] = set()
        self._pinning: Callable[[], tuple[Pin | None, Unpin | None]] = lambda: (None, None)
        self._geometry = geometry
        self._is_verified_layer = is_verified_layer
        self.rank = rank
        self._reported_usable: int | None = None
        self.last_reports: deque[TieredKVWorkerMetadata] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._due: list[StoreJob] = []  # stores of this step, to be copied after its forward
        self.is_in_step = False
        """Whether a forward is being enqueued; vLLM may process an earlier step's output at the
        same time."""
        self._copier: Copier | None = None
        self.arena: Arena | None = None
        self.block_bytes: tuple[int, ...] = ()
        self.wait_for_sources = steps.have_other_connectors
        """Other connectors write GPU blocks on their own streams before any hook of this connector,
        so the host waits until stores have read their GPU blocks."""
        self._must_report_block_bytes = steps.have_other_connectors  # there is no handshake

    def register_kv_caches(
        self, kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig
    ) -> None:
        if self._config.remote:
            require_whole_blocks(kv_caches, kv_cache_config)
        runs = group_runs(kv_caches, kv_cache_config, self._holding.shards)
        groups = range(len(kv_cache_config.kv_cache_groups))
        self.block_bytes = tuple(runs[group_id].block_bytes for group_id in groups)
        # Loads wait layer by layer only after each layer's hook was called once. vLLM does not call
        # the hooks within a full CUDA graph.
        self._layers_not_seen = {name for group in runs.values() for name, _ in group.layer_ends}
        device = next(iter(kv_caches.values())).device
        self._close_copies()
        if self.arena is None:
            # Kept when vLLM registers its caches again: the scheduler's index refers to its slots.
            self.arena = self._open_arena(device)
        self._copier = _open_copier(device, runs, self._config, self._geometry, self.arena)
        self._pinning = functools.partial(_pinning, device)
        if self._verifier is not None:
            parts = state_parts(kv_cache_config)
            self._verifier.describe(
                layer_numbers(kv_caches, runs, self._cache_dtype, parts, self._is_verified_layer)
            )
        logger.info(
            "CPU tier of %s on %s: %d slabs, %d byte runs per block",
            format_size(self.arena.nbytes),
            device,
            self._geometry.num_slabs,
            max(len(group.runs) for group in runs.values()),
        )

    def before_forward(self, metadata: TieredKVMetadata) -> None:
        """Makes the coming forward and loads wait until stores have read the blocks they write."""
        for job in self._due:
            # vLLM skipped `after_forward` of the last step (as it does on inner pipeline stages
            # with speculative decoding). The blocks may have changed since, so the stores fail.
            self._report(job.job_id, StoreReport(0, DropReason.COPY_FAILED))
        self._due = metadata.stores_after
        self.is_in_step = True
        if self._verifier is not None:
            self._verifier.begin_step(metadata.verifications, self._is_ours)
        self._next.measured_step = metadata.measured_step
        self._device.finish_step_loads()
        self._step_thread = threading.get_ident()
        if metadata.identity is not None and self._remote is None:
            self._remote = self._open_remote(metadata.identity)
        if self._remote is not None:
            # Here and not in `start_loads`, which usually comes after the forward.
            self._remote.regions.step_begins()
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
        """Starts loads before the scheduler has finished planning their step (see `early_loads`),
        behind the stores that read the same GPU blocks. False: nothing was started, and the step
        has to load."""
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
        """Starts the step's loads, puts, fetches and probes. `calls_each_layer`: the coming forward
        calls `before_layer` before each layer."""
        step_loads = [job for job in metadata.loads if job.step_load is not None]
        if step_loads:
            overtakes = self._loads_overtake and not self.wait_for_sources
            if not overtakes:
                # vLLM may have cleared these blocks since `before_forward`. With step loads vLLM
                # calls this before the forward.
                self._device.fence()
            by_layer = calls_each_layer and not self._layers_not_seen
            self._step_loads.start(self._device, self._remote, step_loads, by_layer, overtakes)
        for job in metadata.loads:
            if job.step_load is not None:
                continue
            self._loads.begin(job.request_id, bool(job.transfers) + bool(job.remote))
            if job.transfers:
                self._times.begin(job.request_id, Tier.CPU)
                self._device.load(job.request_id, job.transfers)
            if job.remote:
                assert self._remote is not None, "load from a daemon, but none is configured"
                self._times.begin(job.request_id, Tier.REMOTE)
                self._remote.loader.load(job.request_id, job.remote)
        for put in metadata.puts:
            assert self._remote is not None, "put to a daemon, but none is configured"
            self._remote.writer.begin(put)
        for fetch in metadata.fetches:
            assert self._remote is not None, "fetch from a daemon, but none is configured"
            self._fetch(self._remote, fetch)
        for probe in metadata.probes:
            assert self._remote is not None, "probe of a daemon, but none is configured"
            self._remote.loader.probe(probe)

    def before_layer(self, name: str) -> None:
        if self._layers_not_seen:
            self._layers_not_seen.discard(name)
        self._device.wait_for_layer(name)

    def finish_step_loads(self) -> None:
        """Makes the stream wait for all step loads: work after the model's layers may read any
        layer's blocks."""
        self._device.finish_step_loads()

    def after_forward(self) -> None:
        """Enqueues the stores of blocks that the forward fills, behind the forward."""
        due, self._due = self._due, []
        self.is_in_step = False
        self._device.finish_step_loads()
        self._store(due)
        if self._verifier is not None:
            self._copy_out([(job.job_id, job.transfer) for job in self._verifier.take_copies()])

    def results(self) -> KVConnectorTransferResults:
        """Returns the asynchronous loads that ended since the last call, each exactly once."""
        results = KVConnectorTransferResults()
        if self._copier is None:
            return results
        self._collect(self._copier)
        if self._remote is not None:
            self._remote.regions.step_ends()
        for request_id, failed in self._loads.take_finished():
            results.finished_recving.add(request_id)
            if failed is not None:
                results.failed_recving.add(request_id)
            if failed is Tier.REMOTE:
                self._next.remote_failures.add(request_id)
        return results

    def _collect(self, copier: Copier) -> None:
        """Collects what has ended since the last call."""
        self._step_loads.poll(copier)
        stores, loads = copier.poll()
        for store in stores:
            if self._verifier is not None and self.arena is not None:
                read_remote = self._remote.read if self._remote else None
                if self._verifier.copied(store, self.arena, read_remote):
                    continue
            self._report(store.job_id, self._striping.end(store))
        for load in loads:
            self._times.end(load.request_id, Tier.CPU, load.ended_at, load.error is None)
            self._loads.end(load.request_id, Tier.CPU if load.error is not None else None)
        if self._remote is not None:
            for load in self._remote.loader.poll():
                self._times.end(load.request_id, Tier.REMOTE, load.ended_at, load.error is None)
                self._loads.end(load.request_id, Tier.REMOTE if load.error is not None else None)
            for name, fetched in self._remote.loader.take_probed().items():
                self._next.probed[name] = [fetched]
            for put in self._remote.writer.poll():
                self._next.puts[put.job_id] = [put.report]
            for fetch in self._remote.fetcher.poll():
                self._next.fetches[fetch.job_id] = [fetch.report]
        self._times.polled()

    def take_invalid_blocks(self) -> set[int]:
        return self._step_loads.take_invalid_blocks()

    def worker_metadata(self) -> TieredKVWorkerMetadata | None:
        """Returns the report for the scheduler half; None if nothing has changed since the last."""
        report, self._next = self._next, TieredKVWorkerMetadata()
        report.step_loads = self._step_loads.take_ended()
        report.load_seconds = self._times.take()
        if self._verifier is not None:
            report.verdicts = self._verifier.take_verdicts()
        if self._must_report_block_bytes:
            report.block_bytes = {self.rank: self.block_bytes}
            self._must_report_block_bytes = False
        if self.arena is not None and self.arena.ready_bytes != self._reported_usable:
            self._reported_usable = self.arena.ready_bytes
            report.usable_bytes = {self.rank: self._reported_usable}
        arenas = self._remote.regions.ready_arenas if self._remote is not None else {}
        if arenas != self._reported_arenas:
            self._reported_arenas = arenas
            report.ready_arenas = {self.rank: arenas}
        if report == TieredKVWorkerMetadata():
            return None
        self.last_reports.append(report)
        return report

    def shutdown(self) -> None:
        """Releases all memory and threads. On a GPU that has failed, some of that may fail."""
        try:
            self._close_copies()
            if self._verifier is not None:
                self._verifier.close()
            if self.arena is not None:
                self.arena.close()
            if self._shared_fd is not None:
                os.close(self._shared_fd)
        except TieredKVError as error:
            logger.warning("cannot close the CPU tier cleanly: %s", error)
        self.arena = self._shared_fd = None
        self._striping = ReplicaStriping()

    def _report(self, job_id: int, report: StoreReport) -> None:
        self._next.stores[job_id] = [report]

    @property
    def _device(self) -> Copier:
        assert self._copier is not None, "vLLM did not register its KV caches"
        return self._copier

    def _store(self, jobs: Sequence[StoreJob]) -> None:
        copies = []
        for job in jobs:
            usable = self._usable(job.transfer.group_id, job.transfer.slots)
            copies.append((job.job_id, self._striping.begin(job, usable)))
        self._copy_out(copies)

    def _fetch(self, remote: RemoteIO, job: FetchJob) -> None:
        if self._usable(job.group_id, job.slots) < len(job.slots):
            self._next.fetches[job.job_id] = [StoreReport(0, DropReason.NOT_PINNED_YET)]
        elif self._is_ours(job.keys[0]):
            remote.fetcher.begin(job)
        else:  # the rank that fetches the job reports any failure
            self._next.fetches[job.job_id] = [StoreReport(len(job.keys))]

    def _usable(self, group_id: int, slots: Int64Array) -> int:
        """Returns how many of the first of these slots lie in memory that is already pinned."""
        assert self.arena is not None, "the arena is not open"
        ready = self.arena.ready_bytes
        if ready >= self._geometry.capacity_bytes:
            return len(slots)
        nbytes = self.block_bytes[group_id]
        offsets = self._geometry.offsets(slots, self._geometry.class_of_block(nbytes))
        beyond = np.flatnonzero(offsets + nbytes > ready)
        return int(beyond[0]) if len(beyond) else len(slots)

    def _copy_out(self, copies: Sequence[tuple[int, GroupTransfer]]) -> None:
        for job_id, transfer in copies:
            self._device.store(job_id, transfer)
        if copies and self.wait_for_sources:
            self._device.settle_sources()
        elif copies and self._steps_zero_blocks:
            # `before_forward` of the next step is too late: vLLM clears blocks before it.
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
            self._stripe_replicas()
        return arena

    def _stripe_replicas(self) -> None:
        """Divides stores among the replicas: they share one arena, and one of them copies each
        block."""
        self._striping = ReplicaStriping(self._holding.replica, self._holding.replicas)

    def _is_ours(self, first: BlockKey) -> bool:
        """Whether this rank runs the verification or fetch that starts with this block. Of the
        ranks that share an arena only one does, because they share the job's slots."""
        return not self._striping.is_shared or self._holding.sends(first)

    def _open_remote(self, identity: EngineIdentity) -> RemoteIO:
        assert self.arena is not None, "vLLM did not register its KV caches"
        if self.block_bytes:
            # Inside a MultiConnector no handshake compares the sizes, so the daemon compares them.
            lengths = tuple(nbytes // self._holding.shards for nbytes in self.block_bytes)
            identity = dataclasses.replace(identity, block_bytes=lengths)
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
        """Ends all copies in flight and collects their results: the scheduler needs a report of
        each, and no copy may touch memory after its release."""
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
    """Returns the functions that pin and unpin memory for this device; None for a CPU."""
    if device.type == "cpu":
        return None, None
    if device.type != "cuda":
        raise UnsupportedError(f"vllm-tiered-kv supports CPU and CUDA devices, not {device.type!r}")
    from vllm_tiered_kv.native import cuda

    reason = cuda.why_unavailable()
    if reason is not None:
        raise UnsupportedError(f"vllm-tiered-kv cannot use this GPU: {reason}")
    # Bound to the device: otherwise a background thread would create a CUDA context on GPU 0.
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
) -> Copier:
    if device.type == "cpu":
        from vllm_tiered_kv.device.cpu_copier import CpuCopier

        return CpuCopier(runs, geometry, arena, config.copy_threads)
    import torch

    from vllm_tiered_kv.device.cuda_copier import CudaCopier
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
        config.copy_strategy,
    )


def _cuda_index(device: torch.device) -> int:
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)
