"""Joins the parts of a load: it has ended when its CPU part and its remote part have ended."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.tiers import Tier


@dataclass
class _Open:
    parts: int
    failed: Tier | None = None


class LoadTracker:
    """Asynchronous loads of one worker. `WorkerHalf` calls it from the model's thread."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._finished: list[tuple[str, Tier | None]] = []

    def begin(self, request_id: str, parts: int) -> None:
        self._open[request_id] = _Open(parts)

    def end(self, request_id: str, failed: Tier | None) -> None:
        """Ends one part; `failed` is the tier if it failed. If both parts fail, the CPU tier is
        reported, because the scheduler must then stop using its blocks."""
        load = self._open[request_id]
        load.parts -= 1
        if failed is Tier.CPU or load.failed is None:
            load.failed = failed or load.failed
        if not load.parts:
            del self._open[request_id]
            self._finished.append((request_id, load.failed))

    def take_finished(self) -> list[tuple[str, Tier | None]]:
        finished, self._finished = self._finished, []
        return finished
