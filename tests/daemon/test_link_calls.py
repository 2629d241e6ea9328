"""What an attached process may ask over the connection that keeps it attached."""

from __future__ import annotations

import contextlib
import itertools
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, TIMEOUT_S, RawClient, attach, blocks, key, wire
from tests.patience import eventually, examples
from tests.remote.daemon_facts import requests_of
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.wire.limits import MAX_LINK_BYTES

ids = itertools.count(1)


def say(connection: socket.socket, request: Any) -> int:
    request_id = next(ids)
    connection.send(wire.encode_request(request_id, request))
    return request_id


def hear(connection: socket.socket) -> tuple[int, Any]:
    return wire.decode_reply(connection.recv(MAX_LINK_BYTES + 1), ())


def hear_all(connection: socket.socket) -> list[Any]:
    """All replies that lie in the socket."""
    replies = []
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            replies.append(hear(connection)[1])
    connection.settimeout(TIMEOUT_S)
    return replies


def ask(connection: socket.socket, request: Any) -> Any:
    sent = say(connection, request)
    answered, reply = hear(connection)
    assert answered == sent
    return reply


def borrow(*numbers: int) -> wire.Borrow:
    return wire.Borrow(KEY_BYTES, [key(n) for n in numbers], [], 4096)


def leases(client: RawClient) -> int:
    return client.stats()["leases"]


def test_the_answer_is_that_of_zmq(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(5))
    here = ask(attached.connection, borrow(0, 1, 2, 99))
    there = client.borrow([key(0), key(1), key(2), key(99)])
    assert (here.count, here.tiers, here.lent) == (3, [3, 0, 0], 3)
    assert (here.offsets, here.generations) == (there.offsets, there.generations)
    assert here.lease != there.lease
    assert leases(client) == 6
    assert ask(attached.connection, wire.Release([here.lease])).count == 1
    assert client.release([there.lease, here.lease]) == 1
    assert leases(client) == 0
    attached.close()


def test_hello_comes_first_and_its_end_is_the_end(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    assert ask(attached.connection, borrow(0)).code is ErrorCode.NO_HELLO
    client = connect(daemon.ipc, arena=attached.token)
    assert ask(attached.connection, borrow(0)).count == 0
    client.hello()  # without the memory: no session of that process is left
    assert ask(attached.connection, borrow(0)).code is ErrorCode.NO_HELLO
    attached.close()


def test_a_session_sees_its_own_namespace_only(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    one, other = attach(daemon.ipc_path), attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=one.token)
    connect(daemon.ipc, arena=other.token, namespace=bytes(32))
    client.put(blocks(1))
    assert ask(one.connection, borrow(0)).count == 1
    assert ask(other.connection, borrow(0)).count == 0
    one.close()
    other.close()


@pytest.mark.parametrize(
    "request_",
    [
        wire.Info(),
        wire.Get(KEY_BYTES, [key(0)], stream=True),
        wire.Delete(KEY_BYTES, [key(0)]),
        wire.Lend(KEY_BYTES, [key(0)]),
        wire.Seal([1]),
    ],
    ids=lambda request: request.op,
)
def test_everything_else_is_asked_over_zmq(
    start: StartDaemon, connect: Connect, request_: Any
) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(1))
    assert ask(attached.connection, request_).code is ErrorCode.UNKNOWN_OP
    assert client.tiers([key(0)]) == [1]
    attached.close()


def test_too_long_a_packet_is_refused(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    connect(daemon.ipc, arena=attached.token)
    reply = ask(attached.connection, borrow(*range(MAX_LINK_BYTES // KEY_BYTES)))
    assert reply.code is ErrorCode.TOO_LARGE
    assert ask(attached.connection, borrow(0)).count == 0
    attached.close()


def test_too_long_an_answer_is_refused_and_lends_nothing(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start("--memory", "256MiB")  # a quarter may be lent
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    suffixes = [bytes([n]) for n in range(200)]
    position = key(0, KEY_BYTES - 1)
    for suffix in suffixes:
        client.put({position + suffix: bytes(4096)})
    # Few keys, many blocks: the question is short, the answer is not.
    many = wire.Borrow(KEY_BYTES - 1, [position] * 60, suffixes, 4096)
    assert len(wire.encode_request(1, many)) < MAX_LINK_BYTES
    assert ask(attached.connection, many).code is ErrorCode.TOO_LARGE
    assert leases(client) == 0
    attached.close()


def test_replies_that_nobody_reads_hold_nothing(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(1))
    sent = [say(attached.connection, borrow(0)) for _ in range(5000)]
    eventually(lambda: requests_of(daemon)["borrow"] == len(sent))
    replies = hear_all(attached.connection)
    assert 0 < len(replies) < len(sent), "all replies found room"
    lent = [reply.lease for reply in replies if reply.lease]
    assert lent
    assert leases(client) == len(lent)
    assert ask(attached.connection, wire.Release(lent)).count == len(lent)
    assert leases(client) == 0
    attached.close()


def test_garbage(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(2))
    good = wire.encode_request(7, borrow(0, 1))
    mangled = st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)).map(
        lambda change: good[: change[0]] + bytes([change[1]]) + good[change[0] + 1 :]
    )
    cut = st.integers(1, len(good) - 1).map(lambda n: good[:n])

    @examples(300, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(st.binary(min_size=1, max_size=4096), mangled, cut), max_size=8))
    def bombard(packets: list[bytes]) -> None:
        lent = []
        for packet in packets:
            attached.connection.send(packet)
            _, reply = hear(attached.connection)  # whatever it was, there is one answer
            lent.append(getattr(reply, "lease", 0))
        reply = ask(attached.connection, borrow(0, 1))
        assert reply.count == 2
        ask(attached.connection, wire.Release([lease for lease in (*lent, reply.lease) if lease]))

    bombard()
    assert leases(client) == 0
    attached.close()
