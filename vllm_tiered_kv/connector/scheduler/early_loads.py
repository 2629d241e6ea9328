"""Loads that begin while their step is still being planned.

vLLM gives a step to its worker when all requests of it have been planned and its inputs prepared.
With many long prompts that takes as long as several of their loads. Where scheduler and worker live
in one process, a load begins as soon as another one is planned behind it. The last is left to the
step itself, whose layers run while it arrives.

Blocks just given to a request may be written before the step comes to the worker, because
- vLLM plans in the thread that executes, so all work of earlier steps has been enqueued. The worker
  makes sure of thread and stream;
- it waits for stores that still read these blocks (`wait_for_stores`), those among them that begin
  before the step's forward (`stores_before`);
- vLLM itself does nothing to these blocks before the forward. Where it clears new blocks, or a
  draft model or another connector writes to them, there is no head start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_tiered_kv.connector.metadata import TieredKVMetadata
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import LoadJob, StoreJob
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EarlyLoader(Protocol):
    """The worker half, as far as this module knows it."""

    def start_early(
        self,
        stores: Sequence[StoreJob],
        loads: Sequence[LoadJob],
        wait_for_stores: int | None,
    ) -> bool: ...


class EarlyLoads:
    """Starts planned loads before their step is complete. Called by the scheduler half."""

    def __init__(self, find_worker: Callable[[], EarlyLoader | None], recorder: Recorder) -> None:
        self._find_worker = find_worker
        self._recorder = recorder

    def planned(self, step: TieredKVMetadata, wait_for_stores: int | None) -> None:
        """Another load was planned for this step: all that come before it begin, behind the stores
        up to `wait_for_stores`."""
        waiting = [job for job in step.loads if job.step_load is not None]
        if len(waiting) < 2:
            return
        worker = self._find_worker()
        early = waiting[:-1]
        if worker is None or not worker.start_early(step.stores_before, early, wait_for_stores):
            return
        step.stores_before = []
        begun = {job.step_load for job in early}
        step.loads = [job for job in step.loads if job.step_load not in begun]
        for job in early:
            tier = Tier.CPU if job.transfers else Tier.REMOTE
            self._recorder.add(names.EARLY_LOADS, 1, tier.value)


def is_possible(vllm_config: VllmConfig, steps_zero_blocks: bool) -> bool:
    return (
        vllm_config.parallel_config.world_size == 1
        and vllm_config.speculative_config is None
        and not steps_zero_blocks
    )
