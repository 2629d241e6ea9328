"""What a large arena costs at the start: pinned in the background, it should cost nothing.

    python -m benchmarks.pinning --out result.json             64 GiB and a 7B shape on a GPU
    python -m benchmarks.pinning --tiny --out result.json      the same code on a laptop

Engines start one after the other, with and without the arena in turns; `nothing` is our connector
doing nothing, so that both kinds load the same code. The first start fills vLLM's compile cache
and is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.fleet import device_memory_mib, say
from benchmarks.samples import spread
from tests.models import QWEN2_7B

GIB = 1 << 30


def spec(name: str, tiny: bool, gib: float) -> EngineSpec:
    extra = {"cpu_memory": int(gib * GIB)} if name == "with" else {"mode": "naive"}
    return EngineSpec(
        name=name,
        model={} if tiny else QWEN2_7B,
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


def measure_arena(gib: float) -> dict[str, float] | None:
    """Pinning alone, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pinning", "--arena", str(gib)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _measure_arena_here(nbytes: int) -> dict[str, float]:
    """How long an arena holds up the start, and how long pinning it takes altogether."""
    from vllm_tiered_kv.device.arena import Arena
    from vllm_tiered_kv.native import cuda

    cuda.Event(0)  # the context exists by the time an engine opens its arena
    begin = time.perf_counter()
    arena = Arena(nbytes, cuda.host_register, cuda.host_unregister)
    opened = time.perf_counter() - begin
    while arena.ready_bytes < nbytes:
        time.sleep(0.01)
    pinned = time.perf_counter() - begin
    arena.close()
    return {"start_held_up_s": round(opened, 3), "pinned_s": round(pinned, 3)}


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
    parser.add_argument("--starts", type=int, default=2, help="of each kind")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--arena", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arena is not None:
        print(json.dumps(_measure_arena_here(int(args.arena * GIB))))
        return
    gib = args.gib or (0.25 if args.tiny else 64.0)
    gpu = device_memory_mib() is not None and not args.tiny
    starts: dict[str, list[float]] = {"without": [], "with": []}
    report: dict[str, Any] = {"environment": environment.describe(), "gib": gib}
    report |= {"arena": measure_arena(gib) if gpu else None, "starts_s": starts, "failed": {}}

    def save() -> None:
        report["derived"] = derive(starts)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")

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
            save()
    save()
    print(json.dumps(report["derived"]))


if __name__ == "__main__":
    main()
