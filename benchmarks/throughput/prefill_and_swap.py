"""Computing 8192 tokens against swapping their blocks in or out, for the five shapes.

    python -m benchmarks.throughput.prefill_and_swap --out result.json

Prefill: real vLLM with dummy weights, a step computes at most 1024 tokens. Swap: 8 batches of 64
random blocks through our native copies; what weights are kept in changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.engine_process import EngineSpec
from benchmarks.throughput import block_swap
from benchmarks.throughput.engine_pool import EnginePool, run_table
from benchmarks.throughput.engines import (
    GLM_9B,
    LLAMA_8B,
    QWEN_7B,
    QWEN_32B,
    SHAPES,
    TINY,
    Prompts,
    Shape,
    engine_spec,
)
from benchmarks.throughput.record import Record

_LONGEST = 8448  # no need for the cache a longer context would ask for


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@dataclass(frozen=True)
class Row:
    shape: Shape
    weights: str = "bf16"

    def spec(self) -> EngineSpec:
        short = replace(self.shape, max_model_len=min(self.shape.max_model_len, _LONGEST))
        plain = engine_spec(short, "vllm", None, gpu_cache=False, kv_bytes=_kv_bytes(short))
        changes = {
            "bf16": plain,
            "fp8": replace(plain, options={**plain.options, "quantization": "fp8"}),
            "GPTQ-Int4": replace(
                plain,
                model={**plain.model, "quantization_config": _GPTQ},
                options={**plain.options, "dtype": "float16"},
            ),
        }
        return replace(changes[self.weights], name=f"{plain.name}-{self.weights}")


BATCHES = (
    tuple(Row(shape) for shape in SHAPES),
    (Row(QWEN_32B, "GPTQ-Int4"), Row(QWEN_7B, "fp8"), Row(GLM_9B, "fp8"), Row(LLAMA_8B, "fp8")),
)
"""Engines that live at the same time. Those of the first take about 135 GB."""


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int = 8192
    repetitions: int = 5
    batches: int = 8
    blocks: int = 64


SIZES = Sizes()
TINY_SIZES = Sizes(prompt_tokens=2048, repetitions=2, batches=2, blocks=8)


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    for shape in SHAPES:
        times = block_swap.measure(shape, sizes.batches, sizes.blocks, sizes.repetitions)
        for what, seconds in times.items():
            for one in seconds:
                record.add(one, shape=shape.name, what=what)
    for rows in ((Row(TINY),),) if pool.tiny else BATCHES:
        if record.over:
            return
        _prefill(pool, record, sizes, rows)


def _prefill(pool: EnginePool, record: Record, sizes: Sizes, rows: Sequence[Row]) -> None:
    specs = [row.spec() for row in rows]
    engines = pool.engines(specs, record)
    for repetition in range(sizes.repetitions + 1):
        for row, spec in zip(rows, specs, strict=True):
            if record.over or spec.name not in pool.alive([spec.name]):
                continue
            prompts = Prompts(row.shape.vocabulary, repetition).distinct(1, sizes.prompt_tokens)
            with pool.surviving(spec.name, record):
                seconds = engines[spec.name].ask(prompts).seconds
                if repetition:  # the first one warms up
                    record.add(seconds, shape=row.shape.name, weights=row.weights, what="prefill")


def _kv_bytes(shape: Shape) -> int:
    return (shape.max_model_len + 512) * shape.token_bytes


def main() -> None:
    run_table("prefill_and_swap", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
