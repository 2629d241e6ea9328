"""P15 on a GPU, 7B shape: 16 identical prompts of 10,240 tokens are computed once.

In one engine whose prompts take a part of each step, and whose prompts load half of what they share
beside the steps; each with and without the option.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from vllm import SamplingParams  # noqa: E402

from tests.engine.real_engine import RealEngine, real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

K = 16
LENGTH = 10_240
BLOCK = 16


@pytest.mark.parametrize("case", ["part_of_each_step", "half_is_loaded"])
def test_identical_prompts_are_computed_once(tmp_path: Path, case: str) -> None:
    rng = random.Random(15)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(LENGTH)] for _ in range(3)]
    is_loaded = case == "half_is_loaded"
    with real_engine(
        write_model(tmp_path / "qwen2-7b", **QWEN2_7B),
        {"cpu_memory": "4GiB", "load_policy": "always", "step_loads": "never"},
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        long_prefill_token_threshold=0 if is_loaded else 2048,
        num_gpu_blocks_override=None,
        **memory(12),
        enforce_eager=False,
    ) as engine:
        engine.ask([prompts[0]], 8)  # the first prompt of an engine is slow
        computed, seconds, tokens = {}, {}, {}
        for is_on in (False, True):
            settle(engine)
            assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
            if is_loaded:
                engine.ask([prompts[1][: LENGTH // 2 + 1]], 1)
                settle(engine)
                engine.drop_gpu_cache()
            computed[is_on], seconds[is_on], tokens[is_on] = _ask(engine, prompts[1], is_on)
        once = LENGTH // 2 if is_loaded else LENGTH
        assert computed[True] <= once + K * BLOCK
        assert computed[False] > 2 * once
        assert engine.total(names.SHARED_PREFIX_WAITS, "served") >= K - 2
        assert len(set(tokens[True])) == 1
        print(f"\n{case}: {computed} tokens computed in {seconds} s")
        settle(engine)
        engine.assert_at_rest()


def _ask(
    engine: RealEngine, prompt: list[int], is_on: bool
) -> tuple[int, float, list[tuple[int, ...]]]:
    """Tokens that were computed, seconds, and the answers."""
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"tiered_kv": {"compute_once": is_on}}},
    )
    begin = time.perf_counter()
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for _ in range(K)], params, use_tqdm=False
    )
    seconds = round(time.perf_counter() - begin, 3)
    computed = K * LENGTH - sum(output.num_cached_tokens for output in outputs)
    return computed, seconds, [tuple(output.outputs[0].token_ids) for output in outputs]
