"""SHA-256, XXH3 and the chain of block keys, compared with hashlib, xxhash and Python."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from vllm_tiered_kv.errors import NativeError, NoDeviceError
from vllm_tiered_kv.native import _cpu, cuda
from vllm_tiered_kv.native.cpu import (
    HostRegion,
    checksum,
    copy_and_hash,
    extend_keys,
    hash_buffers,
    sha256,
    xxh3_64,
)

ZERO = bytes(32)


@pytest.fixture(params=["best", "portable"], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    _cpu._force_portable(request.param == "portable")
    yield
    _cpu._force_portable(False)


def test_sha256_short_messages_match_hashlib() -> None:
    data = random.Random(1).randbytes(400)
    for size in range(len(data) + 1):
        assert sha256(data[:size]) == hashlib.sha256(data[:size]).digest(), size


def test_sha256_long_messages_match_hashlib() -> None:
    for size in (4095, 4096, 65_537, 1_000_003):
        data = random.Random(size).randbytes(size)
        assert sha256(data) == hashlib.sha256(data).digest()


def test_xxh3_short_inputs_match_xxhash() -> None:
    data = random.Random(2).randbytes(1201)
    for size in range(len(data) + 1):
        assert xxh3_64(data[:size]) == xxhash.xxh3_64_intdigest(data[:size]), size


@pytest.mark.parametrize("size", [2047, 2048, 2049, 65_536, 1_000_003, 1_835_008, 5 << 20])
def test_xxh3_long_inputs_match_xxhash(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)
    # Unaligned, and another type of buffer.
    assert xxh3_64(memoryview(data)[1:]) == xxhash.xxh3_64_intdigest(data[1:])


def at_alignment(size: int, remainder: int) -> tuple[np.ndarray, int]:
    """Returns zeros and an offset in them with this remainder of 64, for `size` bytes."""
    memory = np.zeros(size + 192, dtype=np.uint8)
    return memory, 64 - memory.ctypes.data % 64 + remainder


def copied_and_hashed(data: bytes, remainder: int) -> None:
    memory, start = at_alignment(len(data), remainder)
    end = start + len(data)
    sums = copy_and_hash([memoryview(memory)[start:end]], [memoryview(data)])
    assert sums == [xxhash.xxh3_64_intdigest(data)]
    assert memory[start:end].tobytes() == data
    assert not memory[:start].any(), "a byte before the place was written"
    assert not memory[end:].any(), "a byte behind the place was written"


@pytest.mark.parametrize("remainder", [0, 1, 8, 16, 32, 48])
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 66_559, 66_560, 589_824, 1_000_003])
def test_copy_and_hash_copies_all_bytes_and_hashes(size: int, remainder: int) -> None:
    copied_and_hashed(random.Random(size).randbytes(size), remainder)


@given(st.binary(max_size=2000), st.integers(0, 63))
@examples(50)
def test_copy_and_hash_short_copies_are_complete(data: bytes, remainder: int) -> None:
    copied_and_hashed(data, remainder)


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("unit", [1000, 300_001])  # stays on the calling thread, and does not
def test_copy_and_hash_returns_checksums_in_order(unit: int, threads: int) -> None:
    sources = [random.Random(n).randbytes(unit * n) for n in range(7)]
    places = [bytearray(len(source)) for source in sources]
    data = [memoryview(source) for source in sources]
    expected = [xxhash.xxh3_64_intdigest(source) for source in sources]
    assert copy_and_hash([memoryview(p) for p in places], data, threads) == expected
    assert [bytes(place) for place in places] == sources
    assert hash_buffers(data, threads) == expected
    assert copy_and_hash([], [], threads) == hash_buffers([], threads) == []


def test_copy_and_hash_invalid_pairs_move_nothing() -> None:
    good, zeros = memoryview(b"1" * 8), bytearray(16)
    place, other = memoryview(zeros)[:8], memoryview(zeros)[8:]
    for into, sources, message in (
        ([place], [], r"^sources: 0 buffers for 1"),
        ([place, other], [good, good[:7]], r"^into\[1\]: 8 bytes for 7"),
        ([place, memoryview(bytes(8))], [good, good], r"^into\[1\]: not a contiguous writable"),
        ([place, other], [good, memoryview(bytes(16))[::2]], r"^sources\[1\]: not a contiguous"),
        ([place, other], [good, memoryview(zeros)[4:12]], r"^into\[1\]: overlaps its source"),
    ):
        with pytest.raises(NativeError, match=message):
            copy_and_hash(into, sources)
        assert zeros == bytes(16)


def test_hash_non_contiguous_buffer_is_refused() -> None:
    data = np.arange(64, dtype=np.uint8)[::2]
    for function in (xxh3_64, sha256):
        with pytest.raises(NativeError, match=r"^data: "):
            function(data)
    with pytest.raises(NativeError, match=r"^buffers\[1\]: not a contiguous"):
        hash_buffers([memoryview(b"1"), memoryview(data)])
    with pytest.raises(NativeError, match=r"^threads: "):
        hash_buffers([memoryview(b"1")], threads=-1)


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize(("count", "nbytes"), [(0, 64), (1, 1000), (7, 33), (9, 300_001), (5, 0)])
def test_hash_buffers_matches_xxhash(count: int, nbytes: int, threads: int) -> None:
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    offsets = rng.integers(0, memory.nbytes - nbytes + 1, count, dtype=np.int64)
    region = HostRegion(memory.ctypes.data, memory.nbytes)
    sums = checksum(region, offsets, nbytes, threads)
    assert sums.dtype == np.uint64
    raw = memory.tobytes()
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(raw[at : at + nbytes]) for at in offsets]


@pytest.mark.parametrize(
    ("offsets", "nbytes", "words"),
    [
        ([0, 65], 64, r"^offsets\[1\]: 64 bytes at 65 are not within the region of 128"),
        ([-1], 64, r"^offsets\[0\]: "),
        ([0], 129, r"^offsets\[0\]: "),
        ([0], -1, r"^nbytes: "),
    ],
)
def test_checksum_invalid_offsets_are_refused(offsets: list[int], nbytes: int, words: str) -> None:
    memory = np.zeros(128, dtype=np.uint8)
    region = HostRegion(memory.ctypes.data, memory.nbytes)
    with pytest.raises(NativeError, match=words):
        checksum(region, np.array(offsets, dtype=np.int64), nbytes)


def test_checksum_error_names_bad_argument() -> None:
    memory = np.zeros(128, dtype=np.uint8)
    region = HostRegion(memory.ctypes.data, memory.nbytes)
    with pytest.raises(NativeError, match=r"^offsets: dtype int32"):
        checksum(region, np.zeros(1, dtype=np.int32), 1)  # type: ignore[arg-type]
    with pytest.raises(NativeError, match=r"^region: "):
        checksum(HostRegion(0, 128), np.zeros(1, dtype=np.int64), 1)
    with pytest.raises(NativeError, match=r"^threads: "):
        checksum(region, np.zeros(1, dtype=np.int64), 1, threads=-2)


def plain_keys(
    parent: bytes, tokens: list[int], block_size: int, extras: dict[int, bytes], suffix: bytes
) -> tuple[list[bytes], bytes]:
    keys = []
    for i in range(len(tokens) // block_size):
        block = tokens[i * block_size : (i + 1) * block_size]
        extra = extras.get(i, b"")
        packed = struct.pack(f"<I{len(extra)}s{block_size}I", len(extra), extra, *block)
        # struct aligns nothing with "<".
        parent = hashlib.sha256(parent + packed).digest()
        keys.append(parent[:16] + suffix)
    return keys, parent


@examples(80)
@given(
    parent=st.binary(min_size=32, max_size=32),
    block_size=st.integers(1, 70),
    blocks=st.integers(0, 6),
    start=st.integers(0, 5),
    after=st.integers(0, 5),
    extras=st.dictionaries(st.integers(0, 7), st.binary(max_size=150), max_size=4),
    suffix=st.binary(max_size=12),
    seed=st.integers(0, 2**16),
)
def test_extend_keys_matches_definition(
    parent: bytes,
    block_size: int,
    blocks: int,
    start: int,
    after: int,
    extras: dict[int, bytes],
    suffix: bytes,
    seed: int,
) -> None:
    rng = random.Random(seed)
    stop = start + blocks * block_size
    bits = rng.choice([4, 17, 31])
    tokens = [rng.getrandbits(bits) for _ in range(stop + after)]
    expected = plain_keys(parent, tokens[start:stop], block_size, extras, suffix)
    kinds = (
        tokens,
        tuple(tokens),
        np.array(tokens, dtype=np.int32),
        np.array(tokens, dtype=np.int64),
        np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
        array("i", tokens),
        list(np.array(tokens, dtype=np.int64)),
    )
    for kind in kinds:
        assert extend_keys(parent, kind, start, stop, block_size, extras, suffix) == expected


def test_extend_keys_continues_from_last_digest() -> None:
    tokens = list(range(1000, 1064))
    whole, last = extend_keys(ZERO, tokens, 0, 64, 16, {3: b"image"}, b"s")
    head, middle = extend_keys(ZERO, tokens, 0, 32, 16, None, b"s")
    tail, end = extend_keys(middle, tokens, 32, 64, 16, {1: b"image"}, b"s")
    assert (head + tail, end) == (whole, last)
    assert extend_keys(last, tokens, 64, 64, 16, None, b"s") == ([], last)


def test_extend_keys_every_input_changes_key() -> None:
    def key(**changes: Any) -> bytes:
        arguments: dict[str, Any] = {
            "parent": ZERO,
            "tokens": [1, 2, 3, 4],
            "start": 0,
            "stop": 4,
            "block_size": 4,
            "extras": None,
            "suffix": b"",
        }
        keys, _ = extend_keys(**{**arguments, **changes})
        return keys[-1]

    keys = {
        key(),
        key(parent=b"\1" + ZERO[1:]),
        key(tokens=[1, 2, 3, 5]),
        key(extras={0: b"a"}),
        key(extras={0: b"\0"}),
        key(suffix=b"a"),
        key(block_size=2),
    }
    assert len(keys) == 7
    assert key(extras={}) == key(extras={0: b""}) == key(extras={1: b"a"}) == key()


def test_extend_keys_accepts_largest_token() -> None:
    tokens = [2**32 - 1, 0]
    expected = plain_keys(ZERO, tokens, 2, {}, b"")
    assert extend_keys(ZERO, tokens, 0, 2, 2, None, b"") == expected
    as_array = np.array(tokens, dtype=np.int64)
    assert extend_keys(ZERO, as_array, 0, 2, 2, None, b"") == expected


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**40), 2**40, 2**70, -(2**70)])
def test_extend_keys_invalid_token_is_refused(bad: int) -> None:
    tokens = [1, 2, 3, bad, 5, 6]
    with pytest.raises(NativeError, match=r"^tokens\[3\]: .*not in \[0, 2\*\*32\)"):
        extend_keys(ZERO, tokens, 2, 6, 2, None, b"")
    if abs(bad) < 2**63:
        with pytest.raises(NativeError, match=r"^tokens\[3\]: "):
            extend_keys(ZERO, np.array(tokens, dtype=np.int64), 2, 6, 2, None, b"")
    # Tokens outside of the range are not read.
    assert len(extend_keys(ZERO, tokens, 4, 6, 2, None, b"")[0]) == 1


def test_extend_keys_negative_int32_is_refused() -> None:
    with pytest.raises(NativeError, match=r"^tokens\[0\]: -1"):
        extend_keys(ZERO, np.array([-1, 1], dtype=np.int32), 0, 2, 2, None, b"")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parent": bytes(31)}, r"^parent: 31 bytes"),
        ({"tokens": [1.5, 2, 3, 4]}, r"^tokens\[0\]: not an integer"),
        ({"tokens": ["1", 2, 3, 4]}, r"^tokens\[0\]: not an integer"),
        ({"tokens": 7}, r"^tokens: "),
        ({"tokens": np.zeros(4)}, r"^tokens: items of format 'd'"),
        ({"tokens": np.zeros(4, dtype=np.uint64)}, r"^tokens: items of format"),
        ({"tokens": np.zeros(4, dtype=">i4")}, r"^tokens: items of format '>i'"),
        ({"tokens": np.zeros((2, 2), dtype=np.int64)}, r"^tokens: 2 dimensions"),
        ({"start": -2}, r"^start: -2"),
        ({"stop": 6}, r"^stop: 6 is beyond the 4 tokens"),
        ({"stop": 3}, r"^stop: 0 to 3 is not a whole number of blocks of 2"),
        ({"start": 4, "stop": 2}, r"^stop: 2 is less than start 4"),
        ({"block_size": 0}, r"^block_size: 0"),
        ({"extras": {0: "text"}}, r"^extras\[0\]: not bytes"),
        ({"extras": {"0": b""}}, r"^extras: a key is not an int"),
        ({"extras": [b""]}, r"^extras: not a dict"),
    ],
)
def test_extend_keys_bad_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "parent": ZERO,
        "tokens": [1, 2, 3, 4],
        "start": 0,
        "stop": 4,
        "block_size": 2,
        "extras": None,
        "suffix": b"",
    }
    with pytest.raises(NativeError, match=words):
        extend_keys(**{**arguments, **changes})


def test_extend_keys_shrinking_token_list_is_refused() -> None:
    class Vanishing:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    tokens: list[Any] = [Vanishing(), 2, 3, 4]
    with pytest.raises(NativeError, match=r"^tokens: shrank"):
        extend_keys(ZERO, tokens, 0, 4, 2, None, b"")


def test_cuda_unavailable_reports_reason() -> None:
    reason = cuda.why_unavailable()
    if reason is None:
        assert cuda.device_count() >= 1
        return
    assert reason.startswith(("no CUDA device: ", "the CUDA module "))
    for call in (lambda: cuda.device_count(), lambda: cuda.Stream(0), lambda: cuda.Event(0)):
        with pytest.raises(NoDeviceError) as caught:
            call()
        assert str(caught.value) == reason
