"""A process that uses the store is killed at hundreds of random instants, and always recovered.

SIGKILL leaves the page cache as it is: this is about the order of writes and about what a process
may leave half done. What a loss of power adds is in `test_ssd_power_loss.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.patience import mostly_slow
from tests.stores.ssd_blocks import SMALL
from tests.stores.ssd_workload import inspect, note_departures, still_owed, work
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy
from vllm_tiered_kv.stores.ssd.store import SsdStore


class EventFile:
    """A log that survives its writer, because each line is one system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    def note(self, event: str, key: bytes) -> None:
        os.write(self._fd, f"{event} {key.hex()}\n".encode())

    def events(self) -> list[tuple[str, bytes]]:
        os.close(self._fd)
        lines = (line.split() for line in self._path.read_text().splitlines())
        return [(event, bytes.fromhex(key)) for event, key in lines]


def use_until_killed(folder: Path, events: EventFile, fsync: FsyncPolicy, seed: int) -> None:
    """Runs in the child; never returns."""

    def endless(number: int) -> None:
        try:
            work(store, events, left, seed + number, 1 << 30)
        finally:
            os._exit(1)

    try:
        store = SsdStore(folder, SMALL, fsync=fsync, io_threads=2)
        left = note_departures(store, events)
        for number in range(2):
            threading.Thread(target=endless, args=(number,)).start()
        time.sleep(60)
    finally:
        os._exit(1)


@pytest.mark.parametrize("fsync", list(FsyncPolicy))
@pytest.mark.parametrize("slowest", [0.02, 0.15])  # seconds: during recovery, or well into the work
@pytest.mark.parametrize("least", mostly_slow([8, 80], 1), ids=["few", "many"])
def test_store_killed_at_any_instant_recovers(
    tmp_path: Path, fsync: FsyncPolicy, slowest: float, least: int
) -> None:
    rng = random.Random(slowest)
    folder, copy = tmp_path / "store", tmp_path / "copy"
    owed: set[bytes] = set()
    acknowledged = kills = 0
    # On a slow machine a child does less before it dies, and it takes more of them.
    while kills < least or (slowest > 0.1 and acknowledged <= 10 * least):
        assert kills < 10 * least
        kills += 1
        events = EventFile(tmp_path / "events")
        seed = rng.randrange(1 << 30)
        child = os.fork()
        if not child:
            use_until_killed(folder, events, fsync, seed)
        time.sleep(rng.uniform(0, slowest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        seen = events.events()
        owed = still_owed(owed, seen)
        acknowledged += len(seen)
        if folder.is_dir():
            shutil.copytree(folder, copy)  # the next child finds what this one left
            inspect(copy, owed, SMALL)
            shutil.rmtree(copy)
