"""Run in a process of its own by test_prefill_context.py: four ranks agree on memory to share."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)

from tests.engine.engine_apart import tell
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.identity.shard import holding_of, ranks_of_stage, replicas_of

PARALLEL: Any = SimpleNamespace(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=1,
    pipeline_parallel_size=1,
)
RANKS = 4


def run_rank(rank: int, folder: str, reports: Any) -> None:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(RANKS, rank, f"file://{folder}/meeting", rank, "gloo")
        initialize_model_parallel(2, 1, 2, backend="gloo")
    kv_cache: Any = SimpleNamespace(kv_tp_replicas=2)
    holding = holding_of(rank, ranks_of_stage(PARALLEL), replicas_of(kv_cache, PARALLEL))
    gathered: list[object] = []
    share = assembly.share_memory

    def watched(nbytes: int, replicas: Any) -> int | None:
        gathered.extend(replicas.gather(replicas.rank))
        fd = share(nbytes, replicas)
        if fd is not None and not rank:
            os.pwrite(fd, b"rank 0", 0)
        replicas.gather(None)
        return fd

    with mock.patch.object(assembly, "share_memory", watched):
        fd = assembly._share_among_replicas(1 << 20, holding, PARALLEL)
    assert fd is not None
    found = os.fstat(fd)
    reports.put((rank, gathered, (found.st_dev, found.st_ino), os.pread(fd, 6, 0).decode()))


def main() -> None:
    processes = multiprocessing.get_context("fork")
    reports = processes.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(target=run_rank, args=(rank, folder, reports))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = sorted(reports.get() for _ in ranks if not reports.empty())
    names = ("ranks", "gathered", "memory", "written")
    tell({name: [report[n] for report in found] for n, name in enumerate(names)})


if __name__ == "__main__":
    main()
