"""DeepSeek-V4 on a GPU: windows over latent KV, compressed KV, an indexer, compressors' states.

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

HEADS = {"num_attention_heads": 64, "index_n_heads": 64, "max_position_embeddings": 16_384}
BLOCK = 256
LENGTHS = (6_000, 4_097, 1_500, 777)


def test_a_tier_hit_is_a_device_hit(tmp_path: Path) -> None:
    model = window_models.write(tmp_path, {**window_models.DEEPSEEK_V4, **HEADS})
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    with real_engine(
        model,
        {"cpu_memory": "4GiB"},
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        block_size=BLOCK,
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
            assert tier.cached == (len(ids) - 1) // BLOCK * BLOCK
            needed = sum(len(group.needed(0, tier.cached)) for group in engine.half._groups)
            assert engine.total(names.LOADED_BLOCKS) - before == needed
            settle(engine)
            engine.drop_gpu_cache()
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[:] ^= 0x15
        (changed,) = engine.ask([prompts[0]], COUNT)
        assert changed.logprobs != expected[0].logprobs
