"""`tiered-kv up` and `tiered-kv bench` as a user runs them, with a real server and a daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from examples.smollm2 import ensure_model
from tests.daemon.up_process import Up
from tests.patience import eventually
from tests.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
START_S = 300.0


def bench_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vllm_tiered_kv.api.cli", "bench", *arguments]


def bench(*arguments: str) -> str:
    done = subprocess.run(
        bench_command(*arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_up_serves_a_model_whose_prompts_come_from_each_tier_and_after_a_restart_from_the_ssd(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # as servers do
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("TIERED_KV_LOAD_POLICY", "always")
    port, daemon = free_port(), f"ipc://{folder}/kv.sock"
    args = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "block_size": 32}
    content = {
        "daemon": {
            "memory": "256MiB",
            "ssd": str(folder / "ssd"),
            "ssd_space": "256MiB",
            "listen": daemon,
            "http": f"127.0.0.1:{free_port()}",
        },
        "servers": [
            {
                "model": str(ensure_model()),
                "name": "chat",
                "port": port,
                "args": args,
                "cache": {"cpu_memory": "128MiB"},
                "env": {"VLLM_SERVER_DEV_MODE": 1},
            }
        ],
    }
    file = folder / "deploy.yml"
    file.write_text(yaml.safe_dump(content))
    run = Up(file)
    try:
        eventually(lambda: "all is ready" in run.text, START_S)
        url, prompts = f"http://127.0.0.1:{port}", str(folder / "prompts.jsonl")
        bench("inputs", prompts, "--length", "600", "--count", "2", "--url", url)
        shown = bench("stress", prompts, "--url", url).splitlines()
        assert [line.split()[2::2] for line in shown[1:]] == [["computed"], ["gpu", "computed"]]
        speed = subprocess.Popen(
            bench_command(
                "speed", prompts, "--url", url, "--daemon", daemon, "--restarts=1", "--json"
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert speed.stderr is not None
        while "restart the server now" not in (line := speed.stderr.readline()):
            assert line, "it ended"
        run.signal()
        assert run.end() == 0
        run = Up(file)
        output, _ = speed.communicate(timeout=START_S)
        assert speed.returncode == 0
        rows = json.loads(output)["rows"]
        assert [(row["row"], row["served_by"]) for row in rows] == [
            ("first", "computed"),
            ("GPU", "gpu"),
            ("CPU tier", "cpu"),
            ("daemon", "remote(memory)"),
            ("after restart 1", "remote(ssd)"),
            ("GPU", "gpu"),
        ]
        assert all(abs(row["prompt_tokens"] - 600) <= 7 for row in rows)
        assert rows[0]["tokens"]["computed"] == rows[0]["prompt_tokens"]
    finally:
        run.signal()
        status = run.end()
        print(run.text)
    assert status == 0
    assert run.wait_for("chat ended with status 0") < run.wait_for("stopping daemon")
    assert "everything is written" in run.text


def test_chat_example_gets_its_second_answer_from_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    done = subprocess.run(
        [sys.executable, "examples/chat.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "tokens came from the daemon, and the answer is equal" in done.stdout
