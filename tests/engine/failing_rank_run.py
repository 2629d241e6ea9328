"""Run in a process of its own by test_mla_ranks.py: one of two ranks fails while the engine starts.

Reports what the start ended with. A start that hangs is ended by the test's limit.
"""

from __future__ import annotations

import datetime
import os
import sys

from tests.engine.engine_apart import open_engine, tell
from tests.engine.replicated_run import BLOCK


def plant(where: str) -> None:
    """In a worker."""
    import vllm.v1.worker.gpu_model_runner as runner

    from vllm_tiered_kv.connector import assembly

    if where == "allocation":
        allocate = runner.GPUModelRunner.initialize_kv_cache_tensors

        def fail(self, *args, **kwargs):
            if self.vllm_config.parallel_config.rank == 1:
                raise MemoryError("planted")
            return allocate(self, *args, **kwargs)

        runner.GPUModelRunner.initialize_kv_cache_tensors = fail
    else:
        share = assembly._share_among_replicas
        assembly._RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=5)

        def stay_away(nbytes, holding, parallel):
            if holding.replica == (0 if where == "meeting of the first" else 1):
                raise MemoryError("planted")
            return share(nbytes, holding, parallel)

        assembly._share_among_replicas = stay_away


if __name__ == "__mp_main__":  # a worker: it imports what started it
    plant(os.environ["FAIL_AT"])


def main(model: str) -> None:
    try:
        open_engine(
            model,
            {"cpu_memory": "64MiB"},
            block_size=BLOCK,
            tensor_parallel_size=2,
            enforce_eager=True,
            attention_config={"backend": "CPU_MLA"},
        )
    except BaseException as error:
        tell({"error": repr(error)})


if __name__ == "__main__":
    main(sys.argv[1])
