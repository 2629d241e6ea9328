"""Adapters that are not what they were when their request came: vLLM computes with what it has, or
reads, when the request is scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.conformance.contract_engine import ContractEngine
from tests.engine.keyed_requests import write_adapter
from tests.engine.toy_asking import seeded_prompt

IDS = seeded_prompt(1, 41)


@pytest.fixture
def engine(tiny_model: Path, async_scheduling: bool, step_loads: str) -> ContractEngine:
    return ContractEngine(tiny_model, async_scheduling)


def warm(engine: ContractEngine, adapter: Path) -> None:
    """The tier holds what a request with this adapter has computed, the GPU does not."""
    engine.add(IDS, 6, lora_request=LoRARequest("first", 7, str(adapter)), model="old")
    engine.run()
    engine.drop_gpu_cache()
    assert len(engine.half.index) >= len(IDS) // 4


def test_what_was_computed_with_an_adapter_is_not_loaded_once_it_was_replaced(
    engine: ContractEngine, tmp_path: Path
) -> None:
    """In the place of the one that a waiting request has come for, another is loaded meanwhile."""
    old, new = (write_adapter(tmp_path / name, name.encode()) for name in ("old", "new"))
    warm(engine, old)
    waiting = engine.add(IDS, 6, lora_request=LoRARequest("tune", 1, str(old)), model="new")
    in_place = LoRARequest("tune", 1, str(new), load_inplace=True)
    engine.add(IDS[5:], 1, lora_request=in_place, model="new")
    engine.run()
    assert not engine.calls.loads_of(waiting)
    engine.assert_conforms()
