"""Whether the step that computes a request also waits for its load.

A load beside the steps costs its request some steps more: it is reported with the output of a later
step, and asynchronous scheduling has planned the one after that by then. A load within the step
costs none, and its layers run as their blocks arrive. But a step is shared. While nothing else
runs, requests that come together are loaded together, up to a limit, as the first of them waits for
the last. While others run, a step waits for so few bytes that it takes little longer than its
forward. Nothing is loaded so while loads beside the steps are under way: it would wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.config import StepLoads

_MAX_BYTES_PER_STEP = 6 << 30  # 0.12 s on PCIe 5
_MAX_BYTES_WITH_OTHERS = 1 << 30
"""20 ms on PCIe 5. A forward of a few hundred tokens takes 15 of them."""


class StepLoadPolicy:
    def __init__(self, setting: StepLoads, groups: Sequence[Group], ledger: TransferLedger) -> None:
        # vLLM cannot be told which blocks of which group a step did not get. And it would go on
        # from the first of them, where a window has no blocks before it.
        self._possible = setting is StepLoads.AUTO and len(groups) == 1 and groups[0].window is None
        self._ledger = ledger
        self._running: set[str] = set()
        self._planned_bytes = 0
        self._is_reserved = self._is_next_reserved = False

    def allows(self, request_id: str, nbytes: int) -> bool:
        """No side effects: vLLM may ask again, or not admit the request after all."""
        if not self._possible or self._is_reserved or self._ledger.has_open_loads:
            return False
        if not self._running <= {request_id}:
            return self._planned_bytes + nbytes <= _MAX_BYTES_WITH_OTHERS
        return not self._planned_bytes or self._planned_bytes + nbytes <= _MAX_BYTES_PER_STEP

    @property
    def has_planned(self) -> bool:
        """Whether the step that is being planned waits for a load."""
        return bool(self._planned_bytes)

    def reserve_next_step(self) -> None:
        """A request must be loaded beside a step that waits for nothing: the next one does not."""
        self._is_next_reserved = True

    def admitted(self, nbytes: int) -> None:
        self._planned_bytes += nbytes

    def step_planned(self, request_ids: Iterable[str]) -> None:
        self._running = set(request_ids)
        self._planned_bytes = 0
        self._is_reserved, self._is_next_reserved = self._is_next_reserved, False

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)
