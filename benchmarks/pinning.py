"""What a large arena costs at the start: pinned in the background, it should cost nothing.

    python -m benchmarks.pinning --out result.json             64 GiB and a 7B shape on a GPU
    python -m benchmarks.pinning --tiny --out result.json      the same code on a laptop

Engines start one after the other, with and without the arena in turns; without it our connector
does nothing, so that both kinds load the same code. The first start warms up and is not counted.
The model has few layers and runs eagerly: starts that load, compile and capture more differ by far
more than an arena could add, and hide more of what it does. The arena alone is pinned beside a loop
of small kernels, which says how long the driver, while it pins, holds up others; once as it is
done, and once with half as much memory whose pages the driver has to get by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine_process import (
    EngineFailed,
    EngineProcess,
    EngineSpec,
    device_memory_mib,
    say,
)
from benchmarks.result_files import describe_environment, save, spread
from tests.models import QWEN2_7B

GIB = 1 << 30
_ALONE_S = 1.0
_LEFT_TO_DRIVER = "--left-to-driver"  # pin pages that the kernel was not asked for before
SMALL = {**QWEN2_7B, "num_hidden_layers": 4}


def spec(name: str, tiny: bool, gib: float) -> EngineSpec:
    extra = {"cpu_memory": int(gib * GIB)} if name == "with" else {"mode": "naive"}
    return EngineSpec(
        name=name,
        model={} if tiny else SMALL,
        options={"enforce_eager": True},
        transfer={
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )


def start_once(spec: EngineSpec) -> float:
    """Seconds until an engine can be asked, from the moment vLLM is imported."""
    with EngineProcess(spec) as engine:
        engine.wait_ready()
        engine.ask([[7] * 64])
        return engine.started_s


def measure_arena(gib: float, *options: str) -> dict[str, Any] | None:
    """Pinning alone, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pinning", "--arena", str(gib), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _measure_arena_here(nbytes: int, left_to_driver: bool) -> dict[str, Any]:
    """How long an arena holds up the start, how long pinning it takes altogether, and what it does
    to kernels that are launched meanwhile."""
    import torch

    from vllm_tiered_kv.device.arena import Arena
    from vllm_tiered_kv.native import cuda, memory

    if left_to_driver:
        memory.populate = lambda address, nbytes: False
    numbers = torch.zeros(1 << 16, device="cuda")

    def launches(go_on: Callable[[], bool]) -> list[float]:
        times = []
        while go_on():
            begin = time.perf_counter()
            numbers.add_(1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return times

    soon = time.monotonic() + _ALONE_S
    launches(lambda: time.monotonic() < soon)
    soon = time.monotonic() + _ALONE_S
    alone = launches(lambda: time.monotonic() < soon)
    begin = time.perf_counter()
    arena = Arena(nbytes, cuda.host_register, cuda.host_unregister)
    opened = time.perf_counter() - begin
    pinning = arena._pinner._thread
    assert pinning is not None
    beside = launches(pinning.is_alive)
    pinned = time.perf_counter() - begin
    arena.close()
    return {
        "gib": nbytes / GIB,
        "start_held_up_s": round(opened, 3),
        "pinned_s": round(pinned, 3),
        "launch_ms": {"alone": _launch_facts(alone), "while_pinning": _launch_facts(beside)},
    }


def _launch_facts(times: list[float]) -> dict[str, float] | None:
    if not times:
        return None  # a small arena is pinned at once
    ordered = sorted(times)
    return {
        "launches": len(ordered),
        "median": round(1e3 * statistics.median(ordered), 4),
        "p99": round(1e3 * ordered[int(len(ordered) * 0.99)], 3),
        "longest": round(1e3 * ordered[-1], 3),
    }


def derive(starts: dict[str, list[float]]) -> dict[str, Any] | None:
    if not all(starts.values()):
        return None
    later = statistics.median(starts["with"]) - statistics.median(starts["without"])
    return {
        **{name: spread(values) for name, values in starts.items()},
        "later_by_s": round(later, 3),
        "goal": "P13: at most 1 s",
        "reached": later <= 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without GPU")
    parser.add_argument("--gib", type=float, default=0.0, help="size of the arena")
    parser.add_argument("--starts", type=int, default=3, help="of each kind")
    parser.add_argument("--starts-only", action="store_true", help="pin nothing apart from them")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--arena", type=float, help=argparse.SUPPRESS)
    parser.add_argument(_LEFT_TO_DRIVER, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arena is not None:
        print(json.dumps(_measure_arena_here(int(args.arena * GIB), args.left_to_driver)))
        return
    gib = args.gib or (0.25 if args.tiny else 64.0)
    pins = device_memory_mib() is not None and not (args.tiny or args.starts_only)
    starts: dict[str, list[float]] = {"without": [], "with": []}
    report: dict[str, Any] = {"environment": describe_environment(), "gib": gib}
    report |= {
        "arena": measure_arena(gib) if pins else None,
        "arena_left_to_driver": measure_arena(gib / 2, _LEFT_TO_DRIVER) if pins else None,
        "failed": {},
    }

    def save_all() -> None:
        report["derived"] = derive(starts)
        save(args.out, report, {"starts_s": starts})

    say(f"first start: {start_once(spec('without', args.tiny, gib)):.1f} s")
    for number in range(args.starts):
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            try:
                seconds = start_once(spec(name, args.tiny, gib))
            except EngineFailed as error:
                say(str(error))
                report["failed"][name] = error.what[:300]
                continue
            starts[name].append(round(seconds, 3))
            say(f"{name} arena: {seconds:.1f} s")
            save_all()
    save_all()
    print(json.dumps(report["derived"]))


if __name__ == "__main__":
    main()
