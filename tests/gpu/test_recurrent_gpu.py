"""Recurrent layers beside attention on a GPU: GDN, Mamba 2 and Mamba 1, with CUDA graphs.

A hit in the tier is compared with vLLM's own hit on the device, token by token and bit by bit.
vLLM's CPU back-end runs only the first of these kinds (tests/engine/test_recurrent_engine.py).
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

from tests.engine import window_models  # noqa: E402
from tests.engine.real_engine import real_engine  # noqa: E402
from tests.engine.test_recurrent_engine import state_in_tier  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

COUNT = 8
LENGTHS = (6_000, 4_097, 2_500)

_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 1024,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN3_NEXT = {
    **window_models.QWEN3_NEXT,
    **_SMALL,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
"""Gated delta nets (GDN)."""

GRANITE = {
    **_SMALL,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 2048,
    "position_embedding_type": "rope",
    "rope_theta": 10_000.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 0.125,
}
"""Mamba 2, which exports states within a forward."""

NEMOTRON_H = {
    **_SMALL,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "M-*-M",
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 256,
    "use_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "attention_head_dim": 64,
}
"""Mamba 2 with states in float32."""

JAMBA = {
    **_SMALL,
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_hidden_layers": 4,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 64,
    "use_mamba_kernels": True,
}
"""Mamba 1."""

MODELS = {"qwen3_next": QWEN3_NEXT, "granite": GRANITE, "nemotron_h": NEMOTRON_H, "jamba": JAMBA}


@pytest.mark.parametrize("name", list(MODELS))
def test_tier_hit_is_a_device_hit(tmp_path: Path, name: str) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    with real_engine(
        window_models.write(tmp_path, MODELS[name]),
        {"cpu_memory": "4GiB"},
        dtype="bfloat16",
        block_size=None,
        max_model_len=8192,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=None,
        enable_prefix_caching=True,
        **memory(6),
        enforce_eager=False,
        gdn_prefill_backend="triton",  # the default needs FlashInfer
    ) as engine:
        assert engine.half is not None, "the cache leaves this model alone"
        recurrent = [group for group in engine.half._groups if group.is_recurrent]
        block = recurrent[0].block_size
        print(f"\n{name}: blocks of {block} tokens, {engine.half.block_bytes} bytes")
        expected = []
        for ids in prompts:
            engine.ask([ids], COUNT)
            (device,) = engine.ask([ids], COUNT)
            assert device.cached == (len(ids) - 1) // block * block
            settle(engine)
            engine.drop_gpu_cache()
            before = engine.total(names.LOADED_BLOCKS)
            (tier,) = engine.ask([ids], COUNT)
            assert tier == device
            needed = sum(len(group.needed(0, tier.cached)) for group in engine.half._groups)
            assert engine.total(names.LOADED_BLOCKS) - before == needed
            expected.append(device)
            settle(engine)
            engine.drop_gpu_cache()
        assert engine.total(names.LOAD_FAILURES) == 0
        together = engine.ask(prompts, COUNT, together=True)
        assert [answer.cached for answer in together] == [answer.cached for answer in expected]
        settle(engine)
        engine.drop_gpu_cache()
        state_in_tier(engine, recurrent[0], prompts[0][: expected[0].cached])[:] ^= 0x15
        (changed,) = engine.ask([prompts[0]], COUNT)
        assert changed.cached == expected[0].cached
        assert changed.logprobs != expected[0].logprobs
        settle(engine)
        engine.assert_at_rest()
