"""The native receiver: what it returns of a message, and what it leaves to the socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.patience import eventually
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native.zmq_messages import ZmqReceiver, make_zmq_receiver

MOST = 1 << 20


class Bench:
    """A ROUTER with a receiver, and a client of it."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(endpoint)
        self.client = self.context.socket(zmq.DEALER)
        self.client.routing_id = b"me"
        self.client.connect(endpoint)
        self.receiver = make_zmq_receiver(self.router.underlying)

    def receive(
        self, *frames: bytes, most: int = MOST
    ) -> tuple[bytes, bytes, int, int | None, str, bool]:
        self.client.send_multipart(frames)
        eventually(lambda: self.router.poll(0))
        received = self.receiver.receive(most)
        assert received is not None
        return received


@pytest.fixture(params=["inproc", "ipc"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    one = Bench(f"{request.param}://{tmp_path}/socket")
    yield one
    one.context.destroy(linger=0)


@pytest.mark.parametrize("size", [0, 1, 30, 100, 70_000])
def test_receive_returns_identity_and_header(bench: Bench, size: int) -> None:
    identity, header, nbytes, descriptor, user, has_more = bench.receive(b"h" * size)
    assert (identity, header, nbytes, user, has_more) == (b"me", b"h" * size, size, "", False)
    endpoint = bench.router.getsockopt_string(zmq.LAST_ENDPOINT)
    assert (descriptor is None) == endpoint.startswith("inproc")
    assert bench.receiver.receive(MOST) is None


def test_receive_leaves_frames_after_header_to_socket(bench: Bench) -> None:
    assert bench.receive(b"header", b"first", b"second")[-1]
    assert bench.router.recv_multipart() == [b"first", b"second"]
    assert bench.receive(b"next")[1:3] == (b"next", 4)


def test_drop_ends_with_message_and_waits_for_nothing(bench: Bench) -> None:
    assert bench.receive(b"header", b"", b"two", b"three" * 20_000, b"four")[-1]
    assert bench.receiver.drop(2) == (2, 3, True)
    assert bench.receiver.drop(0) == (0, 0, True)
    assert bench.receiver.drop(100) == (2, 100_004, False)
    assert bench.receive(b"next")[1:3] == (b"next", 4)
    assert bench.receiver.drop(1) == (0, 0, True), "there is none"


@pytest.mark.parametrize("size", [9, 10, 11, 70_000])
def test_receive_returns_beginning_of_long_header(bench: Bench, size: int) -> None:
    assert bench.receive(b"h" * size, most=10)[1:3] == (b"h" * min(size, 10), size)
    assert bench.receiver.receive(MOST) is None


def test_receive_from_socket_that_cannot_raises(bench: Bench) -> None:
    push = bench.context.socket(zmq.PUSH)
    with pytest.raises(RuntimeError, match="cannot receive from zmq"):
        make_zmq_receiver(push.underlying).receive(MOST)


def test_receiver_of_null_address_is_refused() -> None:
    with pytest.raises(NativeError, match="null address"):
        make_zmq_receiver(0)
    with pytest.raises(NativeError, match="null address"):
        ZmqReceiver(1, *[0] * 9)
