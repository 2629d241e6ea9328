"""Starts step loads while their step is still being planned.

vLLM passes a step to its worker only after it has planned all requests and prepared the inputs.
With many long prompts this takes as long as several loads. If scheduler and worker run in one
process, a load starts as soon as another load is planned after it. The last load starts with the
step itself, because the layers of the step run while its blocks arrive.

It is safe to write the newly allocated blocks before the step reaches the worker:
- vLLM plans in the thread that executes, so all work of earlier steps is already enqueued. The
  worker checks thread and stream.
- The worker waits for stores that still read these blocks (`wait_for_stores`), including the
  stores that start before the step's forward (`stores_before`).
- vLLM does not touch these blocks before the forward. Early loads are off if vLLM zeroes new
  blocks, or if a draft model or another connector may write to them.
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
    """The part of the worker half that this module calls."""

    def start_early(
        self,
        stores: Sequence[StoreJob],
        loads: Sequence[LoadJob],
        wait_for_stores: int | None,
    ) -> bool: ...


class EarlyLoads:
    """Starts planned loads before their step is complete. The scheduler half calls it, in the
    scheduler's thread."""

    def __init__(self, find_worker: Callable[[], EarlyLoader | None], recorder: Recorder) -> None:
        self._find_worker = find_worker
        self._recorder = recorder

    def planned(self, step: TieredKVMetadata, wait_for_stores: int | None) -> None:
        """Called after each load that is planned for `step`. Starts all loads before the newest
        one, after the stores up to `wait_for_stores`."""
        not_started = [job for job in step.loads if job.step_load is not None]
        if len(not_started) < 2:
            return
        worker = self._find_worker()
        early = not_started[:-1]
        if worker is None or not worker.start_early(step.stores_before, early, wait_for_stores):
            return
        step.stores_before = []
        started = {job.step_load for job in early}
        step.loads = [job for job in step.loads if job.step_load not in started]
        for job in early:
            tier = Tier.CPU if job.transfers else Tier.REMOTE
            self._recorder.add(names.EARLY_LOADS, 1, tier.value)


def is_possible(vllm_config: VllmConfig, steps_zero_blocks: bool) -> bool:
    return (
        vllm_config.parallel_config.world_size == 1
        and vllm_config.speculative_config is None
        and not steps_zero_blocks
    )
