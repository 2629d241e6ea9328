"""Engines in child processes: what the parent sees when a child fails. Needs no engine.

A broken `vllm` first on the child's path stands for an engine that does not start.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.engine_process import EngineFailed, EngineGroup, EngineProcess, EngineSpec


def spec(folder: Path, code: str) -> EngineSpec:
    (folder / "vllm.py").write_text(code)
    return EngineSpec("broken", environment={"PYTHONPATH": str(folder)})


def test_engine_that_raises_says_so_with_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('about to fail')\nraise RuntimeError('no device')"
    with EngineProcess(spec(tmp_path, code), tmp_path) as engine:
        with pytest.raises(EngineFailed, match="raised RuntimeError: no device") as raised:
            engine.ask([[1, 2, 3]])
    assert "about to fail" in raised.value.log
    assert "broken" in str(raised.value)
    assert not alive(engine.pid)


def test_engine_that_dies_is_noticed(tmp_path: Path) -> None:
    code = "import os\nos.kill(os.getpid(), 9)"
    with EngineProcess(spec(tmp_path, code)) as engine:
        with pytest.raises(EngineFailed, match=r"died \(exit code -9\)"):
            engine.wait_ready()


def test_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    engine = EngineProcess(spec(tmp_path, "import time\ntime.sleep(1000)"))
    with pytest.raises(EngineFailed, match="did not answer"):
        engine.wait_ready(0.2)
    engine.kill()
    assert not alive(engine.pid)
    with pytest.raises(EngineFailed, match=f"exit code {-signal.SIGKILL}"):
        engine.settle()


def test_nothing_is_left_of_a_log_without_a_place(tmp_path: Path) -> None:
    with EngineProcess(spec(tmp_path, "raise RuntimeError")) as engine:
        folder = engine.log.parent
        assert folder.exists()
    assert not folder.exists()


def test_group_goes_on_without_those_that_fail(tmp_path: Path) -> None:
    code = "raise RuntimeError('not today')"
    with EngineGroup(lambda name: EngineSpec(name, environment=env), tmp_path) as group:
        env = spec(tmp_path, code).environment
        group.start(["one", "two"])
        assert group.running == {}
        assert list(group.described) == ["one", "two"]
        for found in group.described.values():
            assert found["failed"] == "raised RuntimeError: not today (exit code 1)"
        with group.drop_failed():
            raise EngineFailed("one", "died later", "")
        assert group.described["one"]["failed"] == "died later"
        group.start(["one", "two"])  # neither is tried again
        assert group.running == {}


def alive(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True
