"""A minimal client of the wire protocol, without retries or caching."""

from __future__ import annotations

import array
import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import zmq

from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.wire import messages as wire
from vllm_tiered_kv.wire.codec import decode_reply, encode_request

TIMEOUT_S = 30.0
KEY_BYTES = 24
NAMESPACE = bytes(range(32))

_R = TypeVar("_R")


class Refused(Exception):
    """The daemon answered with an error."""

    def __init__(self, error: wire.ErrorReply) -> None:
        super().__init__(f"{error.code.value}: {error.message}")
        self.code: ErrorCode = error.code
        self.message = error.message


class RawClient:
    """One DEALER socket. `options` are attributes of the zmq socket."""

    def __init__(self, endpoint: str, identity: bytes | None = None, **options: Any) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = int(TIMEOUT_S * 1000)
        if identity is not None:
            self.socket.routing_id = identity
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.ids = itertools.count(1)
        self.timeout_s = TIMEOUT_S  # for a reply

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def send(self, request: Any, payload: Sequence[bytes] = ()) -> int:
        request_id = next(self.ids)
        self.socket.send_multipart([encode_request(request_id, request), *payload])
        return request_id

    def receive(self, timeout_s: float | None = None) -> tuple[int, Any, list[bytes]]:
        if not self.socket.poll(int((timeout_s or self.timeout_s) * 1000)):
            raise TimeoutError("no reply")
        header, *payload = self.socket.recv_multipart()
        request_id, reply = decode_reply(header, [len(part) for part in payload])
        return request_id, reply, payload

    def ask(self, request: Any, payload: Sequence[bytes] = ()) -> Any:
        """The reply; Refused for an error."""
        return self.ask_for_payload(request, payload)[0]

    def ask_for_payload(
        self, request: Any, payload: Sequence[bytes] = ()
    ) -> tuple[Any, list[bytes]]:
        sent = self.send(request, payload)
        request_id, reply, received = self.receive()
        assert request_id == sent
        if isinstance(reply, wire.ErrorReply):
            raise Refused(reply)
        return reply, received

    # ---- verbs ----------------------------------------------------------------------------------

    def hello(
        self,
        block_bytes: Sequence[int] = (4096,),
        namespace: bytes = NAMESPACE,
        layout: str = "test",
        key_bytes: int = KEY_BYTES,
        arena: bytes = b"",
        client: str = "test",
    ) -> wire.HelloReply:
        return self.ask(  # type: ignore[no-any-return]
            wire.Hello(1, client, namespace, key_bytes, list(block_bytes), layout, arena)
        )

    def put(
        self,
        blocks: dict[bytes, bytes],
        durability: Durability = Durability.MEMORY,
        parents: Sequence[bytes | None] | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[PutResult]:
        payload = list(blocks.values())
        request = wire.Put(
            len(next(iter(blocks))),
            list(blocks),
            [None] * len(blocks) if parents is None else list(parents),
            [len(block) for block in payload],
            [xxh3_64(block) for block in payload] if checksums is None else list(checksums),
            durability,
        )
        return wire.put_results(self.ask(request, payload).results)

    def get(self, keys: Sequence[bytes], stream: bool = False) -> dict[bytes, bytes]:
        """The blocks that were found, with verified checksums."""
        sent = self.send(wire.Get(len(keys[0]), list(keys), stream))
        found: dict[bytes, bytes] = {}
        while True:
            request_id, reply, payload = self.receive()
            if isinstance(reply, wire.ErrorReply):
                raise Refused(reply)
            assert request_id == sent
            for position, checksum, block in zip(
                reply.positions, reply.checksums, payload, strict=True
            ):
                assert xxh3_64(block) == checksum
                assert keys[position] not in found
                found[keys[position]] = block
            if not reply.more:
                return found

    def match(
        self, keys: Sequence[bytes], suffixes: Sequence[bytes] = (), pin_ms: int = 0
    ) -> wire.MatchReply:
        return self.ask(  # type: ignore[no-any-return]
            wire.Match(len(keys[0]), list(keys), list(suffixes), pin_ms)
        )

    def tiers(self, keys: Sequence[bytes]) -> list[int]:
        return list(self.ask(wire.Contains(len(keys[0]), list(keys))).tiers)

    def stats(self) -> dict[str, Any]:
        return self.ask(wire.Stats()).facts  # type: ignore[no-any-return]

    def lend(self, keys: Sequence[bytes]) -> wire.LendReply:
        return self.ask(wire.Lend(len(keys[0]), list(keys)))  # type: ignore[no-any-return]

    def borrow(
        self, keys: Sequence[bytes], suffixes: Sequence[bytes] = (), length: int = 4096
    ) -> wire.BorrowReply:
        return self.ask(  # type: ignore[no-any-return]
            wire.Borrow(len(keys[0]), list(keys), list(suffixes), length)
        )

    def reserve(self, lengths: dict[bytes, int]) -> wire.ReserveReply:
        keys = list(lengths)
        return self.ask(  # type: ignore[no-any-return]
            wire.Reserve(len(keys[0]), keys, [None] * len(keys), list(lengths.values()))
        )

    def seal(self, leases: Sequence[int]) -> list[PutResult]:
        return wire.put_results(self.ask(wire.Seal(list(leases))).results)

    def release(self, leases: Sequence[int]) -> int:
        return self.ask(wire.Release(list(leases))).count  # type: ignore[no-any-return]


@dataclass
class Attached:
    """An attached process's end of the AF_UNIX connection."""

    connection: socket.socket
    answer: dict[str, Any]
    fd: int  # of the memory; -1 if attaching was refused

    @property
    def token(self) -> bytes:
        return self.answer["token"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.connection.close()
        if self.fd >= 0:
            os.close(self.fd)


def attach(ipc_path: os.PathLike[str] | str, hello: Any = None) -> Attached:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(TIMEOUT_S)
    connection.connect(os.fspath(ipc_path) + ".arena")
    hello = {"protocol": 1, "client": "test"} if hello is None else hello
    connection.send(hello if isinstance(hello, bytes) else msgpack.packb(hello))
    packet, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    return Attached(connection, msgpack.unpackb(packet), fds[0] if fds else -1)


def key(n: int, width: int = KEY_BYTES) -> bytes:
    return n.to_bytes(8, "little") + bytes([7]) * (width - 8)


def block(n: int, nbytes: int = 4096) -> bytes:
    """Content that is unique to this block."""
    return (n.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


def blocks(count: int, nbytes: int = 4096, start: int = 0) -> dict[bytes, bytes]:
    return {key(n): block(n, nbytes) for n in range(start, start + count)}


def push_out(client: RawClient, start: int) -> None:
    """Puts enough into a memory of 1 MiB to evict everything evictable."""
    for n in range(start, start + 600):
        client.put(blocks(1, start=n))
