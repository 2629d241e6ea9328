"""Two ranks that divide a context, with vLLM's kernels for a GPU: both run on one device.

Each answer from the CPU tier must equal that of vLLM's own hit, and bytes spoiled on one rank must
change it. Engines are processes of their own, over the host's memory (`one_device_worker.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.made_models import write_weights  # noqa: E402
from tests.engine.parallel_run import BLOCK  # noqa: E402
from tests.engine.test_parallel import LENGTHS, check_hits, run_ranks  # noqa: E402
from tests.gpu.engine_on_gpu import memory  # noqa: E402
from tests.gpu.test_models_gpu import MLA, QWEN2  # noqa: E402
from tests.models import write_config  # noqa: E402

pytestmark = pytest.mark.gpu

MQA = {**QWEN2, "num_key_value_heads": 1}
"""vLLM divides the tokens of a KV head among the ranks that hold it."""

RANKS: dict[str, Any] = {
    "worker_cls": "tests.gpu.one_device_worker.OneDeviceWorker",
    # Named, because vLLM chooses it only where it sees a GPU for each rank.
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
    # A rank that fails leaves the other one waiting.
    "distributed_timeout_seconds": 60,
    "cpu_distributed_timeout_seconds": 60,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 512,
    **memory(1),
}


def check_ranks(folder: Path, config: dict[str, Any], span: int, **settings: Any) -> None:
    """Compares hits in the tier with those of vLLM. `span`: tokens in a block of the engine."""
    model = write_weights(write_config(folder / "model", config))
    report = run_ranks(model, {**RANKS, **settings}, GLOO_SOCKET_IFNAME="lo")
    print(f"attention of each rank: {report['attention']}")
    assert [answer["cached"] for answer in report["cold"]] == [0] * len(LENGTHS)
    check_hits(report, span)
    counters = report["counters"]
    cached = sum((length - 1) // span * span for length in LENGTHS)
    # The last round hits as well: nothing told the index that the bytes were changed.
    assert counters["vllm:tiered_kv_hit_tokens"] == 2 * cached
    assert counters["vllm:tiered_kv_loaded_blocks"] == 2 * cached // span


# MLA takes other kernels for a prompt where a rank keeps several tokens in a row: each rank then
# gathers the KV of the context.
@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("config", [MQA, MLA], ids=["mqa", "mla"])
def test_decode_context_parallelism(
    tmp_path: Path, config: dict[str, Any], interleave: int
) -> None:
    check_ranks(
        tmp_path,
        config,
        2 * BLOCK,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=interleave,
    )


def test_prefill_context_parallelism(tmp_path: Path) -> None:
    """vLLM runs it with MLA alone; both ranks hold the same KV, and share the CPU tier."""
    check_ranks(tmp_path, MLA, BLOCK, prefill_context_parallel_size=2)
