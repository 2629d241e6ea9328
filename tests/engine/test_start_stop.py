"""Started and stopped again and again in one process: nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_at_daemon import (
    address,
    engine_at,
    prompts,
    serve,
    wait_attached,
)
from tests.engine.toy_engine import ToyEngine
from tests.patience import eventually, mostly_slow
from tests.remote.daemon_facts import leases_of
from tests.soak.footprint import Footprint, settled, shared_files

pytestmark = pytest.mark.engine

ROUNDS = 12
RSS_SLACK = 16 << 20
"""Far less than the arenas of a few rounds, which are 8 MiB each."""
ARENA_BLOCKS = 65536  # of 128 bytes


def rounds(one: Callable[[], None], count: int = ROUNDS) -> None:
    """The first ones import and warm up; after them everything must come back."""
    of_other_tests = Counter(Footprint.now().ours)  # which did not close their engines
    for _ in range(3):
        one()
    baseline = Footprint.now()
    assert not Counter(baseline.ours) - of_other_tests
    for _ in range(count):
        one()
    more = settled(baseline, RSS_SLACK)
    assert not more, f"left behind: {', '.join(more)}"


def fill(toy: ToyEngine) -> None:
    toy.arena[:] = 1  # touched, so that it would be missed


def test_cpu_tier_alone(tiny_model: Path) -> None:
    def one() -> None:
        toy = ToyEngine(tiny_model, cpu_blocks=ARENA_BLOCKS)
        fill(toy)
        serve(toy, prompts(1, 2))
        toy.close()

    rounds(one)


@pytest.mark.parametrize("transport", mostly_slow(["ipc", "tcp"], 1))
@pytest.mark.parametrize("ranks", [1, 2])
def test_beside_a_daemon(
    tiny_model: Path, daemon: DaemonProcess, transport: str, ranks: int
) -> None:
    at = address(daemon, transport)

    def one() -> None:
        toy = engine_at(tiny_model, at, ranks, cpu_blocks=ARENA_BLOCKS)
        fill(toy)
        wait_attached(toy, at)
        serve(toy, prompts(2, 3))
        toy.close()

    rounds(one, 2)
    of_daemon = Footprint.now(daemon.pid)
    rounds(one)
    eventually(lambda: leases_of(daemon) == 0)
    more = settled(of_daemon, RSS_SLACK, pid=daemon.pid)
    assert not more, f"left behind in the daemon: {', '.join(more)}"


@pytest.mark.parametrize("how", ["frozen", "killed", "never there"])
def test_beside_a_daemon_that_does_not_answer(
    tiny_model: Path, daemon: DaemonProcess, folder: Path, how: str
) -> None:
    """Stores and loads of theirs are under way, or rather, are not."""
    at = f"ipc://{folder}/nobody" if how == "never there" else daemon.ipc
    timeouts = {"remote_lookup_timeout": 0.05, "remote_load_timeout": 0.2}

    def one() -> None:
        toy = engine_at(tiny_model, at, extra=timeouts)
        if how == "never there":
            serve(toy, prompts(3, 1))
        else:
            wait_attached(toy, at)
            toy.add(prompts(3, 1)[0], 2)
            toy.step()
            toy.step()
        if how == "frozen":
            daemon.freeze()
        elif how == "killed":
            daemon.kill()
        toy.add(prompts(4, 1)[0], 2)
        toy.step()
        toy.close()
        if how == "frozen":
            daemon.thaw()
        elif how == "killed":
            daemon.restart()

    rounds(one, 4)


@pytest.mark.parametrize("transport", mostly_slow(["none", "ipc", "tcp"], 2))
def test_shut_down_with_stores_loads_and_lookups_under_way(
    tiny_model: Path, daemon: DaemonProcess, transport: str
) -> None:
    """After any number of steps, as a server does when it is told to end."""
    rng = random.Random(5)
    asked = prompts(5, 6)
    remote = {"tcp": daemon.endpoint, "ipc": daemon.ipc}.get(transport)
    extra = {"step_loads": "never", **({"remote": remote} if remote else {})}

    def one() -> None:
        toy = ToyEngine(tiny_model, seed=rng.randrange(99), extra_config=extra)
        toy.copier.max_delay = 12
        if remote:
            wait_attached(toy, remote)
        serve(toy, asked[:3])
        toy.drop_gpu_cache()
        for prompt in asked:
            toy.add(prompt, 8)
        for _ in range(rng.randrange(8)):
            toy.step()
        toy.close()

    rounds(one)
    if remote:
        eventually(lambda: leases_of(daemon) == 0)


_ENGINES = """
import os, sys, time
from pathlib import Path
from tests.engine.toy_at_daemon import engine_at, prompts, wait_attached


def serve_for_ever(at):
    toy = engine_at(Path(sys.argv[1]), at, cpu_blocks=600, extra={"step_loads": "never"})
    wait_attached(toy, at)
    asked = prompts(6, 8)
    first = True
    while True:  # loads, leased blocks, reservations: until somebody kills it
        for prompt in asked:
            toy.add(prompt, 3)
        toy.run()
        if first:
            print("SERVED", os.getpid(), flush=True)
            first = False
        toy.half.index.clear()
        toy.scheduler.reset_prefix_cache()
        for prompt in asked:
            toy.add(prompt, 3)
        for _ in range(40):
            toy.step()
        for name in list(toy.requests):
            if not toy.requests[name].is_finished():
                toy.abort(name)


for at in sys.argv[2:]:  # one process after the other: vLLM is imported once
    child = os.fork()
    if not child:
        serve_for_ever(at)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_killed_engines_leave_nothing_with_their_daemon(
    tiny_model: Path, daemon: DaemonProcess, tmp_path: Path
) -> None:
    files, calm = shared_files(), leases_of(daemon)
    addresses = [daemon.endpoint, daemon.ipc, daemon.endpoint, daemon.ipc, daemon.ipc]
    complaints = tmp_path / "stderr"
    with complaints.open("wb") as log:
        engines = subprocess.Popen(
            [sys.executable, "-c", _ENGINES, str(tiny_model), *addresses],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
    before = None
    try:
        assert engines.stdout is not None
        for round_, _ in enumerate(addresses):
            while not (line := engines.stdout.readline()).startswith(b"SERVED"):
                assert line, f"the engine ended by itself: {complaints.read_text()[-4000:]}"
            time.sleep(0.15 * round_)
            os.kill(int(line.split()[1]), signal.SIGKILL)
            eventually(lambda: leases_of(daemon) == calm)
            if round_ == 1:
                before = Footprint.now(daemon.pid)
        assert engines.wait(60) == 0, complaints.read_text()[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engines.pid, signal.SIGKILL)
        engines.communicate()
    assert before is not None
    more = settled(before, RSS_SLACK, pid=daemon.pid)
    assert not more, f"left behind in the daemon: {', '.join(more)}"
    assert shared_files() <= files
    survivor = engine_at(tiny_model, daemon.ipc, cpu_blocks=600)
    wait_attached(survivor, daemon.ipc)
    serve(survivor, prompts(6, 8), 3)
    survivor.close()
