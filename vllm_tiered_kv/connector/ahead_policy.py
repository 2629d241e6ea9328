"""Whether the step that computes a request also waits for its load.

Waiting saves the request a step, and its layers run as their blocks arrive. But a step is shared:
requests that run would wait too, and so would requests loaded after it. So it is done while nothing
else runs or loads. Requests that come together are loaded together: a step for each would take
longer than its load does. The first of them waits for the last, so there is a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.config import StepLoads

_BYTES_PER_STEP = 6 << 30  # 0.12 s on PCIe 5


class AheadPolicy:
    def __init__(self, setting: StepLoads, groups: Sequence[Group], ledger: TransferLedger) -> None:
        # vLLM cannot be told which blocks of which group a step did not get. And it would go on
        # from the first of them, where a window has no blocks before it.
        self._possible = setting is StepLoads.AUTO and len(groups) == 1 and groups[0].window is None
        self._ledger = ledger
        self._running: set[str] = set()
        self._planned_bytes = 0
        self._gives_way = self._will_give_way = False

    def allows(self, request_id: str, nbytes: int) -> bool:
        """No side effects: vLLM may ask again, or not admit the request after all."""
        return (
            self._possible
            and not self._gives_way
            and self.is_alone(request_id)
            and (not self._planned_bytes or self._planned_bytes + nbytes <= _BYTES_PER_STEP)
        )

    def is_alone(self, request_id: str) -> bool:
        """Whether no other request ran in the last step, or is being loaded beside the steps."""
        return not self._ledger.has_open_loads and self._running <= {request_id}

    @property
    def has_planned(self) -> bool:
        """Whether the step that is being planned waits for a load."""
        return bool(self._planned_bytes)

    def give_way(self) -> None:
        """A request must be loaded beside a step that waits for nothing: the next one does not."""
        self._will_give_way = True

    def admitted(self, nbytes: int) -> None:
        self._planned_bytes += nbytes

    def step_planned(self, request_ids: Iterable[str]) -> None:
        self._running = set(request_ids)
        self._planned_bytes = 0
        self._gives_way, self._will_give_way = self._will_give_way, False

    def finished(self, request_id: str) -> None:
        self._running.discard(request_id)
