"""One process of many in a shared directory: `python -m tests.stores.shared_dir_worker ROLE …`.

Works until it is killed or its seconds are over. What it finds wrong it writes to its log and
exits with 1. Bytes are a function of the key, so any process can judge any block.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path

from tests.stores.contract import chain_items, chain_keys, content
from vllm_tiered_kv.core.store import Durability, PutResult, StoreKey
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.gc import SharedDirGc
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore

CHAINS = [chain_keys(f"chain {at}", 6) for at in range(10)]
SIZE = 30_000
READ_CHAINS = CHAINS[:3]
NEVER = (Event.DAMAGED, Event.READ_ERROR, Event.WRITE_ERROR, Event.REMOVE_ERROR)
KEPT = (PutResult.STORED, PutResult.PRESENT)


class Worker:
    def __init__(self, settings: SharedDirSettings, log: Path, seed: int) -> None:
        self.store = SharedDirStore(settings)
        self.grace_s = settings.grace_s
        self.log = log
        self.rng = random.Random(seed)

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text + "\n")

    def write(self) -> None:
        keys = self.rng.choice(CHAINS)
        keys = keys[: self.rng.randint(1, len(keys))]
        durability = self.rng.choice([Durability.MEMORY, Durability.MEMORY, Durability.DISK])
        began = time.monotonic()
        results = self.store.put(chain_items(keys, SIZE), durability)
        for key, result in zip(keys, results, strict=True):
            assert result in KEPT, result
            if result is PutResult.STORED:
                self.say(f"stored {key.hex()}")
                self.check_published(key, began)

    def check_published(self, key: StoreKey, began: float) -> None:
        """A block published just now is present, or in the trash of a dying collector."""
        trash = f".{key.hex()}.*.trash"
        for _ in range(2):
            present = self.store.contains([key]) == [True]
            if present or any(Path(self.store.tree.shard_of(key)).glob(trash)):
                return
        if time.monotonic() - began < 0.9 * self.grace_s:
            raise AssertionError(f"{key.hex()} was deleted within its grace period")

    def read(self) -> None:
        keys = self.rng.choice(READ_CHAINS)
        buffers = [bytearray(SIZE) for _ in keys]
        found = self.store.get(keys, [memoryview(b) for b in buffers])
        for key, buffer, hit in zip(keys, buffers, found, strict=True):
            assert not hit or bytes(buffer) == content(key, SIZE), "a hit with other bytes"
        self.say(f"hits {sum(found)}")

    def collect(self) -> None:
        report = SharedDirGc(self.store).collect()
        assert report.errors == 0, report
        self.say(f"removed {report.removed_blocks}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["write", "read", "collect"])
    parser.add_argument("root")
    parser.add_argument("log", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--grace", type=float, default=1.0)
    parser.add_argument("--capacity", type=int, default=0)
    options = parser.parse_args()
    settings = SharedDirSettings(
        options.root,
        options.capacity,
        grace_s=options.grace,
        # What readers use stays warm; writers alone do not save what they find present.
        touch_interval_s=options.grace / 4 if options.role == "read" else 1000.0,
        low_watermark=0.5,
        threads=2,
    )
    worker = Worker(settings, options.log, options.seed)
    work = {"write": worker.write, "read": worker.read, "collect": worker.collect}[options.role]
    worker.say("begun")
    end = time.monotonic() + options.seconds
    try:
        for _ in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
            work()
        counts = worker.store.counts.snapshot()
        assert not any(counts[event] for event in NEVER), counts
    except AssertionError as error:
        worker.say(f"wrong: {error}")
        raise
    worker.say("done")


if __name__ == "__main__":
    main()
