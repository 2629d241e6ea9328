"""Requests per second as the prefix they share grows from nothing to all of the prompt.

    python -m benchmarks.throughput.hit_rates --out result.json

Requests of 1000 tokens that ask for 24 more, 32 sequences at a time. Columns: `naive` (vLLM without
prefix cache), `disable_prefix_caching` (the same, and keys are computed), `prefix_caching` (vLLM's
own), `yoco` (our connector behind it, which keeps the block a prompt ends in), `swap_in` (no GPU
cache, hits come from the CPU tier) and `transfer_in` (no GPU cache, hits come from a daemon). The
last one runs twice: what one engine wrote to the daemon in its first run, another one, which has no
copy of it, reads in the second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_process import EngineProcess, EngineSpec
from benchmarks.throughput.engine_pool import EnginePool, run_table, shape_of, small_engine
from benchmarks.throughput.engines import Prompts
from benchmarks.throughput.record import Record

COLUMNS = {  # system, GPU cache
    "naive": ("vllm", False),
    "disable_prefix_caching": ("hash_only", False),
    "prefix_caching": ("vllm", True),
    "yoco": ("yoco", True),
    "swap_in": ("tiered", False),
}
SCHEDULINGS = ("sync", "async")


@dataclass(frozen=True)
class Sizes:
    requests: int = 48
    prompt_tokens: int = 1000
    output_tokens: int = 24
    percents: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    asynchronous: int = 1
    attach_s: int = 5
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(requests=8, output_tokens=4, percents=(0, 50, 100), asynchronous=0, attach_s=1)


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    """An engine for each of `_labels`, then the two that write to and read from the daemon."""
    columns = [
        small_engine(pool, system, labels["scheduling"], gpu_cache)
        for labels in _labels(sizes)
        for system, gpu_cache in [COLUMNS[labels["column"]]]
    ]
    # Both, always: one reads what the other has written.
    return columns + [small_engine(pool, "daemon", s, False) for s in SCHEDULINGS]


def _labels(sizes: Sizes) -> list[dict[str, str]]:
    return [
        {"column": column, "scheduling": scheduling}
        for column in COLUMNS
        for scheduling in (SCHEDULINGS if sizes.asynchronous else SCHEDULINGS[:1])
    ]


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    wanted = specs(pool, sizes)
    pair = wanted[-len(SCHEDULINGS) :]
    named = zip(wanted, _labels(sizes), strict=False)  # the pair has no labels of its own
    labels = {spec.name: one for spec, one in named}
    engines = pool.engines(wanted, record)
    fresh = Prompts(shape_of(pool).vocabulary, seed=3)
    for name in pool.alive(list(engines)):
        with pool.surviving(name, record):
            engines[name].ask(fresh.distinct(4, sizes.prompt_tokens), sizes.output_tokens)
            engines[name].settle()
    time.sleep(sizes.attach_s)
    for percent in sizes.percents:
        if record.over:
            return
        prompts = fresh.sharing(sizes.requests, sizes.prompt_tokens, percent)
        for name in pool.alive(list(labels)):
            with pool.surviving(name, record):
                _ask(engines[name], prompts, record, sizes, {**labels[name], "percent": percent})
        names = [spec.name for spec in pair]
        if len(pool.alive(names)) == len(names):
            _transfer(pool, [engines[name] for name in names], fresh, record, sizes, percent)


def _ask(
    engine: EngineProcess,
    prompts: list[list[int]],
    record: Record,
    sizes: Sizes,
    labels: dict[str, Any],
) -> None:
    before = engine.loaded()
    asked = engine.ask(prompts, sizes.output_tokens)
    record.add(asked.seconds, len(prompts), **labels)
    engine.settle()
    loaded = {tier: count - before.get(tier, 0) for tier, count in engine.loaded().items()}
    record.loaded_blocks(labels, loaded)


def _transfer(
    pool: EnginePool,
    pair: list[EngineProcess],
    fresh: Prompts,
    record: Record,
    sizes: Sizes,
    percent: int,
) -> None:
    written = [fresh.sharing(sizes.requests, sizes.prompt_tokens, percent) for _ in pair]
    for column, sets in (("transfer_in-1", written), ("transfer_in-2", written[::-1])):
        for engine, scheduling, prompts in zip(pair, SCHEDULINGS, sets, strict=True):
            labels = {"column": column, "scheduling": scheduling, "percent": percent}
            with pool.surviving(engine.spec.name, record):
                _ask(engine, prompts, record, sizes, labels)
        if len(pool.alive([engine.spec.name for engine in pair])) < len(pair):
            return


def main() -> None:
    run_table("hit_rates", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
