"""The vLLM settings that change what a model computes, as a canonical text.

Every field of vLLM's configs counts unless it is listed here. A field that a newer vLLM adds thus
separates engines until it has been reviewed. That costs hits; ignoring it by default could give
wrong tokens.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, ModelConfig, VllmConfig

IGNORED_OF_MODEL = frozenset(
    {
        # Names and paths: the contents of the files count, see `model_fingerprint`.
        *("model", "model_weights", "served_model_name", "hf_config_path", "hf_token"),
        "revision",  # a field of the fingerprint
        # Covered separately, see `model_fingerprint` and below.
        *("hf_config", "hf_text_config", "multimodal_config", "max_model_len", "seed"),
        "config_format",  # covered by hf_config
        # Keys contain token ids, so the tokenizer does not matter.
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        *("io_processor_plugin", "renderer_num_workers"),
        # Restrict the requests, not the answers.
        *("allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization"),
        *("enable_prompt_embeds", "enable_trace_replay"),
        # Apply after the last layer: sampling, probabilities, pooling. Llama 4 reads more from
        # `override_generation_config`, see below.
        *("generation_config", "override_generation_config", "logits_processors", "pooler_config"),
        *("return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel"),
        # Change how, not what is computed: graphs, memory, sleep. vLLM has no cascades any more.
        *("enforce_eager", "disable_cascade_attn", "enable_cumem_allocator", "enable_sleep_mode"),
        *("sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
        "enable_nccl_comm_suspend",
        "spec_target_max_model_len",  # of a draft model: restricts the requests
        # Derived from the weights, and set only in the process that loads them.
        "word_embeddings_untied_by_checkpoint",
    }
)

IGNORED_OF_MEDIA = frozenset(
    {
        # Restrict the requests.
        *("limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings"),
        # Caches and communication between processes.
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling"),
        "mm_hasher_algorithm",  # changes the hashes of media, which the keys contain
        "interleave_mm_strings",  # changes the token ids, which the keys contain
        # Output files.
        *("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
    }
)

IGNORED_OF_ADAPTERS = frozenset(
    {
        # Numbers, sizes, and how, not what is computed.
        *("max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras"),
        "specialize_active_lora",
        "default_mm_loras",  # chooses a request's adapter, which its keys contain
        "max_lora_cls_labels",  # applies after the last layer
    }
)

IGNORED_OF_DRAFTS = frozenset(
    {
        # Covered separately, see `model_fingerprint`: what they load counts, not its name.
        *("model", "revision", "code_revision", "draft_model_config", "draft_load_config"),
        # The engine's own configs, and a draft's that follows from its tensor parallelism.
        *("target_model_config", "target_parallel_config", "draft_parallel_config"),
        "tensor_parallel_size",  # unused
        # How many tokens are drafted, sampled and accepted. Of drafts only the KV of accepted
        # tokens is cached. Modules that read further tokens count, see `draft_lookahead`.
        *("num_speculative_tokens", "num_speculative_tokens_per_batch_size", "max_model_len"),
        *("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"),
        *("draft_sample_method", "enable_adaptive_verification", "use_local_argmax_reduction"),
        # Change how, not what is computed, or where vLLM's own hits end.
        *("enforce_eager", "moe_backend", "attention_backend", "disable_padded_drafter_batch"),
        "disable_eagle_block_drop",
        # Of methods without KV.
        *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
        *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
        "suffix_decoding_min_token_prob",
    }
)

_FILES = ("mm_encoder_fp8_scale_path",)  # the contents of these files count, not their paths
_LLAMA4_LONG = 32768  # tokens; for longer contexts vLLM turns on attn_temperature_tuning
_MAX_DEPTH = 8
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def settings(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the name and the value, as text, of all settings that count and are set."""
    yield from _counted(model, IGNORED_OF_MODEL, "")
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        yield from _counted(media, IGNORED_OF_MEDIA, "multimodal ")
    yield from _by_longest_context(model)


def adapter_settings(lora: LoRAConfig | None) -> str:
    """Returns the settings that change what an engine computes with any adapter."""
    return "" if lora is None else canonical_text(dict(_counted(lora, IGNORED_OF_ADAPTERS, "")))


def draft_settings(vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
    """Yields the settings that change the KV of draft layers; none if the engine has no such
    layers: methods like n-gram change no KV."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():
        yield from _counted(speculative, IGNORED_OF_DRAFTS, "draft ")
        yield "draft lookahead", str(draft_lookahead(vllm_config))


def draft_lookahead(vllm_config: VllmConfig) -> int:
    """Returns how many tokens after its own the KV of a draft layer depends on. EAGLE and MTP
    compute the KV of a position from the model's hidden state there and the token after it."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(vllm_config.num_prefill_lookahead_tokens)


def _counted(config: object, ignored: frozenset[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in sorted(_fields(config).items(), key=lambda field: field[0]):
        if name in ignored or name.startswith("_"):
            continue
        # An empty value counts as unset, so that a new field that is off changes no key.
        if value is not None and value not in ("", {}, [], ()):
            text = _content(value) if name in _FILES else canonical_text(value)
            yield prefix + name, text


def _fields(config: object) -> dict[str, Any]:
    """Returns the declared fields; other attributes are derived from these."""
    if dataclasses.is_dataclass(config):
        return {f.name: getattr(config, f.name, None) for f in dataclasses.fields(config)}
    return dict(vars(config))


def _content(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # vLLM reports it
        return str(path)


def _by_longest_context(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields settings of models whose computation depends on vLLM's --max-model-len."""
    for part in _parts(model.hf_config.to_dict()):
        rope = part.get("rope_type", part.get("type"))
        if rope in ("longrope", "su"):
            original = part.get("original_max_position_embeddings")
            if original is None:
                original = getattr(model.hf_config, "original_max_position_embeddings", 0)
            yield "long_rope", str(model.max_model_len > int(original or 0))
        elif rope == "dynamic":
            yield "dynamic_rope", str(model.max_model_len)
        elif str(part.get("model_type", "")).startswith("llama4"):
            asked = getattr(model, "override_generation_config", None) or {}
            tuned = asked.get("attn_temperature_tuning", model.max_model_len > _LLAMA4_LONG)
            yield "attn_temperature_tuning", str(tuned)


def _parts(config: object) -> Iterator[dict[str, Any]]:
    """Yields a config and all configs nested in it: of the text model, of RoPE, of layer types."""
    if isinstance(config, dict):
        yield config
        for inner in config.values():
            yield from _parts(inner)


def canonical_text(value: object) -> str:
    """Returns a text that is equal for equal values in every process and on every machine: it
    contains no memory addresses and does not depend on the order of sets."""
    return json.dumps(_plain(value, 0))


def _plain(value: object, depth: int) -> object:
    """Converts a value to JSON types. Values of other types carry the name of their type."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth >= _MAX_DEPTH:
        return ["deep", _name(type(value))]
    inner = depth + 1
    if isinstance(value, enum.Enum):
        return ["enum", _name(type(value)), value.name]
    for plain in (int, float, str):
        if isinstance(value, plain):  # of a subclass
            return [_name(type(value)), plain(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Mapping):
        items = [(json.dumps(_plain(k, inner)), _plain(v, inner)) for k, v in value.items()]
        return ["map", sorted(items, key=lambda item: item[0])]
    if isinstance(value, (list, tuple)):
        return ["list", [_plain(part, inner) for part in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(json.dumps(_plain(part, inner)) for part in value)]
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return ["partial", [_plain(part, inner) for part in parts]]
    if hasattr(value, "__qualname__"):  # a class, a function, a bound method
        return ["named", _name(value)]
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        fields = {k: v for k, v in _fields(value).items() if not k.startswith("_")}
        return ["object", _name(type(value)), _plain(fields, inner)]
    return ["text", _ADDRESS.sub("", repr(value))]  # for example torch dtypes and devices


def _name(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}"
