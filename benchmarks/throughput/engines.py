"""Of whom the throughput tables ask what: model shapes, engines and prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_process import EngineSpec
from tests.models import QWEN2_7B

HEAD_SIZE = 128
_BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    kv_heads: int
    model: dict[str, Any]
    """Arguments of `tests.models.write_model`."""
    max_model_len: int
    sequences: int
    """At a time. This and the length are the same in all tables: vLLM's compile cache is found
    again only by engines that are alike."""
    vocabulary: int = 128_000
    block_tokens: int = 16

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * HEAD_SIZE * _BYTES_PER_VALUE

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Keys, or values, of one block in one layer."""
        return self.block_bytes // (2 * self.layers)


def _shape(
    name: str, layers: int, kv_heads: int, max_model_len: int, sequences: int, **model: int | bool
) -> Shape:
    sizes: dict[str, Any] = {
        **QWEN2_7B,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131_072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **model,
    }
    return Shape(name, layers, kv_heads, sizes, max_model_len, sequences)


QWEN_32B = _shape(
    "Qwen2.5-32B-Instruct",
    64,
    8,
    8_448,
    4,
    hidden_size=5120,
    num_attention_heads=40,
    intermediate_size=27_648,
)
QWEN_7B = _shape("Qwen2.5-7B-Instruct", 28, 4, 10_496, 2)
QWEN_3B = _shape(
    "Qwen2.5-3B-Instruct",
    36,
    2,
    8_448,
    32,
    hidden_size=2048,
    num_attention_heads=16,
    intermediate_size=11_008,
    vocab_size=151_936,
    tie_word_embeddings=True,
)
GLM_9B = _shape(
    "glm-4-9b-chat-1m",
    40,
    4,
    110_000,
    1,
    hidden_size=4096,
    num_attention_heads=32,
    intermediate_size=13_696,
    vocab_size=151_552,
)
LLAMA_8B = _shape(
    "Llama-3.1-8B",
    32,
    8,
    8_448,
    4,
    hidden_size=4096,
    num_attention_heads=32,
    intermediate_size=14_336,
    vocab_size=128_256,
)
SHAPES = (QWEN_32B, QWEN_7B, QWEN_3B, GLM_9B, LLAMA_8B)

TINY = Shape("tiny", 4, 2, {}, 4096, 32, vocabulary=1000, block_tokens=32)
"""Stands for any of them where there is no GPU. Its heads are smaller than `HEAD_SIZE`."""


_FIRST_TOKEN = 500  # clear of the special ones


class Prompts:
    """The same sequence of prompts for the same seed."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._tokens = range(_FIRST_TOKEN, vocabulary)
        self._rng = random.Random(seed)

    def distinct(self, count: int, length: int) -> list[list[int]]:
        return [self._rng.choices(self._tokens, k=length) for _ in range(count)]

    def sharing(self, count: int, length: int, percent: int) -> list[list[int]]:
        """Prompts whose first `percent` of tokens are the same in all of them."""
        shared = length * percent // 100
        prefix = self._rng.choices(self._tokens, k=shared)
        return [prefix + rest for rest in self.distinct(count, length - shared)]


SCHEDULING = {"sync": False, "async": True}
CHUNK = 1024
_LOOKUP_TIMEOUT_S = 5
_LOAD_TIMEOUT_S = 120


def connector(mode: str = "tiered", **options: Any) -> dict[str, Any]:
    """Our connector, for `kv_transfer_config`. It loads whatever a tier holds: tables show how fast
    a tier is, also where computing again would be faster."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, "load_policy": "always", **options},
    }


def with_tails(cpu_memory: int) -> dict[str, Any]:
    """Partial tails are reused too: "you only compute once"."""
    return connector(cpu_memory=cpu_memory, reuse_partial_tail=True)


def with_daemon(address: str, cpu_memory: int) -> dict[str, Any]:
    """Patient: tables measure how fast a tier is, not how soon it is given up."""
    return connector(
        cpu_memory=cpu_memory,
        remote=address,
        remote_lookup_timeout=_LOOKUP_TIMEOUT_S,
        remote_load_timeout=_LOAD_TIMEOUT_S,
    )


def offloading(cpu_memory: int) -> dict[str, Any]:
    """vLLM's own connector, as it comes. It needs a GPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_memory},
    }


def daemon_of(spec: EngineSpec) -> str | None:
    """The address of the daemon behind an engine."""
    options = (spec.transfer or {}).get("kv_connector_extra_config", {})
    address: str | None = options.get("remote")
    return address


def engine_spec(
    shape: Shape,
    system: str,
    transfer: dict[str, Any] | None,
    *,
    gpu_cache: bool,
    kv_bytes: int,
    scheduling: str | None = None,
) -> EngineSpec:
    """`scheduling` None is what vLLM chooses by itself."""
    cache = "cache" if gpu_cache else "nocache"
    options: dict[str, Any] = {
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": shape.sequences,
        "block_size": shape.block_tokens,
        "enable_prefix_caching": gpu_cache,
        "kv_cache_memory_bytes": kv_bytes,
    }
    if scheduling is not None:
        options["async_scheduling"] = SCHEDULING[scheduling]
    return EngineSpec(
        name="-".join([shape.name, system, scheduling or "default", cache]),
        model=shape.model,
        transfer=transfer,
        options=options,
    )
