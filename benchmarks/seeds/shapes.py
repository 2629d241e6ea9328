"""The five models of the tables, by shape: weights are not needed to run kernels of the real size.

All are built as Qwen2 models. What decides a speed here (layers, heads, widths, vocabulary) is that
of the named model; activations and biases may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
