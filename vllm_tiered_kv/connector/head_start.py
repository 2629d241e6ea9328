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

import threading
import weakref
from typing import TYPE_CHECKING

from vllm_tiered_kv.connector.metadata import TieredKVMetadata
from vllm_tiered_kv.connector.worker_half import WorkerHalf
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# An engine has one configuration, which both halves get. In another process it is another object.
_workers: weakref.WeakKeyDictionary[WorkerHalf, VllmConfig] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # other threads may start engines


def here_is(worker: WorkerHalf, vllm_config: VllmConfig) -> None:
    """Lets a scheduler half of this process find the engine's worker half."""
    with _lock:
        _workers[worker] = vllm_config


def find_worker(vllm_config: VllmConfig) -> WorkerHalf | None:
    """The worker half of the engine with this configuration, if it lives in this process."""
    with _lock:
        mine = [worker for worker, config in _workers.items() if config is vllm_config]
    return mine[0] if len(mine) == 1 else None


class HeadStart:
    def __init__(self, vllm_config: VllmConfig, recorder: Recorder) -> None:
        self._vllm_config = vllm_config
        self._recorder = recorder

    def planned(self, step: TieredKVMetadata, wait_for_stores: int | None) -> None:
        """Another load was planned for this step: all that come before it begin, behind the stores
        up to `wait_for_stores`."""
        waiting = [job for job in step.loads if job.ahead is not None]
        if len(waiting) < 2:
            return
        worker = find_worker(self._vllm_config)
        early = waiting[:-1]
        if worker is None or not worker.start_early(step.stores_before, early, wait_for_stores):
            return
        step.stores_before = []
        begun = {job.ahead for job in early}
        step.loads = [job for job in step.loads if job.ahead not in begun]
        for job in early:
            tier = Tier.CPU if job.transfers else Tier.REMOTE
            self._recorder.add(names.EARLY_LOADS, 1, tier.value)


def is_possible(vllm_config: VllmConfig, steps_zero_blocks: bool) -> bool:
    return (
        vllm_config.parallel_config.world_size == 1
        and vllm_config.speculative_config is None
        and not steps_zero_blocks
    )
