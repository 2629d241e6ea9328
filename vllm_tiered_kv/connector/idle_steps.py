"""Extra steps for an engine that runs inside the caller's process.

The engine of a server keeps stepping while `has_pending_push_work` is true. With
`VLLM_ENABLE_V1_MULTIPROCESSING=0`, `LLM.generate` returns with the last output and nothing steps
the engine any more. Puts to a daemon would then wait for the next prompt, or be lost when the
process exits. So they are completed before the last output is returned. The CPU tier needs no such
steps: a later lookup waits for stores in flight (`load_planner`).
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from vllm_tiered_kv.connector.same_process import find_worker
from vllm_tiered_kv.connector.scheduler.scheduler_half import SchedulerHalf
from vllm_tiered_kv.connector.worker.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_MAX_DRAIN_S = 5.0
_PAUSE_S = 0.001


def are_needed(vllm_config: VllmConfig) -> bool:
    """Whether the engine steps only while its caller asks for output, with its only worker in this
    process. Reports of several workers can be merged by vLLM only."""
    from vllm import envs

    is_core_process = multiprocessing.current_process().name.startswith("EngineCore")
    has_no_loop = not envs.VLLM_ENABLE_V1_MULTIPROCESSING and not is_core_process
    return has_no_loop and vllm_config.parallel_config.world_size == 1


class IdleSteps:
    """Steps scheduler half and worker half without vLLM. The connector calls it in the scheduler's
    thread, after the output of a step was processed."""

    def __init__(self, half: SchedulerHalf, vllm_config: VllmConfig) -> None:
        self._half = half
        self._vllm_config = vllm_config

    def run(self) -> None:
        """If no request is left, steps until all stores and puts are done, for a few seconds at
        most. The rest follows with the next request."""
        half = self._half
        if not half.has_only_push_work():
            return
        worker = find_worker(self._vllm_config)
        if worker is None or worker.is_in_step:
            return  # the worker is in another process, or in the middle of a step
        end = time.monotonic() + _MAX_DRAIN_S
        while half.has_pending_push_work():
            if time.monotonic() > end:
                logger.warning(
                    "puts to a daemon are not finished after %.0f s; they continue with the next "
                    "request and are lost if the process exits before",
                    _MAX_DRAIN_S,
                )
                return
            self._step(worker)
            time.sleep(_PAUSE_S)

    def _step(self, worker: WorkerHalf) -> None:
        # With asynchronous scheduling, reports of an earlier step may be in an output that vLLM
        # processes only when it steps again.
        for earlier in worker.last_reports:
            self._half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=earlier))
        metadata = self._half.build_connector_meta(SchedulerOutput.make_empty())
        worker.before_forward(metadata)
        worker.start_loads(metadata)
        worker.after_forward()
        worker.results()
        reports = worker.worker_metadata()
        self._half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))
