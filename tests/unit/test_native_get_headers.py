"""The native headers of reads are those of the codec; what they do not read, it decides."""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from tests.unit.test_wire_fuzz import CHANGES, change
from vllm_tiered_kv.errors import NativeError, ProtocolError
from vllm_tiered_kv.native.cpu import MAX_REPLY_BLOCKS, pack_get_reply, read_get
from vllm_tiered_kv.wire.codec import decode_request, encode_reply, encode_request
from vllm_tiered_kv.wire.messages import Contains, Get, GetReply

WIDTH = 25
PREFIX = bytes(range(16))
MOST = 16
IDS = st.integers(1, 2**64 - 1) | st.sampled_from([1, 127, 128, 255, 256, 2**16, 2**32, 2**64 - 1])
NUMBERS = st.integers(0, 2**64 - 1)


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * WIDTH for number in range(count)]


@examples(200)
@given(IDS, st.integers(1, MOST), st.booleans())
def test_read_get_of_encoded_request_returns_id_and_whole_keys(
    request_id: int, count: int, stream: bool
) -> None:
    header = encode_request(request_id, Get(WIDTH, keys(count), stream))
    expected = (request_id, [PREFIX + key for key in keys(count)])
    assert read_get(memoryview(header), PREFIX, WIDTH, MOST) == expected


@examples(1000)
@given(IDS, st.integers(0, MOST + 1), st.booleans(), CHANGES)
def test_read_get_of_changed_request_reads_what_the_codec_reads(
    request_id: int, count: int, stream: bool, changes: list[tuple[str, int, int]]
) -> None:
    header = change(encode_request(request_id, Get(WIDTH, keys(count), stream)), changes)
    found = read_get(header, PREFIX, WIDTH, MOST)
    if found is None:
        return
    decoded_id, decoded = decode_request(header, [])
    assert isinstance(decoded, Get)
    assert found == (decoded_id, [PREFIX + key for key in decoded.keys])
    assert decoded.width == WIDTH
    assert len(decoded.keys) <= MOST


@pytest.mark.parametrize("size", range(0, 100, 3))
def test_read_get_of_truncated_request_reads_nothing(size: int) -> None:
    header = encode_request(7, Get(WIDTH, keys(3), False))
    assert len(header) > 100
    assert read_get(header[:size], PREFIX, WIDTH, MOST) is None


@pytest.mark.parametrize(
    "header",
    [
        encode_request(7, Contains(WIDTH, keys(1))),
        encode_request(7, Get(WIDTH, keys(MOST + 1), False)),
        encode_request(7, Get(WIDTH, [], False)),
        encode_request(7, Get(WIDTH - 1, [bytes(WIDTH - 1)], False)),
        encode_request(7, Get(WIDTH, keys(1), False)) + b"\xc0",
        msgpack.packb({"id": 0, "op": "get", "width": 25, "keys": keys(1)[0], "stream": True}),
        msgpack.packb({"op": "get", "id": 7, "width": 25, "keys": keys(1)[0], "stream": True}),
        msgpack.packb({"id": 7, "op": "get", "width": 25, "keys": b"short", "stream": True}),
    ],
)
def test_read_get_of_other_header_reads_nothing(header: bytes) -> None:
    assert read_get(header, PREFIX, WIDTH, MOST) is None


class Block(NamedTuple):
    nbytes: int
    checksum: int


BLOCKS = st.builds(Block, st.integers(1, 2**20), NUMBERS)


@examples(200)
@given(IDS, st.lists(BLOCKS, min_size=1, max_size=MAX_REPLY_BLOCKS))
def test_pack_get_reply_equals_encoded_reply(request_id: int, blocks: list[Block]) -> None:
    lengths = [block.nbytes for block in blocks]
    checksums = [block.checksum for block in blocks]
    reply = encode_reply(request_id, GetReply(list(range(len(blocks))), lengths, checksums))
    assert pack_get_reply(request_id, blocks, frozenset(lengths)) == (reply, sum(lengths))


def test_pack_get_reply_with_other_length_packs_nothing() -> None:
    blocks = [Block(4096, 1), Block(8192, 2)]
    assert pack_get_reply(7, blocks, frozenset({4096, 8192})) is not None
    assert pack_get_reply(7, blocks, frozenset({4096})) is None


def test_pack_get_reply_of_too_many_blocks_is_refused() -> None:
    with pytest.raises(NativeError, match="blocks"):
        pack_get_reply(1, [Block(4096, 0)] * (MAX_REPLY_BLOCKS + 1), frozenset({4096}))


def test_read_get_of_no_buffer_is_refused() -> None:
    with pytest.raises((NativeError, TypeError)):
        read_get("text", PREFIX, WIDTH, MOST)  # type: ignore[arg-type]


def test_codec_refuses_what_read_get_leaves_to_it() -> None:
    header = encode_request(7, Get(WIDTH, keys(2), False)).replace(b"\xc4\x32", b"\xc4\x31")
    assert read_get(header, PREFIX, WIDTH, MOST) is None
    with pytest.raises(ProtocolError):
        decode_request(header, [])
