"""Models that need more than a config, made on the spot: adapters, tokenizers, processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.models import write_config


def write_adapter(folder: Path, config: dict[str, Any], seed: int, rank: int = 8) -> Path:
    """A LoRA adapter of random weights for the attention of a tiny Qwen2, KV included."""
    from safetensors.torch import save_file

    hidden = config["hidden_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = torch.randn(rank, hidden, generator=generator), torch.randn(out, rank)
            b.normal_(generator=generator)
            weights[f"{at}.lora_A.weight"] = 0.3 * a
            weights[f"{at}.lora_B.weight"] = 0.3 * b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def write_tokenizer(folder: Path, special: dict[str, int] | None = None) -> Path:
    """A word for each of 1024 token ids, for what vLLM does not start without a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {token_id: f"t{token_id}" for token_id in range(1024)}
    words |= {token_id: word for word, token_id in (special or {}).items()}
    tokenizer = Tokenizer(WordLevel({w: i for i, w in words.items()}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        pad_token="t0",
        bos_token="t1",
        eos_token="t2",
        additional_special_tokens=list(special or ()),
    ).save_pretrained(folder)
    return folder


def write_multimodal(folder: Path) -> Path:
    """BLIP-2: of the models with images, one that vLLM imports without torchvision. An image is 16
    tokens in front of the prompt."""
    from transformers import Blip2Config, Blip2QFormerConfig, Blip2VisionConfig, OPTConfig

    image_token = 1000
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            hidden_size=64, image_size=56, patch_size=14, **small
        ).to_dict(),
        qformer_config=Blip2QFormerConfig(
            vocab_size=1024, hidden_size=64, encoder_hidden_size=64, **small
        ).to_dict(),
        text_config=OPTConfig(
            vocab_size=1024,
            hidden_size=128,
            word_embed_proj_dim=128,
            num_hidden_layers=2,
            ffn_dim=256,
            num_attention_heads=4,
            max_position_embeddings=2048,
        ).to_dict(),
        num_query_tokens=16,
        image_token_index=image_token,
    ).to_dict()
    write_config(folder, {**config, "architectures": ["Blip2ForConditionalGeneration"]})
    write_tokenizer(folder, {"<image>": image_token})
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 16}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    images = {
        "processor_class": "Blip2Processor",
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def write_whisper(folder: Path) -> Path:
    from transformers import WhisperConfig

    config = WhisperConfig(
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ).to_dict()
    write_config(folder, {**config, "architectures": ["WhisperForConditionalGeneration"]})
    sound = {
        "processor_class": "WhisperProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(sound))
    return write_tokenizer(folder)


def draw_weights(model: torch.nn.Module) -> None:
    """Random ones, at a scale that makes answers depend on the KV cache."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0 if "norm" in name else 0.0)
            else:
                weight.normal_(0.0, 1.0 if "embed" in name else 2.5 / weight.shape[-1] ** 0.5)


def write_weights(folder: Path) -> Path:
    """Weights beside a config, for engines in several processes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    draw_weights(model)
    config = (folder / "config.json").read_text()
    model.save_pretrained(folder)
    # As it was: transformers writes more than vLLM reads.
    (folder / "config.json").write_text(config)
    return folder
