"""Adapters that are not what they were when their request came: vLLM computes with what it has, or
reads, when the request is scheduled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.conformance.contract_engine import ContractEngine
from tests.engine.keyed_requests import write_adapter
from tests.engine.toy_asking import seeded_prompt, total
from vllm_tiered_kv.metrics import names

IDS = seeded_prompt(1, 41)


def replace_files(folder: Path, content: bytes) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(content)
    os.utime(file, (9, 9))


@pytest.fixture
def engine(tiny_model: Path, async_scheduling: bool, step_loads: str) -> ContractEngine:
    return ContractEngine(tiny_model, async_scheduling)


def warm(engine: ContractEngine, adapter: Path) -> None:
    """The tier holds what a request with this adapter has computed, the GPU does not."""
    engine.add(IDS, 6, lora_request=LoRARequest("first", 7, str(adapter)), model="old")
    engine.run()
    engine.drop_gpu_cache()
    assert len(engine.half.index) >= len(IDS) // 4


def test_blocks_of_a_replaced_adapter_are_not_loaded(
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


def test_adapter_files_changed_back_after_reading_are_not_cached(
    engine: ContractEngine, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "tune", b"old")
    lora = LoRARequest("tune", 1, str(adapter))
    engine.add(IDS, 6, lora_request=lora, model="new")
    replace_files(adapter, b"new")
    engine.run()
    replace_files(adapter, b"old")
    later = engine.add(IDS, 6, lora_request=lora, model="new")
    assert later in engine.half._uncached
    engine.run()
    assert not len(engine.half.index)
    engine.assert_conforms()


def test_files_that_change_before_vllm_reads_them(engine: ContractEngine, tmp_path: Path) -> None:
    """It does when the request is first scheduled, which may be long after it came. What it then
    computes is neither loaded nor stored as that of the files that were there."""
    adapter = write_adapter(tmp_path / "tune", b"old")
    warm(engine, write_adapter(tmp_path / "copy", b"old"))
    held = len(engine.half.index)
    late = engine.add(IDS + IDS, 6, lora_request=LoRARequest("tune", 1, str(adapter)), model="new")
    replace_files(adapter, b"new")
    engine.run()
    assert not engine.calls.loads_of(late)
    assert len(engine.half.index) == held
    engine.assert_conforms()


@pytest.mark.parametrize("count", [1, 6])
def test_files_that_change_between_the_plan_of_a_step_and_its_execution(
    engine: ContractEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """vLLM reads them in the worker, when the step has been planned with those of before."""
    adapter = write_adapter(tmp_path / "tune", b"old")
    execute, read = engine._execute, []

    def reads_new_files(output: SchedulerOutput) -> ModelRunnerOutput:
        if not read:
            replace_files(adapter, b"new")
        read.append(output)
        return execute(output)

    monkeypatch.setattr(engine, "_execute", reads_new_files)
    engine.add(IDS, count, lora_request=LoRARequest("tune", 1, str(adapter)), model="new")
    engine.run()
    assert total(engine, names.STORED_BLOCKS) == len(engine.half.index) == 0
    replace_files(adapter, b"old")
    later = engine.add(IDS, 1, lora_request=LoRARequest("tune", 1, str(adapter)), model="new")
    assert later in engine.half._uncached
    engine.run()
    engine.assert_conforms()
