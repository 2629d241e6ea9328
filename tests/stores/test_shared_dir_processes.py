"""Many processes in one shared directory, some of them killed at any instant."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stores.contract import content, read
from tests.stores.shared_dir_cases import litter, opened
from tests.stores.shared_dir_worker import CHAINS, SIZE
from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.gc import SharedDirGc

REPOSITORY = Path(__file__).parents[2]


class Crowd:
    """Processes that are started, killed and replaced."""

    def __init__(self, root: Path, logs: Path, **options: float) -> None:
        self.root = root
        self.logs = logs
        self.options = [text for name, value in options.items()
                        for text in (f"--{name}", str(value))]  # fmt: skip
        self.running: list[tuple[subprocess.Popen[bytes], str]] = []
        self.started = 0
        self.killed = 0

    def start(self, role: str) -> None:
        log = self.logs / f"{self.started} {role}"
        command = [sys.executable, "-m", "tests.stores.shared_dir_worker", role]
        command += [str(self.root), str(log), "--seed", str(self.started), *self.options]
        self.running.append((subprocess.Popen(command, cwd=REPOSITORY), role))
        self.started += 1
        deadline = time.monotonic() + 120
        while not log.exists():  # a start takes longer than most of the work
            assert time.monotonic() < deadline
            assert self.running[-1][0].poll() is None
            time.sleep(0.02)

    def kill_one(self, rng: random.Random) -> None:
        process, role = self.running.pop(rng.randrange(len(self.running)))
        if process.poll() is None:
            process.kill()
            self.killed += 1
        process.wait()
        self.start(role)

    def finish(self) -> None:
        for process, role in self.running:
            assert process.wait(120) == 0, role

    def abandon(self) -> None:
        for process, _ in self.running:
            process.kill()
            process.wait()

    def said(self, word: str) -> list[str]:
        lines = [line for log in self.logs.iterdir() for line in log.read_text().splitlines()]
        return [line.removeprefix(word).strip() for line in lines if line.startswith(word)]


def run_crowd(tmp_path: Path, roles: list[str], kills: int, **options: float) -> Crowd:
    (tmp_path / "logs").mkdir()
    crowd = Crowd(tmp_path / "shared", tmp_path / "logs", **options)
    rng = random.Random(4)
    try:
        for role in roles:
            crowd.start(role)
        for _ in range(kills):
            time.sleep(rng.uniform(0.05, 0.4))
            crowd.kill_one(rng)
        crowd.finish()
    finally:
        crowd.abandon()
    assert crowd.said("wrong") == []
    assert crowd.killed > 0
    return crowd


def check_afterwards(root: Path) -> set[StoreKey]:
    """Finishes the removals of dead collectors and checks every remaining block; returns their
    keys."""
    with opened(root) as store:
        report = SharedDirGc(store).collect(now=time.time() + 1e6)
        assert report.errors == 0
        assert litter(root) == []
        present = set()
        for chain in CHAINS:
            for key in chain:
                data = read(store, key, SIZE)
                assert data is None or data == content(key, SIZE)
                if data is not None:
                    present.add(key)
        return present


@pytest.mark.slow
def test_processes_with_kills_read_no_wrong_block(tmp_path: Path) -> None:
    """Collectors always find too much and remove what is older than the grace period; writers
    put it again at once, so that removals and publications of one key meet."""
    crowd = run_crowd(
        tmp_path,
        ["write", "write", "read", "collect", "collect"],
        kills=6,
        seconds=3,
        grace=0.5,
        capacity=20 * SIZE,
    )
    assert sum(map(int, crowd.said("removed"))) > 0
    assert sum(map(int, crowd.said("hits"))) > 0
    assert len(crowd.said("stored")) > len(set(crowd.said("stored")))  # removed and put again
    check_afterwards(tmp_path / "shared")


def test_processes_lose_nothing_within_grace_period(tmp_path: Path) -> None:
    crowd = run_crowd(
        tmp_path,
        ["write", "write", "collect", "collect"],
        kills=2,
        seconds=1,
        grace=3600,
        capacity=1,
    )
    stored = {StoreKey(bytes.fromhex(text)) for text in crowd.said("stored")}
    assert stored
    assert stored <= check_afterwards(tmp_path / "shared")
