"""The prompts, and the comparison with vLLM alone."""

from __future__ import annotations

import random

from tests.engine.real_engine import Answer, RealEngine

BLOCK = 32
BLOCK_BYTES = 4 * 2 * BLOCK * 64 * 4  # layers, heads, tokens, K and V of 32 channels, float32
COUNT = 6


def make_prompts() -> list[list[int]]:
    """24 prompts: four stems shared by four each, eight of their own; 40 to 700 tokens."""
    rng = random.Random(11)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(length)]

    stems = [ids(rng.randrange(64, 400)) for _ in range(4)]
    shared = [stem + ids(rng.randrange(8, 300)) for stem in stems for _ in range(4)]
    prompts = shared + [ids(rng.randrange(40, 700)) for _ in range(8)]
    # A single row takes another path through the CPU's kernels, with other rounding: vLLM's own
    # prefix cache shows it too. Comparing bit by bit needs at least two tokens left to compute.
    return [ids if len(ids) % BLOCK != 1 else ids[:-1] for ids in prompts]


PROMPTS = make_prompts()

Truth = tuple[list[Answer], dict[tuple[int, ...], bytes]]


def assert_same(answers: list[Answer], engine: RealEngine, truth: Truth) -> None:
    expected, kv_bytes = truth
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        assert mine.tokens == theirs.tokens, f"tokens of prompt {number}"
        assert mine.logprobs == theirs.logprobs, f"logprobs of prompt {number}"
    assert engine.kv_bytes.keys() <= kv_bytes.keys()
    for name, content in engine.kv_bytes.items():
        assert content == kv_bytes[name], f"KV bytes of block {len(name) // BLOCK - 1}"
