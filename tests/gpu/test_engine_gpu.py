"""A real engine on a GPU: 7B shape, CUDA graphs, asynchronous scheduling on and off.

A hit in the tier is compared with vLLM's own hit on the device, which computes the same tokens in
the same shapes: tokens and logprobs must be equal, and so must the bytes of every KV block.

vLLM's sleep mode allows one engine per process: run `-k async_on` and `-k async_off` apart, as
`make gpu-test` does.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.real_engine import RealEngine, real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

COUNT = 16
LENGTHS = (10_240, 10_000, 4_097, 3_000, 1_000, 777, 130, 10_240)


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(1000, 150_000) for _ in range(2000)]
    prompts = [[rng.randrange(1000, 150_000) for _ in range(length)] for length in LENGTHS]
    prompts[-1][:2000] = stem
    return [*prompts, stem + prompts[2][:500], stem + prompts[3][:700]]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen2-7b", **QWEN2_7B)


@pytest.fixture(scope="module", params=[True, False], ids=["async_on", "async_off"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[RealEngine]:
    start = time.perf_counter()
    with real_engine(
        model,
        {"cpu_memory": "8GiB"},
        dtype="bfloat16",
        block_size=16,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=None,
        **memory(8),
        enforce_eager=False,
        enable_sleep_mode=True,
        async_scheduling=request.param,
    ) as running:
        resolved = running.scheduler.vllm_config.scheduler_config.async_scheduling
        assert resolved is request.param
        print(
            f"\nengine up in {time.perf_counter() - start:.1f} s: async_scheduling={resolved}, "
            f"{type(running.scheduler).__name__}, "
            f"{type(running.runner).__module__.rsplit('.', 2)[-2]} runner, "
            f"layout {running.scheduler.kv_cache_config.kv_cache_layout}, "
            f"cudagraphs {running.scheduler.vllm_config.compilation_config.cudagraph_mode}"
        )
        yield running


def forget_all(engine: RealEngine) -> None:
    settle(engine)
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    engine.kv_bytes.clear()


def test_tier_hit_is_a_device_hit(engine: RealEngine) -> None:
    forget_all(engine)
    loaded = 0
    same_as_cold = 0
    for ids in PROMPTS:
        (cold,) = engine.ask([ids], COUNT)
        (device,) = engine.ask([ids], COUNT)
        settle(engine)
        computed = {
            name: content for name, content in engine.kv_bytes.items() if len(name) <= len(ids)
        }
        engine.kv_bytes.clear()
        engine.drop_gpu_cache()
        before = engine.total(names.LOADED_BLOCKS)
        (tier,) = engine.ask([ids], COUNT)
        assert tier.cached == device.cached == (len(ids) - 1) // 16 * 16
        assert engine.total(names.LOADED_BLOCKS) - before == tier.cached // 16
        assert tier.tokens == device.tokens
        assert tier.logprobs == device.logprobs
        prefix = {n: c for n, c in engine.kv_bytes.items() if len(n) <= tier.cached}
        assert len(prefix) == tier.cached // 16
        assert all(content == computed[name] for name, content in prefix.items())
        loaded += len(prefix)
        same_as_cold += cold.tokens == tier.tokens
        settle(engine)
        engine.drop_gpu_cache()
    engine.assert_at_rest()
    assert engine.total(names.DROPPED_BLOCKS) == 0
    print(
        f"\n{len(PROMPTS)} prompts: tokens, logprobs and {loaded} loaded blocks equal to the "
        f"device's; tokens equal to the cold run in {same_as_cold}"
    )


def test_batch_is_stored_without_steps_after_its_last_output(engine: RealEngine) -> None:
    forget_all(engine)
    rng = random.Random(6)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(10_240)] for _ in range(8)]
    engine.ask(prompts, 1, together=True)
    engine.drop_gpu_cache()
    warm = engine.ask(prompts, 1, together=True)
    assert [answer.cached for answer in warm] == [10_224] * 8
    assert engine.total(names.DROPPED_BLOCKS) == 0


def test_slow_stores_read_what_was_computed_though_blocks_are_reused_at_once(
    engine: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are so few free blocks that each prompt is computed into those of the previous one.

    That the wait is needed is shown in `test_cuda_copier.py`. Here it cannot be: the copy of a
    sampled token queues behind those of the stores, so no prompt begins before they have ended.
    """
    forget_all(engine)
    copier = engine.worker_half._copier
    stream = torch.cuda.ExternalStream(copier._store_stream.handle)
    enqueue, store, wait = copier._enqueue_store, copier.store, copier.wait_for_stores
    calls: list[tuple[str, int]] = []

    def enqueue_slowly(blocks: object) -> object:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)  # about a second, longer than a prompt takes
        return enqueue(blocks)

    def note_store(number: int, *rest: object) -> object:
        calls.append(("store", number))
        return store(number, *rest)

    def note_wait(newest: int) -> None:
        calls.append(("wait", newest))
        wait(newest)

    monkeypatch.setattr(copier, "_enqueue_store", enqueue_slowly)
    monkeypatch.setattr(copier, "store", note_store)
    monkeypatch.setattr(copier, "wait_for_stores", note_wait)
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 150_000) for _ in range(1_600)] for _ in range(3)]
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 110)
    try:
        engine.ask(prompts, 1)
    finally:
        settle(engine)
        pool.free_blocks(taken)
    stores = [number for what, number in calls if what == "store"]
    assert len(stores) == 3
    for earlier, later in itertools.pairwise(stores):
        between = calls[calls.index(("store", earlier)) : calls.index(("store", later))]
        assert any(what == "wait" and newest >= earlier for what, newest in between), calls
    computed = dict(engine.kv_bytes)
    engine.kv_bytes.clear()
    monkeypatch.undo()
    engine.drop_gpu_cache()
    assert [answer.cached for answer in engine.ask(prompts, 1)] == [1_584] * 3
    loaded = {name: content for name, content in engine.kv_bytes.items() if len(name) <= 1_584}
    assert len(loaded) == 3 * 99
    assert all(content == computed[name] for name, content in loaded.items())
    forget_all(engine)


def test_flipped_byte_is_noticed(engine: RealEngine) -> None:
    forget_all(engine)
    ids = PROMPTS[2]
    engine.ask([ids], COUNT)
    (device,) = engine.ask([ids], COUNT)
    settle(engine)
    engine.drop_gpu_cache()
    geometry = engine.half.index.geometry
    for slot in [use.slot for use in engine.half.index.slots()][:64]:
        engine.worker_half.arena.bytes_at(slot * geometry.slab_bytes, geometry.slab_bytes)[
            1::2
        ] ^= 0x15
    (tier,) = engine.ask([ids], COUNT)
    assert tier.cached == device.cached
    assert tier.logprobs != device.logprobs


def test_all_at_once_with_aborts(engine: RealEngine) -> None:
    """Loads of some beside the compute of others, aborts in between, bytes checked at the end."""
    from vllm import SamplingParams

    forget_all(engine)
    truth: dict = {}
    for ids in PROMPTS:
        engine.ask([ids], COUNT)
    settle(engine)
    truth.update(engine.kv_bytes)
    engine.kv_bytes.clear()
    rng = random.Random(8)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    vllm_engine = engine.llm.llm_engine
    for round_ in range(4):
        settle(engine)
        engine.drop_gpu_cache()
        live = []
        for number, ids in enumerate(PROMPTS):
            name = f"{round_}-{number}"
            vllm_engine.add_request(name, {"prompt_token_ids": ids}, params)
            live.append(name)
            for _ in range(rng.randrange(3)):
                vllm_engine.step()
            if rng.random() < 0.3:
                vllm_engine.abort_request([live.pop(rng.randrange(len(live)))])
        while vllm_engine.has_unfinished_requests():
            vllm_engine.step()
    settle(engine)
    for _ in range(5):
        engine.core.step_fn()
    engine.assert_at_rest()
    loaded = engine.total(names.LOADED_BLOCKS)
    assert loaded > 0
    # The end of a prompt is computed again, in batches of other shapes; the rest was loaded.
    prompt_blocks = {
        name: content
        for name, content in engine.kv_bytes.items()
        if any(
            len(name) <= (len(ids) - 1) // 16 * 16 and list(name) == ids[: len(name)]
            for ids in PROMPTS
        )
    }
    wrong = sum(truth[name] != content for name, content in prompt_blocks.items())
    print(
        f"\n{len(prompt_blocks)} prompt blocks compared, {wrong} differ, {loaded:.0f} loaded so far"
    )
    assert wrong == 0


def test_batch_begins_to_load_while_it_is_planned(engine: RealEngine) -> None:
    forget_all(engine)
    batch = PROMPTS[:6]
    for ids in batch:
        engine.ask([ids], 1)
    settle(engine)
    truth = dict(engine.kv_bytes)
    for _ in range(3):
        engine.kv_bytes.clear()
        engine.drop_gpu_cache()
        before = engine.total(names.EARLY_LOADS)
        answers = engine.ask(batch, 1, together=True)
        settle(engine)
        assert engine.total(names.EARLY_LOADS) - before == len(batch) - 1
        assert [a.cached for a in answers] == [(len(ids) - 1) // 16 * 16 for ids in batch]
        # The end of a prompt is computed again, in a batch of another shape; the rest was loaded.
        loaded = [
            tuple(ids[:end])
            for ids, answer in zip(batch, answers, strict=True)
            for end in range(16, answer.cached + 1, 16)
        ]
        wrong = sum(engine.kv_bytes[name] != truth[name] for name in loaded)
        assert wrong == 0, f"{wrong} of {len(loaded)} loaded blocks differ"
    engine.assert_at_rest()


def test_sleep_while_requests_run_and_blocks_are_stored(engine: RealEngine) -> None:
    from vllm import SamplingParams

    forget_all(engine)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    vllm_engine = engine.llm.llm_engine
    names_of = [f"s{number}" for number in range(4)]
    for name, ids in zip(names_of, PROMPTS, strict=False):
        vllm_engine.add_request(name, {"prompt_token_ids": ids}, params)
    for _ in range(20):
        vllm_engine.step()
        if engine.half.ledger.has_open_stores:
            break
    assert engine.half.ledger.has_open_stores
    if engine.scheduler.defer_block_free:
        # With a step under way, vLLM in the process of its caller cannot sleep beside any
        # connector that loads. In a process of its own it waits for that step.
        vllm_engine.abort_request(names_of)
        for _ in range(20):
            if not engine.scheduler.deferred_frees:
                break
            vllm_engine.step()
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    # Within one process nobody tells the front that they were aborted.
    vllm_engine.abort_request(names_of)
    settle(engine)
    assert engine.half.index.used_bytes == 0
    assert_a_hit(engine, PROMPTS[0])


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(engine: RealEngine, level: int) -> None:
    """Sleeping discards the device's cache and starts a new epoch; afterwards all works again."""
    from vllm.model_executor.model_loader import get_model_loader

    forget_all(engine)
    ids = PROMPTS[3]
    (first,) = engine.ask([ids], COUNT)
    settle(engine)
    engine.llm.sleep(level=level)
    if level == 1:
        engine.llm.wake_up()
    else:
        engine.llm.wake_up(tags=["weights"])
        # As `reload_weights` would, which knows no weights that are made up.
        config = engine.scheduler.vllm_config
        loader = get_model_loader(config.load_config)
        loader.load_weights(engine.runner.model, config.model_config)
        engine.llm.wake_up(tags=["kv_cache"])
    assert engine.half.index.used_bytes == 0
    (second,) = engine.ask([ids], COUNT)
    assert second.cached == 0
    if level == 1:  # weights that are loaded anew need not be the same
        assert second.tokens == first.tokens
    assert_a_hit(engine, ids)


def assert_a_hit(engine: RealEngine, ids: list[int]) -> None:
    """What is stored from now on is loaded, and is what the device had."""
    engine.ask([ids], COUNT)
    (device,) = engine.ask([ids], COUNT)
    settle(engine)
    engine.drop_gpu_cache()
    (tier,) = engine.ask([ids], COUNT)
    assert tier.cached == (len(ids) - 1) // 16 * 16
    assert (tier.tokens, tier.logprobs) == (device.tokens, device.logprobs)
    settle(engine)
    engine.assert_at_rest()
