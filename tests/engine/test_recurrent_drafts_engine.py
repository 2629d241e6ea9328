"""A real engine with recurrent layers and MTP (Qwen3-Next with its draft layer).

vLLM's CPU back-end computes such steps, but has no kernels that move states between blocks: a
stand-in does (`state_copies`). What the tier serves must be what vLLM's own cache serves: the same
number of tokens found, then the same tokens, logprobs and accepted drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.engine import window_models
from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.real_engine import Answer, real_engine
from tests.engine.state_copies import HostKernel, on_cpu
from tests.engine.test_drafts import Drafting
from tests.engine.test_recurrent_engine import state_in_tier
from vllm_tiered_kv.metrics import names

pytestmark = [pytest.mark.engine, pytest.mark.slow, WITH_RECURRENT_STATES]

MODEL = {**window_models.QWEN3_NEXT, "num_nextn_predict_layers": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
COUNT = 24


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Drafting, HostKernel]]:
    model = window_models.write(tmp_path_factory.mktemp("model"), MODEL)
    with (
        on_cpu() as after,
        real_engine(
            model,
            {"cpu_memory": "64MiB", "verify_fraction": 1e-12},  # verifies if a test says so
            gain=0.5,  # some drafts are right and some are not
            dtype="bfloat16",
            prefix_cache_retention_interval=None,  # vLLM keeps the states of answers too
            speculative_config=MTP,
        ) as engine,
    ):
        assert engine.half is not None
        yield Drafting(engine), after


@pytest.fixture
def fresh(drafting: tuple[Drafting, HostKernel]) -> Drafting:
    engine = drafting[0].engine
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    return drafting[0]


def make_prompts(block: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 1000) for _ in range(2 * block + more)] for more in (7, block - 9)]


def test_tier_hit_is_a_device_hit(fresh: Drafting, drafting: tuple[Drafting, HostKernel]) -> None:
    engine = fresh.engine
    block = engine.half._groups[0].block_size

    def loaded_by(ids: list[int]) -> Answer:
        engine.drop_gpu_cache()
        before = engine.total(names.LOADED_BLOCKS)
        (answer,) = fresh.ask([ids], COUNT)
        needed = sum(len(group.needed(0, answer.cached)) for group in engine.half._groups)
        assert engine.total(names.LOADED_BLOCKS) - before == needed > 0
        return answer

    ends_in_answers = []
    for ids in make_prompts(block):
        (cold,) = fresh.ask([ids], 2 * block)
        assert 0 < fresh.accepted < fresh.drafted
        turn = [*ids, *cold.tokens, 5, 6, 7]
        # vLLM alone loses the state at a boundary that a step passes by more than a token.
        (first_turn,) = fresh.ask([turn], COUNT)
        ends_in_answers.append(first_turn.cached > len(ids))
        right = []
        for asked in (ids, turn):
            (answer,) = fresh.ask([asked], COUNT)
            right.append((answer, fresh.accepted, fresh.drafted))
        assert right[0][0].cached == ((len(ids) - 1) // block - 1) * block
        assert right[0][0].tokens == cold.tokens[:COUNT]
        for asked, expected in zip((ids, turn), right, strict=True):
            answer = loaded_by(asked)
            assert (answer, fresh.accepted, fresh.drafted) == expected
    assert any(ends_in_answers)  # after a state that comes from a step with drafts
    assert drafting[1].calls > 0
    engine.assert_at_rest()


def test_planted_corruption_of_a_state_is_seen(fresh: Drafting) -> None:
    engine = fresh.engine
    ids = make_prompts(engine.half._groups[0].block_size)[0]
    fresh.ask([ids], COUNT)
    (right,) = fresh.ask([ids], COUNT)
    ahead = engine.half._engine.draft_lookahead
    for group in engine.half._groups:
        if not group.is_recurrent:
            continue
        state = state_in_tier(engine, group, ids[: right.cached + ahead])
        state[0::2] ^= 0x55
        engine.drop_gpu_cache()
        (answer,) = fresh.ask([ids], COUNT)
        assert answer.cached == right.cached
        assert answer.logprobs != right.logprobs
        state[0::2] ^= 0x55
    engine.drop_gpu_cache()
    assert fresh.ask([ids], COUNT) == [right]


def test_verification_leaves_out_the_inputs_of_drafts(
    fresh: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie behind the inputs that a convolution continues from, and mean nothing."""
    engine = fresh.engine
    ids = make_prompts(engine.half._groups[0].block_size)[0]
    fresh.ask([ids], COUNT)
    verification = engine.half.verification
    monkeypatch.setattr(verification, "selects", lambda state: not state.verification.has_begun)
    engine.drop_gpu_cache()
    fresh.ask([ids], COUNT)
    assert engine.total(names.VERIFIED_BLOCKS) > 0
    assert engine.total(names.DIFFERING_BLOCKS) == 0
    group = next(group for group in engine.half._groups if group.is_recurrent)
    ahead = engine.half._engine.draft_lookahead
    block = group.block_size
    state_in_tier(engine, group, ids[: block + ahead])[-1024:] ^= 0x15
    engine.drop_gpu_cache()
    fresh.ask([ids], COUNT)
    assert engine.total(names.DIFFERING_BLOCKS) > 0
