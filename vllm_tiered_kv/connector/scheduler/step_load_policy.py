"""Decides whether a load is a step load or an asynchronous load.

An asynchronous load delays its request by some steps: it is reported with the output of a later
step, and asynchronous scheduling has already planned the step after that one. A step load causes no
such delay, and layers run as their blocks arrive. But all requests of the step wait for it. So:

- If nothing else runs, requests that arrive together are loaded in the same step, up to a limit,
  because the first one waits for the last.
- If others run, a step loads so few bytes that it takes little longer than its forward.
- While asynchronous loads are in flight there are no step loads, which would queue behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.config import StepLoads

_MAX_BYTES_PER_STEP = 6 << 30  # 0.12 s on PCIe 5
_MAX_BYTES_WITH_OTHERS = 1 << 30
"""20 ms on PCIe 5. A forward of a few hundred tokens takes 15 ms."""


class StepLoadPolicy:
    """Limits the bytes that a step loads. The load planner asks it and reports to it, in the
    scheduler's thread."""

    def __init__(self, setting: StepLoads, groups: Sequence[Group], ledger: TransferLedger) -> None:
        # After a failed step load vLLM cannot be told which group the invalid blocks belong to. And
        # it continues from the first of them, where a window has no blocks before it.
        self._possible = setting is StepLoads.AUTO and len(groups) == 1 and groups[0].window is None
        self._ledger = ledger
        self._running: set[str] = set()
        self._planned_bytes = 0
        self._is_forbidden = self._is_next_forbidden = False

    def allows(self, request_id: str, nbytes: int) -> bool:
        """Whether this request may have a step load of `nbytes`. No side effects: vLLM may ask
        again, or not admit the request."""
        if not self._possible or self._is_forbidden or self._ledger.has_open_loads:
            return False
        if not self._running <= {request_id}:
            return self._planned_bytes + nbytes <= _MAX_BYTES_WITH_OTHERS
        return not self._planned_bytes or self._planned_bytes + nbytes <= _MAX_BYTES_PER_STEP

    @property
    def has_planned(self) -> bool:
        """Whether the step that is being planned waits for a load."""
        return bool(self._planned_bytes)

    def forbid_in_next_step(self) -> None:
        """Forbids step loads in the next step, because a request needs an asynchronous load beside
        a step that has none."""
        self._is_next_forbidden = True

    def admitted(self, nbytes: int) -> None:
        self._planned_bytes += nbytes

    def step_planned(self, request_ids: Iterable[str]) -> None:
        self._running = set(request_ids)
        self._planned_bytes = 0
        self._is_forbidden, self._is_next_forbidden = self._is_next_forbidden, False

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)
