"""Recurrent layers with speculative decoding under vLLM's real schedulers, in "align" mode.

A step leaves one state for each draft, and nobody knows yet which of them will be accepted. What
the tier stores must be the state after a block of confirmed tokens, and no other.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.test_recurrent import found_on_gpu, states_in_tier
from tests.engine.toy_asking import ask, assert_tier_is_right, keys_of, prompt, total, workload
from tests.engine.toy_engine import play
from tests.engine.toy_groups import EXPORTED_STATE, STATE, WrongRead
from tests.engine.toy_speculation import DraftingToyEngine, SpeculatingToyEngine
from vllm_tiered_kv.metrics import names

pytestmark = WITH_RECURRENT_STATES

ENGINES = {"ngram": SpeculatingToyEngine, "eagle": DraftingToyEngine}
EVERY_ENGINE = pytest.mark.parametrize("make", ENGINES.values(), ids=list(ENGINES))
SHAPES: dict[str, dict[str, Any]] = {
    "hybrid": {"windows": (None, STATE)},
    "state_first": {"windows": (STATE, STATE, None)},
    "with_a_window": {"windows": (None, 10, STATE)},
    "exported": {"windows": (None, EXPORTED_STATE)},
    "fine_hashes": {"windows": (None, STATE), "hash_size": 2},
    "fine_and_exported": {"windows": (None, EXPORTED_STATE), "hash_size": 2},
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
"""All have attention: vLLM keeps no states of drafts in models without."""


@EVERY_ENGINE
@pytest.mark.parametrize("retention", [0, 8, None], ids=["few", "some", "all"])
def test_a_repeated_prompt_and_the_next_turn_are_found_as_by_vllm_itself(
    tiny_model: Path,
    async_scheduling: bool,
    make: type[SpeculatingToyEngine],
    retention: int | None,
) -> None:
    engine = make(
        tiny_model, async_scheduling, windows=(None, STATE), cpu_blocks=256, retention=retention
    )
    ids = prompt(random.Random(3), 21)
    turn = [*ids, *play(ids, 30)[0], 7, 8, 9]
    ask(engine, ids, 30)
    found = [found_on_gpu(engine, asked) for asked in (ids, turn)]
    print(found)
    for asked, end in zip((ids, turn), found, strict=True):
        engine.drop_gpu_cache()
        before = total(engine, names.HIT_TOKENS)
        ask(engine, asked, 2)
        print(total(engine, names.HIT_TOKENS) - before, end)
    engine.assert_at_rest()
