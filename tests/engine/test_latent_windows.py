"""DeepSeek-V4's caches: latent KV with windows, compressed KV, an indexer, compressors' states.

vLLM's kernels for it need a GPU, or a CPU with AMX. Here vLLM builds the model and its caches and
computes nothing; `test_windows.py` runs such groups under vLLM's schedulers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.engine import real_engine as real_engine_module
from tests.engine import window_models
from tests.engine.real_engine import RealEngine, real_engine
from vllm_tiered_kv.connector.worker.kv_layout import group_block_bytes, group_runs

pytestmark = pytest.mark.engine

TOKEN = 584  # bytes: 448 fp8 values, 64 bfloat16 values, 8 scales
STATE = 2 * 512 * 4  # bytes of one token in a compressor's state, without overlap


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    model = window_models.write(tmp_path_factory.mktemp("models"), window_models.DEEPSEEK_V4)
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(torch.ops._C, "convert_weight_packed"):  # no weights are read
            patch.setattr(torch.ops._C, "convert_weight_packed", lambda w: w, raising=False)
        patch.setattr(real_engine_module, "has_bfloat16", lambda: True)
        with real_engine(
            model,
            {"cpu_memory": "64MiB"},
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            num_gpu_blocks_override=None,
        ) as running:
            yield running


def test_all_groups_of_deepseek_v4_are_cached(engine: RealEngine) -> None:
    assert engine.half is not None
    # Two groups of plain windows, compressed KV, and states of compressors of 4 and 128 tokens.
    assert [(group.block_size, group.window) for group in engine.half._groups] == [
        (64, 128),
        (64, 128),
        (256, None),
        (4, 8),
        (8, 128),
    ]
    compressed = 2 * 64 * (TOKEN + 128 + 4) + 2 * TOKEN
    states = 2 * 4 * 2 * (STATE + 2 * 128 * 4)
    assert engine.half.block_bytes == (
        2 * 64 * TOKEN,
        2 * 64 * TOKEN,
        compressed,
        states,
        8 * STATE,
    )
    assert engine.half.block_bytes == engine.worker_half.block_bytes
    assert engine.half.stores._manager is engine.scheduler.kv_cache_manager


def test_blocks_of_deepseek_v4_are_the_bytes_of_their_layers(engine: RealEngine) -> None:
    """Layers of several sizes lie side by side in one block, with padding between them."""
    config = engine.runner.kv_cache_config
    caches = dict(engine.runner.compilation_config.static_forward_context)
    views = {
        name: caches[name].kv_cache.unsqueeze(1)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
    rng = np.random.default_rng(1)
    runs, expected = group_runs(views, config), group_block_bytes(config)
    for group_id, group in enumerate(config.kv_cache_groups):
        content = []
        for name in group.layer_names:
            block = views[name][3]
            numbers = rng.integers(0, 256, block.nbytes, np.uint8)
            block.copy_(torch.from_numpy(numbers).view(block.dtype).view(block.shape))
            content.append(numbers.tobytes())
        slot = bytearray(expected[group_id])
        for run in runs[group_id].runs:
            found = ctypes.string_at(run.address + 3 * run.block_stride, run.nbytes)
            slot[run.slot_offset : run.slot_offset + run.nbytes] = found
        assert bytes(slot) == b"".join(content)
