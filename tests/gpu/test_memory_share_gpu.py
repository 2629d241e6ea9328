"""A GPU of which vLLM takes 0.9: the engine starts, captures its CUDA graphs, stores and loads.

Alone on the device: whatever else lives there would have to make room.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.real_engine import real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import settle  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.device.staging import allocate_up_to  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402
from vllm_tiered_kv.native import cuda  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCK = 16
COUNT = 16


def test_device_memory_that_cannot_be_had_is_asked_for_by_halves() -> None:
    free, total = torch.cuda.mem_get_info()
    buffer = allocate_up_to(lambda nbytes: cuda.DeviceBuffer(0, nbytes), total, 1 << 20)
    assert total // 4 <= buffer.nbytes < free
    del buffer
    assert torch.cuda.mem_get_info()[0] == free


def test_engine_with_nine_tenths_of_the_device(tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    rng = random.Random(9)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(8_000)] for _ in range(6)]
    with real_engine(
        write_model(tmp_path / "qwen2-7b", **QWEN2_7B),
        {"cpu_memory": "8GiB", "block_layout": "any"},
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=None,
        gpu_memory_utilization=0.9,
        enforce_eager=False,
    ) as engine:
        blocks = engine.scheduler.kv_cache_config.num_blocks
        assert blocks * engine.half.block_bytes[0] > 0.6 * total
        engine.ask(prompts, COUNT)
        device = engine.ask(prompts, COUNT)
        settle(engine)
        engine.drop_gpu_cache()
        tier = engine.ask(prompts, COUNT)
        whole = (len(prompts[0]) - 1) // BLOCK
        assert [answer.cached for answer in tier] == [whole * BLOCK] * len(prompts)
        assert engine.total(names.LOADED_BLOCKS) == whole * len(prompts)
        assert [answer.tokens for answer in tier] == [answer.tokens for answer in device]
        assert engine.total(names.LOAD_FAILURES) == 0
        settle(engine)
        engine.assert_at_rest()
