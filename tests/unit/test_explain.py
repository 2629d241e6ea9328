"""`tiered-kv explain` against a small server; tests/engine/test_serve.py uses the real vLLM."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.test_replay import Running, SmallServer
from vllm_tiered_kv.api import explain as module
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.metrics.names import MissCause

ACCOUNT = {
    "prompt_tokens": 100,
    "gpu": 32,
    "cpu": 0,
    "memory": 16,
    "ssd": 0,
    "backing": 0,
    "computed": 52,
    "missed": [
        {"cause": "evicted", "tokens": 16, "tier": "cpu", "seconds_ago": 12.4},
        {"cause": "dropped", "tokens": 32, "tier": "cpu", "seconds_ago": 3, "reason": "tier_full"},
        {"cause": "unheard_of", "tokens": 4},
    ],
}
METRICS = """\
vllm:tiered_kv_computed_tokens_total{cause="evicted",engine="0"} 600.0
vllm:tiered_kv_computed_tokens_total{cause="policy",engine="0"} 300.0
vllm:tiered_kv_computed_tokens_total{cause="policy",engine="1"} 100.0
vllm:tiered_kv_would_hit_tokens_total{capacity="2x",engine="0"} 310.0
vllm:tiered_kv_would_hit_tokens_total{capacity="4x",engine="0"} 555.0
"""


@dataclass
class Explaining(SmallServer):
    account: Any = None

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = super().answer(path, body)
        return status, {**reply, "kv_transfer_params": self.account}


@pytest.fixture
def running() -> Iterator[Running]:
    account = {"tiered_kv": {"explain": ACCOUNT}}
    running = Running(Explaining(metrics=METRICS, account=account))
    yield running
    running.close()


def test_explain_prints_sources_causes_and_what_more_memory_would_save(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "Once", "--url", running.url, "--salt", "s"]) == 0
    assert (
        capsys.readouterr().out
        == """\
100 prompt tokens
      32  from the GPU's prefix cache
      16  from the memory of a daemon
      16  computed: evicted from the CPU tier 12 s ago
      32  computed: dropped when they were to be stored (tier_full) 3 s ago
       4  computed: unheard_of
all requests since the server started: with 2x the CPU tier 31.0% fewer tokens computed, \
with 4x the CPU tier 55.5% fewer tokens computed
"""
    )
    (body,) = running.small.asked
    assert body["prompt"] == "Once"
    assert body["max_tokens"] == 1
    assert body["cache_salt"] == "s"
    assert body["kv_transfer_params"] == {"tiered_kv": {"explain": True, "store": False}}


def test_explain_names_the_daemon_that_lost_the_tokens() -> None:
    miss = {"cause": "evicted", "tokens": 8, "tier": "remote", "seconds_ago": 7.0}
    lines = module.Explanation({"prompt_tokens": 8, "missed": [miss]}, {}).lines()
    assert lines[1].endswith(
        "8  computed: evicted from the CPU tier, and lost by a daemon that had them, 7 s ago"
    )


def test_explain_json_is_the_account_of_the_server(
    running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": []}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(chat) + "\n"))
    assert main(["explain", "-", "--url", running.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {**ACCOUNT, "saved_by_capacity": {"2x": 0.31, "4x": 0.555}}
    assert running.small.asked[0]["tools"] == []


def test_explain_without_metrics_prints_the_account_alone(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.has_metrics = False
    assert main(["explain", "Once", "--url", running.url]) == 0
    assert "all requests" not in capsys.readouterr().out


def answered(account: Any) -> dict[str, Any]:
    return {"tiered_kv": {"explain": account}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        "no",
        answered({"missed": 3}),
        answered({"missed": []}),
        answered({**ACCOUNT, "gpu": "many"}),
        answered({**ACCOUNT, "missed": [3]}),
        answered({**ACCOUNT, "missed": [{"cause": "evicted"}]}),
        answered({**ACCOUNT, "missed": [{"cause": "evicted", "tokens": 1, "seconds_ago": "x"}]}),
    ],
)
def test_explain_server_without_an_account_says_what_to_check(
    running: Running, capsys: pytest.CaptureFixture[str], answer: Any
) -> None:
    running.small.account = answer
    assert main(["explain", "Once", "--url", running.url]) == 2
    assert "answered without an account" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [("  ", "the prompt is empty"), ("{no json", "not JSON"), ('{"a": 1}', 'either "prompt" or')],
)
def test_explain_mistaken_prompt_is_an_error(
    prompt: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", prompt, "--url", "http://127.0.0.1:9"]) == 2
    assert problem in capsys.readouterr().err


def test_explain_has_a_sentence_for_each_cause() -> None:
    assert set(module._CAUSES) == set(MissCause) - {MissCause.OTHER_SALT}  # no response has it
