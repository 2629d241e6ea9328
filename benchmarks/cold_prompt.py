"""What storing adds to the time of a single cold prompt, part by part.

    python -m benchmarks.cold_prompt --out result.json      needs a GPU

Prompts nobody has seen, one at a time, asked of vLLM alone and of our connector, which take turns.
Ours with everything on, without the copies, and without planning what to store. The time to the
first token, and the one to the eighth. Also how long vLLM spends in each hook of ours meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.engine_process import EngineSpec
from benchmarks.fleet import Fleet, say
from benchmarks.left_out import PARTS
from benchmarks.samples import spread
from tests.models import QWEN2_7B

_TOKENS = 10_240
_ANSWERS = (1, 8)  # tokens
_TIER_BYTES = 4 << 30
_HOOK_ROUNDS = 8


def spec(name: str) -> EngineSpec:
    ours = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_memory": _TIER_BYTES},
    }
    return EngineSpec(
        name=name,
        model=QWEN2_7B,
        transfer=None if name == "vllm" else ours,
        options={"kv_cache_memory_bytes": 2 << 30, "max_model_len": _TOKENS + 64},
    )


def derive(samples: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for answer in _ANSWERS:
        times: dict[str, list[float]] = {}
        for sample in samples:
            if sample["tokens"] == answer:
                times.setdefault(sample["mode"], []).append(sample["ms"])
        if "vllm" not in times:
            continue
        alone = statistics.median(times["vllm"])
        found[str(answer)] = {
            mode: {**spread(some), "of_vllm": round(statistics.median(some) / alone, 4)}
            for mode, some in times.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds in all")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(100, 150_000) for _ in range(_TOKENS)]

    samples: list[dict[str, Any]] = []
    modes = ["vllm", *PARTS]
    with tempfile.TemporaryDirectory() as folder, Fleet(spec, Path(folder)) as fleet:
        fleet.start(["vllm"])
        fleet.start(["vllm", "tiered"])
        for engine in fleet.running.values():
            engine.ask([prompt()], max_tokens=8)
        for number in range(args.rounds):
            for place in range(len(modes)):
                mode = modes[(number + place) % len(modes)]
                engine = fleet.running["vllm" if mode == "vllm" else "tiered"]
                for answer in _ANSWERS:
                    if time.monotonic() > deadline:
                        continue
                    engine.forget_device()
                    if mode == "vllm":
                        asked = engine.ask([prompt()], answer)
                    else:
                        asked = engine.ask_without(mode, prompt(), answer)
                    name = mode if mode == "vllm" else f"without {mode}" if mode else "ours"
                    ms = round(asked.seconds * 1e3, 3)
                    samples.append({"mode": name, "tokens": answer, "ms": ms})
            say(f"round {number} of {args.rounds}")
        hooks: dict[str, float] = {}
        for _ in range(_HOOK_ROUNDS):
            fleet.running["tiered"].forget_device()
            for name, ms in fleet.running["tiered"].time_hooks(prompt(), 1).items():
                hooks[name] = hooks.get(name, 0.0) + ms / _HOOK_ROUNDS
    report = {
        "environment": environment.describe(),
        "prompt_tokens": _TOKENS,
        "engines": fleet.described,
        "derived": derive(samples),
        "hooks_ms": {name: round(ms, 4) for name, ms in hooks.items()},
        "samples": [list(sample.values()) for sample in samples],
    }
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    print(json.dumps({k: report[k] for k in ("derived", "hooks_ms")}, indent=1))


if __name__ == "__main__":
    main()
