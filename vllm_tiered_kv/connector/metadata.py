"""What scheduler half and worker half tell each other: once at start, then once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import Fetched, LoadJob, ProbeJob, PutJob, StoreJob
from vllm_tiered_kv.core.verdict import BlockVerdict, VerifyJob
from vllm_tiered_kv.remote.address import EngineIdentity


@dataclass(frozen=True)
class TieredKVHandshake(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once, at start."""

    block_bytes: tuple[int, ...]
    """Of its blocks, per group."""


@dataclass
class TieredKVMetadata(KVConnectorMetadata):
    """Scheduler to workers: the transfers of one step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores_before: list[StoreJob] = field(default_factory=list)
    """Blocks of finished requests: they may be given away in this very step, so their stores begin
    before its forward."""
    wait_for_stores: int | None = None
    """The newest store that may still read a block which this step writes: the write fence."""
    stores_after: list[StoreJob] = field(default_factory=list)
    """Blocks this step's forward fills."""
    puts: list[PutJob] = field(default_factory=list)
    """Blocks of the CPU tier to be sent to daemons."""
    probes: list[ProbeJob] = field(default_factory=list)
    """Blocks to be fetched from daemons for nobody, behind all loads."""
    verifications: list[VerifyJob] = field(default_factory=list)
    """Blocks this step's forward fills that are compared with what a tier holds."""
    measured_step: int | None = None
    """Told back with the output of the step, so that it is known when it ended."""
    identity: EngineIdentity | None = None
    """Who this engine is to the daemons, where there are any. The scheduler says it: ranks of a
    pipeline see only their own layers, and must not come to another namespace."""

    @property
    def has_transfers(self) -> bool:
        """Whether workers have something to report of."""
        jobs = (self.loads, self.stores_before, self.stores_after, self.puts, self.verifications)
        return any(jobs)


@dataclass
class TieredKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: stores that ended, one report per rank, and usable memory by rank."""

    stores: dict[int, list[StoreReport]] = field(default_factory=dict)
    usable_bytes: dict[int, int] = field(default_factory=dict)
    """How much of its arena a rank can use; told whenever it changed."""
    puts: dict[int, list[StoreReport]] = field(default_factory=dict)
    """Puts that ended, one report per rank."""
    remote_failures: set[str] = field(default_factory=set)
    """Requests whose load failed in the part that came from a daemon."""
    step_loads: dict[int, list[bool]] = field(default_factory=dict)
    """Loads ahead of a forward that ended, one report per rank: whether it went well."""
    load_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By request and tier: how long a load took that has ended."""
    measured_step: int | None = None
    ready_arenas: dict[int, dict[bytes, int]] = field(default_factory=dict)
    """By rank: how much of daemons' memories can be used there; told whenever that changed."""
    verdicts: dict[int, list[list[BlockVerdict]]] = field(default_factory=dict)
    """Comparisons that ended, one report per rank."""
    block_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: of its blocks, per group; nothing where it cannot take part. Told once, inside a
    MultiConnector, which leaves no room for a handshake of ours."""
    probed: dict[str, list[Fetched]] = field(default_factory=dict)
    """Probes that ended, one report per rank."""
    was_processed: bool = False
    """The scheduler has dealt with it, see `idle_steps`."""

    @property
    def has_reports(self) -> bool:
        """Whether something has come to its end."""
        return bool(self.stores or self.puts or self.step_loads or self.verdicts)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredKVWorkerMetadata:
        assert isinstance(other, TieredKVWorkerMetadata)
        for job_id, reports in other.stores.items():
            self.stores.setdefault(job_id, []).extend(reports)
        for job_id, reports in other.puts.items():
            self.puts.setdefault(job_id, []).extend(reports)
        self.usable_bytes.update(other.usable_bytes)
        self.ready_arenas.update(other.ready_arenas)
        self.block_bytes.update(other.block_bytes)
        self.remote_failures |= other.remote_failures
        for request_id, by_tier in other.load_seconds.items():
            mine = self.load_seconds.setdefault(request_id, {})
            for tier, seconds in by_tier.items():
                mine[tier] = max(mine.get(tier, 0.0), seconds)
        self.measured_step = self.measured_step or other.measured_step
        for job_id, ended in other.step_loads.items():
            self.step_loads.setdefault(job_id, []).extend(ended)
        for job_id, verdicts in other.verdicts.items():
            self.verdicts.setdefault(job_id, []).extend(verdicts)
        for name, fetched in other.probed.items():
            self.probed.setdefault(name, []).extend(fetched)
        return self
