"""Computing 8192 tokens against swapping their blocks in or out, for the five shapes.

    python -m benchmarks.seeds.prefill_and_swap --out result.json

Prefill: real vLLM with dummy weights in bfloat16, a step computes at most 1024 tokens. Swap: 8
batches of 64 random blocks through our native copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.seeds import block_swap, engine_kinds
from benchmarks.seeds.command_line import run_table
from benchmarks.seeds.prompts import Prompts
from benchmarks.seeds.record import Record
from benchmarks.seeds.shapes import SHAPES, TINY, Shape
from benchmarks.seeds.workbench import Workbench

_LONGEST = 8448  # no need for the cache a longer context would ask for


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int = 8192
    repetitions: int = 5
    batches: int = 8
    blocks: int = 64
    engines_at_once: int = 5
    """All five take about 135 GB by their weights and caches; fewer at a time take longer."""


SIZES = Sizes()
TINY_SIZES = Sizes(prompt_tokens=2048, repetitions=2, batches=2, blocks=8, engines_at_once=1)


def measure(bench: Workbench, record: Record, sizes: Sizes) -> None:
    record.note(
        "weights",
        "Weights are bfloat16 in every row. The GPTQ and fp8 rows of the original table are not "
        "run: GPTQ needs kernels that not every build of vLLM has, and quantised weights change "
        "the prefill alone, not what is swapped.",
    )
    for shape in SHAPES:
        times = block_swap.measure(shape, sizes.batches, sizes.blocks, sizes.repetitions)
        for what, seconds in times.items():
            for one in seconds:
                record.add(one, shape=shape.name, what=what)
    shapes = [TINY] if bench.tiny else list(SHAPES)
    for start in range(0, len(shapes), sizes.engines_at_once):
        if record.over:
            return
        _prefill(bench, record, sizes, shapes[start : start + sizes.engines_at_once])


def _prefill(bench: Workbench, record: Record, sizes: Sizes, shapes: list[Shape]) -> None:
    specs = {}
    for shape in shapes:
        short = replace(shape, max_model_len=min(shape.max_model_len, _LONGEST))
        specs[shape.name] = engine_kinds.engine(
            short,
            "vllm",
            None,
            gpu_cache=False,
            kv_bytes=_kv_bytes(short),
        )
    engines = bench.engines(list(specs.values()), record)
    for repetition in range(sizes.repetitions + 1):
        for shape in shapes:
            name = specs[shape.name].name
            if record.over or name not in bench.alive([name]):
                continue
            prompts = Prompts(shape.vocabulary, repetition).distinct(1, sizes.prompt_tokens)
            with bench.surviving(name, record):
                seconds = engines[name].ask(prompts).seconds
                if repetition:  # the first one warms up
                    record.add(seconds, shape=shape.name, what="prefill")


def _kv_bytes(shape: Shape) -> int:
    return (shape.max_model_len + 512) * shape.token_bytes


def main() -> None:
    run_table("prefill_and_swap", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
