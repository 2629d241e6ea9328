"""`examples/demo.py`, which `make demo` runs, with a tiny model in place of SmolLM2."""

from __future__ import annotations

import gc
import importlib
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from examples.smollm2 import ensure_model
from tests.engine.made_models import draw_weights

pytestmark = [pytest.mark.engine]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def small_chat_model(tmp_path: Path) -> Path:
    """SmolLM2's tokenizer and template, and two layers of random weights, which compute the text
    a hundred times as fast."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=49_152, max_position_embeddings=4_096, **sizes, **heads)
    model = LlamaForCausalLM(config)
    draw_weights(model)
    folder = tmp_path / "small"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ensure_model() / name, folder)
    return folder


def test_demo_answers_every_question_from_the_tier(
    small_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported vLLM: a new one would take most of the test's time."""
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = importlib.import_module("demo")
    shown: list[str] = []

    class Lines(demo.Screen):
        def __init__(self) -> None:
            self.log = tmp_path / "log"

        def show(self, text: str = "") -> None:
            shown.extend(text.splitlines())

        step = show

    engines: list[LLM] = []
    start = demo.start_engine
    monkeypatch.setattr(
        demo, "start_engine", lambda model: engines.append(start(model)) or engines[0]
    )
    try:
        status = demo.run(Lines(), small_chat_model)
        engines.pop().llm_engine.engine_core.engine_core.shutdown()
    finally:
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()
    assert status == 0, shown
    assert "Every question was answered from a tier with an equal answer." in shown
    rows = re.findall(r"^Q\d +computed +cpu +(\d+) +(\d+) .* yes$", "\n".join(shown), re.MULTILINE)
    assert len(rows) == 3
    for prompt, loaded in rows:
        assert int(prompt) - 128 <= int(loaded) < int(prompt), "all full blocks"
