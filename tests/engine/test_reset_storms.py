"""Resets while requests run, as weights change in place: what the old ones had a part in is never
readable under the new ones, whoever finds it on the GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.delayed_copier import LAYERS
from tests.engine.toy_asking import ask, prompt, seeded_prompt
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import STATE, ToyGroup
from tests.engine.toy_speculation import SpeculatingToyEngine
from vllm_tiered_kv.core.tiers import Lookup

_LAST = len(LAYERS) - 1


@dataclass(frozen=True)
class AgedGroup(ToyGroup):
    """Its last layer does not hold KV, but which weights had a part in each token: the oldest."""

    age: int = 0

    def read(self, cache: np.ndarray, blocks: Sequence[int], start: int) -> list[int]:
        """What the tokens from `start` on build on."""
        if self.is_recurrent:
            return self.rows(cache)[blocks[(start - 1) // self.block_size]].tolist() * bool(start)
        table, place = self.table(blocks, start)
        first = 0 if self.window is None else max(0, start - self.window + 1)
        return self.rows(cache)[table[first:], place[first:]].tolist()

    def forward(
        self,
        name: str,
        caches: Sequence[np.ndarray],
        blocks: Sequence[int],
        right: np.ndarray,
        span: range,
        before_layer: Callable[[int], None],
    ) -> None:
        super().forward(name, caches[:_LAST], blocks, right, span, before_layer)
        if self.is_recurrent:
            self.rows(caches[_LAST])[blocks[(span.stop - 1) // self.block_size]] = self.age
            return
        table, place = self.table(blocks, span.stop)
        self.rows(caches[_LAST])[table[span.start :], place[span.start :]] = self.age


@dataclass
class AgedToyEngine(ToyEngine):
    weights: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups = [AgedGroup(**vars(group)) for group in self.groups]

    def change_weights(self) -> None:
        assert self.scheduler.reset_connector_cache()
        self.weights += 1

    def _forward(self, request_id: str, count: int) -> list[int]:
        running = self._running[request_id]
        self._before_layer(_LAST)
        start = self._first_computed(request_id, running.computed)
        read = [
            group.read(self.caches[_LAST], blocks, start)
            for group, blocks in zip(self.groups, running.blocks, strict=True)
        ]
        age = min(self.weights, *(min(ages, default=self.weights) for ages in read))
        self.groups = [replace(group, age=age) for group in self.groups]
        return super()._forward(request_id, count)

    def _first_computed(self, request_id: str, planned: int) -> int:
        return planned

    def _process_oldest(self) -> None:
        super()._process_oldest()
        self.assert_nothing_old_is_readable()

    def assert_nothing_old_is_readable(self) -> None:
        for slot, key, *_ in self.half.index.slots():
            if self.half.index.lookup(key) is Lookup.HIT:
                ages = self.groups[key[-1]].rows(self.arena[slot][_LAST])
                assert set(ages.tolist()) == {self.weights}

    def evict(self, request_id: str, group: int, positions: Sequence[int]) -> None:
        """vLLM gives away what it has cached of a request: the copies found first."""
        pool = self.scheduler.kv_cache_manager.block_pool
        each = self.groups[group].block_size // pool.hash_block_size
        for position in positions:
            block_hash = self.requests[request_id].block_hashes[(position + 1) * each - 1]
            (block,) = pool.get_cached_block(block_hash, [group])
            self.scheduler.kv_cache_manager.evict_blocks({block.block_id})


@dataclass
class AgedSpeculatingEngine(AgedToyEngine, SpeculatingToyEngine):
    def _first_computed(self, request_id: str, planned: int) -> int:
        return min(planned, self._known[request_id] - 1)


def find_among_new_ones(engine: AgedToyEngine, ids: list[int], old: dict[int, range]) -> None:
    """All of these blocks are computed with the new weights, too. Then vLLM gives the old ones
    away, but not those at the `old` positions of groups: the next request finds both kinds."""
    request = engine.add(ids, 1)
    engine.requests[request].skip_reading_prefix_cache = True
    engine.run()
    for group in engine.groups:
        full = range((len(ids) - 1) // engine.alignment * engine.alignment // group.block_size)
        kept = old.get(group.group_id, range(0))
        engine.evict(request, group.group_id, [n for n in full if n not in kept])
    ask(engine, [*ids, *seeded_prompt(9, 20)])
    engine.assert_at_rest()


def test_old_blocks_of_a_later_group(tiny_model: Path, async_scheduling: bool) -> None:
    engine = AgedToyEngine(tiny_model, async_scheduling, windows=(6, None), cpu_blocks=128)
    ids = seeded_prompt(1, 21)
    ask(engine, ids)
    engine.change_weights()
    find_among_new_ones(engine, ids, {1: range(5)})


def test_hash_that_is_written_when_blocks_of_all_groups_are_full(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = AgedToyEngine(
        tiny_model, async_scheduling, windows=(None, 10), block_sizes=(4, 8), cpu_blocks=128
    )
    ids = seeded_prompt(1, 6)
    request = engine.add(ids, 15)
    engine.step()
    engine.step()
    assert 4 < engine.requests[request].num_computed_tokens < 8
    engine.change_weights()
    engine.run()
    find_among_new_ones(engine, ids + play(ids, 15)[0], {0: range(1)})


@pytest.mark.parametrize("count", [6, 7, 8])
def test_window_past_blocks_from_before_a_reset_is_right(
    tiny_model: Path, async_scheduling: bool, count: int
) -> None:
    """Of a prompt that the GPU has nothing is worked out as long as there is nothing to store."""
    options = {"store_decode": False}
    engine = AgedToyEngine(tiny_model, async_scheduling, windows=(10,), extra_config=options)
    ids = seeded_prompt(1, 12)
    ask(engine, ids, 1)
    engine.change_weights()
    ask(engine, ids, count)
    engine.assert_at_rest()


@pytest.mark.parametrize("steps", [1, 3, 7, 9])
@pytest.mark.parametrize("is_preempted", [False, True], ids=["abort", "preemption"])
def test_hash_that_is_written_just_before_blocks_are_freed(
    tiny_model: Path, async_scheduling: bool, steps: int, is_preempted: bool
) -> None:
    """As it is when drafts turn out to be right."""
    engine = AgedSpeculatingEngine(tiny_model, async_scheduling, cpu_blocks=128)
    ids = seeded_prompt(1, 6)
    request = engine.add(ids, 40)
    engine.step()
    engine.step()
    engine.change_weights()
    for _ in range(steps):
        engine.step()
    if is_preempted:  # as for want of blocks
        engine.land()
        engine.scheduler.running.remove(engine.requests[request])
        engine.scheduler._preempt_request(engine.requests[request], 0.0)
    tokens = list(engine.requests[request].all_token_ids)
    engine.abort(request)
    last = (len(tokens) - 1) // 4
    find_among_new_ones(engine, tokens, {0: range(last - 1, last)})


STORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "in chunks, slow stores": {"max_tokens_per_step": 6, "store_delay": 4},
    "lazy": {"extra_config": {"store": "lazy", "lazy_window": 48}},
    "a window, prompts alone": {"windows": (10,), "extra_config": {"store_decode": False}},
    "window first": {"windows": (6, None), "gpu_blocks": 72},
    "a recurrent layer": {"windows": (None, STATE), "retention": 0},
    "two sizes of blocks": {"windows": (None, 10), "block_sizes": (4, 8), "gpu_blocks": 72},
}


@pytest.mark.parametrize("kind", STORMS)
def test_storms(tiny_model: Path, async_scheduling: bool, kind: str) -> None:
    for seed in (0, 4, 5):
        facts = {"gpu_blocks": 40, "cpu_blocks": 300, "seed": seed, **STORMS[kind]}
        storm(AgedToyEngine(tiny_model, async_scheduling, **facts), random.Random(seed))


def storm(engine: AgedToyEngine, rng: random.Random) -> None:
    stems = [prompt(rng, rng.randrange(8, 44)) for _ in range(3)]
    asked = {}
    for _ in range(60):
        stem, count = rng.choice(stems), rng.choice([1, 2, 5, 14])
        ids = stem[: rng.randrange(1, len(stem) + 1)] + prompt(rng, rng.choice([0, 1, 3, 12]))
        request = engine.add(ids, count)
        asked[request] = play(ids, count)[0]
        # Such a request computes what the GPU has, so that it has it twice.
        engine.requests[request].skip_reading_prefix_cache = rng.random() < 0.1
        for _ in range(rng.randrange(7)):
            engine.step()
        event = rng.random()
        if event < 0.15:
            engine.change_weights()
        elif event < 0.35:
            victim = rng.choice(list(asked))
            if not engine.requests[victim].is_finished():
                engine.abort(victim)
    engine.run()
    for request, right in asked.items():
        said = engine.finished[request].tokens
        assert said == right[: len(said)]
    engine.assert_at_rest()
    assert not engine.half.stores._stale_requests
