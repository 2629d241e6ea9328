"""A toy engine with several ranks of one pipeline stage, each with its own memory and faults.

Every rank runs the same steps on its own cache and checks its own reads. vLLM's own aggregator
merges the reports. The KV of each shard is masked differently, so a shard that is served to the
wrong rank is a wrong read. Replicas hold the same KV and share one arena.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.delayed_copier import DelayedCopier
from tests.engine.toy_engine import ToyEngine, _Running
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.device.arena import Arena

_MASK_OF_RANK = 0x5A5A << 40  # makes shards of the same tokens differ


@dataclass
class ToyRank:
    """The worker state of one rank, which `ToyEngine` keeps for its only worker."""

    worker: TieredKVConnector
    caches: list[np.ndarray]
    arena: np.ndarray
    copier: DelayedCopier
    running: dict[str, _Running] = field(default_factory=dict)


@dataclass
class RankedToyEngine(ToyEngine):
    """A toy engine whose ranks run one after the other, in the test's thread."""

    ranks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.replicas in (1, self.ranks)
        if self.replicas > 1:
            assert self.worker.worker_half is not None
            self.worker.worker_half._stripe_replicas()
        first = ToyRank(self.worker, self.caches, self.arena, self.copier, self._running)
        self.all_ranks = [first, *map(self._equip, self._other_workers)]
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, self.ranks)
        self._rank = 0

    @property
    def copiers(self) -> list[DelayedCopier]:
        return [rank.copier for rank in self.all_ranks]

    def close(self) -> None:
        for rank in self.all_ranks[1:]:
            rank.worker.shutdown()
        super().close()

    def _open_workers(self) -> None:
        super()._open_workers()
        self._other_workers = []
        for rank in range(1, self.ranks):
            config = copy.copy(self.config)
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = rank
            self._other_workers.append(
                TieredKVConnector(config, KVConnectorRole.WORKER, self.kv_cache_config)
            )

    def _equip(self, worker: TieredKVConnector) -> ToyRank:
        caches = [np.full_like(cache, -2) for cache in self.caches]
        half, first = worker.worker_half, self.worker.worker_half
        assert half is not None
        assert first is not None
        if self.replicas > 1:
            half.arena, arena = first.arena, self.arena
            half._stripe_replicas()
        else:
            half.arena = Arena(self.half.index.geometry.capacity_bytes)
            arena = np.lib.stride_tricks.as_strided(
                half.arena.bytes_at(0, half.arena.nbytes).view(np.int64),
                self.arena.shape,
                self.arena.strides,
            )
            arena[:] = -3
        half.block_bytes = first.block_bytes
        rng = random.Random(self.seed + 100 * half.rank)
        copier = half._copier = DelayedCopier(caches, arena, rng)
        copier.store_delay = self.store_delay
        return ToyRank(worker, caches, arena, copier)

    def _use(self, number: int) -> None:
        rank = self.all_ranks[number]
        self._rank = number
        self.worker, self.caches, self.arena = rank.worker, rank.caches, rank.arena
        self.copier, self._running = rank.copier, rank.running
        self.groups = [replace(group, rank=number % group.ranks) for group in self.groups]

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        outputs: list[ModelRunnerOutput | None] = []
        shared = output.kv_connector_metadata
        try:
            for number in range(self.ranks):
                self._use(number)
                output.kv_connector_metadata = copy.deepcopy(shared)  # as between processes
                reported = len(self.reported_loads)
                outputs.append(super()._execute(output))
                del self.reported_loads[reported:]
        finally:
            self._use(0)
            output.kv_connector_metadata = shared
        merged = self._aggregator.aggregate(outputs)
        assert merged is not None
        assert merged.kv_connector_output is not None
        self.reported_loads += merged.kv_connector_output.finished_recving or ()
        return merged

    def _right(self, request_id: str) -> np.ndarray:
        shard = self._rank // self.replicas
        return super()._right(request_id) ^ (shard * _MASK_OF_RANK)
