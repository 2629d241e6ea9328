"""Groups whose blocks are larger than what vLLM hashes: one hash is not one block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.contract_engine import ContractEngine
from tests.engine.toy_asking import seeded_prompt

IDS = seeded_prompt(1, 61)
GROUPS: dict[str, dict[str, Any]] = {
    "full": {"windows": (None, None), "block_sizes": (4, 8)},
    "window_of_small_blocks": {"windows": (12, None), "block_sizes": (4, 8)},
    "window_of_large_blocks": {"windows": (None, 12), "block_sizes": (4, 8)},
}


def engine_with(
    tiny_model: Path, async_scheduling: bool, groups: str, **settings: Any
) -> ContractEngine:
    engine = ContractEngine(
        tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=96, **GROUPS[groups], **settings
    )
    assert engine.scheduler.hash_block_size == 4
    assert engine.alignment == 8
    return engine


@pytest.mark.usefixtures("step_loads")
@pytest.mark.parametrize("groups", GROUPS)
def test_prefixes_are_loaded_for_all_groups(
    tiny_model: Path, async_scheduling: bool, groups: str
) -> None:
    engine = engine_with(tiny_model, async_scheduling, groups)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    request_id = engine.ask(IDS)
    assert (request_id, 56) in engine.calls.admitted  # whole blocks of both sizes
    engine.drop_gpu_cache()
    for length in (5, 9, 17, 33, 40):
        engine.ask(IDS[:length])
        engine.drop_gpu_cache()
    engine.assert_conforms()


@pytest.mark.parametrize("groups", GROUPS)
def test_blocks_stored_after_their_request_are_known_by_their_hash(
    tiny_model: Path, async_scheduling: bool, groups: str
) -> None:
    engine = engine_with(
        tiny_model,
        async_scheduling,
        groups,
        max_tokens_per_step=64,
        extra_config={"store": "lazy", "lazy_window": 127},
    )
    engine.ask(IDS, 1)
    engine.ask(seeded_prompt(2, 9), 1)  # one more step, after the blocks were given back
    engine.drop_gpu_cache()
    request_id = engine.ask(IDS, 1)
    assert (request_id, 56) in engine.calls.admitted
    engine.assert_conforms()


def test_block_pool_has_the_last_word(tiny_model: Path) -> None:
    """vLLM 0.31 does not tell the connector how fine its hashes are; the pool knows."""
    engine = engine_with(tiny_model, False, "full")
    engine.half.stores._hash_block_size = 8
    engine.scheduler.connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)
    assert engine.half.stores._hash_block_size == 4
