"""What every BlockStore must do. `test_contract.py` runs this over all of them.

What a store with an exact capacity must do as well is in `contract_capacity.py`. A store is
registered by a `StoreCase`: how to open one in an empty folder with so many bytes, and which of
the optional promises it makes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from vllm_tiered_kv.core.store import (
    BlockStore,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    namespace_of,
)

ROOMY = 256 << 20
KIB = 1 << 10
MIB = 1 << 20
SIZES = [1, 2, 7, 255, 256, 257, 4095, 4096, 4097, 65537, MIB + 3, 4 * MIB]


@dataclass(frozen=True)
class StoreCase:
    """One implementation: `open(folder, capacity_bytes)` yields a store and closes it."""

    name: str
    open: Callable[[Path, int], AbstractContextManager[BlockStore]]
    exact_capacity: bool = False  # never above its capacity; tails leave before heads
    persistent: bool = False  # blocks put with Durability.DISK are there after it is opened again
    describes: bool = False  # is a LowerStore
    exact_usage: bool = True  # the bytes it reports are those of its blocks alone


def store_key(name: str, namespace: str = "contract", nbytes: int = 41) -> StoreKey:
    """A key of this length, at least 17, made of a name."""
    digest = random.Random(name).randbytes(nbytes - 16)
    return StoreKey(random.Random(namespace).randbytes(16) + digest)


def chain_keys(name: str, count: int, namespace: str = "contract") -> list[StoreKey]:
    return [store_key(f"{name}/{at}", namespace) for at in range(count)]


def content(key: StoreKey, nbytes: int, version: int = 0) -> bytes:
    """The bytes that belong to a key."""
    return random.Random(key + bytes([version])).randbytes(nbytes)


def item(
    key: StoreKey,
    nbytes: int = 4 * KIB,
    parent: StoreKey | None = None,
    version: int = 0,
    checksum: int | None = None,
) -> PutItem:
    return PutItem(key, parent, memoryview(content(key, nbytes, version)), checksum)


def chain_items(keys: Sequence[StoreKey], nbytes: int = 4 * KIB) -> list[PutItem]:
    parents = [None, *keys[:-1]]
    return [item(key, nbytes, parent) for key, parent in zip(keys, parents, strict=True)]


def read(store: BlockStore, key: StoreKey, nbytes: int) -> bytes | None:
    buffer = bytearray(nbytes)
    return bytes(buffer) if store.get([key], [memoryview(buffer)]) == [True] else None


def assert_holds(store: BlockStore, key: StoreKey, nbytes: int, version: int = 0) -> None:
    assert store.contains([key]) == [True]
    assert read(store, key, nbytes) == content(key, nbytes, version)


def assert_lacks(store: BlockStore, key: StoreKey, nbytes: int = 4 * KIB) -> None:
    assert store.contains([key]) == [False]
    assert store.match([key]) == 0
    assert read(store, key, nbytes) is None


class StoreContract:
    """The tests of the contract. Derive a class named Test… and provide a fixture `case`."""

    @pytest.fixture
    def store(self, case: StoreCase, tmp_path: Path) -> Iterator[BlockStore]:
        with case.open(tmp_path, ROOMY) as opened:
            yield opened

    def test_store_empty_batch_returns_nothing(self, store: BlockStore) -> None:
        assert store.match([]) == 0
        assert store.contains([]) == []
        assert store.get([], []) == []
        assert store.put([]) == []
        assert store.delete([]) == 0
        assert store.usage().blocks == 0

    def test_get_of_unknown_key_is_a_miss(self, store: BlockStore) -> None:
        assert_lacks(store, store_key("a"))
        assert store.delete([store_key("a")]) == 0

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_get_after_put_returns_the_bytes(self, store: BlockStore, nbytes: int) -> None:
        key = store_key("a")
        assert store.put([item(key, nbytes)]) == [PutResult.STORED]
        assert_holds(store, key, nbytes)
        assert_holds(store, key, nbytes)

    def test_put_blocks_of_many_lengths_are_all_readable(self, store: BlockStore) -> None:
        keys = [store_key(f"size {nbytes}") for nbytes in SIZES]
        items = [item(key, nbytes) for key, nbytes in zip(keys, SIZES, strict=True)]
        assert store.put(items) == [PutResult.STORED] * len(SIZES)
        buffers = [bytearray(nbytes) for nbytes in SIZES]
        assert store.get(keys, [memoryview(b) for b in buffers]) == [True] * len(SIZES)
        assert [bytes(b) for b in buffers] == [bytes(one.payload) for one in items]

    @pytest.mark.parametrize("nbytes", [17, 40, 41, 63, 64])
    def test_put_keys_of_any_length_are_stored(self, store: BlockStore, nbytes: int) -> None:
        key = store_key("a", nbytes=nbytes)
        assert len(key) == nbytes
        assert store.put([item(key)]) == [PutResult.STORED]
        assert_holds(store, key, 4 * KIB)

    def test_key_that_is_a_prefix_of_another_is_distinct(self, store: BlockStore) -> None:
        long = store_key("a", nbytes=64)
        for key in (long, StoreKey(long[:63]), StoreKey(long[:17]), StoreKey(long[:40] + bytes(1))):
            assert_lacks(store, key)
            assert store.put([item(key)]) == [PutResult.STORED]
            assert_holds(store, key, 4 * KIB)

    def test_namespaces_with_equal_keys_are_separate(self, store: BlockStore) -> None:
        one, two = store_key("a", "one"), store_key("a", "two")
        assert one[16:] == two[16:]
        assert namespace_of(one) != namespace_of(two)
        store.put([item(one)])
        assert_lacks(store, two)
        assert store.put([item(two, version=1)]) == [PutResult.STORED]
        assert_holds(store, one, 4 * KIB)
        assert_holds(store, two, 4 * KIB, version=1)
        assert store.delete([one]) == 1
        assert_holds(store, two, 4 * KIB, version=1)

    def test_match_stops_at_the_first_gap(self, store: BlockStore) -> None:
        keys = chain_keys("a", 300)
        assert set(store.put(chain_items(keys, 64))) == {PutResult.STORED}
        assert store.match(keys) == 300
        assert store.match(keys[100:]) == 200
        assert store.match([*keys, store_key("b")]) == 300
        assert store.match([store_key("b"), *keys]) == 0
        store.delete([keys[270], keys[40]])
        assert store.match(keys) == 40
        assert store.match(keys[41:]) == 229
        store.put([item(keys[40], 64, keys[39])])
        assert store.match(keys) == 270

    def test_get_batch_mixes_hits_and_misses(self, store: BlockStore) -> None:
        keys = chain_keys("a", 9)
        store.put([item(key) for key in keys[::2]])
        here = [at % 2 == 0 for at in range(9)]
        assert store.contains(keys) == here
        buffers = [bytearray(4 * KIB) for _ in keys]
        assert store.get(keys, [memoryview(b) for b in buffers]) == here
        for key, buffer in list(zip(keys, buffers, strict=True))[::2]:
            assert bytes(buffer) == content(key, 4 * KIB)

    def test_get_duplicate_key_is_read_twice(self, store: BlockStore) -> None:
        key = store_key("a")
        store.put([item(key)])
        assert store.contains([key, store_key("b"), key]) == [True, False, True]
        buffers = [bytearray(4 * KIB) for _ in range(2)]
        assert store.get([key, key], [memoryview(b) for b in buffers]) == [True, True]
        assert [bytes(b) for b in buffers] == [content(key, 4 * KIB)] * 2
        assert store.delete([key, key]) == 1

    def test_put_duplicate_key_in_batch_keeps_the_first(self, store: BlockStore) -> None:
        key = store_key("a")
        batch = [item(key), item(store_key("b")), item(key, version=1)]
        assert store.put(batch) == [PutResult.STORED, PutResult.STORED, PutResult.PRESENT]
        assert_holds(store, key, 4 * KIB)
        assert store.usage().blocks == 2

    def test_put_of_present_key_changes_nothing(self, store: BlockStore) -> None:
        key = store_key("a")
        store.put([item(key)])
        for nbytes in (4 * KIB, 100, 8 * KIB):
            assert store.put([item(key, nbytes, version=1)]) == [PutResult.PRESENT]
            assert_holds(store, key, 4 * KIB)
        assert store.usage().blocks == 1

    def test_put_with_right_checksum_is_stored(self, store: BlockStore) -> None:
        key = store_key("a")
        checksum = xxhash.xxh3_64_intdigest(content(key, 4 * KIB))
        assert store.put([item(key, checksum=checksum)]) == [PutResult.STORED]
        assert_holds(store, key, 4 * KIB)

    @pytest.mark.parametrize("flip", [1, 1 << 63])
    def test_put_with_wrong_checksum_fails_and_stores_nothing(
        self, store: BlockStore, flip: int
    ) -> None:
        key, other = store_key("a"), store_key("b")
        checksum = xxhash.xxh3_64_intdigest(content(key, 4 * KIB))
        wrong = item(key, checksum=checksum ^ flip)
        assert store.put([wrong, item(other)]) == [PutResult.FAILED, PutResult.STORED]
        assert_lacks(store, key)
        assert_holds(store, other, 4 * KIB)
        assert store.put([item(key, checksum=checksum)]) == [PutResult.STORED]
        assert_holds(store, key, 4 * KIB)

    def test_get_into_buffer_of_other_length_is_a_miss(self, store: BlockStore) -> None:
        key = store_key("a")
        store.put([item(key, 5000)])
        for nbytes in (1, 4999, 5001, 9000):
            assert read(store, key, nbytes) is None
        assert_holds(store, key, 5000)

    def test_get_writes_only_the_buffer(self, store: BlockStore) -> None:
        key = store_key("a")
        store.put([item(key, 1000)])
        around = bytearray(b"\xa5" * 3000)
        assert store.get([key], [memoryview(around)[1001:2001]]) == [True]
        assert bytes(around) == b"\xa5" * 1001 + content(key, 1000) + b"\xa5" * 999

    def test_store_shares_no_memory_with_callers(self, store: BlockStore) -> None:
        key = store_key("a")
        source = bytearray(content(key, 4 * KIB))
        store.put([PutItem(key, None, memoryview(source))])
        source[:] = bytes(4 * KIB)
        buffer = bytearray(4 * KIB)
        store.get([key], [memoryview(buffer)])
        buffer[:] = bytes(4 * KIB)
        assert_holds(store, key, 4 * KIB)

    def test_delete_removes_block_until_it_is_put_again(self, store: BlockStore) -> None:
        keys = chain_keys("a", 5)
        store.put(chain_items(keys))
        assert store.delete([keys[1], store_key("b"), keys[3]]) == 2
        assert store.contains(keys) == [True, False, True, False, True]
        assert_lacks(store, keys[1])
        assert store.put([item(keys[1], 100, version=1)]) == [PutResult.STORED]
        assert_holds(store, keys[1], 100, version=1)

    def test_put_with_missing_parent_is_stored(self, store: BlockStore) -> None:
        key, child = store_key("a"), store_key("a child")
        assert store.put([item(key, parent=store_key("nowhere"))]) == [PutResult.STORED]
        assert store.put([item(child, parent=key)]) == [PutResult.STORED]
        assert store.delete([key]) == 1
        assert_holds(store, child, 4 * KIB)
        assert store.put([item(key, parent=store_key("nowhere"))]) == [PutResult.STORED]
        assert store.match([key, child]) == 2

    def test_chain_that_branches_and_grows_is_matched(self, store: BlockStore) -> None:
        stem, left, right = chain_keys("s", 4), chain_keys("l", 3), chain_keys("r", 3)
        for branch in (stem, [*stem, *left], [*stem, *right]):
            results = store.put(chain_items(branch))
            assert results[-1] is PutResult.STORED
        assert store.match([*stem, *left]) == store.match([*stem, *right]) == 7
        for key in (*stem, *left, *right):
            assert_holds(store, key, 4 * KIB)

    @pytest.mark.parametrize("durability", list(Durability))
    def test_put_with_any_durability_is_readable(
        self, store: BlockStore, durability: Durability
    ) -> None:
        key = store_key("a")
        assert store.put([item(key)], durability) == [PutResult.STORED]
        if durability is Durability.RECEIVED:
            store.flush()  # before it, the block may be on its way
        assert_holds(store, key, 4 * KIB)
        assert store.put([item(key, version=1)], durability) == [PutResult.PRESENT]
        assert_holds(store, key, 4 * KIB)

    def test_usage_follows_puts_and_deletes(self, case: StoreCase, store: BlockStore) -> None:
        keys = chain_keys("a", 10)
        empty = store.usage()
        assert empty.blocks == 0
        store.put(chain_items(keys, 8 * KIB))
        store.flush()
        full = store.usage()
        assert full.blocks == 10
        assert not case.exact_usage or full.used_bytes >= 80 * KIB + empty.used_bytes
        assert full.capacity_bytes == 0 or full.used_bytes <= full.capacity_bytes
        store.delete(keys[5:])
        half = store.usage()
        assert half.blocks == 5
        assert not case.exact_usage or half.used_bytes < full.used_bytes
        store.delete(keys)
        assert store.usage().blocks == 0
        assert not case.exact_usage or store.usage() == empty

    def test_flush_and_close_are_idempotent(self, store: BlockStore) -> None:
        store.flush()
        store.put([item(store_key("a"))])
        store.flush()
        store.flush()
        store.close()
        store.close()

    def test_describe_returns_facts_of_a_block(self, case: StoreCase, store: BlockStore) -> None:
        if not case.describes:
            pytest.skip("does not describe its blocks")
        head, tail = store_key("a"), store_key("b")
        store.put([item(head, 100), item(tail, 5000, head)])
        facts = store.describe([tail, store_key("c"), head])  # type: ignore[attr-defined]
        assert facts[1] is None
        for fact, key, nbytes, parent in (
            (facts[0], tail, 5000, head),
            (facts[2], head, 100, None),
        ):
            assert (fact.nbytes, fact.parent) == (nbytes, parent)
            assert fact.checksum == xxhash.xxh3_64_intdigest(content(key, nbytes))

    @pytest.mark.parametrize("seed", range(3))
    def test_random_calls_agree_with_a_dictionary(self, store: BlockStore, seed: int) -> None:
        rng = random.Random(seed)
        keys = chain_keys("a", 24)
        model: dict[StoreKey, bytes] = {}
        for _ in range(150):
            some = rng.choices(keys, k=rng.randint(0, 6))
            action = rng.randrange(4)
            if action == 0:
                items = [item(key, rng.choice((1, 100, 5000)), version=rng.randrange(3))
                         for key in some]  # fmt: skip
                expected = []
                for one in items:
                    expected.append(PutResult.PRESENT if one.key in model else PutResult.STORED)
                    model.setdefault(one.key, bytes(one.payload))
                assert store.put(items) == expected
            elif action == 1:
                present = {key for key in some if model.pop(key, None) is not None}
                assert store.delete(some) == len(present)
            elif action == 2:
                buffers = [bytearray(len(model.get(key, b"x"))) for key in some]
                found = store.get(some, [memoryview(b) for b in buffers])
                assert found == [key in model for key in some]
                for key, buffer, hit in zip(some, buffers, found, strict=True):
                    assert not hit or bytes(buffer) == model[key]
            else:
                assert store.contains(keys) == [key in model for key in keys]
                gaps = [at for at, key in enumerate(keys) if key not in model]
                assert store.match(keys) == (gaps[0] if gaps else len(keys))
        assert store.usage().blocks == len(model)

    def test_many_threads_at_once(self, store: BlockStore) -> None:
        keys = chain_keys("a", 32)
        sizes = {key: 1 + 977 * at for at, key in enumerate(keys)}
        errors: list[str] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                some = rng.sample(keys, 4)
                action = rng.random()
                if action < 0.45:
                    results = store.put([item(key, sizes[key]) for key in some])
                    if PutResult.FAILED in results:  # deleted meanwhile is DROPPED
                        errors.append(f"put: {results}")
                elif action < 0.9:
                    buffers = [bytearray(sizes[key]) for key in some]
                    found = store.get(some, [memoryview(b) for b in buffers])
                    for key, buffer, hit in zip(some, buffers, found, strict=True):
                        if hit and bytes(buffer) != content(key, sizes[key]):
                            errors.append("a hit with other bytes")
                else:
                    store.delete(some[:1])
                    store.match(keys)

        def guarded(seed: int) -> None:
            try:
                work(seed)
            except BaseException as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert errors == []
        store.put([item(key, sizes[key]) for key in keys])
        for key in keys:
            assert_holds(store, key, sizes[key])
        assert store.usage().blocks == len(keys)

    def test_blocks_on_disk_outlive_the_store(self, case: StoreCase, tmp_path: Path) -> None:
        if not case.persistent:
            pytest.skip("keeps nothing beyond its process")
        keys = chain_keys("a", 5)
        with case.open(tmp_path, ROOMY) as store:
            assert set(store.put(chain_items(keys), Durability.DISK)) == {PutResult.STORED}
            store.delete(keys[4:])
        with case.open(tmp_path, ROOMY) as store:
            assert store.match(keys) == 4
            assert store.usage().blocks == 4
            for key in keys[:4]:
                assert_holds(store, key, 4 * KIB)
            assert_lacks(store, keys[4])
