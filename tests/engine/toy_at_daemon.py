"""Helpers for toy engines that use a daemon."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import ask, prompt
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_ranks import RankedToyEngine
from vllm_tiered_kv.core.tiers import Tier

REMOTE = Tier.REMOTE.value
TRANSPORTS = ["tcp", "ipc"]


def address(daemon: DaemonProcess, transport: str) -> str:
    return daemon.ipc if transport == "ipc" else daemon.endpoint


def engine_at(model: Path, remote: str | list[str], ranks: int = 1, **settings: Any) -> ToyEngine:
    extra = {"remote_lookup_timeout": 5, "remote_landing": "64KiB", **settings.pop("extra", {})}
    kind = ToyEngine if ranks == 1 else RankedToyEngine
    # Puts may fill half of the tier. On a busy machine that can be all blocks of a test.
    settings.setdefault("cpu_blocks", 256)
    return kind(model, ranks=ranks, extra_config={"remote": remote, **extra}, **settings)


def prompts(seed: int, count: int, low: int = 30, high: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [prompt(rng, rng.randrange(low, high)) for _ in range(count)]


def whole_blocks(asked: list[list[int]]) -> int:
    """The number of loadable blocks: vLLM always computes the last token of a prompt."""
    return sum((len(ids) - 1) // 4 for ids in asked)


def serve(toy: ToyEngine, asked: list[list[int]], count: int = 5) -> None:
    """Sends prompts one after the other, and checks the answers and that nothing leaks."""
    for ids in asked:
        ask(toy, ids, count)
    toy.assert_at_rest()


def wait_attached(toy: ToyEngine, at: str) -> None:
    """Lets the worker connect to the daemon, and waits until its memory is mapped."""
    toy.run()
    regions = toy.worker.worker_half._remote.regions
    end = time.monotonic() + 30
    while at.startswith("ipc://") and not regions.of(at):
        assert time.monotonic() < end, "the daemon's memory was never attached"
        time.sleep(0.01)
