"""Toy engines over a daemon: opened at its address, attached to its memory, and served."""

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
    # Half of the tier may wait to be sent: on a busy machine, all that a test asks for.
    settings.setdefault("cpu_blocks", 256)
    return kind(model, ranks=ranks, extra_config={"remote": remote, **extra}, **settings)


def prompts(seed: int, count: int, low: int = 30, high: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    return [prompt(rng, rng.randrange(low, high)) for _ in range(count)]


def whole_blocks(asked: list[list[int]]) -> int:
    """As many as can be loaded: vLLM always computes the last token of a prompt."""
    return sum((len(ids) - 1) // 4 for ids in asked)


def serve(toy: ToyEngine, asked: list[list[int]], count: int = 5) -> None:
    """One after the other, all right, nothing left behind."""
    for ids in asked:
        ask(toy, ids, count)
    toy.assert_at_rest()


def wait_attached(toy: ToyEngine, at: str) -> None:
    """Lets the worker open its way to the daemon, and waits for shared memory."""
    toy.run()
    regions = toy.worker.worker_half._remote._regions
    end = time.monotonic() + 30
    while at.startswith("ipc://") and not regions.covers(at):
        assert time.monotonic() < end, "the daemon's memory was never attached"
        time.sleep(0.01)
