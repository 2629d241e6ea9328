"""Every verb of the protocol, against a real daemon."""

from __future__ import annotations

import signal
import time

import msgpack
import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, NAMESPACE, Refused, block, blocks, key, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import Durability, PutResult, key_prefix
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.native.cpu import xxh3_64

MIB = 1 << 20


@pytest.fixture(params=["tcp", "ipc"])
def client(request: pytest.FixtureRequest, start: StartDaemon, connect: Connect):  # type: ignore[no-untyped-def]
    daemon = start()
    return connect(daemon.endpoint if request.param == "tcp" else daemon.ipc)


def test_put_block_is_found_by_get_match_contains(client) -> None:  # type: ignore[no-untyped-def]
    wanted = blocks(10)
    assert client.put(wanted) == [PutResult.STORED] * 10
    assert client.put(wanted) == [PutResult.PRESENT] * 10
    keys = [*wanted, key(99)]
    for stream in (False, True):
        assert client.get(keys, stream) == wanted
    assert client.match(keys).count == 10
    assert client.match(keys).tiers == [10, 0, 0]
    assert client.match([key(99), *wanted]).count == 0
    assert client.tiers(keys) == [1] * 10 + [0]
    assert client.get([key(99)]) == client.get([key(99)], stream=True) == {}


def test_match_with_suffixes_needs_every_block(client) -> None:  # type: ignore[no-untyped-def]
    client.put({key(1, 23) + b"\0": block(1), key(1, 23) + b"\1": block(2)})
    client.put({key(2, 23) + b"\0": block(3)})
    positions = [key(1, 23), key(2, 23)]
    assert client.match(positions, [b"\0", b"\1"]).count == 1
    assert client.match(positions, [b"\0"]).count == 2


def test_put_with_wrong_checksum_is_rejected(client) -> None:  # type: ignore[no-untyped-def]
    good = xxh3_64(block(1))
    results = client.put({key(1): block(1), key(2): block(2)}, checksums=[good, good])
    assert results == [PutResult.STORED, PutResult.FAILED]
    assert client.tiers([key(1), key(2)]) == [1, 0]


def test_delete_removes_blocks(client) -> None:  # type: ignore[no-untyped-def]
    client.put(blocks(4))
    client.match([key(0)], pin_ms=60_000)
    assert client.ask(wire.Delete(KEY_BYTES, [key(0), key(1), key(9)])).count == 2
    assert client.tiers([key(n) for n in range(4)]) == [0, 0, 1, 1]
    assert client.put({key(0): block(7)}) == [PutResult.STORED]
    assert client.get([key(0)]) == {key(0): block(7)}


def test_flush_info_stats(client) -> None:  # type: ignore[no-untyped-def]
    client.put(blocks(3))
    client.get([key(0), key(9)])
    assert client.ask(wire.Flush()) == wire.FlushReply()
    info = client.ask(wire.Info()).facts
    assert info["tiers"] == {"memory": 64 * MIB}
    stats = client.stats()
    assert stats["put_blocks"] == {"stored": 3}
    assert stats["hit_blocks"] == {"memory": 1}
    assert stats["missed_blocks"] == 1
    assert stats["blocks"] == {"memory": 3}
    assert stats["requests"]["put"] == 1
    held = {"client": "test", "model": "test", "memory_blocks": 3, "memory_bytes": 3 * 4096}
    assert info["by_namespace"] == {key_prefix(NAMESPACE).hex(): held}


@pytest.mark.parametrize("nbytes", [4096, 128 << 10])  # copied, and sent from where they are
def test_get_of_any_form_returns_same_blocks(
    start: StartDaemon, connect: Connect, nbytes: int
) -> None:
    """Requests that are answered at once, and those that are not, differ in nothing else."""
    client = connect(start().ipc, block_bytes=[nbytes, 64])
    there = blocks(3, nbytes)
    client.put(there)
    client.put({key(5): block(5, 64)})
    asked = [key(0), key(2), key(5)]
    expected = {key(0): there[key(0)], key(2): there[key(2)], key(5): block(5, 64)}
    assert client.get(asked) == expected  # as our encoder writes it
    fields = {"keys": b"".join(asked), "width": KEY_BYTES, "stream": False, "op": "get", "id": 99}
    client.socket.send(msgpack.packb(fields))
    request_id, reply, payload = client.receive()
    assert (request_id, reply.positions) == (99, [0, 1, 2])
    assert payload == list(expected.values())
    assert client.get([*asked, key(9)]) == expected
    assert client.stats()["hit_blocks"] == {"memory": 9}
    assert client.stats()["requests"]["get"] == 3


def test_get_of_deleted_block_is_a_miss(client) -> None:  # type: ignore[no-untyped-def]
    client.put(blocks(2))
    assert client.get([key(0), key(1)]) == blocks(2)
    assert client.ask(wire.Delete(KEY_BYTES, [key(0)])).count == 1
    assert client.get([key(0)]) == {}
    assert client.get([key(0), key(1)]) == {key(1): block(1)}


def test_match_counts_misses(client) -> None:  # type: ignore[no-untyped-def]
    """Otherwise the hit rate would always be 100 %."""
    whole = {key(n, KEY_BYTES - 1) + ending: block(n) for n in range(3) for ending in (b"a", b"b")}
    client.put(whole)
    asked = [key(n, KEY_BYTES - 1) for n in range(5)]
    assert client.match(asked, [b"a", b"b"]).count == 3
    assert client.stats()["missed_blocks"] == 4
    assert client.match([key(8), key(9)]).count == 0
    assert client.stats()["missed_blocks"] == 6
    assert client.match(list(whole)).count == 6
    assert client.tiers([key(9)]) == [0]
    assert client.stats()["missed_blocks"] == 6


def test_durable_put_without_disk_is_refused(client) -> None:  # type: ignore[no-untyped-def]
    assert client.put(blocks(1), Durability.RECEIVED) == [PutResult.STORED]
    eventually(lambda: client.tiers([key(0)]) == [1])
    for n in (0, 1):  # there already, and new
        with pytest.raises(Refused) as refused:
            client.put(blocks(1, start=n), Durability.DISK)
        assert refused.value.code is ErrorCode.NOT_WRITTEN
        assert "no disk" in refused.value.message
    assert client.tiers([key(0), key(1)]) == [1, 0], "of what is refused nothing is kept"
    assert client.put(blocks(2), Durability.MEMORY) == [PutResult.PRESENT, PutResult.STORED]


def test_get_beyond_client_share_streams(start: StartDaemon, connect: Connect) -> None:
    """A stream continues as the client reads; a single message is refused."""
    client = connect(start("--memory", "128MiB").endpoint, block_bytes=[MIB])
    wanted: dict[bytes, bytes] = {}
    for n in range(100):
        wanted |= blocks(1, MIB, start=n)
        assert client.put(blocks(1, MIB, start=n)) == [PutResult.STORED]
    assert client.get(list(wanted), stream=True) == wanted
    with pytest.raises(Refused) as refused:
        client.get(list(wanted))
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert client.get(list(wanted)[:8]) == {k: wanted[k] for k in list(wanted)[:8]}
    eventually(lambda: client.stats()["reply_bytes"] == 0)


def test_eviction_takes_tails_before_heads(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    for n in range(1000):
        parent = key(n - 1) if n else None
        assert client.put({key(n): block(n)}, parents=[parent])[0] in (
            PutResult.STORED,
            PutResult.DROPPED,
        )
    stats = client.stats()
    assert stats["used_bytes"]["memory"] <= MIB
    count = client.match([key(n) for n in range(1000)]).count
    assert 0 < count < 1000
    found = client.get([key(n) for n in range(count)], stream=True)
    assert found == {key(n): block(n) for n in range(count)}


def test_pins_survive_eviction_until_released(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    client.put(blocks(8))
    pinned = [key(n) for n in range(8)]
    assert client.ask(wire.Pin(KEY_BYTES, [*pinned, key(99)], 60_000)).count == 8
    for n in range(1000, 2000):
        client.put(blocks(1, start=n))
    assert client.get(pinned) == blocks(8)
    assert client.stats()["pinned_bytes"] == 8 * 4096
    assert client.ask(wire.Pin(KEY_BYTES, pinned[:4], 0)).count == 4
    assert client.ask(wire.Pin(KEY_BYTES, pinned[4:], 1)).count == 4  # longer pins stay
    for n in range(2000, 3000):
        client.put(blocks(1, start=n))
    assert client.tiers(pinned) == [0] * 4 + [1] * 4


def test_pin_expires(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    client.put(blocks(4))
    assert client.match([key(n) for n in range(4)], pin_ms=300).count == 4
    eventually(lambda: client.stats()["pins"] == 4 or client.stats()["pins"] == 0)
    eventually(lambda: client.stats()["pins"] == 0)


def test_pins_are_limited_to_eighth_of_memory(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "1MiB").endpoint)
    for n in range(0, 200, 50):
        client.put(blocks(50, start=n))
    keys = [key(n) for n in range(200)]
    assert client.ask(wire.Pin(KEY_BYTES, keys, 60_000)).count == 32


def test_request_before_hello_is_refused(start: StartDaemon, connect: Connect) -> None:
    client = connect(start().endpoint, greet=False)
    for request in (wire.Info(), wire.Match(4, [b"abcd"], [], 0), wire.Flush()):
        with pytest.raises(Refused) as refused:
            client.ask(request)
        assert refused.value.code is ErrorCode.NO_HELLO
    client.hello()
    client.ask(wire.Info())


def test_session_with_wrong_request_is_refused(start: StartDaemon, connect: Connect) -> None:
    client = connect(start().endpoint)
    for request, code in [
        (wire.Contains(KEY_BYTES - 1, [key(1, KEY_BYTES - 1)]), ErrorCode.MISMATCH),
        (wire.Match(KEY_BYTES, [key(1)], [b"x"], 0), ErrorCode.MISMATCH),
        (wire.Lend(KEY_BYTES, [key(1)]), ErrorCode.NO_ARENA),
        (wire.Seal([1]), ErrorCode.NO_ARENA),
    ]:
        with pytest.raises(Refused) as refused:
            client.ask(request)
        assert refused.value.code is code
    with pytest.raises(Refused) as refused:
        client.put({key(1): block(1, 8192)})
    assert refused.value.code is ErrorCode.MISMATCH
    assert "8192" in refused.value.message


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"layout": "other"}, "is known with the layout 'test', not 'other'"),
        ({"block_bytes": [8192]}, "is known with blocks of [4096] bytes, not [8192]"),
        ({"key_bytes": 25}, "is known with keys of 24 bytes, not 25"),
    ],
)
def test_hello_with_other_shape_is_refused(
    start: StartDaemon,
    connect: Connect,
    other: dict[str, object],
    sentence: str,
) -> None:
    daemon = start()
    connect(daemon.endpoint)
    stranger = connect(daemon.endpoint, greet=False)
    with pytest.raises(Refused) as refused:
        stranger.hello(**other)  # type: ignore[arg-type]
    assert refused.value.code is ErrorCode.MISMATCH
    assert sentence in refused.value.message
    assert NAMESPACE.hex()[:16] in refused.value.message
    stranger.hello(namespace=bytes(32), **other)  # type: ignore[arg-type]


def test_namespaces_do_not_see_each_other(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    one, other = connect(daemon.endpoint), connect(daemon.endpoint, namespace=bytes(32))
    one.put(blocks(1))
    assert other.tiers([key(0)]) == [0]
    other.put({key(0): block(5)})
    assert one.get([key(0)]) == blocks(1)


def test_client_name_with_line_breaks_is_escaped_in_log(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start()
    connect(daemon.endpoint, greet=False).ask(
        wire.Hello(1, "model\nforged line", NAMESPACE, KEY_BYTES, [4096], "test", b"")
    )
    assert f"namespace {key_prefix(NAMESPACE).hex()}: 'model\\nforged line'" in daemon.logs
    assert "\nforged" not in daemon.logs


def test_hello_with_too_large_blocks_is_refused(start: StartDaemon, connect: Connect) -> None:
    client = connect(start("--memory", "32MiB").endpoint, greet=False)
    with pytest.raises(Refused) as refused:
        client.hello(block_bytes=[MIB + 1])
    assert refused.value.code is ErrorCode.TOO_LARGE
    client.hello(block_bytes=[MIB])
    assert client.put({key(1): block(1, MIB)}) == [PutResult.STORED]


def test_hello_with_other_version_is_refused(start: StartDaemon, connect: Connect) -> None:
    import msgpack

    client = connect(start().endpoint, greet=False)
    client.socket.send(msgpack.packb({"id": 5, "op": "hello", "protocol": 2, "new_field": 1}))
    request_id, reply, _ = client.receive()
    assert request_id == 5
    assert reply.code is ErrorCode.UNSUPPORTED_VERSION
    assert "only version 1" in reply.message


def test_sessions_beyond_limit_close_idle_ones(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "64MiB", "--max-sessions", "50")
    clients = [connect(daemon.endpoint) for _ in range(50)]
    clients[0].put(blocks(5))
    for client in clients:
        assert client.get([key(3)]) == {key(3): block(3)}
    assert clients[0].stats()["sessions"] == 50
    time.sleep(1.1)  # a session used just now is not dropped
    for client in clients[1:]:
        client.get([key(3)])
    newcomer = connect(daemon.endpoint)
    assert newcomer.stats()["sessions"] == 50
    with pytest.raises(Refused) as refused:
        clients[0].stats()
    assert refused.value.code is ErrorCode.NO_HELLO


def test_requests_while_stopping_are_unavailable(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    client = connect(daemon.endpoint)
    daemon.freeze()
    daemon.signal(signal.SIGTERM)
    client.send(wire.Info())
    daemon.thaw()
    try:
        _, reply, _ = client.receive(timeout_s=5)
    except TimeoutError:
        pass  # it had stopped before it saw the request
    else:
        assert isinstance(reply, (wire.ErrorReply, wire.InfoReply))
    assert daemon.wait() == 0
    assert "everything is written" in daemon.logs
