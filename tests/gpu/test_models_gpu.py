"""A tiny random model of each architecture on a GPU: a hit in the tier is vLLM's own hit.

Both compute the same tokens in the same shapes, so tokens and logprobs must be equal; loads are
counted, and spoiled bytes must change the answer. Heads are as large as kernels for such a GPU want
them. Engines start one after the other in this process, without CUDA graphs; test_engine_gpu.py has
those.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.made_models import write_adapter  # noqa: E402
from tests.engine.real_engine import Answer, RealEngine, real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.models import TINY_MLA, TINY_QWEN2, write_config  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

COUNT = 8
ROOMY = {"cpu_memory": "256MiB"}

QWEN2: dict[str, Any] = {**TINY_QWEN2, "hidden_size": 256, "intermediate_size": 512}
"""Four heads of 64 channels, two of them with KV."""

MLA: dict[str, Any] = {
    **TINY_MLA,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""The heads of DeepSeek-V2-Lite, in two layers of a small model."""


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in (1000, 600, 333)]


PROMPTS = make_prompts()


@contextlib.contextmanager
def tiny_engine(folder: Path, config: dict[str, Any], **settings: Any) -> Iterator[RealEngine]:
    start = time.perf_counter()
    with real_engine(
        write_config(folder / "model", config),
        ROOMY,
        **{
            "dtype": "bfloat16",
            "block_size": None,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 512,
            **memory(1),
            **settings,
        },
    ) as engine:
        cache = engine.scheduler.kv_cache_config
        print(
            f"\nup in {time.perf_counter() - start:.1f} s: layout {cache.kv_cache_layout}, "
            f"blocks of {[g.kv_cache_spec.block_size for g in cache.kv_cache_groups]} tokens, "
            f"{[type(g.kv_cache_spec).__name__ for g in cache.kv_cache_groups]}"
        )
        assert engine.half is not None, "the cache leaves this model alone"
        yield engine


def assert_tier_serves(engine: RealEngine, inputs: Sequence[list[int]] = PROMPTS) -> list[Answer]:
    """A prompt after the other: cold, from the device's cache, from the tier."""
    answers = []
    for ids in inputs:
        engine.ask([ids], COUNT)
        (device,) = engine.ask([ids], COUNT)
        settle(engine)
        engine.drop_gpu_cache()
        before = engine.total(names.LOADED_BLOCKS)
        (tier,) = engine.ask([ids], COUNT)
        assert tier.cached == device.cached > 0
        assert engine.total(names.LOADED_BLOCKS) > before
        assert (tier.tokens, tier.logprobs) == (device.tokens, device.logprobs)
        answers.append(tier)
        settle(engine)
        engine.drop_gpu_cache()
    assert engine.total(names.LOAD_FAILURES) == 0
    engine.assert_at_rest()
    return answers


def assert_spoiled_bytes_show(engine: RealEngine, right: list[Answer]) -> None:
    arena = engine.worker_half.arena
    arena.bytes_at(0, arena.nbytes)[1::2] ^= 0x15
    for ids, answer in zip(PROMPTS, right, strict=True):
        (spoiled,) = engine.ask([ids], COUNT)
        assert spoiled.cached == answer.cached
        assert spoiled.logprobs != answer.logprobs
        settle(engine)
        engine.drop_gpu_cache()


def test_mla(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, MLA) as engine:
        (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
        tokens = group.kv_cache_spec.block_size
        assert engine.half.block_bytes == (2 * tokens * 576 * 2,)
        answers = assert_tier_serves(engine)
        assert [a.cached for a in answers] == [(len(p) - 1) // tokens * tokens for p in PROMPTS]
        assert_spoiled_bytes_show(engine, answers)


def test_fp8_cache(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, QWEN2, kv_cache_dtype="fp8") as engine:
        (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
        tokens = group.kv_cache_spec.block_size
        assert engine.half.block_bytes == (4 * 2 * 2 * tokens * 64,)
        answers = assert_tier_serves(engine)
        assert_spoiled_bytes_show(engine, answers)


def test_lora_adapters_hit_their_own_blocks_only(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    one, two = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, QWEN2, number)))
        for number, name in enumerate(("one", "two"), 1)
    )
    ids = PROMPTS[0]
    with tiny_engine(tmp_path, QWEN2, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        device = []
        for lora in (None, one, two):
            (cold,) = engine.ask([ids], COUNT, lora_request=lora)
            assert cold.cached == 0
            device += engine.ask([ids], COUNT, lora_request=lora)
            settle(engine)
            engine.drop_gpu_cache()
        assert len({answer.logprobs for answer in device}) == 3
        assert engine.total(names.LOADED_BLOCKS) == 0
        for lora, expected in zip((None, one, two), device, strict=True):
            (tier,) = engine.ask([ids], COUNT, lora_request=lora)
            assert tier == expected
            settle(engine)
            engine.drop_gpu_cache()
        tokens = engine.scheduler.block_size
        assert engine.total(names.LOADED_BLOCKS) == 3 * (device[0].cached // tokens)
        engine.assert_at_rest()


def test_ngram_speculation(tmp_path: Path) -> None:
    """Answers repeat themselves, so that some drafts are accepted and some are not."""
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    motif = PROMPTS[0][:150]
    inputs = [motif * 4, motif[:100] * 3 + motif[50:90]]
    with tiny_engine(tmp_path, QWEN2, gain=0.3, speculative_config=speculation) as engine:
        for ids in inputs:
            (cold,) = engine.ask([ids], 100)
            (device,) = engine.ask([ids], 100)
            settle(engine)
            engine.drop_gpu_cache()
            before = engine.total(names.LOADED_BLOCKS)
            (tier,) = engine.ask([ids], 100)
            assert tier.cached == device.cached > 0
            assert engine.total(names.LOADED_BLOCKS) > before
            assert (tier.tokens, tier.logprobs) == (device.tokens, device.logprobs)
            # What the first answer's blocks were stored under is found again by its tokens.
            settle(engine)
            engine.drop_gpu_cache()
            (turn,) = engine.ask([[*ids, *cold.tokens, 5, 6, 7]], COUNT)
            tokens = engine.scheduler.block_size
            assert turn.cached == (len(ids) + 100 - 1) // tokens * tokens
            settle(engine)
            engine.drop_gpu_cache()
        drafts = {
            metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
            for metric in engine.llm.get_metrics()
            if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
        }
        assert drafts["accepted_tokens"] > 0
        assert drafts["draft_tokens"] > drafts["accepted_tokens"]
        engine.assert_at_rest()


def test_many_requests_with_one_long_prefix(tmp_path: Path) -> None:
    """It is loaded once and read by all, with the answers that vLLM's own cache gives."""
    stem = PROMPTS[0] * 2
    inputs = [[*stem[:1500], *PROMPTS[1][n : n + 20]] for n in range(8)]
    with tiny_engine(tmp_path, QWEN2) as engine:
        engine.ask(inputs, COUNT, together=True)
        device = engine.ask(inputs, COUNT, together=True)
        settle(engine)
        engine.drop_gpu_cache()
        tier = engine.ask(inputs, COUNT, together=True)
        assert all(answer.cached > 0 for answer in tier)
        assert engine.total(names.LOADED_BLOCKS) > 0
        # Requests that wait for a load run in other batches, and round otherwise.
        for mine, theirs in zip(tier, device, strict=True):
            assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)
        settle(engine)
        engine.assert_at_rest()


LLAMA: dict[str, Any] = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MIMO = {**QWEN2, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
DEEPSEEK: dict[str, Any] = {
    **MLA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


def eagle(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    head = write_config(folder / "draft", {**LLAMA, "num_hidden_layers": 1})
    return LLAMA, {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


def mtp(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return MIMO, {"method": "mtp", "num_speculative_tokens": 1}


def mtp_modules(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second module reads two tokens ahead."""
    config = {**DEEPSEEK, "num_nextn_predict_layers": 2}
    return config, {"method": "mtp", "num_speculative_tokens": 2}


def mtp_over_mla(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return DEEPSEEK, {"method": "mtp", "num_speculative_tokens": 1}


def draft_model(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model itself: all its drafts are right unless its KV is wrong."""
    model = write_config(folder / "draft", LLAMA)
    return LLAMA, {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


@pytest.mark.parametrize("draft", [eagle, mtp, mtp_modules, mtp_over_mla, draft_model])
def test_drafts(
    tmp_path: Path, draft: Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Wrong KV of draft layers would change no token, but how many drafts are accepted."""
    config, speculation = draft(tmp_path)
    with tiny_engine(tmp_path, config, gain=0.7, speculative_config=speculation) as engine:
        counted: dict[str, float] = {}

        def ask(prompts: list[list[int]], count: int) -> tuple[list[Answer], float]:
            """The answers, and the share of drafts that were accepted."""
            answers = engine.ask(prompts, count)
            settle(engine)
            now = {
                metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
                for metric in engine.llm.get_metrics()
                if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
            }
            new = {name: value - counted.get(name, 0) for name, value in now.items()}
            counted.update(now)
            return answers, new["accepted_tokens"] / new["draft_tokens"]

        cold, _ = ask(PROMPTS, 100)
        device, device_rate = ask(PROMPTS, 100)
        engine.drop_gpu_cache()
        before = engine.total(names.LOADED_BLOCKS)
        tier, tier_rate = ask(PROMPTS, 100)
        tokens = engine.scheduler.block_size
        blocks = sum(answer.cached for answer in tier) // tokens
        assert engine.total(names.LOADED_BLOCKS) - before == blocks > 0
        assert [answer.cached for answer in tier] == [answer.cached for answer in device]
        assert [answer.tokens for answer in tier] == [answer.tokens for answer in device]
        rates = f"accepted after vLLM's own hit {device_rate:.3f}, after a tier hit {tier_rate:.3f}"
        print(rates)
        # At most the first drafts of each answer could read KV of another next token.
        allowance = len(PROMPTS) * speculation["num_speculative_tokens"] / 100
        assert device_rate > 0
        assert tier_rate >= device_rate - allowance, rates
        # The next turn of a chat: what was generated is loaded, with the draft layers' KV.
        engine.drop_gpu_cache()
        turns = [[*ids, *one.tokens, 5, 6, 7] for ids, one in zip(PROMPTS, cold, strict=True)]
        dropped = speculation["method"] != "draft_model"
        ahead = max(1, engine.half._engine.draft_lookahead)
        turn, _ = ask(turns, COUNT)
        for ids, answer in zip(turns, turn, strict=True):
            # The blocks of all computed tokens, and one less where vLLM's own hit would end.
            full, longest = (len(ids) - 3 - ahead) // tokens, (len(ids) - 1) // tokens - dropped
            assert answer.cached == min(full, longest) * tokens
        engine.drop_gpu_cache()
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[0::2] ^= 0x55  # no exponent: NaN would stop vLLM's drafts
        spoiled, _ = ask(PROMPTS, 100)
        assert all(a.logprobs != b.logprobs for a, b in zip(spoiled, tier, strict=True))
        engine.assert_at_rest()
