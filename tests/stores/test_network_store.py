"""What the stores on a network share, without a network: which blocks a put writes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.stores.contract import chain_keys, content, item
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.network_store import NetworkStore, NewBlock

STORED, PRESENT = PutResult.STORED, PutResult.PRESENT
FAILED, DROPPED = PutResult.FAILED, PutResult.DROPPED


class FakeStore(NetworkStore):
    """Holds keys; writes of some fail, and lookups of some are not answered."""

    def __init__(self) -> None:
        super().__init__(timeout_s=1.0)
        self.held: set[StoreKey] = set()
        self.refused: set[StoreKey] = set()
        self.unanswered: set[StoreKey] = set()
        self.written: list[NewBlock] = []

    def _known(self, keys: Sequence[StoreKey], deadline: float) -> list[bool | None]:
        return [None if key in self.unanswered else key in self.held for key in keys]

    def _write_new(self, blocks: Sequence[NewBlock], deadline: float) -> list[PutResult]:
        self.written += blocks
        return [DROPPED if block.header.key in self.refused else STORED for block in blocks]

    def close(self) -> None:
        self._closed = True


def test_put_writes_verified_blocks_with_their_headers() -> None:
    store = FakeStore()
    parent, key = chain_keys("a", 2)
    assert store.put([item(key, 100, parent)]) == [STORED]
    (block,) = store.written
    assert bytes(block.payload) == content(key, 100)
    expected = (key, parent, 100, xxh3_64(block.payload))
    header = block.header
    assert (header.key, header.parent, header.payload_bytes, header.payload_checksum) == expected


def test_put_of_present_and_unanswered_blocks_writes_nothing() -> None:
    store = FakeStore()
    held, silent, new = chain_keys("a", 3)
    store.held.add(held)
    store.unanswered.add(silent)
    assert store.put([item(held), item(silent), item(new)]) == [PRESENT, FAILED, STORED]
    assert [block.header.key for block in store.written] == [new]
    assert store.failed_blocks == 1


def test_put_of_bad_keys_and_checksums_fails_and_is_counted() -> None:
    store = FakeStore()
    (key,) = chain_keys("a", 1)
    long = StoreKey(bytes(200))
    wrong = PutItem(key, None, memoryview(b"bytes"), xxh3_64(b"bytes") ^ 1)
    assert store.put([item(long), item(key, parent=long), wrong]) == [FAILED] * 3
    assert not store.written
    assert store.failed_blocks == 3


def test_put_of_one_key_twice_writes_its_first_good_block() -> None:
    store = FakeStore()
    key, refused = chain_keys("a", 2)
    store.refused.add(refused)
    wrong = PutItem(key, None, memoryview(b"bytes"), xxh3_64(b"bytes") ^ 1)
    good = [item(key), item(key, version=1), item(refused), item(refused)]
    assert store.put([wrong, *good]) == [FAILED, STORED, PRESENT, DROPPED, DROPPED]
    assert [bytes(block.payload) for block in store.written] == [
        content(key, 4096),
        content(refused, 4096),
    ]


def test_put_after_close_is_dropped() -> None:
    store = FakeStore()
    (key,) = chain_keys("a", 1)
    store.close()
    assert store.put([item(key)]) == [DROPPED]
    assert not store.written
