"""Helpers that send prompts to toy engines and check their answers, metrics and tiers."""

from __future__ import annotations

import random

from vllm.v1.request import RequestStatus

from tests.engine.toy_engine import ToyEngine, play
from vllm_tiered_kv.connector.scheduler.partial_tail import tail_of
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.metrics import names


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 50) for _ in range(length)]


def seeded_prompt(seed: int, length: int = 41) -> list[int]:
    """The same prompt for the same seed and length."""
    return prompt(random.Random(seed), length)


def ask(
    engine: ToyEngine, ids: list[int], count: int = 6, salt: str = "", **control: object
) -> str:
    request = engine.add(ids, count, salt, control=control)
    engine.run()
    assert engine.finished[request].tokens == play(ids, count, salt)[0]
    return request


def total(engine: ToyEngine, metric: names.Metric, *labels: str) -> float:
    return engine.half.recorder.total(metric, *labels)


def keys_of(engine: ToyEngine, request_id: str) -> list[list[BlockKey]]:
    """Per group, the keys of all blocks that the request has filled so far."""
    request = engine.requests[request_id]
    keys = engine.half._key_maker.keys_for(request)
    keys.extend(request, request.num_tokens)
    return keys.of_group


def held(engine: ToyEngine, request: str) -> int:
    """How many blocks of a request the CPU tier holds."""
    return sum(sum(engine.half.index.are_readable(keys)) for keys in keys_of(engine, request))


def fill(engine: ToyEngine, seed: int, blocks: int) -> None:
    """Sends prompts of other content, until so many blocks were stored."""
    rng = random.Random(seed)
    until = total(engine, names.STORED_BLOCKS) + blocks
    while total(engine, names.STORED_BLOCKS) < until:
        ask(engine, prompt(rng, 33), 1)
        engine.drop_gpu_cache()


def assert_tier_is_right(engine: ToyEngine) -> int:
    """Checks that every readable block holds exactly the KV of its key's prefix. Returns the number
    of readable blocks."""
    readable = 0
    for request_id, right in engine._truth.items():
        for group, group_keys in zip(engine.groups, keys_of(engine, request_id), strict=True):
            for position, key in enumerate(group_keys):
                if engine.half.index.match_prefix([key]):
                    slot = engine.half.index.slot_of(key)
                    for layer in range(3):
                        stored = group.rows(engine.arena[slot][layer])
                        assert (stored == group.block(right, position, layer)).all()
                    readable += 1
        readable += _assert_tail_is_right(engine, request_id)
    return readable


def _assert_tail_is_right(engine: ToyEngine, request_id: str) -> bool:
    """Like `assert_tier_is_right` for the tail of the prompt. Bytes after the prompt are
    undefined."""
    request, group = engine.requests[request_id], engine.groups[0]
    keys = engine.half._key_maker.keys_for(request)
    may_have_tail = len(engine.groups) == 1 and not group.is_recurrent
    tail = tail_of(request, keys, group.span) if may_have_tail else None
    if tail is None or not engine.half.index.match_prefix([tail.key]):
        return False
    slot = engine.half.index.slot_of(tail.key)
    right = engine._truth[request_id][group.own(tail.position * group.span, tail.end)]
    for layer in range(3):
        stored = group.rows(engine.arena[slot][layer])[: len(right)]
        assert (stored == group.kv(right, layer)).all()
    return tail.is_partial


def workload(engine: ToyEngine, seed: int, requests: int) -> None:
    """Many concurrent requests with shared prefixes, random aborts and resets of the GPU cache."""
    rng = random.Random(seed)
    stems = [prompt(rng, rng.randrange(8, 40)) for _ in range(4)]
    asked: dict[str, tuple[list[int], int]] = {}
    alive: list[str] = []
    for _ in range(requests):
        stem = rng.choice(stems)
        ids = stem[: rng.randrange(4, len(stem) + 1)] + prompt(rng, rng.randrange(1, 20))
        count = rng.randrange(1, 20)
        request = engine.add(ids, count)
        asked[request] = (ids, count)
        alive.append(request)
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.2:
            victim = rng.choice(alive)
            if not engine.requests[victim].is_finished():
                engine.abort(victim)
        if rng.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        if rng.random() < 0.02:
            engine.scheduler.reset_connector_cache()
    engine.run()
    for request, (ids, count) in asked.items():
        finished = engine.finished[request]
        expected = play(ids, count)[0]
        if finished.status is RequestStatus.FINISHED_ABORTED:
            assert finished.tokens == expected[: len(finished.tokens)]
        else:
            assert finished.tokens == expected
    assert all(
        engine.reported_loads.count(r) <= engine.requests[r].num_preemptions + 1 for r in asked
    )
