"""Zero-copy replies to clients that disconnect while receiving."""

from __future__ import annotations

import time

import pytest
import zmq

from tests.stores.memory_blocks import put_into
from vllm_tiered_kv.core.store import PutItem, StoreKey
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.zmq_messages import make_zmq_sender
from vllm_tiered_kv.server.net import outbox as outbox_module
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Listener, Peer
from vllm_tiered_kv.stores.memory import MemoryStore

MIB = 1 << 20
SIZE = 128 << 10
KEY = StoreKey(bytes(24))


class SenderThatReportsNothing:
    def __init__(self) -> None:
        self.send = make_zmq_sender().send

    def take_sent(self) -> list[int]:
        return []


def turn_until(reactor: Reactor, condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        reactor.turn()


@pytest.mark.parametrize("is_lost", [False, True])
def test_blocks_sent_to_dead_client_are_released(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Even if zmq never drops its reference."""
    if is_lost:
        monkeypatch.setattr(outbox_module, "make_zmq_sender", SenderThatReportsNothing)
    monkeypatch.setattr(outbox_module, "_GRACE_S", 0.1)
    memory = MemoryStore(4 * MIB)
    put_into(memory, [PutItem(KEY, None, memoryview(bytes(SIZE)))])
    reactor = Reactor()
    limits, network = ClientLimits.of_memory(4 * MIB), NetworkMemory(MIB, MIB)
    gone: list[str] = []

    def forget(peer: Peer, why: str) -> None:
        gone.append(why)
        outbox.drop(peer)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        connections = Connections(reactor, context, limits, network, 10, 60.0, Recorder())
        outbox = Outbox(
            reactor,
            memory,
            limits,
            Recorder(),
            network,
            connections,
            0.1,
            on_client_lost=forget,
            on_room_freed=lambda: None,
        )
        router.router_mandatory = True
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = context.socket(zmq.DEALER)
        client.linger = 0
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        identity, _ = router.recv_multipart()
        peer = Peer(Listener(router, "", is_local=False), identity)
        reactor.watch(router, lambda: router.recv_multipart())
        (held,) = memory.hold([KEY])
        assert held is not None
        assert outbox.claim(peer, SIZE)
        assert memory._index.pinned_slots() == {held.slot}
        reactor.post(lambda: outbox.send(peer, b"header", [held]))
        reactor.turn()
        if is_lost:  # a client that is there may still be sent it
            assert client.recv_multipart() == [b"header", bytes(SIZE)]
            turn_until(reactor, lambda: client.poll(0))  # it is asked for, by an error reply
            assert outbox.claimed_bytes == SIZE
        client.close()
        turn_until(reactor, lambda: outbox.claimed_bytes == 0)
        assert not memory._index.pinned_slots()
        assert gone == (["it has disconnected"] if is_lost else [])
        assert outbox.is_empty
        assert not outbox.has_claims(peer)
        reactor.unwatch(router)
    reactor.close()
    memory.close()
