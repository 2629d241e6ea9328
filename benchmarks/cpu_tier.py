"""TTFT of a prompt computed, found on the device, and found in the CPU tier; by mode.

    python -m benchmarks.cpu_tier --out result.json              7B shape on a GPU
    python -m benchmarks.cpu_tier --tiny --out result.json       the same code on a laptop

Modes: `vllm` (no connector), `naive` and `hash_only` (our connector without caching: what vLLM's
hooks and hashing cost), `tiered`, and `offloading` (vLLM's own OffloadingConnector, GPU only). Each
mode runs in a process of its own on the same prompts. Compare within one run only.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import children, environment
from tests.models import QWEN2_7B, write_model

MODES = ("vllm", "naive", "hash_only", "tiered", "offloading")


def transfer_config(mode: str, memory: int) -> dict[str, Any] | None:
    if mode == "vllm":
        return None
    if mode == "offloading":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": memory},
        }
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, "cpu_memory": memory},
    }


def measure(mode: str, tiny: bool) -> dict[str, Any]:
    """One engine, one mode: medians in milliseconds, batches in seconds."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    length, prompts, memory = (900, 4, 256 << 20) if tiny else (10_240, 8, 16 << 30)
    vocab = 1000 if tiny else 150_000
    folder = Path(tempfile.mkdtemp()) / "model"
    write_model(folder, **({} if tiny else QWEN2_7B))
    transfer = transfer_config(mode, memory)
    start = time.perf_counter()
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
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )
    started = time.perf_counter() - start
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = random.Random(0)

    def prompt() -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(500, vocab) for _ in range(length)]}

    def ask(*batch: dict[str, list[int]]) -> float:
        begin = time.perf_counter()
        llm.generate(list(batch), params, use_tqdm=False)
        return time.perf_counter() - begin

    def drop() -> None:
        core = llm.llm_engine.engine_core.engine_core
        for _ in range(2000):  # as the engine's own loop does while stores are under way
            if not core.scheduler.has_requests():
                break
            core.step_fn()
            time.sleep(0.001)
        assert llm.reset_prefix_cache()

    ask(prompt())
    ask(prompt())
    asked = [prompt() for _ in range(prompts)]
    cold, device, tier = [], [], []
    for one in asked:
        cold.append(ask(one))
        ask(one)
        device.append(ask(one))
        drop()
        tier.append(ask(one))
        drop()
    fresh = [prompt() for _ in range(prompts)]
    cold_batch = ask(*fresh)
    drop()
    tier_batch = ask(*fresh)

    return {
        "mode": mode,
        "prompt_tokens": length,
        "engine_start_s": round(started, 2),
        "cold_ms": children.milliseconds(cold),
        "device_hit_ms": children.milliseconds(device),
        "tier_hit_ms": children.milliseconds(tier),
        "cold_batch_s": round(cold_batch, 4),
        "tier_batch_s": round(tier_batch, 4),
    }


def measure_pinning(nbytes: int) -> dict[str, float]:
    """How long an arena holds up the start, and how long pinning it takes altogether."""
    from vllm_tiered_kv.device.arena import Arena
    from vllm_tiered_kv.native import cuda

    cuda.Event(0)  # the context exists by the time an engine opens its arena
    start = time.perf_counter()
    arena = Arena(nbytes, cuda.host_register, cuda.host_unregister)
    opened = time.perf_counter() - start
    while arena.ready_bytes < nbytes:
        time.sleep(0.01)
    pinned = time.perf_counter() - start
    arena.close()
    return {
        "gib": nbytes / 2**30,
        "start_held_up_s": round(opened, 3),
        "pinned_s": round(pinned, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, for a machine without GPU"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="which modes, comma-separated")
    parser.add_argument("--pin-gib", type=int, default=0, help="also time pinning so many GiB")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.child:
        result = (
            measure_pinning(args.pin_gib << 30)
            if args.child == "pinning"
            else measure(args.child, args.tiny)
        )
        children.tell(result)
        return

    modes = [m for m in args.modes.split(",") if not (args.tiny and m == "offloading")]
    asked = [*modes, *(["pinning"] if args.pin_gib else [])]
    report: dict[str, Any] = {"environment": environment.describe(), "asked": asked}
    children.run("benchmarks.cpu_tier", asked, report, "modes", args.out)


if __name__ == "__main__":
    main()
