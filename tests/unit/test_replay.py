"""`tiered-kv replay` against a small server that caches answers by salt and can corrupt them.
tests/engine/test_serve.py uses the real vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.openai_server import OpenAIServer
from vllm_tiered_kv.metrics import names

WORDS = ["alpha", "beta", "gamma", "delta"]
BLOCKS = 3  # blocks that one answer from the cache loads


@dataclass
class SmallServer:
    """Generates words from the prompt; returns cached answers, corrupted if `spoil` is set."""

    models: list[str] = field(default_factory=lambda: ["m"])
    instead_of_models: tuple[int, Any] | None = None
    keeps: bool = True
    has_metrics: bool = True
    can_empty: bool = True
    spoil: str = ""  # how a cached answer is corrupted: "word", "tie", "logprob", "short"
    refuse: str = ""  # prompts with this word are refused
    refusal_bytes: int | None = None  # Content-Length of an error reply, if wrong
    answers: int | None = None  # prompts to answer before the server dies
    kept: set[tuple[str, str]] = field(default_factory=set)
    loaded: int = 0
    metrics: str = ""  # further ones
    emptied: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_died(self) -> bool:
        return self.answers is not None and len(self.asked) >= self.answers

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/reset_prefix_cache":
            self.emptied += 1
            return (200, {"success": True}) if self.can_empty else (404, {"detail": "Not Found"})
        if body["model"] not in self.models:
            return 404, {"error": {"message": "no such model"}}
        content = json.dumps(body.get("prompt", body.get("messages")))
        if self.refuse and self.refuse in content:
            return 400, {"error": {"message": "the prompt is too long"}}
        key = (body.get("cache_salt", ""), content)
        with self.lock:
            self.asked.append(body)
            from_cache = self.keeps and key in self.kept
            self.kept.add(key)
            self.loaded += BLOCKS * from_cache
        words = [WORDS[(len(content) + n) % len(WORDS)] for n in range(body["max_tokens"])]
        tokens = [(word, -0.1, {word: -0.1, "omega": -0.15, "zeta": -3.0}) for word in words]
        if from_cache and self.spoil == "word":
            tokens[1] = ("zeta", -0.2, {"zeta": -0.2})
        elif from_cache and self.spoil == "tie":
            tokens[1] = ("omega", -0.1, {"omega": -0.1})
        elif from_cache and self.spoil == "logprob":
            tokens[1] = (tokens[1][0], -0.9, tokens[1][2])
        elif from_cache and self.spoil == "short":
            tokens.pop()
        return 200, _chat(tokens) if "messages" in body else _completion(tokens)


def _completion(tokens: list[tuple[str, float, dict[str, float]]]) -> dict[str, Any]:
    logprobs = {
        "tokens": [token for token, _, _ in tokens],
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": [others for _, _, others in tokens],
    }
    text = " ".join(token for token, _, _ in tokens)
    return {"choices": [{"text": text, "logprobs": logprobs}]}


def _chat(tokens: list[tuple[str, float, dict[str, float]]]) -> dict[str, Any]:
    content = [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": t, "logprob": p} for t, p in others.items()],
        }
        for token, logprob, others in tokens
    ]
    message = {"role": "assistant", "content": " ".join(token for token, _, _ in tokens)}
    return {
        "choices": [{"message": message, "logprobs": {"content": content}}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 7}},
    }


class _Handler(BaseHTTPRequestHandler):
    small: SmallServer

    def do_GET(self) -> None:
        if self.small.has_died:
            self.close_connection = True
        elif self.path == "/v1/models" and self.small.instead_of_models:
            self._send(*self.small.instead_of_models)
        elif self.path == "/v1/models":
            self._send(200, {"data": [{"id": name} for name in self.small.models]})
        elif self.path == "/metrics" and self.small.has_metrics:
            counter = names.LOADED_BLOCKS.exposed_name
            text = f'# TYPE x\n{counter}_total{{tier="cpu"}} {self.small.loaded}.0\n'
            text += self.small.metrics
            self._send(200, text + f'{counter}_created{{tier="cpu"}} 1.7e9\n')
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.small.has_died:
            self._send(*self.small.answer(self.path, body))

    def _send(self, status: int, content: Any) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        promised = self.small.refusal_bytes if status >= 400 else None
        self.send_header("Content-Length", str(promised or len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class Running:
    def __init__(self, small: SmallServer) -> None:
        self.small = small
        handler = type("Handler", (_Handler,), {"small": small})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(SmallServer())
    yield running
    running.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two two"}]}\n'
        'plain text\n{"prompt": [1, 2, 3], "max_tokens": 2}\n'
    )
    return path


def replay(running: Running, prompts: Path, *flags: str) -> int:
    return main(["replay", str(prompts), "--url", running.url, "--max-tokens", "4", *flags])


def test_replay_equal_answers_exit_zero(
    running: Running, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert replay(running, prompts, "--json", str(out)) == 0
    shown = capsys.readouterr()
    assert "4 prompts: 4 equal" in shown.out
    assert "12 blocks were loaded" in shown.out
    assert "WARNING" not in shown.out
    assert "second: 4 of 4" in shown.err
    report = json.loads(out.read_text())
    assert report["status"] == 0
    assert report["counted"]["loaded_blocks"] == 12
    assert [prompt["line"] for prompt in report["prompts"]] == [1, 3, 4, 5]
    assert report["prompts"][1]["answers"]["second"]["cached_tokens"] == 7
    assert running.small.emptied == 1

    rounds = [running.small.asked[start : start + 4] for start in (0, 4, 8)]
    salts = [body["cache_salt"] for body in rounds[0]]
    assert len(set(salts)) == 4  # all different
    assert all("cache_salt" not in body for body in rounds[1] + rounds[2])
    assert all(body["temperature"] == 0 for body in running.small.asked)
    assert [body["max_tokens"] for body in rounds[0]] == [4, 4, 4, 2]


@pytest.mark.parametrize(
    ("spoil", "status", "told"),
    [
        ("word", 1, "different one\n    second round: token 1 differs, logprob gap 2.9"),
        ("short", 1, "different one\n    second round: token 3 differs, logprob gap inf"),
        ("logprob", 1, "drift     one\n    second round: logprob of token 1 is 0.8 off"),
        ("tie", 0, "tie       one\n    second round: token 1 differs, logprob gap 0.05"),
    ],
)
def test_replay_different_answers_are_reported(
    running: Running,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: str,
    status: int,
    told: str,
) -> None:
    running.small.spoil = spoil
    assert replay(running, prompts) == status
    assert f"line 1: {told}" in capsys.readouterr().out


def test_replay_zero_tie_reports_different(running: Running, prompts: Path) -> None:
    running.small.spoil = "tie"
    assert replay(running, prompts, "--tie", "0.01") == 1


def test_replay_large_drift_limit_accepts_drift(running: Running, prompts: Path) -> None:
    running.small.spoil = "logprob"
    assert replay(running, prompts, "--drift", "1") == 0


def test_replay_without_loads_exits_nothing_loaded(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str], quick: None
) -> None:
    running.small.keeps = False
    running.small.can_empty = False
    assert replay(running, prompts) == 3
    shown = capsys.readouterr()
    assert "NO BLOCK WAS LOADED" in shown.out
    assert "GPU prefix cache" in shown.err
    assert replay(running, prompts, "--allow-no-loads") == 0


def test_replay_without_metrics_exits_nothing_loaded(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.has_metrics = False
    assert replay(running, prompts) == 3
    assert "no /metrics" in capsys.readouterr().out


def test_replay_keep_gpu_cache_does_not_empty_it(running: Running, prompts: Path) -> None:
    assert replay(running, prompts, "--keep-gpu-cache") == 0
    assert running.small.emptied == 0


def test_replay_salt_is_sent_in_cached_rounds(running: Running, prompts: Path) -> None:
    assert replay(running, prompts, "--salt", "tenant") == 0
    assert [body["cache_salt"] for body in running.small.asked[4:]] == ["tenant"] * 8


def test_replay_baseline_server_computes(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Running(SmallServer(models=["m"]))
    try:
        assert replay(running, prompts, "--baseline-url", other.url, "--concurrency", "3") == 0
        assert len(other.small.asked) == 4
        assert len(running.small.asked) == 8
    finally:
        other.close()


def test_replay_failed_request_is_reported(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.refuse = "plain"
    assert replay(running, prompts) == 2
    out = capsys.readouterr().out
    assert "line 4" in out
    assert "computed round failed" in out
    assert "400: the prompt is too long" in out
    assert "1 failed" in out
    assert "line 4: failed" in out


@pytest.mark.parametrize("round_", [1, 2])
def test_replay_dead_server_still_reports(
    running: Running,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    round_: int,
) -> None:
    """The report still contains the earlier answers, especially the different ones."""
    out = tmp_path / "report.json"
    running.small.answers = 4 * round_ + 1
    running.small.spoil = "word"
    if round_ == 1:
        running.small.kept.add(("", '"one"'))
    assert replay(running, prompts, "--json", str(out)) == 1
    shown = capsys.readouterr().out
    assert "4 prompts: 1 different, 3 failed" in shown
    assert "cannot be reached" in shown
    assert json.loads(out.read_text())["counted"] is None


def test_replay_truncated_error_reply_fails_one_prompt(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.refuse = "plain"
    running.small.refusal_bytes = 1000
    assert replay(running, prompts) == 2
    assert "4 prompts: 3 equal, 1 failed" in capsys.readouterr().out


def test_replay_error_page_is_one_line(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running.small.instead_of_models = 404, "<html>\n  <h1>Not\n Found</h1>\n</html>\n"
    assert replay(running, prompts) == 2
    assert "/v1/models answered 404: <html> <h1>Not Found</h1> </html>\n" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [[], {"data": None}, {"data": [7]}, {"data": 7}, 7, None])
def test_replay_other_kind_of_server_is_error(
    running: Running, prompts: Path, capsys: pytest.CaptureFixture[str], answer: object
) -> None:
    running.small.instead_of_models = 200, answer
    assert replay(running, prompts) == 2
    assert "does not list its models; is it an OpenAI-compatible server?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "flags", "told"),
    [
        (["m"], ["--model", "other"], "does not serve model 'other'; it serves m"),
        (["a", "b"], [], "serves 2 models; choose one with --model (a, b)"),
        ([], [], "serves 0 models"),
    ],
)
def test_replay_model_choice_errors(
    running: Running,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    models: list[str],
    flags: list[str],
    told: str,
) -> None:
    running.small.models = models
    assert replay(running, prompts, *flags) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"text": "a"}\n', 'line 1: expected either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}\n', "line 1: expected either"),
        ('{"messages": []}\n', 'line 1: "messages" must be'),
        ('{"prompt": 7}\n', 'line 1: "prompt" must be'),
    ],
)
def test_replay_bad_prompt_file_names_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    assert main(["replay", str(path)]) == 2
    assert told in capsys.readouterr().err


def test_replay_unreachable_server_is_error(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(prompts), "--url", "http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert main(["replay", str(prompts), "--url", "127.0.0.1:1"]) == 2
    assert "is not a URL like" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_replay_help_shows_details(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in ("cache_salt", "--tie", "exit status", "messages", "proves nothing"):
        assert word in shown
    with pytest.raises(SystemExit) as ended:
        main(["replay"])
    assert ended.value.code == 2


def test_replay_invalid_counts_are_refused(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("x", "0", "-1", "1.5"):
        with pytest.raises(SystemExit):
            main(["replay", str(prompts), f"--max-tokens={wrong}"])
        assert "expected a whole number of at least 1" in capsys.readouterr().err


def test_replay_api_key_is_sent(running: Running, prompts: Path, tmp_path: Path) -> None:
    server = OpenAIServer(running.url + "/v1/", 5, "secret")
    assert server.url == running.url
    assert server._headers["Authorization"] == "Bearer secret"
    assert replay(running, prompts, "--api-key-file", str(tmp_path / "none")) == 2


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay is shortened, because the counters never change here."""
    monkeypatch.setattr("vllm_tiered_kv.api.replay._COUNTER_DELAY_S", 0.1)


@pytest.mark.parametrize("content", [b"sk-1\nsk-2\n", b"", b"\xff\xfe", b"sk-1\x00"])
def test_replay_invalid_api_key_is_not_shown(
    running: Running,
    prompts: Path,
    tmp_path: Path,
    content: bytes,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert main(["replay", str(prompts), "--url", running.url, "--api-key-file", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert "sk-" not in said


def test_replay_unwritable_report_fails_before_requests(
    running: Running, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "no" / "report.json"
    assert main(["replay", str(prompts), "--url", running.url, "--json", str(report)]) == 2
    assert "the report cannot be written" in capsys.readouterr().err
    assert running.small.asked == []


def test_replay_old_report_is_kept_until_replaced(prompts: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ask = ["replay", str(prompts), "--url", "http://127.0.0.1:1", "--json", str(report)]
    assert main(ask) == 2
    assert not report.exists(), "an empty report was left behind"
    report.write_text("old")
    assert main(ask) == 2
    assert report.read_text() == "old"


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_replay_invalid_urls_are_refused(
    url: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(prompts), "--url", url]) == 2
    assert "is not a URL like" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tie", "--drift", "--timeout"])
@pytest.mark.parametrize("number", ["-1", "nan", "inf", "much"])
def test_replay_invalid_gaps_and_seconds_are_refused(flag: str, number: str, prompts: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(prompts), f"{flag}={number}"])
    assert ended.value.code == 2


def test_cli_mistyped_command_gets_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replya", "prompts.jsonl"])
    assert ended.value.code == 2
    assert "did you mean replay?" in capsys.readouterr().err
