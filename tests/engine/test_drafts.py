"""Draft models with KV of their own on a real engine: EAGLE, EAGLE-3, MTP, a separate model.

Drafts change no token: the model verifies each one. So wrong KV in a draft layer shows only in how
many drafts are accepted. Both are compared: tokens with those of vLLM alone, and acceptance after a
hit in the tier with that after vLLM's own hit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.real_engine import Answer, RealEngine, real_engine
from tests.models import TINY_LLAMA, TINY_MLA, TINY_QWEN2, write_config
from vllm_tiered_kv.connector.worker.number_formats import is_draft_layer
from vllm_tiered_kv.metrics import names

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 32
COUNT = 70
GAIN = 0.7  # drafts are right often, and wrong KV makes them wrong
OPTIONS = {"cpu_memory": "64MiB"}
TINY_MIMO = {**TINY_QWEN2, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
TINY_DEEPSEEK = {
    **TINY_MLA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

Draft = tuple[dict[str, Any], dict[str, Any]]
"""The config of the model and vLLM's speculative config."""


def eagle(folder: Path) -> Draft:
    head = write_config(folder / "draft", {**TINY_LLAMA, "num_hidden_layers": 1})
    return TINY_LLAMA, {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


def eagle3(folder: Path) -> Draft:
    config = {
        **TINY_LLAMA,
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": TINY_LLAMA["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    head = write_config(folder / "draft", config)
    return TINY_LLAMA, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}


def mtp(folder: Path) -> Draft:
    return TINY_MIMO, {"method": "mtp", "num_speculative_tokens": 1}


def mtp_modules(folder: Path) -> Draft:
    """Keys cover two tokens more, although the CPU's model runner runs the first module alone."""
    modules = {**TINY_MIMO, "num_nextn_predict_layers": 2}
    return modules, {"method": "mtp", "num_speculative_tokens": 2}


def mtp_over_mla(folder: Path) -> Draft:
    """DeepSeek-V3."""
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's prefix cache is off with the MLA kernels of CPUs without AMX")
    return TINY_DEEPSEEK, {"method": "mtp", "num_speculative_tokens": 1}


def draft_model(folder: Path) -> Draft:
    """The model itself: all its drafts are right unless its KV is wrong."""
    model = write_config(folder / "draft", TINY_LLAMA)
    return TINY_LLAMA, {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


def make_prompts() -> list[list[int]]:
    """One is computed in two chunks, and one ends with a block."""
    rng = random.Random(3)
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in (300, 170, 129, 128)]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def plain_tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list]:
    """Answers of vLLM alone."""
    known: dict[str, list] = {}

    def tokens(config: dict[str, Any], **settings: Any) -> list:
        name = config["architectures"][0]
        if name not in known:
            model = write_config(tmp_path_factory.mktemp("plain"), config)
            with real_engine(model, None, gain=GAIN, **settings) as engine:
                known[name] = [answer.tokens for answer in engine.ask(PROMPTS, COUNT)]
        return known[name]

    return tokens


class Drafting:
    """An engine with drafts, and how many of them were accepted since the last call."""

    def __init__(self, engine: RealEngine) -> None:
        self.engine = engine
        self.tokens = engine.scheduler.num_spec_tokens
        self.accepted = self.drafted = 0
        self._before = self._counts()

    def ask(self, prompts: list[list[int]], count: int = COUNT) -> list[Answer]:
        answers = self.engine.ask(prompts, count)
        self.engine.settle()
        drafted, accepted = self._counts()
        self.drafted, self.accepted = drafted - self._before[0], accepted - self._before[1]
        self._before = drafted, accepted
        return answers

    def _counts(self) -> tuple[int, int]:
        found = {metric.name: metric for metric in self.engine.llm.get_metrics()}
        names = ("draft_tokens", "accepted_tokens")
        first, second = (int(found[f"vllm:spec_decode_num_{name}"].value) for name in names)
        return first, second

    def spoil_draft_layers(self) -> None:
        """Flips bits of the draft layers in all slots of the CPU tier."""
        (group,) = self.engine.scheduler.kv_cache_config.kv_cache_groups
        own = self.engine.llm.llm_engine.model_config.hf_config.num_hidden_layers
        (nbytes,) = self.engine.half.block_bytes
        is_draft = [is_draft_layer(name, own) for name in group.layer_names]
        assert is_draft == [False] * own + [True] * (len(is_draft) - own)
        first = nbytes // len(group.layer_names) * own
        geometry, arena = self.engine.half.index.geometry, self.engine.worker_half.arena
        for offset in geometry.offsets(
            np.arange(geometry.num_slabs * geometry.slots_per_slab), 0
        ).tolist():
            arena.bytes_at(offset, nbytes)[first + 1 :: 2] ^= 0x15


@pytest.fixture(
    params=[eagle, mtp, mtp_modules, mtp_over_mla, draft_model, eagle3],
    ids=lambda draft: draft.__name__,
)
def drafting(
    request: pytest.FixtureRequest, tmp_path: Path, plain_tokens: Callable[..., list]
) -> Iterator[tuple[str, Drafting, list]]:
    config, drafts = request.param(tmp_path)
    speculation: dict[str, Any] = {"speculative_config": drafts}
    settings: dict[str, Any] = {}
    if config is TINY_DEEPSEEK:
        # Its kernels know no other dtype, and round differently if drafts are verified.
        settings["dtype"] = "bfloat16"
        plain = plain_tokens(config, **settings, **speculation)
    else:
        plain = plain_tokens(config)  # without drafts
    model = write_config(tmp_path / "model", config)
    with real_engine(model, OPTIONS, gain=GAIN, **settings, **speculation) as engine:
        yield drafts["method"], Drafting(engine), plain


def test_tier_hit_is_a_device_hit(drafting: tuple[str, Drafting, list]) -> None:
    method, asked, plain = drafting
    engine = asked.engine
    cold = asked.ask(PROMPTS)
    assert [answer.tokens for answer in cold] == plain
    assert asked.drafted > 0
    # Blocks of drafts that were rejected are not among them.
    ahead = engine.half._engine.draft_lookahead
    assert ahead == {"eagle": 1, "eagle3": 1, "draft_model": 0}.get(method, asked.tokens)
    full = [(len(ids) + COUNT - max(1, ahead)) // BLOCK for ids in PROMPTS]
    assert engine.total(names.STORED_BLOCKS) == sum(full)
    stored = dict(engine.kv_bytes)
    device = asked.ask(PROMPTS)
    device_rate = f"{asked.accepted} of {asked.drafted} drafts accepted after vLLM's own hit"
    accepted, drafted = asked.accepted, asked.drafted
    computed = dict(engine.kv_bytes)

    engine.kv_bytes.clear()
    engine.drop_gpu_cache()
    tier = asked.ask(PROMPTS)
    # vLLM computes a block more for draft layers that read the next token, and so does the tier.
    dropped = method != "draft_model"
    blocks = [(len(ids) - 1) // BLOCK - dropped for ids in PROMPTS]
    assert [answer.cached for answer in tier] == [count * BLOCK for count in blocks]
    assert engine.total(names.LOADED_BLOCKS) == sum(blocks)
    assert tier == device  # tokens, logprobs and cached tokens
    tier_rate = f"{asked.accepted} of {asked.drafted} after a hit in the tier"
    print(f"\n{method}: {device_rate}, {tier_rate}")
    assert (asked.accepted, asked.drafted) == (accepted, drafted), f"{device_rate}, {tier_rate}"
    assert all(content == computed[ids] for ids, content in engine.kv_bytes.items())

    # The next turn of a chat: accepted drafts are loaded too, with the draft layers' KV.
    turns = [[*ids, *said, 5, 6, 7] for ids, said in zip(PROMPTS, plain, strict=True)]
    engine.drop_gpu_cache()
    engine.kv_bytes.clear()
    turn = asked.ask(turns, 8)
    assert [answer.cached for answer in turn] == [
        (count - (dropped and (len(ids) - 1) // BLOCK == count)) * BLOCK
        for ids, count in zip(turns, full, strict=True)
    ]
    for ids, answer in zip(turns, turn, strict=True):
        for end in range(BLOCK, answer.cached + 1, BLOCK):
            assert engine.kv_bytes[tuple(ids[:end])] == stored[tuple(ids[:end])]
    turn_device = asked.ask(turns, 8)
    assert [answer.tokens for answer in turn_device] == [answer.tokens for answer in turn]

    # Another token after the same blocks: the last of them is of no use to EAGLE and MTP.
    engine.drop_gpu_cache()
    loaded = engine.total(names.LOADED_BLOCKS)
    other = [[*ids[:96], 7, *ids[:80]] for ids in PROMPTS]
    assert [answer.cached for answer in asked.ask(other, 8)] == [96 - BLOCK * dropped] * 4
    assert engine.total(names.LOADED_BLOCKS) - loaded == 4 * (3 - dropped)

    # Wrong KV of draft layers is seen in acceptance alone, wrong KV of the model in its answers.
    engine.drop_gpu_cache()
    asked.spoil_draft_layers()
    spoiled = asked.ask(PROMPTS)
    if engine.llm.llm_engine.model_config.dtype is torch.float32:
        assert [answer.tokens for answer in spoiled] == plain
    assert [answer.cached for answer in spoiled] == [answer.cached for answer in tier]
    if method != "eagle3":  # its random head is hardly ever right
        assert asked.accepted < accepted
    engine.drop_gpu_cache()
    arena = engine.worker_half.arena
    arena.bytes_at(0, arena.nbytes)[1::2] ^= 0x15
    wrong = asked.ask(PROMPTS)
    assert all(a.logprobs != b.logprobs for a, b in zip(wrong, tier, strict=True))
    engine.assert_at_rest()


def test_verification_compares_the_model_but_not_its_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other chunks change the KV of draft layers with the CPU's model runner, but no other KV."""
    config, drafts = eagle(tmp_path)
    model = write_config(tmp_path / "model", config)
    options = {**OPTIONS, "verify_fraction": 1}
    with real_engine(model, options, gain=GAIN, speculative_config=drafts) as engine:
        for tokens in (256, 96):
            engine.scheduler.max_num_scheduled_tokens = tokens
            engine.ask(PROMPTS, 4)
            engine.settle()
            engine.drop_gpu_cache()
        assert engine.total(names.VERIFIED_BLOCKS) > 0
        assert engine.total(names.DIFFERING_BLOCKS) == 0
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[1::2] ^= 0x15
        engine.ask(PROMPTS, 4)
        engine.settle()
        assert engine.total(names.DIFFERING_BLOCKS) > 0
        assert "model.layers.4" not in caplog.text  # the draft layer
