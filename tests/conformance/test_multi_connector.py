"""Inside vLLM's MultiConnector, beside a connector of somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.conformance.contract_engine import ContractEngine
from tests.conformance.other_connector import OtherConnector
from tests.engine.toy_asking import seeded_prompt
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.connector.metadata import TieredKVWorkerMetadata
from vllm_tiered_kv.metrics import names

IDS = seeded_prompt(1, 41)


@pytest.fixture(autouse=True)
def _quiet_other_connector() -> Iterator[None]:
    yield
    OtherConnector.offers.clear()
    OtherConnector.fails.clear()
    OtherConnector.is_pushed = False


@dataclass
class SharedEngine(ContractEngine):
    is_started: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_started:
            self.run()  # as an engine does before its first request: ranks say how they cut blocks
        OtherConnector.deliver = self._write_right_kv

    def _transfer_config(self, options: dict[str, Any]) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "connectors": [
                    {
                        "kv_connector": "TieredKVConnector",
                        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": options,
                    },
                    {
                        "kv_connector": "OtherConnector",
                        "kv_connector_module_path": "tests.conformance.other_connector",
                        "kv_role": "kv_both",
                    },
                ]
            },
        )

    def _write_right_kv(self, request_id: str, blocks: list[int]) -> None:
        right = self._truth[request_id]
        at = np.arange(len(blocks) * self.block_size)
        at = at[at < len(right)]
        table = np.array(blocks)[at // self.block_size]
        for layer, cache in enumerate(self.caches):
            cache[table, at % self.block_size] = right[at] ^ layer


def total(engine: SharedEngine, metric: names.Metric) -> float:
    return engine.half.recorder.total(metric)


@pytest.mark.usefixtures("step_loads")
def test_ours_stores_and_loads(tiny_model: Path, async_scheduling: bool) -> None:
    engine = SharedEngine(tiny_model, async_scheduling)
    assert isinstance(engine.scheduler.connector, MultiConnector)
    assert isinstance(engine.scheduler.connector.sub_connectors[0], TieredKVConnector)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    engine.ask(IDS)
    assert total(engine, names.LOADED_BLOCKS) == 10
    engine.assert_conforms()


def test_transfers_do_not_begin_before_their_step(tiny_model: Path, async_scheduling: bool) -> None:
    """Another connector may still read or write the blocks."""
    engine = SharedEngine(tiny_model, async_scheduling)
    prompts = [seeded_prompt(seed, 29) for seed in (1, 2)]
    for ids in prompts:
        engine.add(ids, 4)
        engine.run()
    engine.drop_gpu_cache()
    for ids in prompts:
        engine.add(ids, 4)
    engine.run()
    assert engine.copier.ahead_blocks == 14
    assert engine.copier.early_blocks == 0


@pytest.mark.usefixtures("step_loads")
@pytest.mark.parametrize("fails", [False, True], ids=["arrives", "fails"])
def test_other_connector_loads(tiny_model: Path, async_scheduling: bool, fails: bool) -> None:
    """Its loads are not ours to report or to count; what it brought may be stored by us."""
    engine = SharedEngine(tiny_model, async_scheduling)
    request_id = f"r{engine._next_id}"
    OtherConnector.offers[request_id] = 40
    if fails:
        OtherConnector.fails.add(request_id)
    assert engine.add(IDS, 6) == request_id
    engine.run()
    engine.assert_said(request_id, IDS)
    assert total(engine, names.HIT_TOKENS) == total(engine, names.LOADED_BLOCKS) == 0
    assert total(engine, names.LOAD_FAILURES) == 0
    assert engine.reported_loads == [request_id]
    engine.drop_gpu_cache()
    engine.ask(IDS)
    assert total(engine, names.LOADED_BLOCKS) == 10
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_both_load_at_once(tiny_model: Path, async_scheduling: bool) -> None:
    engine = SharedEngine(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=64)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    other = seeded_prompt(2, 30)
    OtherConnector.offers["r2"] = 20
    OtherConnector.offers["r3"] = 40  # ours is asked first and has it
    asked = [(engine.add(ids, 6), ids) for ids in (IDS, other, IDS)]
    assert [name for name, _ in asked] == ["r1", "r2", "r3"]
    engine.run()
    for request_id, ids in asked:
        engine.assert_said(request_id, ids)
    assert total(engine, names.LOADED_BLOCKS) == 20
    assert sorted(engine.reported_loads) == ["r1", "r2", "r3"]
    engine.assert_conforms()


def test_bound_pool_and_a_reset_reach_ours(tiny_model: Path) -> None:
    engine = SharedEngine(tiny_model)
    engine.ask(IDS)
    assert engine.half.index.used_bytes
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.half.index.used_bytes == 0
    engine.ask(IDS)
    assert total(engine, names.HIT_TOKENS) == 0
    engine.assert_conforms()


def test_our_statistics_are_distinguished_from_those_of_others(tiny_model: Path) -> None:
    engine = SharedEngine(tiny_model)
    engine.add(IDS, 6)
    engine.run()
    engine.half.recorder.add(names.HIT_TOKENS, 3, "cpu")
    stats = engine.scheduler.connector.get_kv_connector_stats()
    assert stats is not None
    rebuilt = MultiConnector.build_kv_connector_stats(
        {name: part.data for name, part in stats.data.items()}
    )
    assert rebuilt.reduce()["TieredKVConnector"][names.HIT_TOKENS.name] == 3


def test_blocks_written_by_a_peer_while_a_step_is_planned_are_not_stored(tiny_model: Path) -> None:
    """It gets the blocks of a request that has ended, ahead of the step that would store them."""
    engine = SharedEngine(tiny_model, True, gpu_blocks=14, cpu_blocks=64, max_tokens_per_step=64)
    OtherConnector.is_pushed = True
    first = engine.add(IDS, 4)  # the last block is full when the last token is known
    while not engine.requests[first].is_finished():
        engine.step()
    assert engine.half._next.stores_before
    OtherConnector.offers["r1"] = 40
    second = engine.add(seeded_prompt(2, 41), 6)
    engine.run()
    engine.assert_said(second, seeded_prompt(2, 41))
    engine.drop_gpu_cache()
    engine.ask([*IDS, *engine.finished[first].tokens])  # a wrong byte would be seen by the model
    assert total(engine, names.DROPPED_BLOCKS) > 0
    engine.assert_conforms()


@pytest.mark.parametrize("told", ["same", "other", "refused"])
def test_ranks_agree_before_anything_is_planned(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    """A rank of a pipeline may have other layers than the first one, or none of a group. The other
    connector's handshake leaves no room for ours."""
    engine = SharedEngine(tiny_model, ranks=2, is_started=False)
    connector, half = engine.scheduler.connector, engine.half
    ours = connector.sub_connectors[0]
    assert engine.worker.get_handshake_metadata() is None
    engine.run()  # the first rank has said it now
    early = engine.add(IDS, 2)
    engine.run()
    assert not half.ledger.has_open_stores
    block_bytes = {"same": half.block_bytes, "other": (128,), "refused": ()}[told]
    says = TieredKVWorkerMetadata(block_bytes={1: block_bytes})
    output = KVConnectorOutput(
        kv_connector_worker_meta=MultiKVConnectorWorkerMetadata((says, None))
    )
    connector.update_connector_output(output)
    assert (ours.scheduler_half is None) is (told != "same")
    assert ("not tiered: blocks of rank 1 have" in caplog.text) is (told != "same")
    late = engine.add(seeded_prompt(2, 41), 2)
    while not engine.requests[late].is_finished():
        engine.step()
    assert half.ledger.has_open_stores is (told == "same")
    for request_id, ids in ((early, IDS), (late, seeded_prompt(2, 41))):
        engine.assert_said(request_id, ids, 2)


def test_refused_rank_says_so_once(tiny_model: Path) -> None:
    engine = SharedEngine(tiny_model, is_started=False)
    rank = engine.worker.sub_connectors[0]
    rank.worker_half, rank._must_report_refusal = None, True
    engine.run()
    assert engine.scheduler.connector.sub_connectors[0].scheduler_half is None
    assert rank.build_connector_worker_meta() is None
    engine.ask(IDS)
