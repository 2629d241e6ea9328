"""Messages between scheduler half and worker half: once at start, then once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import Fetched, FetchJob, LoadJob, ProbeJob, PutJob, StoreJob
from vllm_tiered_kv.core.verdict import BlockVerdict, VerifyJob
from vllm_tiered_kv.remote.address import EngineIdentity


@dataclass(frozen=True)
class TieredKVHandshake(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, once at start."""

    block_bytes: tuple[int, ...]
    """The size of the worker's blocks, per group."""


@dataclass
class TieredKVMetadata(KVConnectorMetadata):
    """From the scheduler to the workers: the transfers of one step."""

    loads: list[LoadJob] = field(default_factory=list)
    stores_before: list[StoreJob] = field(default_factory=list)
    """Stores of finished requests. vLLM may reallocate their blocks in this very step, so these
    stores start before its forward."""
    wait_for_stores: int | None = None
    """The write fence: the newest store that may still read a block which this step writes."""
    stores_after: list[StoreJob] = field(default_factory=list)
    """Stores of blocks that this step's forward fills."""
    puts: list[PutJob] = field(default_factory=list)
    """Blocks of the CPU tier to send to daemons."""
    fetches: list[FetchJob] = field(default_factory=list)
    """Blocks of daemons to bring into the CPU tier, ahead of a request."""
    probes: list[ProbeJob] = field(default_factory=list)
    """Fetches from daemons that only measure speed. They queue behind all loads."""
    verifications: list[VerifyJob] = field(default_factory=list)
    """Blocks that this step's forward fills, to compare with a tier's blocks."""
    measured_step: int | None = None
    """Number of a measured step. Workers return it with the output, which tells when it ended."""
    identity: EngineIdentity | None = None
    """The engine's identity at the daemons, if there are any. It comes from the scheduler because
    pipeline ranks see only their own layers and would compute another namespace."""

    @property
    def has_transfers(self) -> bool:
        """Whether the step has transfers that workers will report."""
        stores = (self.stores_before, self.stores_after, self.puts)
        return any((self.loads, *stores, self.fetches, self.verifications))


@dataclass
class TieredKVWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: transfers that ended since the last step. vLLM merges the
    metadata of all ranks with `aggregate`."""

    stores: dict[int, list[StoreReport]] = field(default_factory=dict)
    """Stores that ended, by job, one report per rank."""
    usable_bytes: dict[int, int] = field(default_factory=dict)
    """By rank: how much of its arena is usable; sent when it changes."""
    puts: dict[int, list[StoreReport]] = field(default_factory=dict)
    """Puts that ended, by job, one report per rank."""
    remote_failures: set[str] = field(default_factory=set)
    """Requests whose load from a daemon failed."""
    step_loads: dict[int, list[bool]] = field(default_factory=dict)
    """Step loads that ended, by job, one report per rank: whether it succeeded."""
    load_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By request and tier: the duration of a load that ended."""
    measured_step: int | None = None
    ready_arenas: dict[int, dict[bytes, int]] = field(default_factory=dict)
    """By rank and arena: how much of a daemon's memory is mapped; sent when it changes."""
    verdicts: dict[int, list[list[BlockVerdict]]] = field(default_factory=dict)
    """Comparisons that ended, by job, one report per rank."""
    block_bytes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: the size of its blocks, per group; empty if the rank refuses the model. Sent once,
    and only inside a MultiConnector, which replaces our handshake."""
    probed: dict[str, list[Fetched]] = field(default_factory=dict)
    """Probes that ended, by request, one report per rank."""
    fetches: dict[int, list[StoreReport]] = field(default_factory=dict)
    """Fetches that ended, by job, one report per rank."""
    was_processed: bool = False
    """The scheduler has processed it already, see `idle_steps`."""

    @property
    def has_reports(self) -> bool:
        """Whether a transfer has ended."""
        reports = (self.stores, self.puts, self.fetches, self.step_loads, self.verdicts)
        return any(reports)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TieredKVWorkerMetadata:
        assert isinstance(other, TieredKVWorkerMetadata)
        for job_id, reports in other.stores.items():
            self.stores.setdefault(job_id, []).extend(reports)
        for job_id, reports in other.puts.items():
            self.puts.setdefault(job_id, []).extend(reports)
        for job_id, reports in other.fetches.items():
            self.fetches.setdefault(job_id, []).extend(reports)
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
