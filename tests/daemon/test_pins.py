"""Pins of blocks that are deleted: they keep nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, block, blocks, key, wire
from tests.patience import eventually
from tests.stores.memory_blocks import put_into
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.tiers.pins import Pins
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

MIB = 1 << 20
AN_HOUR_S = 3600.0
NAME = StoreKey(bytes(40))


@pytest.fixture
def memory() -> Iterator[MemoryStore]:
    memory = MemoryStore(MIB)
    yield memory
    memory.check()
    assert not memory._index.pinned_slots()
    memory.close()


def held(memory: MemoryStore, content: int) -> PinnedSlot:
    """A new block, as one who is about to pin it has it."""
    assert put_into(memory, [PutItem(NAME, None, memoryview(block(content)))]) == [PutResult.STORED]
    (one,) = memory.hold([NAME])
    assert one is not None
    return one


def test_pin_of_deleted_block_is_refused(memory: MemoryStore) -> None:
    pins = Pins(memory, ClientLimits.of_memory(MIB))
    one = held(memory, 1)
    memory.delete([NAME])
    assert not pins.pin(one, AN_HOUR_S)
    assert (len(pins), pins.held_bytes, memory.usage().used_bytes) == (0, 0, 0)


def test_void_ends_only_pins_of_deleted_blocks(memory: MemoryStore) -> None:
    pins = Pins(memory, ClientLimits.of_memory(MIB))
    assert pins.pin(held(memory, 1), AN_HOUR_S)
    pins.void([NAME])
    assert len(pins) == 1, "it is still there"
    (reader,) = memory.hold([NAME])
    assert reader is not None
    memory.delete([NAME])
    pins.void([NAME])
    assert (len(pins), pins.held_bytes) == (0, 0)
    assert reader.view == block(1), "who reads it goes on"
    assert pins.pin(held(memory, 2), AN_HOUR_S), "put again"
    pins.void([NAME])
    assert len(pins) == 1
    memory.let_go([reader])
    assert pins.release([NAME]) == 1


@pytest.mark.slow
def test_pin_racing_delete_keeps_no_memory(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "4MiB").endpoint)
    absent = [key(n) for n in range(1000, 61_000)]  # take a while: the pin comes in between
    for start_at in range(0, 160, 8):
        names = list(blocks(8, start=start_at))
        assert client.put(blocks(8, start=start_at)) == [PutResult.STORED] * 8
        client.send(wire.Delete(KEY_BYTES, [*absent, *names]))
        client.send(wire.Pin(KEY_BYTES, names, 3_600_000))
        replies = {type(client.receive()[1]) for _ in range(2)}
        assert replies == {wire.DeleteReply, wire.PinReply}
        assert client.tiers(names) == [0] * 8
    eventually(lambda: client.stats()["pins"] == 0)
    stats = client.stats()
    assert (stats["pinned_bytes"], stats["used_bytes"]["memory"]) == (0, 0)


def test_delete_unpins_before_answer(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    client.put(blocks(8))
    names = [key(n) for n in range(8)]
    assert client.ask(wire.Pin(KEY_BYTES, names, 3_600_000)).count == 8
    assert client.ask(wire.Delete(KEY_BYTES, names[:5])).count == 5
    stats = client.stats()
    assert (stats["pins"], stats["used_bytes"]["memory"]) == (3, 3 * 4096)
