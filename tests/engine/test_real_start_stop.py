"""A real vLLM engine, started and stopped again and again in one process: nothing is left of it.

What a toy engine leaves, over more rounds and after more kinds of ends, is seen in test_start_stop.
Memory that a GPU pins is counted in tests/gpu.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient
from tests.engine.real_engine import RealEngine, real_engine
from tests.engine.toy_at_daemon import address
from tests.patience import eventually
from tests.soak.footprint import Footprint, settled
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.connector.worker.worker_half import WorkerHalf
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

BLOCK = 32
LENGTHS = (420, 200, 70)
BLOCKS = sum((length - 1) // BLOCK for length in LENGTHS)
"""As many as can be loaded: vLLM always computes the last token of a prompt."""

ARENA_BYTES = 1 << 30
"""Larger than all else in this process, to be told by that: the CPU tier's memory has no name. Most
of it is never touched."""

# Nothing is subtracted for vLLM: alone (options=None, 0.32.0 on a CPU) it leaves as many threads
# after its sixth start as after its first, no descriptor and no shared memory. Its heap grows by 2
# to 3 MiB with every start, and by as much with us.
RSS_SLACK = 32 << 20
KEPT_BY_LIBRARIES = {"threads": 64, "descriptors": 64}
"""What vLLM and torch may start and open once, the first time."""

THREADS = {"tiered-kv-load", "tiered-kv-lookup", "tiered-kv-fetch", "tiered-kv-send"}
THREADS_OF_SHARING = {"tiered-kv-local"}

LEASED = (
    *("attached_processes", "leases", "leased_bytes", "pins", "pinned_bytes"),
    *("reply_bytes", "put_bytes"),
)
"""What a daemon holds for engines. Pins end `remote_load_timeout` after the lookup that made them,
whatever becomes of the engine. Sessions are left out: zmq does not say when a socket has gone, so
one stays on the books until a newer one needs its place, or for a day. The sockets themselves are
counted, as descriptors of the daemon."""


@dataclass(frozen=True)
class Held:
    """What this process holds of the system."""

    all: Footprint
    arena_bytes: int

    @classmethod
    def now(cls) -> Held:
        return cls(Footprint.now(), _arena_bytes())

    @property
    def ways_out(self) -> Counter[str]:
        """Descriptors of sockets, and of memory without a name."""
        files = (name for name in self.all.open_files if name.startswith(("socket:", "/memfd:")))
        return Counter(name.split(":")[0] for name in files)

    def has_arena_beside(self, before: Held) -> bool:
        return self.arena_bytes >= before.arena_bytes + ARENA_BYTES // 2

    def beyond(self, before: Held, is_first: bool) -> list[str]:
        """In words, what there is more of than before. Whatever libraries keep after a first time,
        of ours there is nothing to be kept."""
        if is_first:
            more = self.all.beyond(before.all, rss_slack=1 << 40, accounted=KEPT_BY_LIBRARIES)
        else:
            more = self.all.beyond(before.all, RSS_SLACK)
            more += [f"{count} new {name}" for name, count in self.all.news(before.all).items()]
        more += [f"{count} new {kind}" for kind, count in (self.ways_out - before.ways_out).items()]
        if self.has_arena_beside(before):
            more.append("the memory of the CPU tier")
        return more


def _arena_bytes() -> int:
    """Of mappings without a name that are as large as the CPU tier's."""
    found = 0
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            span, mode, _, _, _, *name = line.split()
            start, stop = (int(end, 16) for end in span.split("-"))
            if not name and mode.startswith("rw") and stop - start >= ARENA_BYTES // 2:
                found += stop - start
    return found


def options(at: str) -> dict[str, Any]:
    return {
        "cpu_memory": ARENA_BYTES,
        "remote": at,
        "remote_lookup_timeout": 30,  # a busy machine
        "remote_load_timeout": 10,
        # Helpers of copies belong to the process, and start when a copy is first large enough.
        "copy_threads": 1,
    }


def serve(engine: RealEngine, at: str, seed: int) -> None:
    """Stores; loads from the engine's own memory, then from the daemon's."""
    rng = random.Random(seed)
    asked = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    engine.settle()  # nobody has asked yet: the worker opens its way to the daemon
    assert engine.worker_half._remote is not None
    if at.startswith("ipc://"):
        regions = engine.worker_half._remote.regions
        eventually(lambda: regions.of(at))
    cold = engine.ask(asked)
    engine.settle()
    for tier in (Tier.CPU.value, Tier.REMOTE.value):
        engine.drop_gpu_cache()
        warm = engine.ask(asked)
        assert [(a.tokens, a.logprobs) for a in warm] == [(a.tokens, a.logprobs) for a in cold]
        assert engine.total(names.LOADED_BLOCKS, tier) == BLOCKS
        engine.half.index.clear()  # from now on only the daemon has them
    assert not engine.total(names.LOAD_FAILURES, Tier.REMOTE.value)


def assert_would_be_missed(held: Held, before: Held, is_sharing: bool) -> None:
    found = {name.rstrip("-_0123456789") for name in held.all.ours}
    assert found >= (THREADS | THREADS_OF_SHARING if is_sharing else THREADS)
    opened = {"socket", "/memfd"} if is_sharing else {"socket"}
    assert set(held.ways_out - before.ways_out) == opened
    assert (held.all.memfd_maps > before.all.memfd_maps) == is_sharing
    assert held.has_arena_beside(before)


def assert_gone(before: Held, is_first: bool) -> None:
    end = time.monotonic() + 30
    while (more := Held.now().beyond(before, is_first)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not more, f"left behind: {', '.join(more)}"


def lent_by(daemon: DaemonProcess) -> dict[str, int]:
    """What a daemon holds for engines, without zeros; asked by somebody who only looks."""
    with RawClient(daemon.endpoint) as client:
        client.hello(block_bytes=())
        facts = client.stats()
    return {name: facts[name] for name in LEASED if facts[name]}


@pytest.mark.parametrize(
    ("transport", "rounds"),
    [
        ("ipc", 0),
        pytest.param("ipc", 3, marks=pytest.mark.slow),
        pytest.param("tcp", 1, marks=pytest.mark.slow),
    ],
    ids=["ipc-once", "ipc", "tcp"],
)
def test_real_engine_beside_a_daemon(
    tiny_model: Path, daemon: DaemonProcess, transport: str, rounds: int
) -> None:
    """After one round that imports and warms up."""
    at = address(daemon, transport)
    is_sharing = transport == "ipc"

    def one(seed: int, before: Held) -> None:
        with real_engine(tiny_model, options(at)) as engine:
            serve(engine, at, seed)
            assert_would_be_missed(Held.now(), before, is_sharing)
            assert ("attached_processes" in lent_by(daemon)) == is_sharing
            worker = engine.worker_half
            kept = (engine.half, worker, worker.arena, worker._copier, worker._remote)
            engine.core.shutdown()
            assert_gone(before, is_first=True)  # closed, that is: nothing of it is garbage yet
            del kept

    untouched = Held.now()  # other tests of this process may have left engines open
    one(0, untouched)
    assert_gone(untouched, is_first=True)
    eventually(lambda: "attached_processes" not in lent_by(daemon))
    baseline, of_daemon = Held.now(), Footprint.now(daemon.pid)
    for number in range(rounds):
        one(number + 1, baseline)
        assert_gone(baseline, is_first=False)
        # Threads of its pools start when several are needed at a time, and are bounded.
        more = settled(of_daemon, RSS_SLACK, pid=daemon.pid, accounted={"threads": 16})
        assert not more, f"left behind in the daemon: {', '.join(more)}"
    eventually(lambda: not lent_by(daemon))


class PlantedError(Exception):
    pass


def fails_after(what: Callable[..., Any], seen: list[Held]) -> Callable[..., Any]:
    """As that, with all it does, and then an error."""

    def fail(*args: Any, **kwargs: Any) -> None:
        what(*args, **kwargs)
        seen.append(Held.now())
        raise PlantedError

    return fail


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (WorkerHalf, "register_kv_caches"),  # before there is a scheduler
        (TieredKVConnector, "build_prom_metrics"),  # the last of a start: both halves stand
    ],
    ids=["caches", "metrics"],
)
@pytest.mark.slow
def test_start_that_fails(
    tiny_model: Path,
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    """Nobody tells the worker of an engine that did not start to end, where that was to be in this
    very process; `real_engine` ends its connector as the worker would."""
    seen: list[Held] = []
    monkeypatch.setattr(owner, name, fails_after(getattr(owner, name), seen))

    def fail_to_start() -> None:
        with pytest.raises(PlantedError), real_engine(tiny_model, options(daemon.ipc)):
            pass

    untouched = Held.now()
    fail_to_start()
    assert "tiered-kv-load" in seen[0].all.ours
    assert seen[0].has_arena_beside(untouched)
    assert_gone(untouched, is_first=True)
    baseline = Held.now()
    fail_to_start()
    assert len(seen) == 2
    assert_gone(baseline, is_first=False)
    assert not lent_by(daemon)
