"""What engines on a GPU have in common: how much they take of it, and how they come to rest."""

from __future__ import annotations

import time
from typing import Any

from tests.engine.real_engine import RealEngine


def memory(gib: int) -> dict[str, Any]:
    """Settings of an engine with a KV cache of this size.

    vLLM measures free memory only if it has to choose the size itself, so several engines with a
    given size can share the device.
    """
    return {"kv_cache_memory_bytes": gib << 30, "gpu_memory_utilization": 0.05}


def settle(engine: RealEngine) -> None:
    """Lets an idle engine commit its last stores, as the engine's own loop does, and take the
    output of the last step, which frees the blocks of finished requests."""

    def is_busy() -> bool:
        return engine.half.has_pending_push_work() or bool(engine.scheduler.deferred_frees)

    deadline = time.monotonic() + 30
    while is_busy() and time.monotonic() < deadline:
        engine.core.step_fn()
        time.sleep(0.001)
    assert not is_busy()
