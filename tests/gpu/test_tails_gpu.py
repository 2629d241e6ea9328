"""Partial tails on a GPU, 7B shape: a repeated prompt computes one token, wherever the rest lies.

A hit on the device, whose tail alone is loaded, computes the same shapes as one that loads all of
it: tokens and logprobs must be equal.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.real_engine import real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

COUNT = 16
LENGTHS = (10_240, 10_239, 4_098, 3_000, 777, 130, 31, 14)


def test_repeated_prompt_computes_one_token(tmp_path: Path) -> None:
    rng = random.Random(9)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(length)] for length in LENGTHS]
    options = {"cpu_memory": "4GiB", "reuse_partial_tail": True, "load_policy": "always"}
    with real_engine(
        write_model(tmp_path / "qwen2-7b", **QWEN2_7B),
        options,
        dtype="bfloat16",
        block_size=16,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=None,
        **memory(4),
        enforce_eager=False,
    ) as engine:
        same_as_cold = 0
        for ids in prompts:
            (cold,) = engine.ask([ids], COUNT)
            settle(engine)
            before = engine.total(names.LOADED_BLOCKS)
            (device,) = engine.ask([ids], COUNT)
            settle(engine)
            assert engine.total(names.LOADED_BLOCKS) - before == 1
            engine.drop_gpu_cache()
            (tier,) = engine.ask([ids], COUNT)
            settle(engine)
            assert cold.cached == 0
            assert device.cached == tier.cached == len(ids) - 1
            assert engine.total(names.LOADED_BLOCKS) - before == 1 + -(-len(ids) // 16)
            assert tier.tokens == device.tokens
            assert tier.logprobs == device.logprobs
            same_as_cold += cold.tokens == tier.tokens
            engine.drop_gpu_cache()
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[:] = 0
        (wrong,) = engine.ask([prompts[-1]], COUNT)
        assert wrong.logprobs != tier.logprobs, "what is loaded is not what is read"
        settle(engine)
        engine.assert_at_rest()
        print(f"\n{len(prompts)} prompts; tokens equal to the cold run in {same_as_cold}")
