"""The worker half on real tensors: registration, copies, shutdown."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheLayout, MambaSpec
from vllm.v1.worker.utils import allocate_kv_cache

from tests.engine.delayed_copier import LAYERS
from tests.engine.made_configs import FULL, engine_config, one_group
from tests.engine.toy_engine import ToyEngine
from tests.models import write_model
from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.idle_steps import IdleSteps, are_needed
from vllm_tiered_kv.connector.metadata import TieredKVMetadata
from vllm_tiered_kv.connector.worker.kv_layout import group_runs, require_whole_blocks
from vllm_tiered_kv.connector.worker.worker_half import WorkerHalf, _pinning
from vllm_tiered_kv.core.transfer import GroupTransfer, LoadJob, StoreJob, int64_array
from vllm_tiered_kv.errors import CudaError, UnsupportedError
from vllm_tiered_kv.metrics.names import DropReason

BLOCKS, TOKENS = 64, 4


def caches(seed: int, channels: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, 1, TOKENS, channels)
    return {
        name: torch.randint(-999, 999, shape, dtype=torch.int16, generator=generator)
        for name in LAYERS
    }


@pytest.fixture
def engine(tiny_model: Path) -> ToyEngine:
    return ToyEngine(tiny_model, block_size=TOKENS, gpu_blocks=BLOCKS)


@pytest.fixture
def worker(engine: ToyEngine) -> WorkerHalf:
    worker = engine.worker.worker_half
    worker._copier = None  # the toy's
    yield worker
    worker.shutdown()
    worker.shutdown()


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_recurrent_block_holds_the_states_of_its_layers(tmp_path: Path, layout: str) -> None:
    """Behind each other, as vLLM's layers see them, without the padding between pages."""
    page = FULL.page_size_bytes
    shapes, dtypes = ((3, 8), (4, 16)), (torch.bfloat16, torch.float32)
    state = MambaSpec(block_size=16, shapes=shapes, dtypes=dtypes, page_size_padded=page)
    config = engine_config(write_model(tmp_path))
    config.cache_config.kv_cache_layout = layout
    groups = [KVCacheGroupSpec(["s0", "s1"], state), KVCacheGroupSpec(["a0", "a1"], FULL)]
    cache_config = get_kv_cache_config_from_groups(config, groups, 2 * page * BLOCKS)
    tensors = allocate_kv_cache(cache_config, torch.device("cpu"), KVCacheLayout[layout])
    expected = b""
    for name in ("s0", "s1"):
        layer = SimpleNamespace(get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes)
        MambaBase.bind_kv_cache(layer, tensors[name])
        for part in layer.kv_cache:
            part[5] = torch.randn(part.shape[1:]).to(part.dtype)
            expected += part[5].contiguous().view(torch.uint8).numpy().tobytes()
    runs = group_runs(tensors, cache_config)[0]
    assert runs.block_bytes == len(expected) == 2 * (3 * 8 * 2 + 4 * 16 * 4)
    found = bytearray(len(expected))
    for run in runs.runs:
        content = ctypes.string_at(run.address + 5 * run.block_stride, run.nbytes)
        found[run.slot_offset : run.slot_offset + run.nbytes] = content
    assert found == expected


def pairs(blocks: list[int], slots: list[int]) -> GroupTransfer:
    return GroupTransfer(0, int64_array(blocks), int64_array(slots))


def load(worker: WorkerHalf, transfer: GroupTransfer) -> None:
    metadata = TieredKVMetadata(loads=[LoadJob("r", (transfer,))])
    worker.before_forward(metadata)
    worker.start_loads(metadata)
    worker.after_forward()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        results = worker.results()
        if results.finished_recving:
            assert results.finished_recving == {"r"}
            assert not results.failed_recving
            return
        time.sleep(0.001)
    raise AssertionError("the load never ended")


def test_stored_blocks_survive_a_new_registration(engine: ToyEngine, worker: WorkerHalf) -> None:
    """The scheduler's index still speaks of the same memory."""
    before = caches(1)
    worker.register_kv_caches(before, engine.kv_cache_config)
    metadata = TieredKVMetadata(stores_after=[StoreJob(7, pairs([3, 5], [0, 9]))])
    worker.before_forward(metadata)
    worker.after_forward()
    worker.results()
    told = worker.worker_metadata()
    assert told is not None
    assert [report.stored for report in told.stores[7]] == [2]
    assert told.usable_bytes == {0: worker.arena.nbytes}
    assert worker.worker_metadata() is None  # nothing new

    after = caches(2)
    worker.register_kv_caches(after, engine.kv_cache_config)
    load(worker, pairs([11, 12], [9, 0]))
    for name in LAYERS:
        assert torch.equal(after[name][11], before[name][5])
        assert torch.equal(after[name][12], before[name][3])
        assert torch.equal(after[name][13], caches(2)[name][13])


def test_running_transfers_end_with_a_new_registration(engine: ToyEngine) -> None:
    """Else the scheduler would wait for it, and an idle engine step, for ever."""
    worker = engine.worker.worker_half
    worker._copier.max_delay = 1 << 30  # polls
    metadata = TieredKVMetadata(
        stores_after=[StoreJob(7, pairs([3, 5], [0, 9]))],
        loads=[LoadJob("r", (pairs([1, 2], [3, 4]),))],
    )
    worker.before_forward(metadata)
    worker.start_loads(metadata)
    worker.after_forward()
    assert not worker.results().finished_recving
    try:
        worker.register_kv_caches(caches(1), engine.kv_cache_config)
        assert worker.results().finished_recving == {"r"}
        told = worker.worker_metadata()
        assert told is not None
        assert [report.stored for report in told.stores[7]] == [2]
    finally:
        worker.shutdown()


def test_tensors_that_do_not_fit_the_configuration_are_refused(
    engine: ToyEngine, worker: WorkerHalf
) -> None:
    with pytest.raises(UnsupportedError, match=r"group 0 has 192 bytes per block.* says 96"):
        worker.register_kv_caches(caches(1, channels=8), engine.kv_cache_config)
    missing = caches(1)
    del missing[LAYERS[1]]
    with pytest.raises(UnsupportedError, match=f"no KV cache for layer {LAYERS[1]}"):
        worker.register_kv_caches(missing, engine.kv_cache_config)


def test_blocks_that_a_back_end_cuts_are_not_sent_to_daemons() -> None:
    """Their numbers are in another order than those of whole blocks; layouts have one name."""
    cache = one_group(num_kv_heads=2)
    halves = (2 * cache.num_blocks, 2, 8, 64)
    by_heads = torch.zeros(halves)
    by_tokens = torch.zeros(2 * cache.num_blocks, 8, 2, 64).transpose(1, 2)
    whole = torch.zeros(cache.num_blocks, 2, 16, 64)
    one_head = torch.zeros(2 * cache.num_blocks, 1, 8, 64)
    for harmless in (by_tokens, whole, one_head):
        require_whole_blocks({"layer.0": harmless}, cache)
    with pytest.raises(UnsupportedError, match="divide --block-size by 2"):
        require_whole_blocks({"layer.0": whole, "layer.1": by_heads}, cache)


def test_cut_blocks_are_refused_only_where_there_is_a_daemon(
    tiny_model: Path, tmp_path: Path
) -> None:
    for remote, is_refused in (([], False), ([f"ipc://{tmp_path}/nobody"], True)):
        engine = ToyEngine(tiny_model, block_size=TOKENS, extra_config={"remote": remote})
        half = engine.worker.worker_half
        half._copier = None  # the toy's
        shape = (2 * BLOCKS, 2, TOKENS // 2, 2)
        cut = {name: torch.zeros(shape, dtype=torch.int16) for name in LAYERS}
        if is_refused:
            with pytest.raises(UnsupportedError, match="splits each block"):
                half.register_kv_caches(cut, engine.kv_cache_config)
        else:
            half.register_kv_caches(cut, engine.kv_cache_config)
        half.shutdown()
        engine.close()


def test_device_we_do_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not 'xpu'"):
        _pinning(torch.device("xpu"))


def test_device_that_failed_does_not_disturb_the_shutdown(
    engine: ToyEngine, worker: WorkerHalf, caplog: pytest.LogCaptureFixture
) -> None:
    worker.register_kv_caches(caches(1), engine.kv_cache_config)

    def broken() -> None:
        raise CudaError("cudaStreamSynchronize: an illegal memory access was encountered")

    real, worker._copier.close = worker._copier.close, broken
    worker.shutdown()
    assert "illegal memory access" in caplog.text
    real()


def test_abandoned_store_is_neither_copied_nor_reported_again(engine: ToyEngine) -> None:
    """An idle step may come between a forward and its end: the slot is somebody else's by then."""
    worker = engine.worker.worker_half
    worker.before_forward(TieredKVMetadata(stores_after=[StoreJob(7, pairs([3], [0]))]))
    assert worker.is_in_step
    worker.before_forward(TieredKVMetadata())
    worker.after_forward()
    assert not worker.is_in_step
    assert not worker._copier._stores
    worker.results()
    told = worker.worker_metadata()
    assert told is not None
    assert told.stores == {7: [StoreReport(0, DropReason.COPY_FAILED)]}


def test_idle_steps_do_not_break_into_a_step(engine: ToyEngine) -> None:
    """With structured output vLLM deals with an earlier step's output before it ends this one."""
    worker, half = engine.worker.worker_half, engine.half
    engine.add(list(range(3, 20)), 1)
    engine.run()
    half.index.touch([])  # what keeps an idle engine stepping
    assert half.has_pending_push_work()
    worker.is_in_step = True
    IdleSteps(half, engine.config).run()
    assert half.has_pending_push_work()
    worker.is_in_step = False
    IdleSteps(half, engine.config).run()
    assert not half.has_pending_push_work()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_v2", [False, True])
def test_steps_of_the_second_model_runner_cannot_be_discarded(device: str, is_v2: bool) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=is_v2,
    )
    assert assembly._steps_can_be_discarded(config) is not (is_v2 and device == "cuda")


@pytest.mark.parametrize(
    ("process", "has_loop", "ranks", "needed"),
    [
        ("MainProcess", "0", 1, True),
        ("MainProcess", "1", 1, False),
        ("EngineCore", "0", 1, False),
        ("EngineCore_DP1", "0", 1, False),
        ("MainProcess", "0", 2, False),
    ],
)
def test_idle_steps_are_for_an_engine_in_the_process_of_its_caller(
    monkeypatch: pytest.MonkeyPatch, process: str, has_loop: str, ranks: int, needed: bool
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", has_loop)
    monkeypatch.setattr(multiprocessing.current_process(), "name", process)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    assert are_needed(config) is needed
