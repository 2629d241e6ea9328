"""`make soak`: the toy engine for one half of the time, a real one for the other."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import tempfile
import time
from pathlib import Path

from tests.models import write_model

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # oneDNN keeps a primitive for each shape it has seen: vLLM alone grows by that for hours.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4",
    "TIERED_KV_LOAD_POLICY": "always",  # whatever this machine is faster at
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=None, help="a random one if not given")
    parser.add_argument("--episode", type=int, default=None, help="only this one of the toy's")
    parser.add_argument("--only", choices=["toy", "engine"], default=None)
    options = parser.parse_args()
    if options.episode is not None and options.only == "engine":
        parser.error("episodes are those of the toy engine")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"soak of {options.seconds:.0f} s with seed {seed}", flush=True)
    share = options.seconds / (1 if options.only or options.episode is not None else 2)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        model = write_model(Path(folder) / "model")
        if options.only != "engine":
            soak_toy(model, Path(folder), seed, share, options.episode)
        if options.only != "toy" and options.episode is None:
            soak_engine(model, Path(folder), seed, share)


def soak_toy(model: Path, folder: Path, seed: int, seconds: float, episode: int | None) -> None:
    from tests.soak.toy_soak import ToySoak

    logging.getLogger("vllm_tiered_kv").setLevel(logging.CRITICAL)  # faults are what is wanted
    soak = ToySoak(model, folder, seed)
    begin = time.monotonic()
    try:
        if episode is None:
            soak.run(seconds)
        else:
            soak.episode(episode)
    finally:
        soak.close()
        print(f"toy engine, {time.monotonic() - begin:.0f} s: {dict(soak.counts)}", flush=True)


def soak_engine(model: Path, folder: Path, seed: int, seconds: float) -> None:
    from tests.soak.engine_soak import EngineSoak

    logging.getLogger("vllm_tiered_kv").setLevel(logging.CRITICAL)
    soak = EngineSoak(model, folder, seed)
    begin = time.monotonic()
    try:
        soak.run(seconds)
    finally:
        print(f"real engine, {time.monotonic() - begin:.0f} s: {dict(soak.counts)}", flush=True)
        sizes = [print_.rss_bytes >> 20 for print_ in soak.footprints]
        print(f"MiB of memory when calm: {sizes}", flush=True)


if __name__ == "__main__":
    main()
