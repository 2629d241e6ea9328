"""Blocks put and read by several threads while the servers of a store fail."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any

from tests.stores.contract import chain_keys, content, item
from vllm_tiered_kv.core.store import PutResult

LATE_S = 20.0  # far beyond any deadline, and below a hang


class Traffic:
    """Threads that put and read blocks, and note bytes that are wrong and calls that are late."""

    def __init__(self, store: Any, threads: int = 3) -> None:
        self._store = store
        self._ends = threading.Event()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self.hits = self.misses = self.failed = 0
        self._threads = [
            threading.Thread(target=partial(self._guarded, seed)) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, seed: int) -> None:
        try:
            self._run(random.Random(seed))
        except BaseException as error:
            self.wrong.append(repr(error))

    def _run(self, rng: random.Random) -> None:
        keys = chain_keys("traffic", 60)
        sizes = {key: 1 + 1777 * n for n, key in enumerate(keys)}
        while not self._ends.is_set():
            some = rng.sample(keys, 8)
            begin = time.monotonic()
            if rng.random() < 0.4:
                results = self._store.put([item(key, sizes[key]) for key in some])
                self.failed += results.count(PutResult.FAILED)
            else:
                buffers = [bytearray(sizes[key]) for key in some]
                found = self._store.get(some, [memoryview(buffer) for buffer in buffers])
                self.hits += sum(found)
                self.misses += len(found) - sum(found)
                for key, buffer, hit in zip(some, buffers, found, strict=True):
                    if hit and bytes(buffer) != content(key, sizes[key]):
                        self.wrong.append("a hit with other bytes")
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
            time.sleep(0.005)

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(LATE_S)
            assert not thread.is_alive()
