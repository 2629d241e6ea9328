"""The native sender: what arrives, and when a message is reported as sent."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import zmq

from tests.patience import eventually
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native.cpu import pack_get_reply
from vllm_tiered_kv.native.zmq_messages import ZmqSender, make_zmq_sender

WAIT_MS = 30_000
LARGE = 64 << 20  # more than the kernel buffers


class Bench:
    """A ROUTER, a client of it that has said something, and a sender."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.router_mandatory = True
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(f"tcp://127.0.0.1:{port}")
        self.client.send(b"hello")
        self.identity = self.router.recv_multipart()[0]
        self.sender: ZmqSender = make_zmq_sender()
        self.sent: list[int] = []
        self.referenced: list[memoryview] = []  # must outlive the context

    def send(self, payload: list[memoryview], copies: bool, ticket: int) -> int:
        self.referenced += payload
        socket = self.router.underlying
        return self.sender.send(socket, self.identity, b"header", payload, copies, ticket)

    def has_sent(self, *tickets: int) -> bool:
        self.router.poll(0)  # lets zmq end connections
        self.sent += self.sender.take_sent()
        return sorted(self.sent) == list(tickets)


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.context.destroy(linger=0)


@pytest.mark.parametrize("lengths", [(), (1,), (0,), (70_000, 1, 3 << 20)])
@pytest.mark.parametrize("copies", [False, True])
def test_message_arrives_and_is_reported_once(
    bench: Bench, lengths: tuple[int, ...], copies: bool
) -> None:
    parts = [memoryview(bytes([n]) * length) for n, length in enumerate(lengths, 1)]
    for ticket in (5, 6):
        assert bench.send(parts, copies, ticket) == 0
        assert bench.client.poll(WAIT_MS)
        assert bench.client.recv_multipart() == [b"header", *parts]
    eventually(lambda: bench.has_sent(5, 6))


def test_message_without_ticket_is_not_reported(bench: Bench) -> None:
    assert bench.send([memoryview(b"block")], True, 0) == 0
    assert bench.client.recv_multipart() == [b"header", b"block"]
    assert bench.send([], True, 1) == 0
    eventually(lambda: bench.has_sent(1))


class Block(NamedTuple):
    nbytes: int
    checksum: int
    view: memoryview


@pytest.mark.parametrize("lengths", [(1,), (4096,), (0, 70_000, 4096)])
def test_get_reply_arrives_with_copies_of_blocks(bench: Bench, lengths: tuple[int, ...]) -> None:
    socket, identity = bench.router.underlying, bench.identity
    blocks = [
        Block(length, 2**64 - 1 - n, memoryview(bytearray([n]) * length))
        for n, length in enumerate(lengths, 1)
    ]
    contents = [bytes(block.view) for block in blocks]
    packed = pack_get_reply(7, blocks, set(lengths))
    assert packed is not None
    for ticket in (0, 5):
        sent = bench.sender.send_get_reply(socket, identity, 7, blocks, set(lengths), ticket)
        assert sent == len(packed[0]) + sum(lengths)
    for block in blocks:
        block.view[:] = bytes(block.nbytes)
    for _ in range(2):
        assert bench.client.poll(WAIT_MS)
        assert bench.client.recv_multipart() == [packed[0], *contents]
    eventually(lambda: bench.has_sent(5))


def test_get_reply_that_cannot_be_sent_sends_nothing(bench: Bench) -> None:
    send = bench.sender.send_get_reply
    socket, blocks = bench.router.underlying, [Block(4096, 0, memoryview(bytes(4096)))]
    assert send(socket, b"nobody", 7, blocks, {4096}, 1) == 0
    assert send(socket, bench.identity, 7, blocks, {8192}, 2) == 0
    with pytest.raises(NativeError, match="null address"):
        send(0, bench.identity, 7, blocks, {4096}, 3)
    assert bench.send([], True, 4) == 0
    assert bench.client.recv_multipart() == [b"header"]
    eventually(lambda: bench.has_sent(4))


@pytest.mark.parametrize("lengths", [(LARGE,), (LARGE, 1), (1, LARGE)])
def test_unread_message_is_reported_when_its_connection_ends(
    bench: Bench, lengths: tuple[int, ...]
) -> None:
    bench.client.close(linger=0)
    stuck = bench.context.socket(zmq.DEALER)
    stuck.rcvhwm = 1
    stuck.connect(bench.router.last_endpoint.decode())
    stuck.send(b"hello")
    bench.identity = bench.router.recv_multipart()[0]
    parts = [memoryview(bytearray(length)) for length in lengths]
    for ticket in (1, 2, 3, 4):
        assert bench.send(parts, False, ticket) == 0
    assert not bench.has_sent(1, 2, 3, 4)
    stuck.close(linger=0)
    eventually(lambda: bench.has_sent(1, 2, 3, 4))


def test_message_to_unknown_client_is_refused_and_not_reported(bench: Bench) -> None:
    bench.identity = b"nobody"
    assert bench.send([memoryview(b"block")], False, 1) == zmq.EHOSTUNREACH
    assert bench.send([memoryview(b"block")], True, 0) == zmq.EHOSTUNREACH
    assert not bench.sender.take_sent()


def test_message_beyond_the_high_water_mark_is_refused(bench: Bench) -> None:
    block = memoryview(bytes(1 << 20))
    refused = 0
    for ticket in range(1, 5000):
        refused = bench.send([block], False, ticket)
        if refused:
            break
    assert refused == errno.EAGAIN


def test_sender_may_end_before_its_messages(bench: Bench) -> None:
    block = memoryview(bytes(LARGE))
    assert bench.send([block, block], False, 1) == 0
    bench.sender = make_zmq_sender()
    assert bench.client.poll(WAIT_MS)
    assert len(bench.client.recv_multipart()) == 3
    assert not bench.sender.take_sent()


def test_send_invalid_arguments_are_refused(bench: Bench) -> None:
    block = memoryview(b"block")
    with pytest.raises(NativeError):
        bench.send([block], False, 0)
    with pytest.raises(NativeError):
        bench.sender.send(0, b"", b"", [], True, 0)
    with pytest.raises(NativeError):
        ZmqSender(0, 0, 0, 0)
