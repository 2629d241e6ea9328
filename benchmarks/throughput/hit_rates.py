"""Requests per second as the prefix they share grows from nothing to all of the prompt.

    python -m benchmarks.throughput.hit_rates --out result.json

Requests of 1000 tokens that ask for 24 more, 32 sequences at a time. Columns: `naive` (vLLM without
prefix cache), `disable_prefix_caching` (the same, and keys are computed), `prefix_caching` (vLLM's
own), `yoco` (our connector behind it, which keeps the block a prompt ends in), `swap_in` (no GPU
cache, hits come from the CPU tier), `OffloadingConnector` (vLLM's, no GPU cache either) and
`transfer_in` (no GPU cache, hits come from a daemon). The last one runs twice: what one engine
wrote to the daemon in its first run, another one, which has no copy of it, reads in the second.
Engines of one kind of scheduling live at the same time and take turns, in another order in each
round.
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
    "OffloadingConnector": ("offloading", False),
}
_READ_WHAT_THE_OTHER_WROTE = ("daemon", "daemon_too")
SCHEDULINGS = ("sync", "async")


@dataclass(frozen=True)
class Sizes:
    requests: int = 48
    prompt_tokens: int = 1000
    output_tokens: int = 24
    percents: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    rounds: int = 3
    asynchronous: int = 1
    attach_s: int = 5
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(
    requests=8, output_tokens=4, percents=(0, 50, 100), rounds=1, asynchronous=0, attach_s=1
)


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    """The engines that are compared first."""
    scheduling = _schedulings(sizes)[0]
    return [*_columns(pool, scheduling).values(), *_pair(pool, scheduling)]


def _schedulings(sizes: Sizes) -> tuple[str, ...]:
    return SCHEDULINGS if sizes.asynchronous else SCHEDULINGS[:1]


def _columns(pool: EnginePool, scheduling: str) -> dict[str, EngineSpec]:
    return {
        column: small_engine(pool, system, scheduling, gpu_cache)
        for column, (system, gpu_cache) in COLUMNS.items()
        if not (pool.tiny and system == "offloading")
    }


def _pair(pool: EnginePool, scheduling: str) -> list[EngineSpec]:
    return [small_engine(pool, one, scheduling, False) for one in _READ_WHAT_THE_OTHER_WROTE]


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    fresh = Prompts(shape_of(pool).vocabulary, seed=3)
    schedulings = _schedulings(sizes)
    for number, scheduling in enumerate(schedulings):
        share = record.seconds_left / (len(schedulings) - number)
        _compare(pool, record, sizes, scheduling, fresh, time.monotonic() + share)


def _compare(
    pool: EnginePool, record: Record, sizes: Sizes, scheduling: str, fresh: Prompts, end: float
) -> None:
    """Whole rounds, as many as are begun before `end`."""
    columns, pair = _columns(pool, scheduling), _pair(pool, scheduling)
    engines = pool.engines([*columns.values(), *pair], record)
    for name in pool.alive(list(engines)):
        with pool.surviving(name, record):
            engines[name].ask(fresh.distinct(4, sizes.prompt_tokens), sizes.output_tokens)
            engines[name].settle()
    time.sleep(sizes.attach_s)
    order = list(columns)
    for number in range(sizes.rounds):
        if time.monotonic() > end:
            return
        for percent in sizes.percents:
            labels = {"scheduling": scheduling, "percent": percent}
            prompts = fresh.sharing(sizes.requests, sizes.prompt_tokens, percent)
            for column in order[number % len(order) :] + order[: number % len(order)]:
                name = columns[column].name
                if pool.alive([name]):
                    with pool.surviving(name, record):
                        _ask(engines[name], prompts, record, sizes, {"column": column, **labels})
            names = [spec.name for spec in pair]
            if len(pool.alive(names)) == len(names):
                _transfer(pool, [engines[name] for name in names], fresh, record, sizes, labels)


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
    labels: dict[str, Any],
) -> None:
    percent = labels["percent"]
    written = [fresh.sharing(sizes.requests, sizes.prompt_tokens, percent) for _ in pair]
    for column, sets in (("transfer_in-1", written), ("transfer_in-2", written[::-1])):
        for engine, prompts in zip(pair, sets, strict=True):
            with pool.surviving(engine.spec.name, record):
                _ask(engine, prompts, record, sizes, {"column": column, **labels})
        if len(pool.alive([engine.spec.name for engine in pair])) < len(pair):
            return


def main() -> None:
    run_table("hit_rates", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
