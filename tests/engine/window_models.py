"""Tiny models with more than full attention, a config each: for `load_format=dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WINDOW = 96

_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MISTRAL = {
    **_TINY,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
"""Every layer has the window."""

GEMMA3 = {
    **_TINY,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "layer_types": ["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(6)],
    "query_pre_attn_scalar": 32,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Two layers with the window to one without. Its embeddings are not tied as in the real one: drawn
at random they would drown what attention says."""

GPT_OSS = {
    **_TINY,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": ["full_attention" if n % 2 else "sliding_attention" for n in range(4)],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 150000,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
"""Windows in every other layer, attention sinks in all."""

LLAMA4 = {
    **{key: value for key, value in _TINY.items() if key != "sliding_window"},
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [0, 1, 2, 3],
    "intermediate_size_mlp": 256,
    "use_qk_norm": True,
    "attn_temperature_tuning": False,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "attention_bias": False,
}
"""Chunked local attention in three of four layers; chunks as long as the windows of the others."""

QWEN3_NEXT = {
    **_TINY,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    # Large heads of attention and few of the recurrence: vLLM chooses blocks as large as a state.
    "hidden_size": 256,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""Recurrent layers (GDN) beside full attention; no windows."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
