"""Sliding windows on a GPU: block-outermost caches of several groups, CUDA graphs, real kernels.

A hit in the tier is compared with vLLM's own hit on the device, token by token and bit by bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine import window_models  # noqa: E402
from tests.engine.real_engine import real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.gpu.test_engine_gpu import COUNT  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 16_384,
    "sliding_window": 1000,
    # vLLM 0.32 overflows a buffer of its FlashAttention builder if prompts have many more chunks.
    "attention_chunk_size": 1024,
    "torch_dtype": "bfloat16",
}
LENGTHS = (6_000, 4_097, 1_500, 777)


@pytest.mark.parametrize("name", ["GEMMA3", "MISTRAL", "GPT_OSS", "LLAMA4"])
def test_tier_hit_is_a_device_hit(tmp_path: Path, name: str) -> None:
    model = window_models.write(tmp_path, {**getattr(window_models, name), **SHAPE})
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    with real_engine(
        model,
        {"cpu_memory": "4GiB"},
        dtype="bfloat16",
        block_size=16,
        max_model_len=8192,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=None,
        **memory(6),
        enforce_eager=False,
    ) as engine:
        expected = []
        for ids in prompts:
            engine.ask([ids], COUNT)
            (device,) = engine.ask([ids], COUNT)
            settle(engine)
            engine.drop_gpu_cache()
            before = engine.total(names.LOADED_BLOCKS)
            (tier,) = engine.ask([ids], COUNT)
            assert tier == device
            expected.append(device)
            assert tier.cached == (len(ids) - 1) // 16 * 16
            needed = sum(len(group.needed(0, tier.cached)) for group in engine.half._groups)
            assert engine.total(names.LOADED_BLOCKS) - before == needed
            settle(engine)
            engine.drop_gpu_cache()
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[:] ^= 0x15
        (changed,) = engine.ask([prompts[0]], COUNT)
        assert changed.cached == (len(prompts[0]) - 1) // 16 * 16
        assert changed.logprobs != expected[0].logprobs
