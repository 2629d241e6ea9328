"""What real engines with sliding windows are asked, and what vLLM's own cache finds of it."""

from __future__ import annotations

import random
from pathlib import Path

from tests.engine import window_models
from tests.engine.oracle import BLOCK, COUNT
from tests.engine.real_engine import Answer, RealEngine

MODELS = {  # the first ones are part of every run
    "gpt_oss": window_models.GPT_OSS,
    "llama4": window_models.LLAMA4,
    "gemma3": window_models.GEMMA3,
    "mistral": window_models.MISTRAL,
}
WINDOW_BLOCKS = -(-(window_models.WINDOW - 1) // BLOCK)


def make_prompts() -> list[list[int]]:
    """Several windows long; see `oracle.make_prompts` for why none leaves a single token."""
    rng = random.Random(5)
    lengths = [length + (length % BLOCK == 1) for length in (130, 420, 700)]
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in lengths]


PROMPTS = make_prompts()


def model_folder(folder: Path, name: str) -> Path:
    return window_models.write(folder / name, MODELS[name])


def needed_blocks(engine: RealEngine, tokens: int) -> int:
    blocks = tokens // BLOCK
    windowed = {False: min(blocks, WINDOW_BLOCKS), True: tokens % window_models.WINDOW // BLOCK}
    return sum(
        blocks if group.window is None else windowed[group.is_chunked]
        for group in engine.half._groups
    )


def found_by_vllm(engine: RealEngine) -> list[Answer]:
    """Each prompt with the GPU's own cache, after it was computed once."""
    answers = []
    for ids in PROMPTS:
        engine.ask([ids], COUNT)
        answers += engine.ask([ids], COUNT)
        engine.drop_gpu_cache()
    return answers
