"""A short soak with a fixed seed; `make soak` runs the same for as long as one likes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.garbage import gc as zmq_garbage

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_at_daemon import engine_at, prompts, serve, wait_attached
from tests.patience import eventually
from tests.soak.connections import ZMQ_THREAD, Connections
from tests.soak.footprint import Footprint
from tests.soak.toy_soak import SoakError, ToySoak, _Episode

pytestmark = pytest.mark.engine


@pytest.fixture
def soak(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToySoak]:
    monkeypatch.delenv("TIERED_KV_STEP_LOADS", raising=False)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        running = ToySoak(tiny_model, Path(folder), seed=20)
        yield running
        running.close()


@pytest.mark.slow
def test_random_requests_and_faults_leave_nothing_behind(soak: ToySoak) -> None:
    soak.run(seconds=20, least_requests=2000)
    print(dict(soak.counts))
    for event in (
        *("answered", "abort", "sleep", "reset_tiers", "restart_running", "change_faults"),
        *("freeze", "thaw", "preemptions", "loaded_blocks", "load_failures", "evicted_blocks"),
        "engines_with_windows",
    ):
        assert soak.counts[event] > 0, f"nothing of this kind happened: {event}"
    assert not soak.counts["differing_blocks"]


def test_soak_can_fail(soak: ToySoak, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which seed and which episode, and what happened last."""
    open_engine = _Episode._open

    def without_pins(episode: _Episode) -> tuple:
        settings, toy = open_engine(episode)
        toy.half.index.unpin = lambda slots: None
        return settings, toy

    monkeypatch.setattr(_Episode, "_open", without_pins)
    with pytest.raises(SoakError, match=r"(?s)seed 20, episode 0.*the last actions.*SOAK_SEED=20"):
        soak.run(seconds=1)


def _zmq_threads() -> int:
    return Footprint.now().thread_names.count(ZMQ_THREAD)


def test_each_connection_to_a_daemon_is_accounted_for(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    """Whether a pool has opened it or a memory that is mapped, before a baseline or after it: else
    the soak takes it for a leak. And a leak is not taken for one of them."""
    if zmq_garbage.thread is None:
        zmq_garbage.start()
    foreign = _zmq_threads()
    asked = prompts(1, 6)
    toy = engine_at(tiny_model, daemon.ipc, cpu_blocks=8)
    wait_attached(toy, daemon.ipc)
    remote, worker = toy.half.remote, toy.worker.worker_half._remote
    eventually(lambda: Connections.now(remote, worker).memories == 2)  # attached at the start
    before, at_first = Connections.now(remote, worker), Footprint.now()
    serve(toy, asked)  # written, leased and read: over the memories' connections, too
    serve(toy, asked)
    now = Connections.now(remote, worker)
    assert now.memories == 2  # the scheduler's and the worker's
    assert now.contexts > before.contexts
    eventually(lambda: _zmq_threads() == foreign + Connections.now(remote, worker).contexts)
    more, later = now.more_than(before), Footprint.now()
    assert later.descriptors - at_first.descriptors <= more["descriptors"]
    assert later.memfd_maps - at_first.memfd_maps == more["memfd_maps"]
    with zmq.Context() as lost, lost.socket(zmq.DEALER):
        assert _zmq_threads() == foreign + Connections.now(remote, worker).contexts + 1
    toy.close()
