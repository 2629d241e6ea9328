"""What scheduler half and worker half tell each other: once at start, then once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import LoadJob, StoreJob


@dataclass(frozen=True)
class TieredKVHandshake(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once, at start: the bytes of its blocks, per group."""

    block_bytes: tuple[int, ...]


@dataclass
class TieredKVMetadata(KVConnectorMetadata):
    """Scheduler to workers: the transfers of one step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores_before: list[StoreJob] = field(default_factory=list)
    """Blocks of finished requests: they may be given away in this very step, so they are read
    before its forward."""
    stores_after: list[StoreJob] = field(default_factory=list)
    """Blocks this step's forward fills."""


@dataclass
class TieredKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: stores that ended, one report per rank, and usable memory by rank."""

    stores: dict[int, list[StoreReport]] = field(default_factory=dict)
    usable_bytes: dict[int, int] = field(default_factory=dict)
    """How much of its arena a rank can use; told whenever it changed."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredKVWorkerMetadata:
        assert isinstance(other, TieredKVWorkerMetadata)
        for job_id, reports in other.stores.items():
            self.stores.setdefault(job_id, []).extend(reports)
        self.usable_bytes.update(other.usable_bytes)
        return self
