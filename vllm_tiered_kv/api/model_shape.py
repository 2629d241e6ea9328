"""Reads the KV cache of a model from its config.json, without torch, vLLM or weights.

The rules are those of vLLM's model classes, by the fields of the file. A test with a real vLLM
compares them with its KV-cache specifications. Whatever the file does not say, and no rule here
knows, becomes a guess that the result names.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ModelConfigError

_MAX_LAYERS = 10_000
_MAX_FILE_BYTES = 16 << 20  # published files have up to a few hundred KiB

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_BYTES = {
    **DTYPE_BYTES,
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1),
}
FP8_DS_MLA = "fp8_ds_mla"
_FP8_DS_MLA_BYTES = 656  # 512 fp8 values, 4 float32 scales, 64 bfloat16 values


class LayerKind(enum.Enum):
    """How a layer keeps its part of the KV cache."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNKED = "chunked attention"
    MLA = "latent KV (MLA)"
    INDEXER = "sparse-attention indexer"
    LATENT_WINDOW = "sliding windows over latent KV"
    REPLAYED_WINDOW = "sliding windows that are recomputed"
    RECURRENT = "recurrent state"
    CROSS = "cross attention"
    ENCODER = "encoder"
    DRAFT = "draft model"
    DIFFUSION = "diffusion"


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind and size. The bytes are those of one layer on one rank: for a token, or
    for a whole snapshot if the kind is RECURRENT."""

    kind: LayerKind
    layers: int
    layer_bytes: int
    window: int | None = None
    is_replicated: bool = False  # every rank holds the same bytes, and the tiers store them once


@dataclass(frozen=True)
class ModelShape:
    """The KV cache of a model, as `read_shape` derives it from a config.json."""

    architecture: str
    model_type: str
    layers: int
    dtype: str
    kv_cache_dtype: str
    groups: tuple[LayerGroup, ...]  # empty if the bytes cannot be computed
    also: tuple[LayerKind, ...] = ()  # kinds that the model has but that add no bytes here
    draft_layers: int = 0  # in the same checkpoint, used only with speculative decoding
    notes: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    is_known: bool = True  # whether the rules here cover the model type

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(dict.fromkeys((*self.also, *(group.kind for group in self.groups))))


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json, given the file or its folder."""
    try:
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise ModelConfigError(_why_missing(path))
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ModelConfigError(f"{file} is too large for a config.json; give its folder")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ModelConfigError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file} does not contain a JSON object")
    return config


def _why_missing(path: Path) -> str:
    if not path.is_dir():
        return (
            f"{path} does not exist; give a local folder or config.json, models are not downloaded"
        )
    if (path / "params.json").exists():
        return f"{path} has params.json (Mistral's format) but no config.json"
    return f"{path} has no config.json"


def read_shape(
    config: Mapping[str, Any],
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> ModelShape:
    """Returns the KV cache of a model served with these settings of vLLM."""
    return _Reader(config, dtype, kv_cache_dtype, tensor_parallel).read()


# The rules below cover these model types completely. Others get the same rules and a warning.
_KNOWN = frozenset(
    """
    apertus bloom cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5
    ernie4_5_moe exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text gemma3n_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid internlm2 jamba kimi_k2 kimi_linear lfm2 lfm2_moe llama
    llama4_text mamba mamba2 minicpm minicpm3 minimax_m2 ministral ministral3 mistral mixtral mpt
    nemotron nemotron_h olmo olmo2 olmo3 olmoe opt phi phi3 phimoe qwen2 qwen2_5_vl qwen2_5_vl_text
    qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905
)

# Model types whose latent KV vLLM keeps compressed; with others it expands kv_lora_rank.
_LATENT = frozenset(
    """
    axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 kimi_k2
    kimi_linear longcat_flash pangu_ultra_moe
    """.split()  # noqa: SIM905
)

_ENCODERS = frozenset(
    """
    albert bert deberta deberta-v2 distilbert electra modernbert mpnet nomic_bert roberta siglip
    xlm-roberta
    """.split()  # noqa: SIM905
)

# Defaults of transformers that published files rely on by leaving the field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3n_text": {
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
    },
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "cohere2": {"sliding_window": 4096},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
}
_ALIASES = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text"}

# Every how many layers one has full attention and the others a window, if the file has no list.
_WINDOW_PATTERNS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
    "olmo3": 4,
}

_NO_CACHE = "none"
_LAYER_TYPES = {
    **dict.fromkeys(
        ("full_attention", "attention", "full", "deepseek_sparse_attention"), (LayerKind.FULL,)
    ),
    **dict.fromkeys(
        ("sliding_attention", "sliding_window", "local_attention"), (LayerKind.WINDOW,)
    ),
    "chunked_attention": (LayerKind.CHUNKED,),
    **dict.fromkeys(
        ("linear_attention", "mamba", "mamba2", "conv", "short_conv", "recurrent"),
        (LayerKind.RECURRENT,),
    ),
    "hybrid": (LayerKind.RECURRENT, LayerKind.FULL),
    **dict.fromkeys(("moe", "mlp", _NO_CACHE), ()),
}
_NEMOTRON_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}

_DRAFTS = ("eagle", "mtp", "medusa", "mlpspeculator", "dflash", "speculator", "nextn", "draft")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

Kinds = tuple[LayerKind, ...]


@dataclass
class _Reader:
    """Collects the parts of one ModelShape; used once."""

    config: Mapping[str, Any]
    asked_dtype: str
    asked_kv_dtype: str
    ranks: int
    dtype: str = ""
    kv_dtype: str = ""
    notes: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = _text_config(self.config)
        architectures = self.config.get("architectures") or self.text.get("architectures")
        self.architecture = (
            str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        )
        own_type = str(self.text.get("model_type") or self.config.get("model_type") or "").lower()
        self.model_type = _ALIASES.get(own_type, own_type)
        self.defaults = _DEFAULTS.get(self.model_type, {})

    def read(self) -> ModelShape:
        if not self.architecture and not self.model_type:
            raise ModelConfigError(
                "the file has neither architectures nor model_type: is it a model's config.json?"
            )
        other = self._other_kind()
        if other is not None:
            return self._shape(layers=0, groups=(), also=(other,))
        self.dtype = self._dtype()
        self.kv_dtype = self._kv_dtype()
        if "compress_ratios" in self.text:
            layers = self._count("num_hidden_layers")
            self.notes.append("the KV bytes of this architecture are not computed here")
            is_replayed = self.model_type == "deepseek_v41"
            kind = LayerKind.REPLAYED_WINDOW if is_replayed else LayerKind.LATENT_WINDOW
            return self._shape(layers, (), (kind,))
        return self._decoder()

    def _shape(self, layers: int, groups: tuple[LayerGroup, ...], also: Kinds = ()) -> ModelShape:
        return ModelShape(
            self.architecture,
            self.model_type,
            layers,
            self.dtype,
            self.kv_dtype,
            groups,
            also,
            max((self._optional(name) or 0 for name in _DRAFT_LAYERS), default=0),
            tuple(self.notes),
            tuple(self.guesses),
            not groups or self.model_type in _KNOWN or self.model_type in _LATENT,
        )

    def _other_kind(self) -> LayerKind | None:
        """The kind of a model that is no decoder with a KV cache of its own."""
        name = f"{self.architecture} {self.model_type}".lower()
        if any(word in name for word in _DRAFTS):
            return LayerKind.DRAFT
        if self.config.get("is_encoder_decoder") or self.text.get("is_encoder_decoder"):
            return LayerKind.CROSS
        if "whisper" in name or "cross_attention_layers" in self.text:
            return LayerKind.CROSS
        if "diffusion" in name or "llada" in name:
            return LayerKind.DIFFUSION
        is_bidirectional = self.text.get("use_bidirectional_attention") is True
        if self.model_type in _ENCODERS or is_bidirectional or self.text.get("is_causal") is False:
            return LayerKind.ENCODER
        return None

    # ---- number formats ----

    def _dtype(self) -> str:
        if self.asked_dtype != "auto":
            return {"half": "float16", "float": "float32"}.get(self.asked_dtype, self.asked_dtype)
        found = next(
            (
                config[name]
                for config in (self.config, self.text)
                for name in ("dtype", "torch_dtype")
                if isinstance(config.get(name), str)
            ),
            None,
        )
        if found is None:
            self.guesses.append("the file has no dtype: assumed bfloat16; set --dtype")
            return "bfloat16"
        name = str(found).removeprefix("torch.")
        if name == "float32":
            self.notes.append("float32 weights: vLLM computes in bfloat16 unless --dtype says so")
            return "bfloat16"
        if name not in DTYPE_BYTES:
            self.guesses.append(f"unknown dtype {name}: assumed bfloat16; set --dtype")
            return "bfloat16"
        return name

    def _kv_dtype(self) -> str:
        if self.asked_kv_dtype != "auto":
            return self.asked_kv_dtype
        quantization = self.config.get("quantization_config") or self.text.get(
            "quantization_config"
        )
        outer = quantization if isinstance(quantization, dict) else {}
        for part in (outer, outer.get("quantization")):
            if not isinstance(part, dict):
                continue
            scheme = part.get("kv_cache_scheme") or part.get("kv_cache_quant_algo")
            if isinstance(scheme, dict):
                scheme = "fp8" if scheme.get("num_bits") == 8 else str(scheme.get("num_bits"))
            if isinstance(scheme, str) and scheme.lower().startswith("fp8"):
                self.notes.append("the checkpoint asks for an fp8 KV cache")
                return "fp8"
            if scheme:
                self.guesses.append(
                    f"KV-cache quantization {scheme} is unknown here: assumed {self.dtype}"
                )
        return self.dtype

    @property
    def _kv_bytes(self) -> int:
        if self.kv_dtype == FP8_DS_MLA:
            raise ModelConfigError(f"{FP8_DS_MLA} is a KV cache of sparse latent attention only")
        return KV_DTYPE_BYTES[self.kv_dtype]

    # ---- layers ----

    def _decoder(self) -> ModelShape:
        kinds = self._kinds()
        owners = kinds[: len(kinds) - self._count("num_kv_shared_layers", default=0)]
        if len(owners) < len(kinds):
            shared = len(kinds) - len(owners)
            self.notes.append(f"{shared} layers use the KV cache of others and have none")
        count: Counter[LayerGroup] = Counter()
        for index, layer in enumerate(owners):
            for kind in layer:
                for group in self._layer(kind, index):
                    count[group] += 1
        groups = tuple(
            LayerGroup(one.kind, layers, one.layer_bytes, one.window, one.is_replicated)
            for one, layers in count.items()
        )
        if not groups:
            raise ModelConfigError("no layer with a KV cache is described in the file")
        if self.model_type not in _KNOWN and self.model_type not in _LATENT:
            assumed = ", ".join(
                f"{group.layers} layers with {group.kind.value}"
                + (f" of {group.window:,} tokens" if group.window else "")
                for group in groups
            )
            name = self.architecture or self.model_type
            self.guesses.insert(0, f"unknown architecture {name}: assumed {assumed}")
        return self._shape(len(kinds), groups)

    def _layer(self, kind: LayerKind, index: int) -> list[LayerGroup]:
        """What one layer keeps, as groups of one layer."""
        if kind is LayerKind.RECURRENT:
            return [LayerGroup(kind, 1, self._state_bytes())]
        if self._is_latent():
            return self._latent_layer(index)
        window = self._count("sliding_window") if kind is LayerKind.WINDOW else None
        if kind is LayerKind.CHUNKED:
            window = self._count("attention_chunk_size")
        heads, size, size_v = self._heads(kind, index)
        return [LayerGroup(kind, 1, heads * (size + size_v) * self._kv_bytes, window)]

    def _kinds(self) -> list[Kinds]:
        """The kinds of state that each layer has, from whichever field lists them."""
        names = self._listed_names()
        layers = self._count(
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "n_layers",
            default=None if names is None else len(names),
        )
        if layers > _MAX_LAYERS:
            raise ModelConfigError(f"{layers} layers cannot be right")
        if names is None:
            names = self._derived_names(layers)
        if names is not None:
            unknown = sorted({name for name in names if name not in _LAYER_TYPES})
            if unknown:
                self.guesses.append(f"unknown layers {', '.join(unknown)}: assumed full attention")
            return [_LAYER_TYPES.get(name, (LayerKind.FULL,)) for name in names]
        if self.model_type in ("mamba", "mamba2", "falcon_mamba"):
            return [(LayerKind.RECURRENT,)] * layers
        if self.model_type == "falcon_h1":
            return [(LayerKind.RECURRENT, LayerKind.FULL)] * layers
        if self.model_type == "longcat_flash":
            return [(LayerKind.FULL,)] * (2 * layers)  # two attentions in each
        if self._has_windows():
            return [(LayerKind.WINDOW,)] * layers
        return [(LayerKind.FULL,)] * layers

    def _listed_names(self) -> list[str] | None:
        """The type of each layer, if the file lists them all."""
        for field_name in ("layer_types", "layers_block_type"):
            listed = self.text.get(field_name)
            if isinstance(listed, list):
                return self._with_last_full([str(name) for name in listed])
        pattern = self.text.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            return [_NEMOTRON_PATTERN.get(letter, letter) for letter in pattern]
        blocks = self.text.get("block_configs")
        if isinstance(blocks, list) and all(isinstance(b, dict) for b in blocks):
            return ["attention" if _has_attention(block) else _NO_CACHE for block in blocks]
        return None

    def _derived_names(self, layers: int) -> list[str] | None:
        """The type of each layer as `layer_types` would list it; None if all are alike."""
        linear = self.text.get("linear_attn_config")
        if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):
            full = linear["full_attn_layers"]  # counted from one
            return ["attention" if n + 1 in full else "linear_attention" for n in range(layers)]
        full_layers = self._full_layers(layers)
        if full_layers is not None:
            other = "conv" if "conv_L_cache" in self.text else "linear_attention"
            return ["attention" if n in full_layers else other for n in range(layers)]
        if self.model_type == "llama4_text" or "no_rope_layers" in self.text:
            return self._chunked_names(layers)
        if self.model_type in ("qwen2", "qwen3") and self._has_windows():
            first = self._count("max_window_layers", default=28)
            return ["attention" if n < first else "sliding_attention" for n in range(layers)]
        every = self._optional("sliding_window_pattern") or _WINDOW_PATTERNS.get(self.model_type)
        if every and self._has_windows():
            names = [
                "full_attention" if (n + 1) % every == 0 else "sliding_attention"
                for n in range(layers)
            ]
            return self._with_last_full(names)
        return None

    def _full_layers(self, layers: int) -> list[int] | None:
        """The layers with attention among recurrent ones; None without recurrent layers."""
        for name in ("full_attn_idxs", "attn_layer_indices"):
            listed = self.text.get(name)
            if isinstance(listed, list):
                return listed
        types = self.text.get("attn_type_list")
        if isinstance(types, list):  # MiniMax: 0 is lightning attention
            return [n for n, kind in enumerate(types) if kind == 1]
        period = self._optional("attn_layer_period")
        if period:
            offset = self._count("attn_layer_offset", default=0)
            return [n for n in range(layers) if n % period == offset]
        interval = self._optional("full_attention_interval")
        if interval:
            return [n for n in range(layers) if (n + 1) % interval == 0]
        return None

    def _chunked_names(self, layers: int) -> list[str] | None:
        if not self._optional("attention_chunk_size"):
            return None
        listed = self.text.get("no_rope_layers")
        if not (isinstance(listed, list) and len(listed) == layers):
            every = self._count("no_rope_layer_interval", default=4)
            listed = [int((n + 1) % every != 0) for n in range(layers)]
        return ["chunked_attention" if rope else "full_attention" for rope in listed]

    def _with_last_full(self, names: list[str]) -> list[str]:
        if self.model_type == "gemma4_text" and names:
            names[-1] = "full_attention"
        return names

    def _has_windows(self) -> bool:
        may_be_off = "use_sliding_window" in self.text or self.model_type.startswith("qwen")
        if may_be_off and not self.text.get("use_sliding_window"):
            return False
        return bool(self._optional("sliding_window"))

    # ---- attention ----

    def _heads(self, kind: LayerKind, index: int) -> tuple[int, int, int]:
        """KV heads of a layer on one rank, and the sizes of a key and of a value."""
        heads = self._count("num_attention_heads", "n_head", "n_heads", "num_heads")
        if self._optional("kv_lora_rank"):
            # vLLM expands the latent KV of such a model, with values padded like keys.
            size = self._count("qk_nope_head_dim") + self._count("qk_rope_head_dim")
            return self._per_rank(heads), size, size
        kv_heads = self._kv_heads(heads, index)
        size = self._optional("head_dim", "hidden_size_per_head", "attention_head_dim") or 0
        if not size:
            hidden = self._count("hidden_size", "n_embd", "d_model")
            if hidden % heads:
                raise ModelConfigError(
                    f"hidden_size {hidden} is no multiple of {heads} attention heads, "
                    "and the file has no head_dim"
                )
            size = hidden // heads
        size_v = self._optional("v_head_dim") or size
        if self.model_type == "gemma4_text" and kind is LayerKind.FULL:
            size = size_v = self._count("global_head_dim")
            if self.text.get("attention_k_eq_v"):
                kv_heads = self._optional("num_global_key_value_heads") or kv_heads
        return self._per_rank(kv_heads), size, size_v

    def _kv_heads(self, heads: int, index: int) -> int:
        attention = self.text.get("attn_config")
        if isinstance(attention, dict) and isinstance(attention.get("kv_n_heads"), int):
            return int(attention["kv_n_heads"])
        blocks = self.text.get("block_configs")
        if isinstance(blocks, list) and index < len(blocks) and isinstance(blocks[index], dict):
            inner = blocks[index].get("attention") or {}
            if isinstance(inner.get("num_key_value_heads"), int):
                return int(inner["num_key_value_heads"])
            if isinstance(inner.get("n_heads_in_group"), int) and inner["n_heads_in_group"] > 0:
                return heads // int(inner["n_heads_in_group"])
        is_new_falcon = bool(self.text.get("new_decoder_architecture"))
        has_one = self.text.get("multi_query") is True and not is_new_falcon
        if has_one and self.model_type in ("falcon", "gpt_bigcode"):
            return 1
        names = (
            "n_head_kv",
            "num_kv_heads",
            "num_key_value_heads",
            "multi_query_group_num",
            "num_attention_groups",
        )
        for name in names:
            listed = self.text.get(name)
            if isinstance(listed, list) and index < len(listed) and isinstance(listed[index], int):
                return int(listed[index])
        return self._optional(*names) or heads

    def _per_rank(self, heads: int) -> int:
        if heads < 1:
            raise ModelConfigError(f"a layer with attention cannot have {heads} KV heads")
        if max(heads, self.ranks) % min(heads, self.ranks):
            raise ModelConfigError(
                f"{heads} KV heads cannot be divided among {self.ranks} tensor-parallel ranks"
            )
        return max(1, heads // self.ranks)

    def _is_latent(self) -> bool:
        if not self._optional("kv_lora_rank"):
            return False
        if self.model_type in _LATENT:
            return True
        if self.model_type in _KNOWN:
            return False
        guess = f"latent KV of an unknown model type {self.model_type}: assumed DeepSeek's form"
        if guess not in self.guesses:
            self.guesses.append(guess)
        return True

    def _latent_layer(self, index: int) -> list[LayerGroup]:
        rope = self._count("qk_rope_head_dim", default=0)
        size = self._count("kv_lora_rank") + rope
        is_sparse = bool(self._optional("index_topk"))
        if is_sparse and self.kv_dtype == FP8_DS_MLA:
            nbytes = _FP8_DS_MLA_BYTES
        else:
            nbytes = size * self._kv_bytes
            note = (
                "with fp8 some attention back-ends pack sparse latent KV into "
                f"{_FP8_DS_MLA_BYTES} bytes; --kv-cache-dtype {FP8_DS_MLA} computes that"
            )
            if is_sparse and self.kv_dtype.startswith("fp8") and note not in self.notes:
                self.notes.append(note)
        groups = [LayerGroup(LayerKind.MLA, 1, nbytes, is_replicated=True)]
        if is_sparse and self._has_indexer(index):
            # A key in fp8, with a float32 scale for each 128 values, whatever the KV dtype.
            key = self._count("index_head_dim")
            groups.append(
                LayerGroup(LayerKind.INDEXER, 1, key + key // 128 * 4, is_replicated=True)
            )
        return groups

    def _has_indexer(self, index: int) -> bool:
        """Whether a layer chooses tokens itself; others take the choice of a layer before."""
        pattern = self.text.get("index_topk_pattern")
        if isinstance(pattern, (str, list)):
            return index >= len(pattern) or pattern[index] != "S"
        every = self._optional("index_topk_freq") or 1
        offset = self._count("index_skip_topk_offset", default=2)
        return max(index - offset + 1, 0) % every == 0

    # ---- recurrent state ----

    def _state_bytes(self) -> int:
        """Bytes of one layer's state on one rank: the convolution's inputs and the state itself."""
        conv, state, state_dtype = self._state_values()
        return conv * DTYPE_BYTES[self.dtype] + state * DTYPE_BYTES[state_dtype]

    def _state_values(self) -> tuple[int, int, str]:
        text = self.text
        state_dtype = self._state_dtype()
        if "linear_num_value_heads" in text:  # gated delta net
            keys = self._count("linear_num_key_heads") * self._count("linear_key_head_dim")
            values = self._count("linear_num_value_heads") * self._count("linear_value_head_dim")
            conv = self._split(2 * keys + values) * (self._count("linear_conv_kernel_dim") - 1)
            return conv, self._split(values) * self._count("linear_key_head_dim"), state_dtype
        linear = text.get("linear_attn_config")
        if isinstance(linear, dict):  # Kimi delta attention
            heads, size = _part(linear, "num_heads"), _part(linear, "head_dim")
            kernel = _part(linear, "short_conv_kernel_size")
            conv = self._split(3 * heads * size) * (kernel - 1)
            return conv, self._split(heads) * size * size, "float32"
        if "conv_L_cache" in text:  # short convolutions
            width = self._count("conv_dim", "hidden_size")
            return self._split(width) * (self._count("conv_L_cache") - 1), 0, state_dtype
        if "attn_type_list" in text:  # lightning attention
            heads, size = self._count("num_attention_heads"), self._count("head_dim")
            return 0, self._split(heads) * size * size, state_dtype
        if any(name in text for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")):
            return self._mamba2_values(
                self._count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
                self._count("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
            )
        if self.model_type == "mamba2":
            return self._mamba2_values(self._count("num_heads"), self._count("head_dim"))
        if "mamba_d_state" in text or self.model_type in ("mamba", "falcon_mamba"):
            return self._mamba1_values()
        raise ModelConfigError(
            f"the recurrent layers of {self.architecture or self.model_type} are not known here"
        )

    def _mamba1_values(self) -> tuple[int, int, str]:
        if "mamba_d_state" in self.text:
            width = self._count("mamba_expand") * self._count("hidden_size")
        else:
            width = self._count("intermediate_size")
        width = self._split(width)
        kernel = self._count("mamba_d_conv", "conv_kernel")
        state = width * self._count("mamba_d_state", "state_size")
        return width * (kernel - 1), state, self._state_dtype()

    def _mamba2_values(self, heads: int, head_size: int) -> tuple[int, int, str]:
        groups = self._count("mamba_n_groups", "mamba_ngroups", "n_groups")
        state = self._count("mamba_d_state", "ssm_state_size", "state_size")
        if groups % self.ranks:
            groups = self.ranks  # vLLM repeats groups so that each rank has those of its heads
        width = self._optional("mamba_d_ssm") or heads * head_size
        kernel = self._count("mamba_d_conv", "conv_kernel")
        conv = self._split(width + 2 * groups * state) * (kernel - 1)
        return conv, self._split(heads) * head_size * state, self._state_dtype()

    def _state_dtype(self) -> str:
        default = "float32" if self.model_type == "nemotron_h" else self.dtype
        named = self.text.get("mamba_ssm_cache_dtype") or self.text.get("mamba_ssm_dtype")
        return str(named) if str(named) in DTYPE_BYTES else default

    def _split(self, width: int) -> int:
        if width % self.ranks:
            raise ModelConfigError(
                f"recurrent state of width {width} cannot be divided among {self.ranks} ranks"
            )
        return width // self.ranks

    # ---- fields ----

    def _optional(self, *names: str) -> int | None:
        """The first of these fields that is a number, or its default for this model type."""
        for name in names:
            value = self.text.get(name, self.defaults.get(name))
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            if value < 0:
                raise ModelConfigError(f"{name} is {value}")
            if name not in self.text and value:
                note = f"{name} is not in the file; transformers' default is {value}"
                if note not in self.notes:
                    self.notes.append(note)
            return value
        return None

    def _count(self, *names: str, default: int | None = None) -> int:
        found = self._optional(*names)
        if found is None or (found == 0 and default is None):
            if default is None:
                others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
                raise ModelConfigError(
                    f"the file has no number {names[0]}{others}, which a model of type "
                    f"{self.model_type or self.architecture} needs"
                )
            return default
        return found


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model of a multimodal one."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict):
        return _text_config(thinker)
    for name in ("text_config", "llm_config", "language_config"):
        part = config.get(name)
        if isinstance(part, dict):
            return part
    return config


def _has_attention(block: Mapping[str, Any]) -> bool:
    attention = block.get("attention")
    if not isinstance(attention, dict):
        return block.get("block_type") == "attention"
    return not (attention.get("no_op") or attention.get("replace_with_linear"))


def _part(part: Mapping[str, Any], name: str) -> int:
    value = part.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelConfigError(f"linear_attn_config has no number {name}")
    return value
