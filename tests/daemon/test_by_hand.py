"""docs/protocol.md is enough for a client: this one uses nothing of the package."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import xxhash
import zmq

from tests.daemon.conftest import StartDaemon

WIDTH = 8
KEYS = [bytes([n]) * WIDTH for n in range(1, 4)]
BLOCKS = [bytes([65 + n]) * length for n, length in enumerate((12288, 100, 12288))]
NONE = bytes(WIDTH)
PADDING = 2 << 20
HELLO = {
    "protocol": 1,
    "client": "by hand",
    "namespace": bytes(range(32)),
    "key_bytes": WIDTH,
    "block_bytes": struct.pack("<2Q", 100, 12288),
    "layout": "none",
    "arena": b"",
}


class Hand:
    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.connect(endpoint)
        self.ids = itertools.count(1)

    def ask(self, op: str, payload: tuple[bytes, ...] = (), **fields: Any) -> Any:
        """The header of the reply; its payload as `frames`."""
        number = next(self.ids)
        header = msgpack.packb({"id": number, "op": op, **fields})
        self.socket.send_multipart([header, *payload])
        reply, *frames = self.socket.recv_multipart()
        answer = msgpack.unpackb(reply)
        assert (answer["id"], answer["op"]) == (number, op)
        return answer | {"frames": frames}

    def put(self, durability: str = "memory") -> Any:
        return self.ask(
            "put",
            tuple(BLOCKS),
            width=WIDTH,
            keys=b"".join(KEYS),
            parents=b"".join([NONE, *KEYS[:-1]]),
            lengths=packed(*map(len, BLOCKS)),
            checksums=packed(*map(xxhash.xxh3_64_intdigest, BLOCKS)),
            durability=durability,
        )


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def numbers_of(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


@pytest.fixture
def hand(start: StartDaemon) -> Iterator[Hand]:
    client = Hand(start("--memory", "16MiB").ipc)
    yield client
    client.socket.close()
    client.context.term()


def test_protocol_page_over_socket_works_as_documented(hand: Hand) -> None:
    assert hand.ask("stats")["code"] == "no_hello"
    assert hand.ask("hello", protocol=2)["code"] == "unsupported_version"
    opened = hand.ask("hello", **HELLO)
    assert set(opened["limits"]) == {"keys", "frames", "message_bytes", "header_bytes"}
    assert hand.put()["results"] == b"\1\1\1"
    assert hand.put()["results"] == b"\2\2\2"
    assert hand.put("disk")["code"] == "not_written"
    all_keys = b"".join([*KEYS, NONE])
    match = hand.ask("match", width=WIDTH, keys=all_keys, suffixes=[], pin_ms=0)
    assert (match["count"], numbers_of(match["tiers"])) == (3, (3, 0, 0))
    short = hand.ask("match", width=7, keys=KEYS[0][:7], suffixes=[KEYS[0][7:]], pin_ms=0)
    assert short["count"] == 1
    assert hand.ask("contains", width=WIDTH, keys=all_keys)["tiers"] == b"\1\1\1\0"
    got = hand.ask("get", width=WIDTH, keys=all_keys, stream=False)
    found = zip(numbers_of(got["positions"]), got["frames"], strict=True)
    assert dict(found) == dict(enumerate(BLOCKS))
    assert hand.ask("delete", width=WIDTH, keys=KEYS[2])["count"] == 1
    assert hand.ask("flush")["ok"]
    assert hand.ask("stats")["facts"]["put_blocks"] == {"stored": 3, "present": 3}


def test_hello_sent_twice_opens_new_session(hand: Hand) -> None:
    assert hand.ask("hello", **HELLO)["ok"]
    for change, code in (
        ({"layout": "other"}, "mismatch"),
        ({"key_bytes": 9}, "mismatch"),
        ({"block_bytes": packed(100)}, "mismatch"),
        ({"block_bytes": packed(1 << 30), "namespace": bytes(32)}, "too_large"),
        ({"arena": bytes(16)}, "no_arena"),
    ):
        assert hand.ask("hello", **(HELLO | change))["code"] == code
    assert hand.put()["ok"], "the session is as it was"
    assert hand.ask("contains", width=9, keys=bytes(9))["code"] == "mismatch"
    for namespace in (HELLO["namespace"], bytes(32)):  # to look only
        looks = {"block_bytes": b"", "layout": "", "namespace": namespace}
        assert hand.ask("hello", **(HELLO | looks))["ok"]
    assert hand.ask("contains", width=WIDTH, keys=KEYS[0])["tiers"] == b"\0"
    assert hand.ask("stats")["facts"]["namespaces"] == 1


def test_protocol_page_in_shared_memory_works_as_documented(start: StartDaemon) -> None:
    daemon = start("--memory", "16MiB")
    hand = Hand(daemon.ipc)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attached:
        attached.connect(f"{daemon.ipc_path}.arena")
        attached.send(msgpack.packb({"protocol": 1, "client": "by hand"}))
        packet, descriptors, _, _ = socket.recv_fds(attached, 4096, 1)
        memory = msgpack.unpackb(packet)
        assert hand.ask("hello", **(HELLO | {"arena": memory["token"]}))["ok"]
        table = -(-memory["capacity"] // 4096 * 8 // PADDING) * PADDING
        slots = -(-memory["capacity"] // PADDING) * PADDING
        assert os.fstat(descriptors[0]).st_size == table + slots
        mapped = mmap.mmap(descriptors[0], table + slots)
        os.close(descriptors[0])

        def generation(offset: int) -> int:
            return int(struct.unpack_from("<Q", mapped, offset // 4096 * 8)[0])

        hand.put()
        lent = hand.ask("lend", width=WIDTH, keys=b"".join([*KEYS, NONE]))
        *leases, missing = numbers_of(lent["leases"])
        assert missing == 0
        places = zip(numbers_of(lent["offsets"]), numbers_of(lent["lengths"]), strict=True)
        assert [mapped[table + o : table + o + n] for o, n in places] == [*BLOCKS, b""]
        generations = numbers_of(lent["generations"])[:3]
        assert tuple(map(generation, numbers_of(lent["offsets"])[:3])) == generations
        held = set(leases)
        assert hand.ask("release", leases=packed(*held))["count"] == len(held)

        new = b"new key!"
        room = hand.ask("reserve", width=WIDTH, keys=new, parents=NONE, lengths=packed(100))
        (offset,), (written,) = numbers_of(room["offsets"]), numbers_of(room["generations"])
        assert room["results"] == b"\0"
        assert generation(offset) == written
        assert written % 2 == 1
        mapped[table + offset : table + offset + 100] = BLOCKS[1]
        assert hand.ask("seal", leases=room["leases"])["results"] == b"\1"
        assert generation(offset) == written + 1
        assert hand.ask("get", width=WIDTH, keys=new, stream=False)["frames"] == [BLOCKS[1]]

        request = {"width": 7, "keys": new[:7], "suffixes": [new[7:]], "length": 100}
        borrowed = hand.ask("borrow", **request)
        assert (borrowed["count"], borrowed["lent"]) == (1, 1)
        assert numbers_of(borrowed["offsets"]) == (offset,)
        assert hand.ask("release", leases=packed(borrowed["lease"]))["count"] == 1
    hand.socket.close()
    hand.context.term()
