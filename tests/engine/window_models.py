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

DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "compress_ratios": [1, 4, 128, 4],
    "sliding_window": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    # Kernels are compiled for heads of these sizes.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "index_topk": 512,
    "q_lora_rank": 256,
    "o_lora_rank": 256,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "num_hash_layers": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 4,
    "rope_theta": 1e4,
    "compress_rope_theta": 4e4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Windows over latent KV, two compressed caches, an indexer and the states of compressors."""


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
