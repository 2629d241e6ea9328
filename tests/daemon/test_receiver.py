"""Messages of too many frames: nothing is kept of them, and the loop goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import blocks, key, wire
from tests.daemon.zmtp import ZmtpClient, frame
from tests.patience import eventually
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.server.net.receiver import Message, Receiver
from vllm_tiered_kv.wire.codec import encode_request
from vllm_tiered_kv.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind("inproc://intake")
    dealer.routing_id = b"me"
    dealer.connect("inproc://intake")
    yield router, dealer
    for one in (router, dealer):
        one.close(linger=0)
    context.term()


def turn(intake: Receiver) -> list[Message]:
    return list(intake.turn())


def test_message_with_max_frames_is_received(pair: Pair) -> None:
    router, dealer = pair
    dealer.send_multipart([b"header", *[b"x"] * MAX_FRAMES])
    [message] = turn(Receiver(router))
    assert message.identity == b"me"
    assert message.fault is None
    assert message.header == b"header"
    assert [bytes(one) for one in message.payload] == [b"x"] * MAX_FRAMES
    assert (message.count, message.nbytes) == (1 + MAX_FRAMES, 6 + MAX_FRAMES)


def test_message_with_too_many_frames_is_dropped_over_turns(pair: Pair) -> None:
    router, dealer = pair
    dealer.send_multipart([encode_request(7, wire.Info()), *[b"x"] * 60_000])
    dealer.send_multipart([b"next"])
    intake = Receiver(router)
    turns = [turn(intake) for _ in range(6)]
    assert turns[:3] == [[], [], []]
    [refused], [following] = turns[3:5]
    assert refused.payload == []
    assert refused.count == 60_001
    assert refused.fault is not None
    assert refused.fault.code is ErrorCode.TOO_LARGE
    assert refused.fault.request_id == 7
    assert "60000 payload frames" in refused.fault.message
    assert following.fault is None
    assert (following.header, following.payload) == (b"next", [])
    assert turns[5] == []


def test_dropped_message_reports_own_request_id(pair: Pair) -> None:
    router, dealer = pair
    dealer.send_multipart([encode_request(7, wire.Info()), *[b"x"] * 1100])
    dealer.send_multipart([b"unreadable", *[b"x"] * 1100])
    intake = Receiver(router)
    [first, second] = turn(intake) + turn(intake)
    assert first.fault is not None
    assert second.fault is not None
    assert (first.fault.request_id, second.fault.request_id) == (7, None)


def test_clients_of_shared_socket_get_fair_share() -> None:
    context = zmq.Context()
    routers = [context.socket(zmq.ROUTER) for _ in range(2)]
    dealers = []
    for number, (router, clients) in enumerate(zip(routers, (7, 1), strict=True)):
        router.bind(f"inproc://fair-{number}")
        for client in range(clients):
            dealer = context.socket(zmq.DEALER)
            dealer.routing_id = b"%d" % client
            dealer.connect(f"inproc://fair-{number}")
            for _ in range(400):
                dealer.send(b"header")
            dealers.append(dealer)
    many, alone = map(Receiver, routers)
    heard = [(len(turn(many)), len(turn(alone))) for _ in range(40)]
    of_many, of_one = (sum(column) for column in zip(*heard, strict=True))
    assert 0.8 <= of_many / 7 / of_one <= 1.25
    for one in (*routers, *dealers):
        one.close(linger=0)
    context.term()


@pytest.mark.parametrize("payload", [0, 2])
def test_header_beyond_limit_is_cut_and_refused(pair: Pair, payload: int) -> None:
    router, dealer = pair
    header = encode_request(7, wire.Info()).ljust(MAX_HEADER_BYTES + 1, b"x")
    dealer.send_multipart([header, *[b"x"] * payload])
    dealer.send(header[:-1])
    intake = Receiver(router)
    [refused] = turn(intake)
    [longest] = turn(intake)
    assert refused.fault is not None
    assert refused.fault.code is ErrorCode.TOO_LARGE
    assert refused.fault.request_id == 7
    assert f"header has {MAX_HEADER_BYTES + 1} bytes" in refused.fault.message
    assert len(refused.header) == MAX_HEADER_BYTES
    assert (refused.count, refused.nbytes) == (1 + payload, MAX_HEADER_BYTES + 1 + payload)
    assert longest.fault is None
    assert longest.header == header[:-1]


def test_large_headers_take_several_turns(pair: Pair) -> None:
    router, dealer = pair
    for _ in range(4):
        dealer.send(bytes(1 << 20))
    intake = Receiver(router)
    assert [len(turn(intake)) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_message_with_many_frames_does_not_block_daemon(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start("--memory", "32MiB")
    honest = connect(daemon.ipc)
    honest.put(blocks(1))
    with ZmtpClient(daemon.endpoint) as rude:
        rude.send(frame(encode_request(7, wire.Info()), more=True))
        before = daemon.rss_bytes()
        rude.send(frame(b"x", more=True) * 300_000)
        eventually(lambda: daemon.rss_bytes() > before + 300_000 * 50)  # zmq has them
        time.sleep(0.5)
        rude.send(frame(b"x", more=False))
        answered = 0
        while not rude.has_reply():
            assert honest.tiers([key(0)]) == [1]
            answered += 1
        assert answered >= 5  # it is one or two while the loop stands still
        request_id, reply = rude.receive()
        assert isinstance(reply, wire.ErrorReply)
        assert (request_id, reply.code) == (7, ErrorCode.TOO_LARGE)
        rude.send(frame(encode_request(8, wire.Info()), more=False))
        request_id, reply = rude.receive()
        assert isinstance(reply, wire.ErrorReply)
        assert (request_id, reply.code) == (8, ErrorCode.NO_HELLO)
    assert "Traceback" not in daemon.logs
