"""vLLM's own OffloadingConnector on a GPU with a daemon below its CPU tier."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.v1.kv_offload.tiering.async_lookup")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

from tests.daemon.daemon_process import DaemonProcess  # noqa: E402
from tests.gpu.engine_on_gpu import memory  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * n + seed) % 1000 + 10 for n in range(2000 + 100 * seed)] for seed in range(3)]
SETTINGS = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "enforce_eager": True,
    "seed": 0,
    **memory(2),
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", "2GiB") as running:
        yield running


def answers(model: Path, server: str) -> list[tuple[list[int], int]]:
    """Tokens and cached tokens of each prompt, from an engine that has just started."""
    extra: dict[str, Any] = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [
            {
                "type": "DaemonTier",
                "module_path": "vllm_tiered_kv.connector.offloading_tier",
                "servers": server,
                "namespace": "dummy weights",
            }
        ],
    }
    connector = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    llm = LLM(model=str(model), kv_transfer_config=connector, **SETTINGS)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    found = []
    for ids in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        found.append((list(output.outputs[0].token_ids), output.num_cached_tokens or 0))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return found


def test_second_engine_loads_the_prompts_of_the_first(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", **{**QWEN2_7B, "num_hidden_layers": 4})
    first = answers(model, daemon.ipc)
    assert [cached for _, cached in first] == [0, 0, 0]
    second = answers(model, daemon.ipc)
    # The last prompt may still be on its way when the first engine ends.
    assert all(cached >= 1900 for _, cached in second[:2])
    assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
