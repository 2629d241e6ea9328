"""Real engines in processes of their own that share blocks, and outlive each other's death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.engine_apart import told_in
from tests.engine.remote_run import BLOCK, LENGTHS
from tests.stores.mooncake_servers import mooncake_servers

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WHOLE = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def run_and_kill(
    model: Path, remote: str, stored_blocks: int = 0, count: int = len(LENGTHS), ranks: int = 1
) -> dict:
    """An engine that answers the first prompts and is then killed with everything it started."""
    options = {
        "cpu_memory": "16MiB",
        "remote": remote,
        "remote_lookup_timeout": 10,  # a busy machine
        "load_policy": "always",
        "portable_shards": 2,
    }
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engine.remote_run",
                str(model),
                json.dumps(options),
                *map(str, (stored_blocks, count, ranks)),
            ],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 300
            while True:
                log.seek(0)
                text = log.read()
                found = told_in(text)
                if found is not None:
                    return found
                assert process.poll() is None, text[-4000:]
                assert time.monotonic() < deadline, text[-4000:]
                time.sleep(0.2)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_engines_share_a_daemon_across_their_sizes_their_deaths_and_its_own(
    random_model: Path, folder: Path
) -> None:
    with DaemonProcess(
        folder,
        *("--memory", "64MiB"),
        *("--ssd", str(folder / "ssd"), "--ssd-space", "128MiB"),
    ) as daemon:
        few = 3
        blocks = [length // BLOCK for length in LENGTHS]
        first = run_and_kill(random_model, daemon.endpoint, sum(blocks[:few]), few)
        assert [answer["cached"] for answer in first["answers"]] == [0] * few
        assert len({tuple(answer["tokens"]) for answer in first["answers"]}) == few

        # The second maps the daemon's memory. Each of its two ranks holds one of two KV heads.
        new = sum(blocks[few:])
        second = run_and_kill(random_model, daemon.ipc, new, ranks=2)
        cached = [answer["cached"] for answer in second["answers"]]
        assert cached == WHOLE[:few] + [0] * (len(LENGTHS) - few)
        _assert_alike(second, first)
        assert "shares the memory" in daemon.logs
        assert f"model {random_model}" in daemon.logs
        assert second["counters"]["hit_tokens[remote]"] == sum(WHOLE[:few])
        assert second["counters"].get("load_failures[remote]", 0) == 0

        # The third has one rank again and finds what both stored.
        daemon.terminate()
        daemon.restart()
        third = run_and_kill(random_model, daemon.endpoint)
        assert [answer["cached"] for answer in third["answers"]] == WHOLE
        _assert_alike(third, first)
        _assert_alike(third, second)
        assert third["counters"]["loaded_blocks[remote]"] == sum(WHOLE) // BLOCK
        assert "recovered" in daemon.logs


def test_engines_share_a_mooncake_store_without_a_daemon(random_model: Path) -> None:
    with mooncake_servers() as servers:
        blocks = sum(length // BLOCK for length in LENGTHS)
        first = run_and_kill(random_model, servers.url, blocks, ranks=2)
        assert [answer["cached"] for answer in first["answers"]] == [0] * len(LENGTHS)
        second = run_and_kill(random_model, servers.url)
        assert [answer["cached"] for answer in second["answers"]] == WHOLE
        _assert_alike(second, first)
        assert second["counters"].get("load_failures[remote]", 0) == 0


def _assert_alike(one: dict, other: dict) -> None:
    """The same tokens, as far as both were asked. Ranks of another number add in another order, so
    that logprobs differ in their last digits."""
    for answer, expected in zip(one["answers"], other["answers"], strict=False):
        assert answer["tokens"] == expected["tokens"]
        assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
