"""Finds the worker half of an engine whose scheduler lives in the same process.

vLLM runs both in one process if an engine has a single worker. The halves do not refer to each
other. This registry connects them only for what cannot wait for the metadata of a step: early loads
and the steps of an idle engine.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tiered_kv.connector.worker.worker_half import WorkerHalf

# Both halves of an engine get the same configuration object, unless they are in two processes.
_workers: weakref.WeakKeyDictionary[WorkerHalf, VllmConfig] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # other threads may start engines


def register_worker(worker: WorkerHalf, vllm_config: VllmConfig) -> None:
    """Called by the connector when it has built a worker half."""
    with _lock:
        _workers[worker] = vllm_config


def find_worker(vllm_config: VllmConfig) -> WorkerHalf | None:
    """The worker half of the engine with this configuration, if it lives in this process."""
    with _lock:
        found = [worker for worker, config in _workers.items() if config is vllm_config]
    return found[0] if len(found) == 1 else None
