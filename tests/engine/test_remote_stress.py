"""One engine over four tiers, each too small for the prompts, so that each of them serves some;
then the daemon is killed, and comes back."""

from __future__ import annotations

import random
import re
import urllib.request
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.oracle import BLOCK, BLOCK_BYTES, COUNT, PROMPTS, Truth, assert_same
from tests.engine.real_engine import real_engine
from tests.patience import eventually, mostly_slow
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine


def daemon_hits(daemon: DaemonProcess) -> dict[str, float]:
    """Blocks asked for and found, by the tier of the daemon they lay in."""
    page = urllib.request.urlopen(f"{daemon.http}/metrics", timeout=10).read().decode()
    pattern = r'^tiered_kv_server_hit_blocks_total\{tier="(\w+)"\} (\S+)$'
    return {tier: float(value) for tier, value in re.findall(pattern, page, re.MULTILINE)}


@pytest.mark.parametrize("transport", mostly_slow(["ipc", "tcp"], 1))
def test_every_tier_serves_its_part_and_the_daemon_may_be_killed(
    tiny_model: Path, truth: Truth, folder: Path, transport: str
) -> None:
    working_set = sum(len(ids) // BLOCK for ids in PROMPTS) * BLOCK_BYTES
    cpu, memory, ssd = 32 * BLOCK_BYTES, 96 * BLOCK_BYTES, 192 * BLOCK_BYTES
    assert max(cpu, memory, ssd) < working_set
    with DaemonProcess(
        folder,
        *("--memory", str(memory), "--http", "127.0.0.1:0"),
        *("--ssd", str(folder / "ssd"), "--ssd-space", str(ssd)),
    ) as daemon:
        remote = daemon.ipc if transport == "ipc" else daemon.endpoint
        options = {"cpu_memory": cpu, "remote": remote, "remote_lookup_timeout": 5}
        with real_engine(tiny_model, options) as engine:
            rng = random.Random(3)
            order = list(range(len(PROMPTS)))

            def ask(number: int) -> None:
                answers = engine.ask([PROMPTS[number]], COUNT)
                assert_same(answers, engine, ([truth[0][number]], truth[1]))
                engine.drop_gpu_cache()

            def is_served_again() -> bool:
                before = engine.total(names.LOADED_BLOCKS, Tier.REMOTE.value)
                for number in order:
                    ask(number)
                return engine.total(names.LOADED_BLOCKS, Tier.REMOTE.value) > before

            for _ in range(2):
                rng.shuffle(order)
                # Some again at once: what was used last is what the CPU tier still has.
                for number in [n for n in order for _ in range(rng.choice([1, 1, 2]))]:
                    ask(number)
                    assert not engine.half.has_pending_push_work()  # the daemon has it
            assert engine.total(names.LOADED_BLOCKS, Tier.CPU.value) > 0
            assert engine.total(names.LOADED_BLOCKS, Tier.REMOTE.value) > 0
            assert engine.total(names.EVICTED_BLOCKS) > 0
            hits = daemon_hits(daemon)
            assert hits["memory"] > 0
            assert hits["ssd"] > 0

            daemon.kill()
            for number in order[:6]:
                ask(number)
            daemon.restart()
            eventually(is_served_again)  # by the daemon's SSD
            engine.assert_at_rest()
