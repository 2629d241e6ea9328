"""The shared directory on disk: format, refused folders and settings, damaged files."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from tests.stores.contract import assert_holds, assert_lacks, chain_keys, content, item, store_key
from tests.stores.shared_dir_cases import as_ordinary_user, file_of, litter, opened
from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.stores.block_format import (
    HEADER_BYTES,
    BlockHeader,
    decode_header,
    encode_header,
)
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import FOLDER, MARKER

SIZE = 1000
keys_of_any_length = st.binary(min_size=1, max_size=64)


# ---- format -------------------------------------------------------------------------------------


@given(keys_of_any_length, st.none() | keys_of_any_length, st.integers(0, 2**63),
       st.integers(0, 2**64 - 1))  # fmt: skip
def test_header_round_trip(key: bytes, parent: bytes | None, nbytes: int, checksum: int) -> None:
    header = BlockHeader(StoreKey(key), parent and StoreKey(parent), nbytes, checksum)
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, header.key) == header
    assert decode_header(data, StoreKey(key + b"?")) is None


@given(st.binary(max_size=600), keys_of_any_length)
def test_decode_header_rejects_random_bytes(data: bytes, key: bytes) -> None:
    assert decode_header(data, StoreKey(key)) is None


def test_block_file_follows_the_documented_format(tmp_path: Path) -> None:
    key, parent = store_key("a"), store_key("b")
    with opened(tmp_path / "s") as store:
        store.put([item(key, SIZE, parent)])
        path = file_of(store, key)
        shard = f"{xxhash.xxh3_64_intdigest(key) & 0xFF:02x}"
        expected = tmp_path / "s" / FOLDER / "blocks" / key[:16].hex() / shard / f"{key.hex()}.blk"
        assert path == expected
        data = path.read_bytes()
    head, payload = data[:256], data[256:]
    assert payload == content(key, SIZE)
    assert head[:14] == b"TKVBLOCK" + struct.pack("<HHBB", 1, 256, 41, 41)
    assert head[16:32] == struct.pack("<QQ", SIZE, xxhash.xxh3_64_intdigest(payload))
    assert head[32:96] == key.ljust(64, b"\0")
    assert head[96:160] == parent.ljust(64, b"\0")
    assert head[248:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:248]))


# ---- opening ------------------------------------------------------------------------------------


def refused(root: Path) -> str:
    before = sorted(root.rglob("*")) if root.is_dir() else []
    with pytest.raises(ConfigError) as error:
        SharedDirStore(SharedDirSettings(str(root)))
    assert (sorted(root.rglob("*")) if root.is_dir() else []) == before
    return str(error.value)


def test_open_with_other_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiered-kv-shared-v2").mkdir()
    assert "tiered-kv-shared-v2" in refused(tmp_path)


def test_open_with_second_version_in_root_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / "tiered-kv-shared-v0").mkdir()
    assert "tiered-kv-shared-v0" in refused(tmp_path)


def test_open_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    assert "holiday.jpg" in refused(tmp_path)


@pytest.mark.parametrize("text", [b"", b"tiered-kv shared directory, format 2\n", b"\xff" * 500])
def test_open_with_wrong_marker_is_refused(tmp_path: Path, text: bytes) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / FOLDER / MARKER).write_bytes(text)
    assert "not a shared directory of this version" in refused(tmp_path)


def test_open_without_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER / "blocks").mkdir(parents=True)
    assert MARKER in refused(tmp_path)


def test_open_file_or_missing_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    refused(tmp_path / "file")
    refused(tmp_path / "not mounted" / "cache")
    assert not (tmp_path / "not mounted").exists()


def test_open_ignores_hidden_files_and_lost_and_found(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    with opened(tmp_path) as store:
        assert store.put([item(store_key("a"))]) == [PutResult.STORED]


def test_open_by_many_at_once_creates_one_folder(tmp_path: Path) -> None:
    for attempt in range(5):
        root = tmp_path / str(attempt)
        with ThreadPoolExecutor(8) as pool:
            stores = list(
                pool.map(lambda _, r=root: SharedDirStore(SharedDirSettings(str(r))), range(8))
            )
        assert os.listdir(root) == [FOLDER]
        stores[0].put([item(store_key("a"))])
        for store in stores:
            assert_holds(store, store_key("a"), 4096)
            store.close()


# ---- keys ---------------------------------------------------------------------------------------


@examples(50)
@given(st.sets(keys_of_any_length, min_size=1, max_size=8))
def test_put_any_bytes_are_a_valid_key(keys: set[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "s") as store:
        for key in map(StoreKey, keys):
            assert store.put([item(key, 10)]) == [PutResult.STORED]
        for key in map(StoreKey, keys):
            assert_holds(store, key, 10)
        assert store.usage().blocks == len(keys)


@pytest.mark.parametrize("key", [b"", bytes(65), bytes(5000)])
def test_invalid_key_is_a_miss_and_a_failed_put(tmp_path: Path, key: bytes) -> None:
    bad, good = StoreKey(key), store_key("a")
    with opened(tmp_path) as store:
        assert store.put([item(bad), item(good), item(store_key("b"), parent=bad)]) == [
            PutResult.FAILED,
            PutResult.STORED,
            PutResult.FAILED,
        ]
        assert_lacks(store, bad)
        assert store.describe([bad]) == [None]
        assert store.delete([bad]) == 0
        assert_holds(store, good, 4096)


def test_empty_block_is_stored(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.put([item(store_key("a"), 0)]) == [PutResult.STORED]
        assert_holds(store, store_key("a"), 0)


def test_closed_directory_misses_and_drops(tmp_path: Path) -> None:
    keys = chain_keys("a", 3)
    with opened(tmp_path) as store:
        store.put([item(key) for key in keys])
    assert store.match(keys) == 0
    assert store.contains(keys) == [False] * 3
    assert store.get(keys, [memoryview(bytearray(4096)) for _ in keys]) == [False] * 3
    assert store.put([item(key) for key in keys]) == [PutResult.DROPPED] * 3
    assert store.describe(keys) == [None] * 3
    assert store.delete(keys) == 0


# ---- damage -------------------------------------------------------------------------------------


def assert_damage_is_noticed(root: Path, data: bytes, key: StoreKey, nbytes: int = SIZE) -> None:
    """A file with this data under the key's name: a miss, counted, gone; a put heals it."""
    with opened(root) as store:
        path = file_of(store, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        buffer = memoryview(bytearray(nbytes))
        assert store.get([key], [buffer]) == [False]
        assert store.counts.snapshot()[Event.DAMAGED] == 1
        assert not path.exists()
        assert litter(root) == []
        assert_lacks(store, key, nbytes)
        assert store.put([item(key, nbytes)]) == [PutResult.STORED]
        assert_holds(store, key, nbytes)
        assert store.delete([key]) == 1


def good_file(key: StoreKey, nbytes: int = SIZE, parent: StoreKey | None = None) -> bytes:
    payload = content(key, nbytes)
    checksum = xxhash.xxh3_64_intdigest(payload)
    return encode_header(BlockHeader(key, parent, nbytes, checksum)) + payload


def with_field(data: bytes, offset: int, value: bytes) -> bytes:
    """A file whose header says something else, with a header checksum that holds."""
    head = bytearray(data[:248])
    head[offset : offset + len(value)] = value
    return bytes(head) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head))) + data[256:]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"TKVBLOCX"),
        (8, struct.pack("<H", 2)),
        (8, struct.pack("<H", 0)),
        (10, struct.pack("<H", 512)),
        (12, b"\0"),
        (12, b"\x28"),
        (12, b"\x41"),
        (13, b"\x41"),
        (16, struct.pack("<Q", SIZE - 1)),
        (16, struct.pack("<Q", SIZE + 1)),
        (16, struct.pack("<Q", 2**64 - 1)),
        (24, struct.pack("<Q", 12345)),
        (32, b"another key"),
    ],
)
def test_get_with_inconsistent_header_is_a_miss(tmp_path: Path, offset: int, value: bytes) -> None:
    key = store_key("a")
    assert with_field(good_file(key), 160, b"") == good_file(key)
    assert_damage_is_noticed(tmp_path, with_field(good_file(key), offset, value), key)


def test_get_with_any_damaged_header_byte_is_a_miss(tmp_path: Path) -> None:
    key = store_key("a")
    good = good_file(key)
    for offset in range(HEADER_BYTES):
        bad = bytearray(good)
        bad[offset] ^= 1 << offset % 8
        assert_damage_is_noticed(tmp_path, bytes(bad), key)


@examples(60)
@given(st.data())
def test_get_with_any_flipped_payload_bit_is_a_miss(data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(1, 20_000))
    bit = data.draw(st.integers(0, 8 * nbytes - 1))
    key = store_key("a")
    bad = bytearray(good_file(key, nbytes))
    bad[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    with tempfile.TemporaryDirectory() as folder:
        assert_damage_is_noticed(Path(folder), bytes(bad), key, nbytes)


@examples(60)
@given(st.integers(0, HEADER_BYTES + SIZE - 1))
def test_get_of_truncated_file_is_a_miss(length: int) -> None:
    key = store_key("a")
    with tempfile.TemporaryDirectory() as folder:
        assert_damage_is_noticed(Path(folder), good_file(key)[:length], key)


@examples(20)
@given(st.binary(min_size=1, max_size=5000))
def test_get_of_file_with_trailing_bytes_is_a_miss(more: bytes) -> None:
    key = store_key("a")
    with tempfile.TemporaryDirectory() as folder:
        assert_damage_is_noticed(Path(folder), good_file(key) + more, key)
        extended = SIZE + len(more)  # a reader that expects just this length is not fooled either
        assert_damage_is_noticed(Path(folder), good_file(key) + more, key, extended)


def test_get_of_renamed_file_is_a_miss(tmp_path: Path) -> None:
    assert_damage_is_noticed(tmp_path, good_file(store_key("b")), store_key("a"))


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_put_replaces_file_truncated_by_a_crash(tmp_path: Path, length: int) -> None:
    key = store_key("a")
    with opened(tmp_path) as store:
        path = file_of(store, key)
        path.parent.mkdir(parents=True)
        path.write_bytes(good_file(key)[:length])
        assert store.put([item(key, SIZE)]) == [PutResult.STORED]
        assert_holds(store, key, SIZE)


def test_damaged_block_does_not_affect_others(tmp_path: Path) -> None:
    keys = chain_keys("a", 9)
    with opened(tmp_path) as store:
        store.put([item(key, SIZE) for key in keys])
        with file_of(store, keys[4]).open("r+b") as file:
            file.seek(HEADER_BYTES + 500)
            file.write(b"....")
        buffers = [bytearray(SIZE) for _ in keys]
        found = store.get(keys, [memoryview(b) for b in buffers])
        assert found == [at != 4 for at in range(9)]
        assert store.match(keys) == 4
        assert store.usage().blocks == 8


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    key = store_key("a")
    with opened(tmp_path) as store:
        store.put([item(key, SIZE)])
        shard = file_of(store, key).parent
        foreign = [
            shard / "notes.txt",
            shard / "xyz.blk",
            shard / "abc.blk",
            shard / ".nfs0000000012345678",
            shard.parent / "README",
            shard.parent.parent / "not-a-namespace" / "00" / "aa.blk",
            shard / f"{store_key('b').hex()}.blk.bak",
        ]
        for path in foreign:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"mine")
        assert store.usage().blocks == 1
        assert all(path.read_bytes() == b"mine" for path in foreign)
        assert_holds(store, key, SIZE)


def test_get_of_link_or_folder_is_a_miss(tmp_path: Path) -> None:
    one, two = store_key("a"), store_key("b")
    with opened(tmp_path / "s") as store:
        outside = tmp_path / "outside"
        outside.write_bytes(good_file(one))
        for key in (one, two):
            file_of(store, key).parent.mkdir(parents=True, exist_ok=True)
        file_of(store, one).symlink_to(outside)
        file_of(store, two).mkdir()
        for key in (one, two):
            assert_lacks(store, key, SIZE)
        assert outside.read_bytes() == good_file(one)


# ---- permissions --------------------------------------------------------------------------------


@pytest.fixture
def anyones_folder() -> Iterator[Path]:
    """A folder every user can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o755)
    shutil.rmtree(folder)


def test_read_only_user_gets_hits_and_failed_puts(anyones_folder: Path) -> None:
    key, new = store_key("a"), store_key("b")
    root = anyones_folder / "s"
    with opened(root) as store:
        store.put([item(key, SIZE)])
        store.put([item(new, SIZE)])  # so that its folders exist
        store.delete([new])
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> None:
        with opened(root, touch_interval_s=0.0) as store:
            assert_holds(store, key, SIZE)
            assert store.put([item(key, SIZE), item(new, SIZE)]) == [
                PutResult.PRESENT,
                PutResult.FAILED,
            ]
            with pytest.raises(NotDeletedError):
                store.delete([key])
            assert_holds(store, key, SIZE)
            counts = store.counts.snapshot()
            assert counts[Event.WRITE_ERROR] == counts[Event.REMOVE_ERROR] == 1

    as_ordinary_user(work)


def test_user_without_permission_gets_misses(anyones_folder: Path) -> None:
    key = store_key("a")
    root = anyones_folder / "s"
    with opened(root) as store:
        store.put([item(key, SIZE)])
        path = file_of(store, key)
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        folder.chmod(0o777)
    (root / FOLDER / MARKER).chmod(0o444)
    path.chmod(0)

    def work() -> None:
        with opened(root) as store:
            assert store.get([key], [memoryview(bytearray(SIZE))]) == [False]
            assert store.counts.snapshot()[Event.READ_ERROR] == 1

    as_ordinary_user(work)
    assert path.exists()


def test_files_are_not_world_accessible(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        store.put([item(store_key("a"), SIZE)])
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            assert path.stat().st_mode & 0o007 == 0
