"""Received blocks on their way into memory: nobody sees half a block, and no slot is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import blocks, key, wire
from tests.patience import eventually
from tests.stores.memory_blocks import get_from
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.cpu import FillPool, xxh3_64
from vllm_tiered_kv.server.tiers.fills import Fills
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore, TierSettings

MIB = 1 << 20
SIZE = 64 << 10
PATIENCE_S = 60.0


def item(n: int, checksum: int | None = None) -> PutItem:
    payload = memoryview(n.to_bytes(4, "little") * (SIZE // 4))
    return PutItem(StoreKey(n.to_bytes(24, "big")), None, payload, checksum)


class Loop:
    """Collects when it is told to."""

    def __init__(self) -> None:
        self.turn: Callable[[], None] = lambda: None
        self.results: list[list[PutResult]] = []
        self.copied = 0

    def watch(self, descriptor: int, collect: Callable[[], None]) -> None:
        assert os.fstat(descriptor)
        self.turn = collect

    def put(
        self,
        store: TieredStore,
        items: list[PutItem],
        durability: Durability = Durability.MEMORY,
    ) -> None:
        def copied() -> None:
            self.copied += 1

        store.put(items, durability, self.results.append, copied)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def store(loop: Loop) -> Iterator[TieredStore]:
    tiered = TieredStore(16 * MIB, None, None, Recorder(), watch=loop.watch)
    yield tiered
    tiered.memory.check()
    tiered.close()


def test_put_block_is_unreadable_until_collected(store: TieredStore, loop: Loop) -> None:
    one = item(1, xxh3_64(item(1).payload))
    loop.put(store, [one])
    store._fills._pool.wait()  # copied, and nobody was told
    assert store.memory.lookup(one.key) is Lookup.PENDING
    assert store.memory.contains([one.key]) == [False]
    assert loop.results == []
    assert loop.copied == 0
    loop.turn()
    assert loop.results == [[PutResult.STORED]]
    assert loop.copied == 1
    into = bytearray(SIZE)
    assert get_from(store.memory, [one.key], [memoryview(into)]) == [True]
    assert into == one.payload


def test_put_wrong_checksum_rejects_only_that_block(store: TieredStore, loop: Loop) -> None:
    loop.put(store, [item(1), item(2, checksum=1), item(3)])
    store._fills.settle()
    assert loop.results == [[PutResult.STORED, PutResult.FAILED, PutResult.STORED]]
    assert store.memory.usage().used_bytes == 2 * SIZE


def test_delete_during_copy_stays_deleted(store: TieredStore, loop: Loop) -> None:
    loop.put(store, [item(1)])
    store.memory.delete([item(1).key])
    loop.turn()
    store._fills.settle()
    assert loop.results == [[PutResult.DROPPED]]
    assert store.memory.usage().used_bytes == 0


def test_put_that_cannot_reserve_leaks_nothing(loop: Loop) -> None:
    """Otherwise network memory and slots would leak."""

    def quota_of(namespace: bytes) -> None:
        if namespace[0]:
            raise MemoryError("as if")

    store = TieredStore(16 * MIB, None, None, Recorder(), TierSettings(quota_of=quota_of))
    strange = item(1)._replace(key=StoreKey(b"\1" * 24))
    with pytest.raises(MemoryError):
        loop.put(store, [item(1), strange])
    assert loop.copied == 1
    assert store.memory.usage().used_bytes == 0
    loop.put(store, [item(1)])
    assert loop.results == [[PutResult.STORED]]
    store.memory.check()
    store.close()


def test_put_that_cannot_start_copies_frees_slots(
    store: TieredStore, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("as if")

    with monkeypatch.context() as patched:
        patched.setattr(FillPool, "start", fail)
        loop.put(store, [item(1), item(2)])
    assert loop.results == [[PutResult.FAILED] * 2]
    assert loop.copied == 1
    assert store.memory.usage().used_bytes == 0
    loop.put(store, [item(1), item(2)])
    store._fills.settle()
    assert loop.results[1:] == [[PutResult.STORED] * 2]


@pytest.mark.parametrize("count", [1, 100])
def test_flush_waits_for_running_copies(store: TieredStore, loop: Loop, count: int) -> None:
    """Even if no event loop runs, and for puts that are finished in the pool."""
    flushed = threading.Event()
    loop.put(store, [item(n) for n in range(count)])
    store.flush(lambda failed: flushed.set())
    assert flushed.wait(PATIENCE_S)
    assert loop.results == [[PutResult.STORED] * count]


@pytest.mark.parametrize("count", [1, 100])
def test_drain_waits_for_running_copies(store: TieredStore, loop: Loop, count: int) -> None:
    loop.put(store, [item(n) for n in range(count)])
    assert store.drain() == []
    assert loop.results == [[PutResult.STORED] * count]
    assert loop.copied == 1


def test_fills_callback_error_does_not_affect_others() -> None:
    loop, told = Loop(), []
    fills = Fills(loop.watch)

    def fail(checksums: list[int]) -> None:
        raise ValueError("as if")

    for filled in (fail, told.append):
        fills.start([memoryview(bytearray(8))], [memoryview(bytes(8))], filled)
    fills.settle()
    assert told == [[xxh3_64(bytes(8))]]


def put_request(wanted: dict[bytes, bytes]) -> wire.Put:
    return wire.Put(
        len(next(iter(wanted))),
        list(wanted),
        [None] * len(wanted),
        [len(block) for block in wanted.values()],
        [xxh3_64(block) for block in wanted.values()],
        Durability.MEMORY,
    )


def test_client_leaving_during_puts_leaks_nothing(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "128MiB")
    size, count = MIB, 8
    with connect(daemon.endpoint, block_bytes=[size]) as leaving:
        for first in range(0, 4 * count, count):
            wanted = blocks(count, size, first)
            leaving.send(put_request(wanted), list(wanted.values()))
        leaving.receive()  # the first has arrived, others may be on their way
    with connect(daemon.endpoint, block_bytes=[size]) as client:

        def found_if_that_is_all() -> dict[bytes, bytes]:
            """What was sent may still arrive after its sender has gone."""
            found = client.get([key(n) for n in range(4 * count)], stream=True)
            stats = client.stats()
            is_all = stats["used_bytes"]["memory"] == len(found) * size
            return found if is_all and not stats["put_bytes"] else {}

        found = eventually(found_if_that_is_all)
        assert found.items() <= blocks(4 * count, size).items()
        rest = {k: v for k, v in blocks(4 * count, size).items() if k not in found}
        assert not rest or set(client.put(rest)) <= {PutResult.STORED, PutResult.PRESENT}
        assert client.get(list(rest) or [key(0)], stream=True).items() >= rest.items()


def test_daemon_stopped_during_puts_stops_in_order(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "128MiB")
    with connect(daemon.endpoint, block_bytes=[MIB]) as client:
        for first in range(0, 32, 8):
            wanted = blocks(8, MIB, first)
            client.send(put_request(wanted), list(wanted.values()))
        client.receive()  # others have arrived, or may just be arriving
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert "Traceback" not in daemon.logs
    assert "without a reply" not in daemon.logs
