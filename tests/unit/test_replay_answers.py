"""How `tiered-kv replay` reads prompts, answers and counters, and compares answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vllm_tiered_kv.api.answers import Answer, Outcome, Token, compare_answers, read_answer
from vllm_tiered_kv.api.openai_server import read_samples, sum_counters
from vllm_tiered_kv.api.prompt_file import read_prompts
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.metrics import names


def tokens(*pairs: tuple[str, float]) -> Answer:
    return Answer(tuple(Token(name, p, {name: p, "b": -1.0}) for name, p in pairs))


def test_compare_answers_outcomes() -> None:
    right = tokens(("a", -0.5), ("a", -0.9), ("c", -0.1))
    same = compare_answers(right, right, 0.1, 0.1)
    assert (same.outcome, same.index, same.drift) == (Outcome.EQUAL, None, 0.0)
    parted = compare_answers(right, tokens(("a", -0.4), ("b", -1.0), ("x", 0.0)), 0.1, 0.05)
    assert (parted.outcome, parted.index) == (Outcome.TIE, 1)
    assert parted.gap == pytest.approx(0.1)
    assert parted.drift == pytest.approx(0.1)
    unlisted = compare_answers(right, tokens(("z", -0.4)), 5, 5)
    assert (unlisted.outcome, unlisted.gap) == (Outcome.DIFFERENT, math.inf)
    moved = compare_answers(right, tokens(("a", -0.5), ("a", -math.inf), ("c", -0.1)), 1, 9)
    assert (moved.outcome, moved.index, moved.drift) == (Outcome.DRIFT, 1, math.inf)


def test_read_answer_invalid_reply_is_error() -> None:
    for reply in ({}, {"choices": []}, {"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}):
        with pytest.raises(ReplayError, match="no logprobs"):
            read_answer(reply)
    assert read_answer({"choices": [{"text": "", "logprobs": None}]}).tokens == ()
    with pytest.raises(ReplayError, match="there is text but no tokens"):
        read_answer({"choices": [{"text": "yes", "logprobs": None}]})


def test_read_prompts_unicode_separators_do_not_end_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "a\u2028b"}\r\nplain\n', encoding="utf-8", newline="")
    first, second = read_prompts(path)
    assert first.fields["prompt"] == "a\u2028b"
    assert second.fields["prompt"].strip() == "plain"


def test_sum_counters_adds_over_labels() -> None:
    name = names.LOADED_BLOCKS.exposed_name
    page = (
        f'{name}_total{{engine="0",tier="cpu"}} 3.0\n{name}_total{{engine="0",tier="remote"}} 4e1\n'
        f'{name}_created{{engine="0",tier="cpu"}} 9.0\n{name}_total_other 5.0\n# {name}_total 7\n'
    )
    metrics = (names.LOADED_BLOCKS, names.LOAD_FAILURES)
    sums = sum_counters(read_samples(page), metrics)
    assert sums == {
        "loaded_blocks": 43.0,
        "load_failures": 0.0,
    }


def test_prompt_title_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("word " * 50 + "\n" + json.dumps({"messages": [{"content": [{"a": 1}]}]}))
    long, odd = read_prompts(path)
    assert len(long.title) == 40
    assert odd.title == '[{"a": 1}]'


def test_read_prompts_ignores_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "from_windows.jsonl"
    path.write_text('{"prompt": "hi"}\n', encoding="utf-8-sig")
    assert [prompt.fields for prompt in read_prompts(path)] == [{"prompt": "hi"}]
