"""Recurrent layers with speculative decoding on a GPU: GDN with MTP (Qwen3-Next), with both model
runners, and Mamba 2 with n-gram drafts, with CUDA graphs.

vLLM keeps one state per drafted token and copies the right one to a block boundary once drafts are
accepted. What the tier stores must be that state and no other: a hit in the tier is vLLM's own hit,
bit by bit, for prompts and for answers whose states come from steps with drafts. On CPUs this needs
a stand-in for vLLM's kernels (tests/engine/test_recurrent_drafts_engine.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine import window_models  # noqa: E402
from tests.engine.real_engine import Answer, RealEngine, real_engine  # noqa: E402
from tests.engine.test_recurrent_engine import state_in_tier  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.gpu.test_recurrent_gpu import GRANITE, QWEN3_NEXT  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

COUNT = 8
_MTP = {"method": "mtp", "num_speculative_tokens": 2}
_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}


@dataclass(frozen=True)
class Drafting:
    config: dict[str, Any]
    speculation: dict[str, Any]
    gain: float  # answers repeat themselves, so that some drafts are right and some are not
    runner: str = ""  # VLLM_USE_V2_MODEL_RUNNER; empty: vLLM's choice


_QWEN3_NEXT_MTP = {**QWEN3_NEXT, "num_nextn_predict_layers": 1}
KINDS = {
    "mtp_runner_2": Drafting(_QWEN3_NEXT_MTP, _MTP, 0.5, "1"),
    "mtp_runner_1": Drafting(_QWEN3_NEXT_MTP, _MTP, 0.5, "0"),
    "mamba_2_ngram": Drafting(GRANITE, _NGRAM, 0.3),
}


def drafts_of(engine: RealEngine) -> tuple[float, float]:
    """How many drafts vLLM has verified so far, and how many of them it has accepted."""
    found = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }
    return found["draft_tokens"], found["accepted_tokens"]


@pytest.mark.parametrize("name", list(KINDS))
def test_tier_hit_is_a_device_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind = KINDS[name]
    if kind.runner:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", kind.runner)
    with real_engine(
        window_models.write(tmp_path, kind.config),
        {"cpu_memory": "4GiB"},
        gain=kind.gain,
        dtype="bfloat16",
        block_size=None,
        max_model_len=8192,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=None,
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,  # vLLM keeps the states of answers too
        speculative_config=kind.speculation,
        **memory(6),
        enforce_eager=False,
        gdn_prefill_backend="triton",  # the default needs FlashInfer
    ) as engine:
        assert engine.half is not None, "the cache leaves this model alone"
        recurrent = [group for group in engine.half._groups if group.is_recurrent]
        block, facts = recurrent[0].block_size, engine.half._engine
        drops = facts.drops_last_block
        print(f"\n{name}: {type(engine.runner).__module__}, blocks of {block} tokens")
        assert drops == (kind.speculation["method"] == "mtp")

        def loaded_by(ids: list[int]) -> Answer:
            """The answer after a hit in the tier, whose loads are counted."""
            settle(engine)
            engine.drop_gpu_cache()
            before = engine.total(names.LOADED_BLOCKS)
            (answer,) = engine.ask([ids], COUNT)
            needed = sum(len(group.needed(0, answer.cached)) for group in engine.half._groups)
            assert engine.total(names.LOADED_BLOCKS) - before == needed > 0
            return answer

        rng = random.Random(5)
        motif = [rng.randrange(3, 1000) for _ in range(150)]
        prompts = [(motif * 40)[first : first + 2 * block + 7 + first] for first in (0, 77)]
        expected, ends_in_answers = [], []
        for ids in prompts:
            (cold,) = engine.ask([ids], 2 * block + 40)  # fills two blocks
            turn = [*ids, *cold.tokens, 5, 6, 7]
            # Only asynchronous scheduling keeps every state: others pass some boundaries by.
            (first_turn,) = engine.ask([turn], COUNT)
            ends_in_answers.append(first_turn.cached > len(ids))
            (device,) = engine.ask([ids], COUNT)
            (device_turn,) = engine.ask([turn], COUNT)
            assert device.cached == (len(ids) // block - drops) * block
            assert device_turn.cached == (len(turn) // block - drops) * block
            for asked, right in ((ids, device), (turn, device_turn)):
                answer = loaded_by(asked)
                assert answer == right, (answer, right)
            expected.append(device)
        assert any(ends_in_answers)  # after a state that comes from a step with drafts
        drafted, accepted = drafts_of(engine)
        print(f"{name}: {accepted:.0f} of {drafted:.0f} drafts accepted")
        assert drafted > accepted > 0
        assert engine.total(names.LOAD_FAILURES) == 0

        settle(engine)
        engine.drop_gpu_cache()
        together = engine.ask(prompts, COUNT, together=True)
        assert [answer.cached for answer in together] == [answer.cached for answer in expected]
        settle(engine)
        engine.drop_gpu_cache()
        end = expected[0].cached
        state = state_in_tier(engine, recurrent[0], prompts[0][: end + facts.draft_lookahead])
        state[0::2] ^= 0x55  # no exponent: NaN would stop vLLM's drafts
        (changed,) = engine.ask([prompts[0]], COUNT)
        assert changed.cached == end
        assert changed.logprobs != expected[0].logprobs
        settle(engine)
        engine.assert_at_rest()
