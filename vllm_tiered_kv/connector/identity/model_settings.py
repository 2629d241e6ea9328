"""What of vLLM's settings changes what a model computes, in a text that is equal everywhere.

Every field of the configs counts unless it is named here: one that a newer vLLM adds separates
engines until somebody has looked at it. That costs hits; the other way round would cost tokens.
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
    from vllm.config import LoRAConfig, ModelConfig

IGNORED_OF_MODEL = frozenset(
    {
        # Names and places: what is found there counts, see `model_identity`.
        *("model", "model_weights", "served_model_name", "hf_config_path", "hf_token"),
        "revision",  # in the fingerprint by itself
        # Counted in their own ways, see `model_identity` and below.
        *("hf_config", "hf_text_config", "multimodal_config", "max_model_len", "seed"),
        "config_format",  # hf_config is what comes of it
        # Keys are made of tokens, whatever made those.
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        *("io_processor_plugin", "renderer_num_workers"),
        # What may be asked, not what is answered.
        *("allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization"),
        *("enable_prompt_embeds", "enable_trace_replay"),
        # After the last layer: sampling, probabilities, pooling. One model takes more from
        # `override_generation_config`, see below.
        *("generation_config", "override_generation_config", "logits_processors", "pooler_config"),
        *("return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel"),
        # How the same is computed: graphs, memory, sleep. Cascades are gone.
        *("enforce_eager", "disable_cascade_attn", "enable_cumem_allocator", "enable_sleep_mode"),
        *("sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
        "enable_nccl_comm_suspend",
        # Of drafts, which are not cached.
        "spec_target_max_model_len",
        # Learned from the weights, and only by the process that loads them.
        "word_embeddings_untied_by_checkpoint",
    }
)

IGNORED_OF_MEDIA = frozenset(
    {
        # What may be asked.
        *("limit_per_prompt", "enable_mm_embeds", "allow_missing_mm_embeddings"),
        # Caches and ways between processes.
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling"),
        "mm_hasher_algorithm",  # another one gives other names, which are in the keys
        "interleave_mm_strings",  # of the text that becomes tokens
        # Written, never read.
        *("mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin"),
    }
)

IGNORED_OF_ADAPTERS = frozenset(
    {
        # How many, how large, and how the same is computed.
        *("max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras"),
        "specialize_active_lora",
        "default_mm_loras",  # which one a request has: by then it has it
        "max_lora_cls_labels",  # after the last layer
    }
)

_FILES = ("mm_encoder_fp8_scale_path",)  # what they hold counts, not where they lie
_LLAMA4_LONG = 32768  # tokens of a context, from which on vLLM tunes its attention
_MAX_DEPTH = 8
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def settings(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """All that count, with their values as text; only those that are set."""
    yield from _counted(model, IGNORED_OF_MODEL, "")
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        yield from _counted(media, IGNORED_OF_MEDIA, "multimodal ")
    yield from _by_longest_context(model)


def adapter_settings(lora: LoRAConfig | None) -> str:
    """What changes how an engine computes with an adapter, whichever that is."""
    return "" if lora is None else canonical_text(dict(_counted(lora, IGNORED_OF_ADAPTERS, "")))


def _counted(config: object, ignored: frozenset[str], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in sorted(_fields(config).items(), key=lambda field: field[0]):
        if name in ignored or name.startswith("_"):
            continue
        # None and nothing at all mean the same, and a new field that is off changes no key.
        if value is not None and value not in ("", {}, [], ()):
            text = _content(value) if name in _FILES else canonical_text(value)
            yield prefix + name, text


def _fields(config: object) -> dict[str, Any]:
    """Those it declares: others are worked out from these."""
    if dataclasses.is_dataclass(config):
        return {f.name: getattr(config, f.name, None) for f in dataclasses.fields(config)}
    return dict(vars(config))


def _content(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # for vLLM to complain about
        return str(path)


def _by_longest_context(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """What some models compute depends on how long vLLM's contexts may get."""
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
    """A config and all that are inside it: of the text part, of positions, of kinds of layers."""
    if isinstance(config, dict):
        yield config
        for inner in config.values():
            yield from _parts(inner)


def canonical_text(value: object) -> str:
    """Equal for equal values in every process and on every machine: no addresses, no order of
    hashing."""
    return json.dumps(_plain(value, 0))


def _plain(value: object, depth: int) -> object:
    """Made of what JSON knows. Other kinds than the plain ones carry their names."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth >= _MAX_DEPTH:
        return ["deep", _name(type(value))]
    inner = depth + 1
    if isinstance(value, enum.Enum):
        return ["enum", _name(type(value)), value.name]
    for plain in (int, float, str):
        if isinstance(value, plain):  # of a kind that is made of it
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
    return ["text", _ADDRESS.sub("", repr(value))]  # torch's dtypes and devices among them


def _name(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}"
