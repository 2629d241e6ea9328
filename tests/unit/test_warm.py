"""`tiered-kv warm` against a small server; tests/engine/test_serve.py uses the real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_replay import Running, SmallServer
from vllm_tiered_kv.api.cli import main

PROMPTS = """\
{"prompt": "one", "max_tokens": 50, "min_tokens": 9}
{"messages": [{"role": "user", "content": "two"}], "max_completion_tokens": 9, "tools": []}
three
"""


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(SmallServer())
    yield running
    running.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


def test_warm_sends_each_prompt_once_for_one_token(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", str(prompts), "--url", running.url, "--salt", "s"]) == 0
    assert capsys.readouterr().out == "3 of 3 prompts are warm, 0 tokens\n"
    first, second, third = running.small.asked
    assert first == {
        "prompt": "one",
        "max_tokens": 1,
        "model": "m",
        "n": 1,
        "stream": False,
        "cache_salt": "s",
    }
    assert second["max_tokens"] == 1
    assert second["tools"] == []
    assert third["prompt"] == "three"


def test_warm_with_pin_asks_the_cache_to_keep_the_prompts(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["warm", str(prompts), "--url", running.url, "--pin", "600", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failures"] == []
    assert told["prompts"] == len(running.small.asked)
    for body in running.small.asked:
        assert body["kv_transfer_params"] == {"tiered_kv": {"pin_seconds": 600.0}}


def test_warm_refused_prompt_is_named_and_the_others_are_sent(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.refuse = "two"
    assert main(["warm", str(prompts), "--url", running.url]) == 2
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("line 2, 'two': ")
    assert line.endswith("answered 400: the prompt is too long")
    assert last == "2 of 3 prompts are warm, 0 tokens"


def test_warm_without_a_server_says_so(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", str(prompts), "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
