"""Steps that an engine inside the caller's process does not take by itself.

The engine of a server goes on stepping while `has_pending_push_work`. With
`VLLM_ENABLE_V1_MULTIPROCESSING=0`, `LLM.generate` returns with the last output and nobody steps any
more: what is on its way to a daemon would wait for the next prompt, or be lost with the process. So
it is sent before the last output is returned. The CPU tier needs no such steps: a later lookup
waits for stores that are under way (`load_planner`).
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
    """Whether the engine in this process steps only while its caller asks for output, and has its
    only worker here too: what several report is put together by vLLM alone."""
    from vllm import envs

    is_core_process = multiprocessing.current_process().name.startswith("EngineCore")
    has_no_loop = not envs.VLLM_ENABLE_V1_MULTIPROCESSING and not is_core_process
    return has_no_loop and vllm_config.parallel_config.world_size == 1


class IdleSteps:
    """Called by the connector when the output of a step has been processed."""

    def __init__(self, half: SchedulerHalf, vllm_config: VllmConfig) -> None:
        self._half = half
        self._vllm_config = vllm_config

    def run(self) -> None:
        """With no request left, steps until everything is stored and sent, for a few seconds at
        most; the rest follows with the next request."""
        half = self._half
        if half.has_requests or half.ledger.has_open_loads or not half.has_pending_push_work():
            return
        worker = find_worker(self._vllm_config)
        if worker is None or worker.is_in_step:
            return  # it lives in another process, or an idle step would break into another one
        end = time.monotonic() + _MAX_DRAIN_S
        while half.has_pending_push_work():
            if time.monotonic() > end:
                logger.warning(
                    "blocks are still on their way to a daemon after %.0f s; they go on with the "
                    "next request",
                    _MAX_DRAIN_S,
                )
                return
            self._step(worker)
            time.sleep(_PAUSE_S)

    def _step(self, worker: WorkerHalf) -> None:
        # With asynchronous scheduling an earlier step's reports may lie in an output that vLLM
        # looks at only when it steps again.
        for earlier in worker.last_told:
            self._half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=earlier))
        metadata = self._half.build_connector_meta(SchedulerOutput.make_empty())
        worker.before_forward(metadata)
        worker.start_loads(metadata)
        worker.after_forward()
        worker.results()
        told = worker.worker_metadata()
        self._half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
