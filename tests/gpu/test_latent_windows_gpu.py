"""DeepSeek-V4 on a GPU: windows over latent KV, compressed KV, an indexer, compressors' states.

A hit in the tier is compared with vLLM's own hit on the device, token by token and bit by bit.
vLLM needs FlashMLA, DeepGEMM, TileLang and CuTe DSL for this model.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from vllm import _custom_ops  # noqa: E402

from tests.engine import window_models  # noqa: E402
from tests.engine.real_engine import real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.gpu.test_engine_gpu import COUNT  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCK = 256
"""The only size of blocks that the kernels take."""

MODEL: dict[str, Any] = {
    **window_models.DEEPSEEK_V4,
    # FlashMLA takes 64 or 128 heads, DeepGEMM 32 or 64 of the indexer.
    "num_attention_heads": 64,
    "index_n_heads": 64,
    "hc_mult": 4,
    # Kernels read angles of rotation at any position: the table ends at the product of these two.
    "rope_scaling": {
        **window_models.DEEPSEEK_V4["rope_scaling"],
        "factor": 4,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 16_384,
}
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "block_size": BLOCK,
    "max_model_len": 8192,
    "max_num_batched_tokens": 4096,
    "num_gpu_blocks_override": None,
    **memory(6),
    "kernel_config": {"sparse_indexer_topk_backend": "torch"},
}
LENGTHS = (6_000, 4_097, 1_500, 777)
"""The indexer chooses 512 times four tokens: of the first two prompts it leaves some out."""


@pytest.fixture(autouse=True)
def chosen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the indexer has chosen is sorted. vLLM's kernels leave it in the order in which their
    threads came to it, and sums in another order differ in the last bits, in a hit on the device
    too. In decoding vLLM's choice by torch (`sparse_indexer_topk_backend`) has a fixed order."""
    choose = _custom_ops.top_k_per_row_prefill

    def choose_in_order(logits: Any, starts: Any, ends: Any, chosen: Any, *sizes: int) -> None:
        choose(logits, starts, ends, chosen, *sizes)
        none = torch.iinfo(chosen.dtype).max
        ordered = chosen.masked_fill(chosen < 0, none).sort(dim=1).values
        chosen.copy_(ordered.masked_fill_(ordered == none, -1))

    monkeypatch.setattr(_custom_ops, "top_k_per_row_prefill", choose_in_order)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_tier_hit_is_a_device_hit(tmp_path: Path, eager: bool) -> None:
    model = window_models.write(tmp_path, MODEL)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    with real_engine(model, {"cpu_memory": "4GiB"}, **ENGINE, enforce_eager=eager) as engine:
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
        # Not random bytes: some would be NaNs, after which the indexer could choose anything.
        arena.bytes_at(0, arena.nbytes)[:] = 0
        (changed,) = engine.ask([prompts[0]], COUNT)
        assert changed.logprobs != expected[0].logprobs
