"""Identical cold prompts at once, with and without `compute_once`: tokens computed, and time.

    python -m benchmarks.compute_once --out result.json                7B shape on a GPU
    python -m benchmarks.compute_once --tiny --out result.json         the same code on a laptop

Cases: `one_engine` (all prompts at one engine), `engines` (the same number, an equal part at each
of several engines with one daemon), and `nothing_shared` (distinct prompts at one engine, to see
what the option costs). Requests switch the option on by themselves, so the same engines run with
and without it, in turn. Every sample has prompts of its own: no tier holds any of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engine_configs import Scale
from benchmarks.engine_process import EngineGroup, EngineProcess, EngineSpec, say
from benchmarks.result_files import describe_environment, save, spread
from tests.daemon.daemon_process import DaemonProcess
from tests.models import QWEN2_7B

GOAL_COMPUTED = 1.05
"""P15: the work of one prompt. Each request computes its last tokens itself."""
GOAL_UNSHARED = 0.995
CASES = ("one_engine", "engines", "nothing_shared")


def spec(name: str, scale: Scale, remote: str) -> EngineSpec:
    return EngineSpec(
        name=name,
        model=scale.model,
        transfer={
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_memory": scale.tier_bytes,
                "remote": remote,
                # Two busy cores may take long to answer; a GPU machine runs with the default.
                **({} if scale.model else {"remote_lookup_timeout": 5, "load_policy": "always"}),
            },
        },
        options={
            "kv_cache_memory_bytes": scale.device_bytes,
            "max_model_len": scale.prompt_tokens + 64,
            "disable_log_stats": False,
        },
    )


class Prompts:
    """Prompts that were never asked before."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self._rng = random.Random(15)
        self._tokens, self._vocabulary = tokens, vocabulary

    def new(self) -> list[int]:
        return [self._rng.randrange(100, self._vocabulary) for _ in range(self._tokens)]


def sample(
    case: str, engines: list[EngineProcess], prompts: Prompts, count: int, is_on: bool
) -> dict[str, Any]:
    used = engines if case == "engines" else engines[:1]
    if case == "nothing_shared":
        asked = [[prompts.new() for _ in range(count)]]
    else:
        asked = [[prompts.new()] * (count // len(used))] * len(used)
    for engine in used:
        engine.forget_device()
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(used)) as pool:
        answers = list(
            pool.map(
                lambda pair: pair[0].ask(pair[1], 1, {"tiered_kv": {"compute_once": is_on}}),
                zip(used, asked, strict=True),
            )
        )
    seconds = time.perf_counter() - begin
    total = sum(len(prompt) for some in asked for prompt in some)
    cached = sum(sum(answer.cached) for answer in answers)
    firsts = [taken for answer in answers for taken in answer.first_token_s]
    return {
        "case": case,
        "on": is_on,
        "seconds": round(seconds, 4),
        "computed": total - cached,
        "prompt_tokens": len(asked[0][0]),
        "ttft_ms": [round(1000 * taken, 2) for taken in firsts],
        "same_first_token": len({answer.tokens[0][0] for answer in answers}) == 1,
    }


def measure(
    engines: list[EngineProcess], prompts: Prompts, count: int, rounds: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """One after the other, on and off in turn; the first of a round is the second of the next."""
    for number, case in itertools.product(range(rounds), CASES):
        for is_on in (False, True) if number % 2 else (True, False):
            if time.monotonic() > deadline:
                return
            yield {"round": number, **sample(case, engines, prompts, count, is_on)}


def derive(samples: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        by_mode = {
            is_on: [s for s in samples if s["case"] == case and s["on"] is is_on]
            for is_on in (False, True)
        }
        if not all(by_mode.values()):
            continue
        row: dict[str, Any] = {}
        for is_on, some in by_mode.items():
            row["on" if is_on else "off"] = {
                "seconds": spread([s["seconds"] for s in some]),
                "computed_prompts": round(
                    statistics.median(s["computed"] / s["prompt_tokens"] for s in some), 4
                ),
                "last_ttft_ms": statistics.median(max(s["ttft_ms"]) for s in some),
                "median_ttft_ms": statistics.median(statistics.median(s["ttft_ms"]) for s in some),
            }
        pairs = zip(by_mode[False], by_mode[True], strict=False)
        row["speedup"] = round(statistics.median(a["seconds"] / b["seconds"] for a, b in pairs), 4)
        if case == "nothing_shared":
            row["goal"] = f"P15: throughput at least {GOAL_UNSHARED} of that without the option"
            row["reached"] = row["speedup"] >= GOAL_UNSHARED
        else:
            row["goal"] = f"P15: at most {GOAL_COMPUTED} prompts computed"
            row["reached"] = row["on"]["computed_prompts"] <= GOAL_COMPUTED
        found[case] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without GPU")
    parser.add_argument("--tokens", type=int, default=0, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=16, help="at once")
    parser.add_argument("--engines", type=int, default=0, help="at one daemon")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds in all")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    tokens = args.tokens or (960 if args.tiny else 10_240)
    count = args.engines or (2 if args.tiny else 4)
    one = Scale({} if args.tiny else QWEN2_7B, tokens, 1, 0, 0).prompt_bytes
    # Distinct prompts fit into the GPU's cache together.
    device_bytes = (256 << 20) if args.tiny else (args.prompts + 2) * one
    scale = Scale({} if args.tiny else QWEN2_7B, tokens, 1, 8 * one, device_bytes)
    prompts = Prompts(tokens, 900 if args.tiny else 150_000)
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "prompt_tokens": tokens,
        "prompts": args.prompts,
        "engines": count,
    }
    samples: list[dict[str, Any]] = []
    raw: dict[str, Any] = {"samples": samples}
    memory = 4 * args.prompts * one
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
        DaemonProcess(Path(folder), "--memory", str(max(1 << 30, memory))) as daemon,
        EngineGroup(lambda name: spec(name, scale, daemon.ipc), Path(folder)) as group,
    ):
        names = [f"engine{number}" for number in range(count)]
        for number in range(1, count + 1):
            # The first alone: it fills vLLM's compile cache. A small machine takes them singly.
            if number in (1, count) or args.tiny:
                group.start(names[:number])
        raw["engines"] = group.described
        engines = [group.running[name] for name in names if name in group.running]
        if len(engines) < count:
            raise SystemExit("not all engines started; see the log above")
        for engine in engines:
            for _ in range(4):  # measures the prefill rate, from which deadlines follow
                engine.ask([prompts.new()], 1)
        for one_sample in measure(engines, prompts, args.prompts, args.rounds, deadline):
            samples.append(one_sample)
            say(
                f"{one_sample['round']:3} {one_sample['case']:14} "
                f"{'on ' if one_sample['on'] else 'off'} {one_sample['seconds']:8.3f} s "
                f"{one_sample['computed'] / tokens:6.2f} prompts computed"
            )
            save(args.out, {**report, "derived": derive(samples)}, raw)
    report["derived"] = derive(samples)
    save(args.out, report, raw)
    print(json.dumps(report["derived"], indent=1))


if __name__ == "__main__":
    main()
