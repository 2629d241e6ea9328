"""What storing costs the engine: swap_out to the CPU tier, transfer_out to a daemon's memory.

    python -m benchmarks.throughput.store_overhead --out result.json

Prompts of 8192 tokens that nobody has seen, one token of output, by tokens per step; with and
without the GPU's prefix cache, with synchronous and asynchronous scheduling. Engines that are
compared with each other live at the same time and take turns, and ratios are those of equal rounds,
since the speed of a processor may change within seconds. With small steps prompts run one after the
other, so fewer of them tell the same rate: each cell says how many it was measured with.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from benchmarks.engine_process import EngineSpec
from benchmarks.throughput.engine_pool import EnginePool, run_table, shape_of, small_engine
from benchmarks.throughput.engines import CHUNK, Prompts
from benchmarks.throughput.record import Record

COMPARED = (("vllm", "tiered"), ("tiered", "daemon"), ("vllm", "offloading"))


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int = 8192
    prompts: int = 4
    steps_at_most: int = 64
    """Prompts are left out as long as more steps than these would be needed."""
    chunks: tuple[int, ...] = (1024, 768, 512, 384, 256, 128, 64, 32)
    repetitions: int = 8
    asynchronous: int = 1
    gpu_cache_on: int = 1
    gpu_cache_off: int = 1
    attach_s: int = 8
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(
    prompt_tokens=512,
    prompts=2,
    chunks=(1024, 256, 64),
    repetitions=1,
    asynchronous=0,  # vLLM has none on a CPU
    gpu_cache_off=0,
    attach_s=1,
)


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    """The engines that are compared first."""
    return list(_engines(pool, sizes, _gpu_caches(sizes)[0]).values())


def _gpu_caches(sizes: Sizes) -> list[bool]:
    return [True] * sizes.gpu_cache_on + [False] * sizes.gpu_cache_off


def _engines(pool: EnginePool, sizes: Sizes, gpu_cache: bool) -> dict[tuple[str, str], EngineSpec]:
    """By scheduling and system."""
    return {
        (scheduling, system): small_engine(pool, system, scheduling, gpu_cache)
        for scheduling in (["sync", "async"] if sizes.asynchronous else ["sync"])
        for system in _systems(pool)
    }


def _systems(pool: EnginePool) -> list[str]:
    systems = list(dict.fromkeys(system for pair in COMPARED for system in pair))
    return [system for system in systems if not (pool.tiny and system == "offloading")]


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    fresh = Prompts(shape_of(pool).vocabulary, seed=2)
    gpu_caches = _gpu_caches(sizes)
    for number, gpu_cache in enumerate(gpu_caches):
        share = record.seconds_left / (len(gpu_caches) - number)
        _compare(pool, record, sizes, gpu_cache, fresh, time.monotonic() + share)


def _compare(
    pool: EnginePool, record: Record, sizes: Sizes, gpu_cache: bool, fresh: Prompts, end: float
) -> None:
    """Whole rounds, as many as are begun before `end`."""
    specs = _engines(pool, sizes, gpu_cache)
    engines = pool.engines(list(specs.values()), record)
    for spec in specs.values():
        for chunk in sizes.chunks:
            with pool.surviving(spec.name, record):
                engines[spec.name].set_chunk(chunk)
                engines[spec.name].ask(fresh.distinct(1, 2 * chunk))
                engines[spec.name].settle()
    time.sleep(sizes.attach_s)
    for repetition in range(sizes.repetitions):
        if time.monotonic() > end:
            break
        for number, chunk in enumerate(sizes.chunks):
            count = prompts_for(sizes, chunk)
            for scheduling, system in _in_turns(specs, repetition + number):
                name = specs[scheduling, system].name
                if not pool.alive([name]):
                    continue
                with pool.surviving(name, record):
                    engine = engines[name]
                    engine.set_chunk(chunk)
                    asked = engine.ask(fresh.distinct(count, sizes.prompt_tokens))
                    labels = _labels(scheduling, system, gpu_cache, chunk)
                    record.add(asked.seconds, count, **labels)
                    engine.settle()
    for scheduling in dict.fromkeys(scheduling for scheduling, _ in specs):
        for base, other in COMPARED:
            for chunk in sizes.chunks:
                record.compare(
                    _labels(scheduling, base, gpu_cache, chunk),
                    _labels(scheduling, other, gpu_cache, chunk),
                )
    for name in pool.alive([spec.name for spec in specs.values()]):
        with pool.surviving(name, record):
            engines[name].set_chunk(CHUNK)


def _in_turns(engines: Iterable[tuple[str, str]], turn: int) -> Iterator[tuple[str, str]]:
    """Those of one kind of scheduling follow each other; each time another one begins."""
    for _, alike in itertools.groupby(engines, key=itemgetter(0)):
        order = list(alike)
        first = turn % len(order)
        yield from order[first:] + order[:first]


def _labels(scheduling: str, system: str, gpu_cache: bool, chunk: int) -> dict[str, Any]:
    return {"system": system, "scheduling": scheduling, "gpu_cache": gpu_cache, "chunk": chunk}


def prompts_for(sizes: Sizes, chunk: int) -> int:
    steps = -(-sizes.prompt_tokens // chunk)
    return max(1, min(sizes.prompts, sizes.steps_at_most // steps))


def main() -> None:
    run_table("store_overhead", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
