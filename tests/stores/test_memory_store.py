"""The memory tier beyond the contract: reservations, generations and eviction."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.stores import memory_blocks
from tests.stores.memory_blocks import MemoryBlocks, fill
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores import memory as memory_module
from vllm_tiered_kv.stores.memory import PinnedSlot

MIB = 1 << 20
SIZE = 4096


def key(n: int) -> StoreKey:
    return StoreKey(bytes(16) + n.to_bytes(8, "little"))


def item(n: int, parent: int | None = None, size: int = SIZE) -> PutItem:
    above = None if parent is None else key(parent)
    return PutItem(key(n), above, memoryview(bytes([n % 251]) * size))


@pytest.fixture
def store() -> Iterator[MemoryBlocks]:
    made = MemoryBlocks(MIB)
    yield made
    made.check()
    made.close()


def reserve(store: MemoryBlocks, n: int) -> PinnedSlot:
    slot = store.reserve(key(n), None, SIZE)
    assert isinstance(slot, PinnedSlot)
    return slot


def test_generation_is_odd_while_slot_is_written(store: MemoryBlocks) -> None:
    seen = set()
    for n in range(6):
        slot = reserve(store, n)
        assert slot.generation % 2 == 1
        assert store.arena.generation(slot.offset) == slot.generation
        if n % 2:
            # Given up half-written: whoever was lent it before must not take it for a whole block.
            store.abort(slot)
        else:
            assert store.commit(slot, 0) if n == 2 else store.seal([slot]) == [PutResult.STORED]
            (held,) = store.hold([key(n)])
            assert held is not None
            assert held.generation % 2 == 0
            assert store.arena.generation(slot.offset) == held.generation
            store.let_go([held])
            store.delete([key(n)])
        seen.add(slot.offset)
    assert len(seen) == 1  # it was one slot all the time


def test_generation_changes_when_slot_size_of_slab_changes(
    store: MemoryBlocks,
) -> None:
    """Only the first page of a block is asked for its generation, and what was lent earlier may
    have begun at any other."""
    numbers = range(8)  # a slab of them
    assert store.put([item(n) for n in numbers]) == [PutResult.STORED] * 8
    lent = store.hold([key(n) for n in numbers])
    store.let_go([block for block in lent if block is not None])
    store.delete([key(n) for n in numbers])
    assert store.put([item(8, size=8 * SIZE)]) == [PutResult.STORED]
    (large,) = store.hold([key(8)])
    assert large is not None
    for block in lent:
        assert block is not None
        assert large.offset <= block.offset < large.offset + large.nbytes
        assert store.arena.generation(block.offset) != block.generation
    store.let_go([large])


def test_put_block_is_unreadable_until_copy_has_ended(
    store: MemoryBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    really_copy = memory_blocks.copy_and_hash

    def slow_copy(into: list[memoryview], sources: list[memoryview]) -> list[int]:
        copying.set()
        assert go_on.wait(30)
        return really_copy(into, sources)

    monkeypatch.setattr(memory_blocks, "copy_and_hash", slow_copy)
    writer = threading.Thread(target=store.put, args=([item(1)],))
    writer.start()
    try:
        assert copying.wait(30)
        assert store.lookup(key(1)) is Lookup.PENDING
        assert store.contains([key(1)]) == [False]
        assert store.get([key(1)], [memoryview(bytearray(SIZE))]) == [False]
        assert store.match([key(1)]) == 0
    finally:
        go_on.set()
        writer.join()
    assert store.contains([key(1)]) == [True]


def test_delete_while_block_is_written_keeps_it_out(store: MemoryBlocks) -> None:
    slot = reserve(store, 1)
    assert store.delete([key(1)]) == 0  # nobody could read it
    assert store.seal([slot]) == [PutResult.DROPPED]
    assert store.contains([key(1)]) == [False]
    assert store.usage().used_bytes == 0


def hold(store: MemoryBlocks, n: int) -> PinnedSlot:
    """Pins a block, which is no use of it."""
    (held,) = store.hold([key(n)], touch=False)
    assert held is not None
    return held


@pytest.mark.parametrize("use", ["hold", "visit", "touch", "delete"])
def test_block_is_written_until_it_is_used_or_leaves(store: MemoryBlocks, use: str) -> None:
    store.put([item(1), item(2)])
    held = [hold(store, 1), hold(store, 2)]
    assert not store.is_written(key(1))
    store.mark_written(held)
    assert store.visit([key(1)], lambda blocks: False) is False
    assert store.is_written(key(1))
    if use == "hold":
        store.let_go([block for block in store.hold([key(1)]) if block is not None])
    elif use == "visit":
        assert store.visit([key(1)], lambda blocks: True)
    elif use == "touch":
        store.touch(held[:1])
    else:
        store.delete([key(1)])
        store.put([item(1)])
        store.mark_written(held[:1])  # the write of the deleted block says nothing of the new one
    assert not store.is_written(key(1))
    assert store.is_written(key(2))
    store.let_go(held)


def test_fill_with_failing_copy_frees_its_slots(store: MemoryBlocks) -> None:
    slots = store.reserve_chain([(key(n), None, SIZE) for n in range(3)])
    wrong = [item(0), item(1, size=SIZE - 1), item(2)]
    with pytest.raises(NativeError):
        fill(store, slots, wrong)
    assert store.usage().used_bytes == 0
    assert [store.lookup(key(n)) for n in range(3)] == [Lookup.MISS] * 3
    assert store.put([item(n) for n in range(3)]) == [PutResult.STORED] * 3


@pytest.mark.parametrize("dropped", [[], [9]], ids=["in runs", "one by one"])
def test_reserve_chain_that_fails_half_way_frees_its_slots(dropped: list[int]) -> None:
    """The blocks of one length are reserved when those of the next cannot be."""

    def fail(block: bytes) -> bool:
        raise OSError("as if")

    store = MemoryBlocks(MIB, may_evict=fail)
    slab = MIB // 32
    assert store.put([item(n, size=slab) for n in range(10, 41)]) == [PutResult.STORED] * 31
    before = store.usage()
    store.turn_away([key(n) for n in dropped])
    with pytest.raises(OSError, match="as if"):
        store.reserve_chain([(key(1), None, SIZE), (key(2), None, slab), (key(3), key(9), SIZE)])
    assert store.usage() == before
    assert store.put([item(1)]) == [PutResult.STORED]
    store.check()
    store.close()


def test_put_blocks_of_all_kinds_in_one_batch(store: MemoryBlocks) -> None:
    other = StoreKey(b"\1" * 16 + bytes(8))
    assert store.put([item(2)]) == [PutResult.STORED]
    store.turn_away([key(5)])
    message = [
        item(1),
        item(2),  # is here
        item(3, parent=2),
        item(3, parent=2),  # is being written
        item(4, size=2 * SIZE),
        PutItem(other, None, memoryview(b"other")),
        item(5),  # finds room again
        item(6, size=MIB),  # never fits
        item(7),
    ]
    results = store.put(message)
    assert [result.name for result in results] == [
        "STORED",
        "PRESENT",
        "STORED",
        "PRESENT",
        "STORED",
        "STORED",
        "STORED",
        "DROPPED",
        "STORED",
    ]
    held = store.hold([one.key for one in message])
    for one, block in zip(message, held, strict=True):
        assert (None if block is None else bytes(block.view)) == (
            None if one.key == key(6) else bytes(one.payload)
        )
    offsets = {block.offset for block in held if block is not None}
    assert len(offsets) == 7  # nobody shares a place
    store.let_go(block for block in held if block is not None)
    assert store.put([item(8, parent=5), item(9, parent=6)]) == [
        PutResult.STORED,
        PutResult.DROPPED,
    ]


def test_put_drops_successors_of_a_dropped_block(store: MemoryBlocks) -> None:
    """Also when there is room again, because no lookup could reach it without its head."""
    store.turn_away([key(1)])
    assert store.put([item(2, parent=1), item(3, parent=2)]) == [PutResult.DROPPED] * 2
    elsewhere = store.reserve_chain([(key(2), key(1), SIZE)], lambda parent: parent == key(1))
    assert isinstance(elsewhere[0], PinnedSlot)  # another tier has the head
    store.abort(elsewhere[0])
    assert store.put([item(1), item(2, parent=1)]) == [PutResult.STORED] * 2


def test_seal_publishes_the_bytes_of_the_writer(store: MemoryBlocks) -> None:
    slots = [reserve(store, n) for n in range(3)]
    for n, slot in enumerate(slots):
        slot.view[:] = bytes([n]) * SIZE
    store.delete([key(1)])  # meanwhile
    assert store.seal(slots) == [PutResult.STORED, PutResult.DROPPED, PutResult.STORED]
    held = store.hold([key(n) for n in range(3)])
    sums = [None if block is None else block.checksum for block in held]
    assert sums == [xxh3_64(bytes(SIZE)), None, xxh3_64(b"\2" * SIZE)]
    store.let_go(block for block in held if block is not None)


def test_seal_error_with_one_block_spares_the_others(store: MemoryBlocks) -> None:
    slots = [reserve(store, n) for n in range(3)]
    store.abort(slots[1])
    assert store.seal(slots) == [PutResult.STORED, PutResult.FAILED, PutResult.STORED]
    assert store.contains([key(n) for n in range(3)]) == [True, False, True]
    slots = [reserve(store, n) for n in range(3, 6)]
    store.abort(slots[1])
    damaged = [item(n)._replace(checksum=0) for n in range(3, 6)]
    assert fill(store, slots, damaged) == [PutResult.FAILED] * 3
    assert [store.lookup(key(n)) for n in range(3, 6)] == [Lookup.MISS] * 3
    store.check()


def test_seal_with_failing_hash_frees_its_slots(
    store: MemoryBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> list[int]:
        raise MemoryError

    monkeypatch.setattr(memory_module, "hash_buffers", fail)
    slots = [reserve(store, n) for n in range(3)]
    with pytest.raises(MemoryError):
        store.seal(slots)
    assert [store.lookup(key(n)) for n in range(3)] == [Lookup.MISS] * 3
    assert store.usage().used_bytes == 0


# ---- making room --------------------------------------------------------------------------------


class Full:
    """A full store, and the blocks evicted from it."""

    def __init__(self, *first: PutItem) -> None:
        self.left: list[bytes] = []
        self.store = MemoryBlocks(128 * SIZE, on_evict=lambda name, _: self.left.append(name))
        fillers = [item(1000 + n) for n in range(128 - len(first))]
        assert set(self.store.put([*first, *fillers])) == {PutResult.STORED}
        assert not self.left


def test_put_of_two_chains_evicts_neither_head() -> None:
    full = Full(item(9), item(2), item(1))
    assert full.store.put([item(11, 1), item(12, 2)]) == [PutResult.STORED] * 2
    assert full.left == [key(9), key(1000)]
    assert full.store.match([key(2), key(12)]) == 2


@pytest.mark.parametrize(
    "others",
    [
        [item(2000 + n, 11, 20 * SIZE) for n in range(30)],
        [item(2000 + n, 999) for n in range(30)],
    ],
    ids=["too-large", "behind-one-that-was-turned-away"],
)
def test_reserve_evicts_nothing_for_a_refused_block(others: list[PutItem]) -> None:
    full = Full(item(9))
    full.store.turn_away([key(999)])
    assert full.store.put([item(11), *others]) == [PutResult.STORED] + [PutResult.DROPPED] * 30
    assert full.left == [key(9)]


def test_reserve_chain_makes_room_at_once() -> None:
    full = Full(item(9), item(8))
    chain = [item(11), item(12, 11), item(13, 12)]
    assert full.store.put(chain) == [PutResult.STORED] * 3
    assert full.left == [key(9), key(8), key(1000)]
    assert full.store.match([key(n) for n in (11, 12, 13)]) == 3


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_reserve_chain_searches_room_once_per_kind(eviction: str) -> None:
    """Each search traverses the whole index while others wait for the lock."""
    asked: list[bytes] = []

    def refuse(name: bytes) -> bool:
        asked.append(name)
        return False

    store = MemoryBlocks(MIB, eviction, may_evict=refuse)
    count = MIB // SIZE
    assert store.put([item(n) for n in range(count)]) == [PutResult.STORED] * count
    new = [item(count + n) for n in range(50)]  # unrelated: none follows another
    old = item(0)
    results = store.put([*new, old, item(1000, size=2 * SIZE), item(1001, size=2 * SIZE)])
    assert results == [*[PutResult.DROPPED] * 50, PutResult.PRESENT, *[PutResult.DROPPED] * 2]
    assert len(asked) <= 2 * count, "once for each kind"
    store.check()
    store.close()
