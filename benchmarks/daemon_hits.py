"""TTFT of a prompt found on the device, in the CPU tier, and in a daemon on the same host.

    python -m benchmarks.daemon_hits --out result.json              7B shape on a GPU
    python -m benchmarks.daemon_hits --tiny --out result.json       the same code on a laptop

One engine for each way to the daemon (`ipc`: its memory is mapped, `tcp`: loopback). Within an
engine the three kinds of hits take turns on prompts of equal length: half of the prompts lie in the
CPU tier and the daemon, the other half in the daemon alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import describe_environment, save
from tests.daemon.daemon_process import DaemonProcess
from tests.models import QWEN2_7B, write_model

_MARK = "RESULT "


def run_children(ways: Sequence[str], report: dict[str, Any], out: Path | None) -> None:
    """Each way in a process of its own, with this one's arguments."""
    report["ways"] = {}
    for way in ways:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.daemon_hits", "--child", way, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        result = json.loads(lines[-1][len(_MARK) :]) if lines else {"failed": done.returncode}
        report["ways"][way] = result
        print(way, json.dumps(result), flush=True)
        save(out, report)


def milliseconds(values: list[float]) -> dict[str, float]:
    """Median and range of times in seconds."""
    return {
        "median": round(statistics.median(values) * 1e3, 3),
        "min": round(min(values) * 1e3, 3),
        "max": round(max(values) * 1e3, 3),
    }


WAYS = ("ipc", "tcp")


def measure(way: str, tiny: bool, repetitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        memory = "256MiB" if tiny else "12GiB"
        with DaemonProcess(Path(folder), "--memory", memory) as daemon:
            address = daemon.ipc if way == "ipc" else daemon.endpoint
            return _measure(way, address, tiny, repetitions)


def _measure(way: str, address: str, tiny: bool, repetitions: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    length, prompts, memory = (900, 3, 256 << 20) if tiny else (10_240, 4, 12 << 30)
    vocab = 1000 if tiny else 150_000
    folder = Path(tempfile.mkdtemp()) / "model"
    write_model(folder, **({} if tiny else QWEN2_7B))
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024 if tiny else 16_384,
        gpu_memory_utilization=0.5,
        enforce_eager=tiny,
        seed=0,
        disable_log_stats=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="TieredKVConnector",
            kv_connector_module_path="vllm_tiered_kv.connector.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_memory": memory,
                "remote": address,
                "remote_lookup_timeout": 5,
                "load_policy": "always",
            },
        ),
    )
    core = llm.llm_engine.engine_core.engine_core
    half = core.scheduler.connector.scheduler_half
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = random.Random(0)

    def prompt() -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(500, vocab) for _ in range(length)]}

    def ask(one: dict[str, list[int]]) -> float:
        begin = time.perf_counter()
        llm.generate([one], params, use_tqdm=False)
        return time.perf_counter() - begin

    def rest() -> None:
        for _ in range(20_000):  # as the engine's own loop does while stores are under way
            if not core.scheduler.has_requests():
                return
            core.step_fn()
            time.sleep(0.001)
        raise RuntimeError("the engine never came to rest")

    def drop() -> None:
        rest()
        assert llm.reset_prefix_cache()

    ask(prompt())
    regions = get_kv_transfer_group().worker_half._remote.regions
    while way == "ipc" and not regions.of(address):
        time.sleep(0.05)
    far, near = [prompt() for _ in range(prompts)], [prompt() for _ in range(prompts)]
    cold = []
    for one in far:
        cold.append(ask(one))
        drop()
    half.index.clear()
    for one in near:
        cold.append(ask(one))
        drop()
    hits: dict[str, list[float]] = {"device": [], "cpu": [], "daemon": []}
    for _ in range(repetitions):
        for here, there in zip(near, far, strict=True):
            for kind, one in (("cpu", here), ("daemon", there)):
                if kind == "daemon" and way == "tcp":
                    # What came over the network is kept: out of the CPU tier again with it.
                    _forget(half, one["prompt_token_ids"])
                before = _loaded(half)
                hits[kind].append(ask(one))
                rest()  # a load within the step is reported by a later one
                after = _loaded(half)
                tier = "remote" if kind == "daemon" else "cpu"
                assert after[tier] > before[tier], f"a {kind} hit was none"
                if kind == "cpu":
                    hits["device"].append(ask(one))
                drop()
    return {
        "way": way,
        "prompt_tokens": length,
        "repetitions": len(hits["cpu"]),
        "cold_ms": milliseconds(cold),
        **{f"{kind}_hit_ms": milliseconds(values) for kind, values in hits.items()},
        "daemon_over_cpu": round(
            statistics.median(hits["daemon"]) / statistics.median(hits["cpu"]), 3
        ),
    }


def _forget(half: Any, tokens: list[int]) -> None:
    """Removes a prompt's blocks from the CPU tier."""
    from vllm_tiered_kv.core.key import root_digest
    from vllm_tiered_kv.native.cpu import extend_keys

    maker = half._key_maker
    root = root_digest(maker._namespace, (maker._epoch, None, None))
    size = maker._block_sizes[0]
    keys, _ = extend_keys(root, tokens, 0, len(tokens) // size * size, size, None, b"\0")
    for key in keys:
        half.index.remove(key)


def _loaded(half: Any) -> dict[str, float]:
    from vllm_tiered_kv.metrics import names

    return {tier: half.recorder.total(names.LOADED_BLOCKS, tier) for tier in ("cpu", "remote")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, for a machine without GPU"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="which ways, comma-separated")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.child:
        print(_MARK + json.dumps(measure(args.child, args.tiny, args.repetitions)))
        return
    report: dict[str, Any] = {"environment": describe_environment()}
    run_children(args.ways.split(","), report, args.out)


if __name__ == "__main__":
    main()
