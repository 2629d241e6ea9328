"""What storing costs the engine: swap_out to the CPU tier, transfer_out to a daemon's memory.

    python -m benchmarks.throughput.store_overhead --out result.json

Prompts of 8192 tokens that nobody has seen, one token of output, by tokens per step; with and
without the GPU's prefix cache, with synchronous and asynchronous scheduling. The three engines that
are compared with each other live at the same time and take turns; the others are not there then,
because a machine with a dozen engines tells no times that repeat. Ratios are those of equal rounds,
since the speed of a processor may change within seconds. With small steps prompts run one after the
other, so fewer of them tell the same rate: each cell says how many it was measured with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_process import EngineSpec
from benchmarks.throughput.engine_pool import EnginePool, run_table, shape_of, small_engine
from benchmarks.throughput.engines import CHUNK, Prompts
from benchmarks.throughput.record import Record

SYSTEMS = ("vllm", "tiered", "daemon")
COMPARED = (("vllm", "tiered"), ("tiered", "daemon"))


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int = 8192
    prompts: int = 2
    steps_at_most: int = 32
    """Prompts are left out as long as more steps than these would be needed."""
    chunks: tuple[int, ...] = (1024, 768, 512, 384, 256, 128, 64, 32)
    repetitions: int = 5
    small_below: int = 128
    """Smaller chunks than this take the longest."""
    small_repetitions: int = 2
    asynchronous: int = 1
    gpu_cache_on: int = 1
    gpu_cache_off: int = 1
    attach_s: int = 8
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(
    prompt_tokens=512,
    chunks=(1024, 256, 64),
    repetitions=1,
    asynchronous=0,  # vLLM has none on a CPU
    gpu_cache_off=0,
    attach_s=1,
)


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    """The engines that are compared first."""
    return _engines(pool, _settings(sizes)[0])


def _settings(sizes: Sizes) -> list[dict[str, Any]]:
    return [
        {"scheduling": scheduling, "gpu_cache": gpu_cache}
        for gpu_cache in [True] * sizes.gpu_cache_on + [False] * sizes.gpu_cache_off
        for scheduling in (["sync", "async"] if sizes.asynchronous else ["sync"])
    ]


def _engines(pool: EnginePool, setting: dict[str, Any]) -> list[EngineSpec]:
    return [small_engine(pool, system, **setting) for system in SYSTEMS]


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    fresh = Prompts(shape_of(pool).vocabulary, seed=2)
    for setting in _settings(sizes):
        if not record.over:
            _compare(pool, record, sizes, setting, fresh)


def _compare(
    pool: EnginePool, record: Record, sizes: Sizes, setting: dict[str, Any], fresh: Prompts
) -> None:
    specs = _engines(pool, setting)
    names = [spec.name for spec in specs]
    engines = pool.engines(specs, record)
    for name in pool.alive(names):
        with pool.surviving(name, record):
            engines[name].ask(fresh.distinct(2, sizes.prompt_tokens))
            engines[name].settle()
    time.sleep(sizes.attach_s)
    order = list(zip(names, SYSTEMS, strict=True))
    for repetition in range(sizes.repetitions):
        for number, chunk in enumerate(sizes.chunks):
            if repetition >= sizes.small_repetitions and chunk < sizes.small_below:
                continue
            count = prompts_for(sizes, chunk)
            turn = (repetition + number) % len(order)
            for name, system in order[turn:] + order[:turn]:
                if record.over:
                    break
                if not pool.alive([name]):
                    continue
                with pool.surviving(name, record):
                    engine = engines[name]
                    engine.set_chunk(chunk)
                    asked = engine.ask(fresh.distinct(count, sizes.prompt_tokens))
                    record.add(asked.seconds, count, system=system, **setting, chunk=chunk)
                    engine.settle()
    for base, other in COMPARED:
        for chunk in sizes.chunks:
            record.compare(
                {"system": base, **setting, "chunk": chunk},
                {"system": other, **setting, "chunk": chunk},
            )
    for name in pool.alive(names):
        with pool.surviving(name, record):
            engines[name].set_chunk(CHUNK)


def prompts_for(sizes: Sizes, chunk: int) -> int:
    steps = -(-sizes.prompt_tokens // chunk)
    return max(1, min(sizes.prompts, sizes.steps_at_most // steps))


def main() -> None:
    run_table("store_overhead", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
