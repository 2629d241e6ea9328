"""Zero-copy sends: payload arrives complete, and `wait` does not return too early."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from vllm_tiered_kv.native.zmq_messages import zmq_function
from vllm_tiered_kv.remote import zero_copy_send
from vllm_tiered_kv.remote.zero_copy_send import ZeroCopySend

WAIT_S = 30.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.SyncSocket]]:
    made: zmq.Context[zmq.SyncSocket] = zmq.Context()
    yield made
    made.destroy(linger=0)


def payload(*lengths: int) -> list[memoryview]:
    return [memoryview(bytes([n]) * length) for n, length in enumerate(lengths, 1)]


@pytest.fixture(params=[True, False], ids=["constant", "tracked"])
def is_constant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without zmq_send_const, which pyzmq may not export."""
    if not request.param:
        monkeypatch.setattr(zero_copy_send, "zmq_function", lambda name: None)
    return bool(request.param)


@pytest.mark.parametrize("lengths", [(1,), (3 << 20,), (2 << 20, 1, 70_000, 3 << 20, 5)])
def test_message_arrives_complete(
    context: zmq.Context[zmq.SyncSocket], is_constant: bool, lengths: tuple[int, ...]
) -> None:
    receiver, sender = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    sender.connect(f"tcp://127.0.0.1:{port}")
    parts = payload(*lengths)
    for _ in range(3):
        sender.send(b"header", zmq.SNDMORE)
        message = ZeroCopySend(parts)
        message.send(sender)
        assert receiver.poll(int(WAIT_S * 1000))
        assert receiver.recv_multipart() == [b"header", *parts]
        message.wait(time.monotonic() + WAIT_S)


@pytest.mark.parametrize("lengths", [(1,), (1 << 20, 1 << 20), (1 << 20, 5)])
def test_unsent_payload_is_not_reported_as_done(
    context: zmq.Context[zmq.SyncSocket], is_constant: bool, lengths: tuple[int, ...]
) -> None:
    """Even if the last frame is small: its tracker stands for all frames."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = context.socket(zmq.DEALER)
        sender.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        sender.send(b"header", zmq.SNDMORE)
        message = ZeroCopySend(payload(*lengths))
        message.send(sender)
        with pytest.raises(zmq.NotDone):
            message.wait(time.monotonic() + 0.05)
        context.destroy(linger=0)


def test_send_const_is_exported_by_pyzmq() -> None:
    """Without it every frame would need a tracker; pyzmq's own wheels export it."""
    assert zmq_function("zmq_send_const") is not None


def test_send_on_an_unconnected_socket_raises(
    context: zmq.Context[zmq.SyncSocket], is_constant: bool
) -> None:
    alone = context.socket(zmq.DEALER)  # not connected
    with pytest.raises(zmq.ZMQError):
        ZeroCopySend(payload(1 << 20, 1 << 20)).send(alone)
