"""Random clients of engines that speculate: whatever drafts leave behind, nobody ever reads it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.toy_asking import prompt, total
from tests.engine.toy_engine import play
from tests.engine.toy_speculation import DraftingToyEngine, SpeculatingToyEngine
from tests.patience import mostly_slow
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "lazy": {"extra_config": {"store": "lazy", "lazy_window": 24, "load_policy": "always"}},
    "slow stores": {"store_delay": 4},
    "windows": {"windows": (None, 10), "gpu_blocks": 40},
}


DRAFTING: dict[str, dict[str, Any]] = {
    # Without vLLM's own cache, which may hold draft KV of another next token, all KV is exact.
    "eagle": {"prefix_caching": False},
    "eagle beside vLLM's cache": {},
    "eagle, slow stores": {"prefix_caching": False, "store_delay": 4},
    "eagle, windows": {"prefix_caching": False, "windows": (None, 10), "gpu_blocks": 40},
    "eagle, lazy": KINDS["lazy"],
    "draft model": {"method": "draft_model"},
    "draft model, tails": {
        "method": "draft_model",
        "extra_config": {"reuse_partial_tail": True, "load_policy": "always"},
    },
}


SEEDS = pytest.mark.parametrize("seeds", mostly_slow([(0, 1), (2, 3)], 1), ids=["0-1", "2-3"])


@SEEDS
@pytest.mark.parametrize("kind", KINDS)
def test_random_clients(
    tiny_model: Path, async_scheduling: bool, kind: str, seeds: tuple[int, ...]
) -> None:
    play_all(SpeculatingToyEngine, tiny_model, async_scheduling, KINDS[kind], seeds)


@SEEDS
@pytest.mark.parametrize("kind", DRAFTING)
def test_random_clients_of_drafting_engines_read_no_wrong_kv(
    tiny_model: Path, async_scheduling: bool, kind: str, seeds: tuple[int, ...]
) -> None:
    play_all(DraftingToyEngine, tiny_model, async_scheduling, DRAFTING[kind], seeds)


def test_partial_tails_with_layers_that_read_ahead_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="not possible with EAGLE or MTP"):
        DraftingToyEngine(tiny_model, extra_config={"reuse_partial_tail": True})


def play_all(
    engine_class: type[SpeculatingToyEngine],
    model: Path,
    async_scheduling: bool,
    settings: dict[str, Any],
    seeds: tuple[int, ...],
) -> None:
    accepted = rejected = loaded = preempted = 0
    for seed in seeds:
        engine = engine_class(
            model,
            async_scheduling=async_scheduling,
            seed=seed,
            **{
                "gpu_blocks": 26,
                "cpu_blocks": 200,
                "extra_config": {"load_policy": "always"},
                **settings,
            },
        )
        play_clients(engine, random.Random(seed))
        accepted += engine.accepted
        rejected += engine.rejected
        loaded += int(total(engine, names.LOADED_BLOCKS))
        preempted += sum(request.num_preemptions for request in engine.requests.values())
        engine.close()
    assert min(accepted, rejected, loaded, preempted) > 0


def play_clients(engine: SpeculatingToyEngine, rng: random.Random) -> None:
    stems = [prompt(rng, rng.randrange(4, 40)) for _ in range(4)]
    for _ in range(40):
        stem = rng.choice(stems)
        asked = [*stem[: rng.randrange(1, len(stem) + 1)], *prompt(rng, rng.randrange(9))]
        if engine.finished and rng.random() < 0.4:
            # The next turn of a conversation: its last answer is a part of the prompt.
            name = rng.choice(list(engine.finished))
            before = engine.requests[name].prompt_token_ids
            asked = [*before, *engine.finished[name].tokens][:60] + prompt(rng, 2)
        engine.add(asked, rng.randrange(1, 18))
        for _ in range(rng.randrange(7)):
            engine.step()
        alive = [name for name in engine.requests if name in engine.scheduler.requests]
        if alive and rng.random() < 0.1:
            engine.abort(rng.choice(alive))
        if rng.random() < 0.15:
            engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.assert_at_rest()
    for name, done in engine.finished.items():
        right = play(engine.requests[name].prompt_token_ids, len(done.tokens))[0]
        assert done.tokens == right
