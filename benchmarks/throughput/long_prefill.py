"""Long prompts asked again and again: computed, from the GPU, the CPU tier, and a daemon.

    python -m benchmarks.throughput.long_prefill --out result.json

Distinct prompts of 10240 tokens, two at a time, three rounds each, by tokens of output.
With a daemon three more follow after the engine has been killed and started again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.engine_process import EngineProcess, EngineSpec
from benchmarks.throughput.engine_pool import EnginePool, run_table
from benchmarks.throughput.engines import (
    QWEN_7B,
    TINY,
    Prompts,
    connector,
    engine_spec,
    offloading,
    with_daemon,
    with_tails,
)
from benchmarks.throughput.record import Record

_ROUNDS = (1, 2, 3)
_AGAIN = (4, 5, 6)  # after the engines were killed
_LOCAL_ROWS = {  # system, GPU cache, rounds
    "naive": ("vllm", False, (1,)),
    "disable_prefix_caching": ("hash_only", False, (1,)),
    "prefix_caching": ("vllm", True, _ROUNDS),
    "yoco": ("yoco", True, _ROUNDS),
    "offloading+prefix_caching": ("tiered", True, _ROUNDS),
    "offloading+no_gpu_caching": ("tiered", False, _ROUNDS),
    "OffloadingConnector+prefix_caching": ("offloading", True, _ROUNDS),
    "OffloadingConnector+no_gpu_caching": ("offloading", False, _ROUNDS),
}
_REMOTE_ROWS = {
    "remote+prefix_caching": ("daemon", True, _ROUNDS),
    "remote+no_prefix_caching": ("daemon", False, _ROUNDS),
}


@dataclass(frozen=True)
class Sizes:
    prompt_tokens: int = 10_240
    prompts: int = 2
    """10 in the original; the daemon holds all of them for every length of output, twice."""
    repetitions: int = 3
    """Each with prompts of its own."""
    outputs: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128)
    remote: int = 1
    """0: without the rows that need a daemon."""
    attach_s: int = 15
    """For the engines to map and pin the daemon's memory, in the background."""


SIZES = Sizes()
TINY_SIZES = Sizes(prompt_tokens=1024, prompts=2, repetitions=1, outputs=(2, 8), attach_s=1)


_Rows = Mapping[str, tuple[str, bool, tuple[int, ...]]]
_Asked = dict[tuple[str, int, int], list[list[int]]]


def specs(pool: EnginePool, sizes: Sizes) -> list[EngineSpec]:
    """Those of the first rows; the others have their engines when these are gone."""
    return [_spec(pool, sizes, row) for row in _local_rows(pool)]


def _local_rows(pool: EnginePool) -> _Rows:
    """vLLM's own connector needs a GPU."""
    rows = _LOCAL_ROWS.items()
    return {row: one for row, one in rows if not (pool.tiny and one[0] == "offloading")}


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    fresh = Prompts((TINY if pool.tiny else QWEN_7B).vocabulary, seed=4)
    engines = pool.engines(specs(pool, sizes), record)
    _ask_all(pool, engines, fresh, record, sizes, _local_rows(pool), {})
    if not sizes.remote or record.over:
        return
    asked: _Asked = {}
    wanted = [_spec(pool, sizes, row) for row in _REMOTE_ROWS]
    engines = pool.engines(wanted, record)
    _ask_all(pool, engines, fresh, record, sizes, _REMOTE_ROWS, asked)
    engines = pool.restart(wanted, record, room=True)
    rows = {row: (system, cache, _AGAIN) for row, (system, cache, _) in _REMOTE_ROWS.items()}
    _ask_all(pool, engines, fresh, record, sizes, rows, asked)


def _ask_all(
    pool: EnginePool,
    engines: dict[str, EngineProcess],
    fresh: Prompts,
    record: Record,
    sizes: Sizes,
    rows: _Rows,
    asked: _Asked,
) -> None:
    """`asked`: the prompts of each cell, filled where there are none. Rows do not share them: two
    of them share a daemon."""
    _warm_up(pool, engines, fresh, record, sizes)
    for repetition in range(sizes.repetitions):
        for output in sizes.outputs:
            for row, (_, _, rounds) in rows.items():
                key = row, output, repetition
                if key not in asked:
                    asked[key] = fresh.distinct(sizes.prompts, sizes.prompt_tokens)
                name = _spec(pool, sizes, row).name
                for number in rounds:
                    labels = {"row": row, "round": number, "output": output}
                    _ask(pool, engines, name, asked[key], record, labels)


def _warm_up(
    pool: EnginePool,
    engines: dict[str, EngineProcess],
    fresh: Prompts,
    record: Record,
    sizes: Sizes,
) -> None:
    for name, engine in engines.items():
        with pool.surviving(name, record):
            engine.ask(fresh.distinct(2, sizes.prompt_tokens // 4), 4)
            engine.settle()
    time.sleep(sizes.attach_s)


def _ask(
    pool: EnginePool,
    engines: dict[str, EngineProcess],
    name: str,
    prompts: list[list[int]],
    record: Record,
    labels: dict[str, Any],
) -> None:
    if record.over or not pool.alive([name]):
        return
    with pool.surviving(name, record):
        engine = engines[name]
        before = engine.loaded()
        asked = engine.ask(prompts, labels["output"])
        record.add(asked.seconds, len(prompts), **labels)
        engine.settle()
        loaded = {tier: count - before.get(tier, 0) for tier, count in engine.loaded().items()}
        record.loaded_blocks(labels, loaded)


def _spec(pool: EnginePool, sizes: Sizes, row: str) -> EngineSpec:
    system, gpu_cache, _ = {**_LOCAL_ROWS, **_REMOTE_ROWS}[row]
    shape = TINY if pool.tiny else QWEN_7B
    one_set = sizes.prompts * (sizes.prompt_tokens + max(sizes.outputs)) * _bytes_per_token(pool)
    cpu_memory = 2 * one_set
    transfer: dict[str, Any] | None = None
    if system == "hash_only":
        transfer = connector("hash_only", cpu_memory=cpu_memory)
    if system == "tiered":
        transfer = connector(cpu_memory=cpu_memory)
    if system == "yoco":
        transfer = with_tails(cpu_memory)
    if system == "offloading":
        transfer = offloading(cpu_memory)
    if system == "daemon":
        sets = sizes.repetitions * len(sizes.outputs) + 1
        memory = int(len(_REMOTE_ROWS) * sets * one_set * 1.1)
        address = pool.daemon("long", "--memory", str(memory)).ipc
        transfer = with_daemon(address, cpu_memory)
    kv_bytes = max(one_set * 5 // 4, (shape.max_model_len + 512) * _bytes_per_token(pool))
    return engine_spec(shape, system, transfer, gpu_cache=gpu_cache, kv_bytes=kv_bytes)


def _bytes_per_token(pool: EnginePool) -> int:
    return 4096 if pool.tiny else QWEN_7B.token_bytes


def main() -> None:
    run_table("long_prefill", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
