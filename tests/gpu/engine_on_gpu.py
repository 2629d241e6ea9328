"""What engines on a GPU have in common: how much they take of it, and how they come to rest."""

from __future__ import annotations

import time
from typing import Any

from tests.engine.real_engine import RealEngine


def memory(gib: int) -> dict[str, Any]:
    """Settings of an engine with a KV cache of so much, whatever else lives on the device.

    vLLM measures what is free only when it has to find the size by itself; engines that are told
    can run beside each other.
    """
    return {"kv_cache_memory_bytes": gib << 30, "gpu_memory_utilization": 0.05}


def settle(engine: RealEngine) -> None:
    """Lets an idle engine commit its last stores, as the engine's own loop does."""
    deadline = time.monotonic() + 30
    while engine.half.has_pending_push_work() and time.monotonic() < deadline:
        engine.core.step_fn()
        time.sleep(0.001)
    assert not engine.half.has_pending_push_work()
