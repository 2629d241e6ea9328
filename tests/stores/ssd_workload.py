"""A random workload on a store, and checks of the store after the workload was killed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tests.stores.ssd_blocks import check, content, item, key, present, read
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.stores.ssd.store import SsdStore

KEYS = 120
ACKNOWLEDGE = "acknowledge"  # a put said DISK
LEAVE = "leave"  # the block is about to be evicted or deleted


class Violation(AssertionError):
    """A state was found that no crash may leave."""


class Witness(Protocol):
    def note(self, event: str, key: bytes) -> None: ...


def still_owed(before: set[bytes], events: Iterable[tuple[str, bytes]]) -> set[bytes]:
    """The blocks that were acknowledged as durable and not removed since."""
    keys = set(before)
    for event, name in events:
        if event == ACKNOWLEDGE:
            keys.add(name)
        else:
            keys.discard(name)
    return keys


def note_departures(store: SsdStore, witness: Witness) -> Counter[bytes]:
    """Reports every removed block to the witness; returns how often each key was removed since."""
    left: Counter[bytes] = Counter()
    hooks = store._index._hooks._hooks
    leave = hooks["on_leave"]
    assert leave is not None

    def noted(slot: int) -> None:
        name, _ = store._index.block_in(slot)
        left[name] += 1
        witness.note(LEAVE, name)
        leave(slot)

    hooks["on_leave"] = noted
    return left


def work(store: SsdStore, witness: Witness, left: Counter[bytes], seed: int, steps: int) -> None:
    """Puts of both kinds, reads, deletes; chains, batches, keys that come back."""
    rng = random.Random(seed)
    for _ in range(steps):
        first = rng.randrange(KEYS)
        action = rng.random()
        if action < 0.7:
            batch = range(first, min(KEYS, first + rng.randint(1, 4)))
            items = [item(n, n - 1 if n > first else None) for n in batch]
            durability = rng.choice((Durability.MEMORY, Durability.DISK))
            left_before = [left[i.key] for i in items]
            results = store.put(items, durability)
            for i, result, before in zip(items, results, left_before, strict=True):
                assert result in (PutResult.STORED, PutResult.PRESENT, PutResult.DROPPED)
                if durability is Durability.DISK and result is PutResult.STORED:
                    with store._lock:
                        # Another thread may have pushed it out by now, a third put it again.
                        if left[i.key] == before:
                            witness.note(ACKNOWLEDGE, i.key)
        elif action < 0.85:
            found = read(store, first)
            assert found in (None, content(first))
        elif action < 0.97:
            store.delete([key(first)])
        else:
            store.flush()


def inspect(folder: Path, owed_keys: set[bytes], capacity: int, strict: bool = True) -> None:
    try:
        store = SsdStore(folder, capacity, io_threads=1)
    except Exception as error:
        raise Violation(f"recovery raised {error!r}") from error
    try:
        check(store)
        reported = present(store, range(KEYS))
        lost = owed_keys - {key(n) for n in reported}
        if lost:
            raise Violation(f"{len(lost)} acknowledged blocks are lost")
        for n in reported:
            found = read(store, n)
            if found is not None and found != content(n):
                raise Violation(f"block {n} has wrong bytes")
            if found is None and (strict or key(n) in owed_keys):
                raise Violation(f"block {n} is reported and cannot be read")
        new = KEYS + 1
        assert store.put([item(new)], Durability.DISK) == [PutResult.STORED]
        assert read(store, new) == content(new)
        check(store)
    finally:
        store.close()
