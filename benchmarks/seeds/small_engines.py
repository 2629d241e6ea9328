"""The engines of the 3B tables, the same in all of them, so that one start serves every table."""

from __future__ import annotations

from typing import Any

from benchmarks.engine_process import EngineSpec
from benchmarks.seeds import engine_kinds
from benchmarks.seeds.shapes import QWEN_3B, TINY, Shape
from benchmarks.seeds.workbench import Workbench

_GIB = 1 << 30
_MIB = 1 << 20


def shape_of(bench: Workbench) -> Shape:
    return TINY if bench.tiny else QWEN_3B


def engine(bench: Workbench, system: str, scheduling: str, gpu_cache: bool) -> EngineSpec:
    """`system`: vllm, hash_only, tiered, yoco (the same, partial tails are reused), or daemon
    (shared memory of a daemon behind the tier)."""
    return engine_kinds.engine(
        shape_of(bench),
        system,
        _transfer(bench, system),
        gpu_cache=gpu_cache,
        kv_bytes=64 * _MIB if bench.tiny else 5 * _GIB // 4,
        scheduling=scheduling,
    )


def _transfer(bench: Workbench, system: str) -> dict[str, Any] | None:
    cpu_memory = 64 * _MIB if bench.tiny else 3 * _GIB
    if system == "vllm":
        return None
    if system == "daemon":
        memory = "256MiB" if bench.tiny else "8GiB"
        address = bench.daemon("small", "--memory", memory).ipc
        return engine_kinds.with_daemon(address, cpu_memory)
    if system == "yoco":
        return engine_kinds.with_tails(cpu_memory)
    return engine_kinds.connector(
        "hash_only" if system == "hash_only" else "tiered", cpu_memory=cpu_memory
    )
