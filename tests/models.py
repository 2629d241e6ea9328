"""Tiny model folders: a config and nothing else, for `load_format=dummy`."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

TINY_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TINY_LLAMA: dict[str, Any] = {
    **TINY_QWEN2,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 32,
}

TINY_MLA: dict[str, Any] = {
    **{key: TINY_QWEN2[key] for key in TINY_QWEN2 if key != "rope_theta"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    # Kernels are compiled for this latent alone: 512 channels and 64 with positions.
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # Experts are declared and never reached: the first layers are dense.
    "first_k_dense_replace": 8,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""DeepSeek-V2: multi-head latent attention."""

TINY_GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention"] * 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "vocab_size_per_layer_input": 1024,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 6,
    "sliding_window": 4096,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Its last two layers read the KV cache of earlier ones and have none of their own."""

TINY_BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def has_bfloat16() -> bool:
    """Of processors by ARM the later ones alone; vLLM ends with an illegal instruction there."""
    import torch

    if torch.cuda.is_available() or platform.machine() != "aarch64":
        return True
    return " bf16" in Path("/proc/cpuinfo").read_text()


def write_model(folder: Path, **changes: Any) -> Path:
    return write_config(folder, {**TINY_QWEN2, **changes})


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN2_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""The shape of Qwen2.5-7B; weights are not needed to move blocks of the real size."""
