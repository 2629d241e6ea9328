"""What vLLM carries between its processes for us arrives as it left, and adds up over ranks."""

from __future__ import annotations

import pickle
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.conformance.contract_engine import ContractEngine
from tests.engine.toy_asking import seeded_prompt
from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.connector.metadata import (
    TieredKVHandshake,
    TieredKVMetadata,
    TieredKVWorkerMetadata,
)
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import (
    Fetched,
    FetchJob,
    GroupTransfer,
    LoadJob,
    ProbeJob,
    PutJob,
    StoreJob,
    int64_array,
)
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.address import EngineIdentity

TRANSFER = GroupTransfer(0, int64_array([3, 1]), int64_array([7, 0]))
KEYS = (BlockKey(b"k" * 17), BlockKey(b"l" * 17))
METADATA = TieredKVMetadata(
    loads=[LoadJob("r1", (TRANSFER,), (), 5)],
    stores_before=[StoreJob(1, TRANSFER)],
    wait_for_stores=8,
    stores_after=[StoreJob(2, TRANSFER)],
    puts=[PutJob(3, "tcp://a:1", 0, int64_array([5, 6]), KEYS, (None, KEYS[0]))],
    fetches=[FetchJob(7, "tcp://a:1", 0, int64_array([5, 6]), KEYS)],
    probes=[ProbeJob("r2", 0, "tcp://a:1", KEYS)],
    verifications=[VerifyJob(6, TRANSFER, KEYS, 64, int64_array([2, 4]), None)],
    measured_step=4,
    identity=EngineIdentity(bytes(32), (64, 128), "LBHNC", "vLLM"),
)
WORKER_METADATA = TieredKVWorkerMetadata(
    stores={1: [StoreReport(2, None)], 2: [StoreReport(0, DropReason.COPY_FAILED)]},
    usable_bytes={0: 4096},
    puts={9: [StoreReport(1, None)]},
    fetches={7: [StoreReport(2, None)]},
    remote_failures={"r1"},
    step_loads={5: [True]},
    load_seconds={"r1": {"cpu": 0.5}},
    measured_step=4,
    ready_arenas={0: {b"arena": 4096}},
    verdicts={6: [[BlockVerdict(Verdict.CLOSE, 0.1, 0.01, "layer")]]},
    block_bytes={0: (64, 128)},
    probed={"r2": [Fetched(128, 0.5)]},
    was_processed=True,
)


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, np.ndarray):
        return bool((mine == theirs).all()) and mine.dtype == theirs.dtype
    if hasattr(mine, "__dataclass_fields__"):
        return type(mine) is type(theirs) and all(
            same(getattr(mine, f.name), getattr(theirs, f.name)) for f in fields(mine)
        )
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize(
    "message",
    [METADATA, TieredKVMetadata(), WORKER_METADATA, TieredKVHandshake((64, 128))],
    ids=["step", "empty_step", "report", "handshake"],
)
def test_messages_survive_pickling(message: Any) -> None:
    """As vLLM's executors carry them; none of it refers to live objects of the sender."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert same(pickle.loads(pickle.dumps(message, protocol)), message)


def test_every_field_is_in_the_samples() -> None:
    """A field added later is empty in the samples, and this says so."""
    for sample in (METADATA, WORKER_METADATA):
        empty = type(sample)()
        for field in fields(sample):
            told = getattr(sample, field.name)
            assert not same(told, getattr(empty, field.name)), field.name


def test_reports_of_ranks_add_up() -> None:
    """vLLM's own aggregator: a load is over when the last rank says so, failed if any failed."""
    aggregator = KVOutputAggregator(expected_finished_count=2)

    def output(rank: int, recving: set[str], failed: set[str], job: int) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving=recving or None,
                failed_recving=failed,
                kv_connector_worker_meta=TieredKVWorkerMetadata(
                    stores={job: [StoreReport(rank, None)]}, usable_bytes={rank: 100 + rank}
                ),
            ),
        )

    first = aggregator.aggregate([output(0, {"a"}, set(), 1), output(1, set(), set(), 1)])
    assert not first.kv_connector_output.finished_recving
    reports = first.kv_connector_output.kv_connector_worker_meta.stores[1]
    assert sorted(report.stored for report in reports) == [0, 1]
    second = aggregator.aggregate([output(0, set(), set(), 2), output(1, {"a"}, {"a"}, 2)])
    assert second.kv_connector_output.finished_recving == {"a"}
    assert second.kv_connector_output.failed_recving == {"a"}
    assert second.kv_connector_output.kv_connector_worker_meta.usable_bytes == {0: 100, 1: 101}


def statistics(tiny_model: Path) -> tuple[ContractEngine, list[dict[str, Any]]]:
    """What the scheduler reported while a prompt was stored and loaded again."""
    engine = ContractEngine(tiny_model)
    reported: list[dict[str, Any]] = []
    update = engine.scheduler.update_from_output

    def listen(*step: Any) -> Any:
        done = update(*step)
        for outputs in done.values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                reported.append(_through_msgpack(stats))
        return done

    engine.scheduler.update_from_output = listen
    for _ in range(2):
        engine.ask(seeded_prompt(1, 41))
        engine.drop_gpu_cache()
    return engine, reported


def _through_msgpack(stats: SchedulerStats) -> dict[str, Any]:
    """From the engine core to the API server."""
    frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(frames).scheduler_stats
    assert arrived.kv_connector_stats == stats.kv_connector_stats
    return dict(arrived.kv_connector_stats)


def test_statistics_reach_the_other_side_and_add_up(tiny_model: Path) -> None:
    engine, reported = statistics(tiny_model)
    total = TieredKVConnector.build_kv_connector_stats()
    assert total.is_empty()
    for data in reported:
        part = TieredKVConnector.build_kv_connector_stats(data=data)
        assert not part.is_empty()
        total = total.aggregate(part)
    for metric in (names.HIT_TOKENS, names.MISS_TOKENS, names.STORED_BLOCKS, names.LOADED_BLOCKS):
        assert total.reduce()[metric.name] == engine.half.recorder.total(metric) > 0
    total.reset()
    assert total.is_empty()


def test_statistics_become_prometheus_metrics(tiny_model: Path) -> None:
    engine, reported = statistics(tiny_model)
    # A registry of its own: an engine that ran earlier in this process has the same names
    # in prometheus_client's.
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    prometheus = TieredKVConnector.build_prom_metrics(
        engine.config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    refused = {"model_name": "m", "engine": "0", "tier": "remote", "reason": "refused"}
    dropped = f"{names.DROPPED_BLOCKS.exposed_name}_total"
    assert registry.get_sample_value(dropped, refused) == 0, "rate() would miss the first"
    for data in reported:
        prometheus.observe(data, 1)
    hits = names.HIT_TOKENS.exposed_name.removesuffix("_total")
    labels = {"model_name": "m", "engine": "1", "tier": "cpu"}
    for metric in (names.LOAD_SECONDS, names.STORE_SECONDS):
        count = registry.get_sample_value(f"{metric.exposed_name}_count", labels)
        assert count is not None
        assert count > 0, metric.name
        assert (
            registry.get_sample_value(f"{metric.exposed_name}_count", {**labels, "engine": "0"})
            == 0
        )
    assert registry.get_sample_value(f"{hits}_total", labels) == 40
