"""The recurrent state that `tiered-kv model` computes is that of vLLM's model classes.

Attention is compared with real engines, where they run anyway
(`RealEngine.assert_bytes_as_computed_from`).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry

from tests.engine.window_models import QWEN3_NEXT
from tests.models import TINY_LLAMA
from vllm_tiered_kv.api.model_shape import LayerKind, read_shape

MAMBA2 = {
    "mamba_expand": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "JambaForCausalLM": {
        "model_type": "jamba",
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "GraniteMoeHybridForCausalLM": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        **MAMBA2,
    },
    "FalconH1ForCausalLM": {"model_type": "falcon_h1", "mamba_d_ssm": None, **MAMBA2},
    "NemotronHForCausalLM": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
    },
    "Lfm2ForCausalLM": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_dim": 128,
        "conv_L_cache": 3,
    },
    "Mamba2ForCausalLM": {
        "model_type": "mamba2",
        "expand": 2,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 16,
        "conv_kernel": 4,
    },
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_recurrent_state_is_that_of_vllm(architecture: str, ranks: int) -> None:
    config = {**TINY_LLAMA, **CONFIGS[architecture], "architectures": [architecture]}
    model = ModelRegistry._try_load_model_cls(architecture)
    assert model is not None
    hf_config = SimpleNamespace(**config)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_config=hf_config, hf_text_config=hf_config
        ),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto",
            # What vLLM sets for this architecture, see NemotronHForCausalLMConfig.
            mamba_ssm_cache_dtype="float32" if "NemotronH" in architecture else "auto",
            use_replayssm=False,
        ),
        num_speculative_tokens=0,
        speculative_config=None,
    )
    shapes = model.get_mamba_state_shape_from_config(vllm_config)
    dtypes = model.get_mamba_state_dtype_from_config(vllm_config)
    expected = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    shape = read_shape(config, tensor_parallel=ranks)
    (state,) = {g.layer_bytes for g in shape.groups if g.kind is LayerKind.RECURRENT}
    assert state == expected
