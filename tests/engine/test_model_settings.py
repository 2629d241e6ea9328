"""Every setting of vLLM's models is either known to change no number, or makes another key."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoadConfig, LoRAConfig, ModelConfig, SpeculativeConfig
from vllm.config.multimodal import MultiModalConfig

from vllm_tiered_kv.connector.identity.model_fingerprint import model_digest
from vllm_tiered_kv.connector.identity.model_settings import (
    IGNORED_OF_ADAPTERS,
    IGNORED_OF_DRAFTS,
    IGNORED_OF_MEDIA,
    IGNORED_OF_MODEL,
    adapter_settings,
    canonical_text,
    draft_settings,
)

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

IN_OTHER_WAYS = {"hf_config", "multimodal_config", "max_model_len", "seed", "revision"}
"""Ignored as fields, yet counted: see the tests of `model_identity`."""

HARMLESS_OF_MODEL = {
    "model",
    "served_model_name",
    "tokenizer",
    "max_logprobs",
    "enforce_eager",
    "enable_sleep_mode",
    "generation_config",
    "hf_token",
}
"""A sample of what must never keep two engines apart."""


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def config_of(folder: Path, **options: Any) -> ModelConfig:
    config = ModelConfig(model=str(folder), skip_tokenizer_init=True, **options)
    config.multimodal_config = MultiModalConfig()
    return config


def digest(config: ModelConfig) -> str:
    load = LoadConfig(load_format="safetensors")
    engine = SimpleNamespace(model_config=config, load_config=load, speculative_config=None)
    return model_digest(engine)  # type: ignore[arg-type]


def another(value: Any) -> Any:
    """Some other value: what it means does not matter, that it is another one does."""
    if isinstance(value, bool):
        return not value
    return "another"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("settings") / "model")


def with_value(folder: Path, part: str, name: str) -> ModelConfig:
    config = config_of(folder)
    owner = config if part == "model" else config.multimodal_config
    # Not by assignment, which pydantic may check.
    owner.__dict__[name] = another(getattr(owner, name, None))
    return config


FIELDS = [
    *(("model", field.name) for field in dataclasses.fields(ModelConfig)),
    *(("media", field.name) for field in dataclasses.fields(MultiModalConfig)),
]


@pytest.mark.parametrize(("part", "name"), [f for f in FIELDS if f[1] not in IN_OTHER_WAYS])
def test_setting_is_ignored_by_name_or_counts(folder: Path, part: str, name: str) -> None:
    ignored = IGNORED_OF_MODEL if part == "model" else IGNORED_OF_MEDIA
    if name in ("model", "model_weights", "hf_text_config"):
        assert name in ignored  # the digest reads what is there
        return
    is_equal = digest(with_value(folder, part, name)) == digest(config_of(folder))
    assert is_equal == (name in ignored)


@pytest.mark.parametrize("part", ["model", "media"])
def test_setting_of_a_newer_vllm_counts(folder: Path, part: str) -> None:
    base = config_of(folder)
    owner = base if part == "model" else base.multimodal_config
    newer = dataclasses.make_dataclass(
        "Newer", [("new_rounding", str)], bases=(type(owner),), kw_only=True
    )

    def of(value: str | None) -> str:
        changed = object.__new__(newer)
        changed.__dict__.update(vars(owner), new_rounding=value)
        if part == "model":
            return digest(changed)
        config = config_of(folder)
        config.__dict__["multimodal_config"] = changed
        return digest(config)

    assert len({of(None), of("up"), of("down")}) == 3
    assert of(None) == digest(base)  # while it is off, nothing has changed


def test_settings_that_change_results_are_not_ignored() -> None:
    counted = {
        *("video_pruning_rate", "video_pruning_method", "quantization_config", "model_impl"),
        *("model_class_overrides", "code_revision", "disable_sliding_window", "convert"),
        *("mm_encoder_attn_dtype", "mm_device_do_normalize", "media_io_kwargs"),
        *("mm_encoder_fp8_scale_path", "mm_processor_kwargs", "hf_overrides", "runner"),
    }
    assert not counted & (IGNORED_OF_MODEL | IGNORED_OF_MEDIA)
    assert HARMLESS_OF_MODEL <= IGNORED_OF_MODEL


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LoRAConfig)])
def test_setting_of_adapters_is_ignored_by_name_or_counts(name: str) -> None:
    config = LoRAConfig()
    before = adapter_settings(config)
    config.__dict__[name] = another(getattr(config, name))
    assert (adapter_settings(config) == before) == (name in IGNORED_OF_ADAPTERS)
    assert not {"target_modules", "lora_dtype"} & IGNORED_OF_ADAPTERS
    assert adapter_settings(None) == ""


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SpeculativeConfig)])
def test_setting_of_drafts_is_ignored_by_name_or_counts(name: str) -> None:
    drafts = object.__new__(SpeculativeConfig)  # vLLM's own needs a draft model
    for field in dataclasses.fields(SpeculativeConfig):
        drafts.__dict__[field.name] = None
    drafts.__dict__["method"] = "eagle"
    engine = SimpleNamespace(speculative_config=drafts, num_prefill_lookahead_tokens=1)
    before = dict(draft_settings(engine))
    drafts.__dict__[name] = "mtp" if name == "method" else "another"
    assert (dict(draft_settings(engine)) == before) == (name in IGNORED_OF_DRAFTS)
    counted = {"method", "quantization", "kv_cache_dtype", "parallel_drafting"}
    assert not counted & IGNORED_OF_DRAFTS


def test_drafts_without_kv_have_no_settings() -> None:
    for method in ("ngram", "suffix"):
        drafts = object.__new__(SpeculativeConfig)
        drafts.__dict__["method"] = method
        assert not dict(draft_settings(SimpleNamespace(speculative_config=drafts)))
    assert not dict(draft_settings(SimpleNamespace(speculative_config=None)))


def test_file_of_scales_counts_by_its_content(folder: Path, tmp_path: Path) -> None:
    def of(path: Path) -> str:
        config = config_of(folder)
        assert config.multimodal_config is not None
        config.multimodal_config.__dict__["mm_encoder_fp8_scale_path"] = str(path)
        return digest(config)

    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(text)
    assert of(tmp_path / "a") == of(tmp_path / "b") != of(tmp_path / "c")


def test_equal_files_are_one_model_under_any_name(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "under another name")
    assert digest(config_of(folder)) == digest(config_of(other, served_model_name="x"))


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from tests.engine.test_model_settings import Opaque, config_of, digest, odd_values
config = config_of(Path(sys.argv[1]))
config.hf_config.update({"targets": set("abcdef"), "part": Opaque()})
config.__dict__.update(odd_values())
config.multimodal_config.__dict__["media_io_kwargs"] = odd_values()
print("digest", digest(config))
"""


class Shade(enum.Enum):
    DARK = enum.auto()


@dataclasses.dataclass
class Spec:
    parts: frozenset[str]
    inner: Any = None


class Opaque:
    """Its repr holds an address."""

    __slots__ = ()


def odd_values() -> dict[str, Any]:
    """Values whose text likes to hold addresses, or an order that is by chance."""
    names = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate"})
    return {
        "quantization_config": Spec(names, Spec(frozenset("abcdef"), Opaque())),
        "hf_overrides": odd_values,
        "model_class_overrides": {"b": torch.float16, "a": Shade.DARK, "c": ModelConfig},
        "convert": functools.partial(write_model, folder=names),
    }


@pytest.mark.slow
def test_keys_are_equal_in_every_process(folder: Path, tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        digests |= {line for line in done.stdout.splitlines() if line.startswith("digest")}
    assert len(digests) == 1


def test_other_values_have_another_text() -> None:
    values = [
        *(None, True, 1, 1.0, "1", b"1", [1], {1}, {1: 1}, {"1": 1}, [[1]], [], {}, Shade.DARK),
        *(torch.float16, torch.bfloat16, torch.device("cpu"), Path("a"), Path("b")),
        *(Spec(frozenset("a")), Spec(frozenset("b")), Spec, odd_values, Opaque, Opaque()),
        *(functools.partial(print, 1), functools.partial(print, 2), SimpleNamespace(a=1)),
    ]
    texts = [canonical_text(value) for value in values]
    assert len(set(texts)) == len(values)
    assert not any("0x" in text for text in texts)
    assert canonical_text({"a": 1, "b": 2}) == canonical_text({"b": 2, "a": 1})
    assert canonical_text((1, 2)) == canonical_text([1, 2])  # as after a trip through JSON
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert canonical_text(loop)
