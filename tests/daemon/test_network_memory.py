"""The limit on network memory: messages of all clients outside of the memory tier."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import zmq

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, block, blocks, key, wire
from tests.daemon.zmtp import ZmtpClient
from tests.patience import eventually
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.errors import ConfigError, ErrorCode, ProtocolError
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.daemon import Daemon
from vllm_tiered_kv.server.net.connections import Connections, _Connection
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory, request_cost
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Listener, Peer
from vllm_tiered_kv.server.net.unfinished_memory import UnfinishedMessage
from vllm_tiered_kv.server.options import ServerOptions
from vllm_tiered_kv.wire.codec import encode_request

MIB = 1 << 20
LIMIT = ("--memory", "32MiB", "--network-memory", "64MiB", "--prefault", "false")
TOO_MUCH = "messages use more than network_memory"
LISTENER = Listener(zmq.Context.instance().socket(zmq.ROUTER), "tcp://", is_local=False)
LISTENER.socket.close()


def peer(n: int) -> Peer:
    return Peer(LISTENER, bytes([n]))


def connection(listener: Listener, inode: int, identity: bytes | None = None) -> _Connection:
    return _Connection(listener, inode, UnfinishedMessage(listener.is_local), identity)


@pytest.fixture
def network() -> NetworkMemory:
    return NetworkMemory(limit=100, max_request_bytes=40)


def assert_refused(network: NetworkMemory, who: Peer, nbytes: int) -> None:
    before = network.total
    with pytest.raises(ProtocolError) as refused:
        network.admit_request(who, nbytes)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert network.total == before


def test_admit_request_beyond_client_share_is_refused(network: NetworkMemory) -> None:
    network.admit_request(peer(1), 30)
    network.admit_request(peer(1), 10)
    assert_refused(network, peer(1), 1)
    network.admit_request(peer(2), 50)
    assert_refused(network, peer(2), 1)
    network.end_request(peer(1), 30)
    network.admit_request(peer(1), 1)


def test_admit_request_beyond_limit_refuses_largest_client() -> None:
    told: list[int] = []
    network = NetworkMemory(100, 40, lambda: told.append(network.total))
    for n in range(3):
        network.admit_request(peer(n), 30)
    assert_refused(network, peer(3), 31)  # itself the largest
    assert_refused(network, peer(2), 11)
    assert not told
    network.admit_request(peer(3), 20)
    assert told == [110]
    network.mark_disconnected(peer(0))
    assert network.total == 80
    network.end_request(peer(0), 30)
    assert network.total == 80


def test_departed_clients_make_no_room(network: NetworkMemory) -> None:
    """Their requests cannot be ended. If they made room, reconnecting would avoid the limit."""
    for n in range(3):
        network.admit_request(peer(n), 40 if n < 2 else 15)
    for n in range(2):
        network.mark_departed(peer(n))
    assert_refused(network, peer(3), 16)
    network.admit_request(peer(3), 14)  # less than client 2, which can be disconnected
    network.end_request(peer(0), 40)
    network.mark_reconnected(peer(1))
    network.admit_request(peer(3), 20)


def test_requests_of_departed_clients_do_not_disconnect_others(
    network: NetworkMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reactor = Reactor()
    limits = ClientLimits.of_memory(MIB)
    connections = Connections(reactor, context, limits, network, 10, 30.0, Recorder())
    closed: list[int] = []
    monkeypatch.setattr(connections, "_disconnect", closed.append)
    connections._open[7] = connection(LISTENER, 0, b"\1")
    network.hold(peer(0), 90)
    network.mark_departed(peer(0))
    network.hold(peer(1), 30)
    connections._shed()
    assert closed == [], "it would be in vain"
    network.hold(peer(1), 30)  # more than half of the limit
    connections._shed()
    assert closed == [7]
    reactor.close()
    context.term()


def test_end_of_connection_to_other_listener_is_not_that_of_its_successor(
    network: NetworkMemory,
) -> None:
    """The kernel reuses descriptor numbers, and each listener tells its news by itself."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reactor = Reactor()
    limits = ClientLimits.of_memory(MIB)
    connections = Connections(reactor, context, limits, network, 10, 30.0, Recorder())
    listeners = [
        Listener(context.socket(zmq.ROUTER), f"tcp://{number}", is_local=False)
        for number in range(2)
    ]
    for listener in listeners:
        listener.socket.bind("tcp://127.0.0.1:*")
        connections.watch(listener)
    address = listeners[0].socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with ZmtpClient(address):
        eventually(lambda: connections.read_monitors() or connections._open)
        ((descriptor, first),) = connections._open.items()
        assert first.listener is listeners[0]
        connections._open[descriptor] = second = connection(listeners[1], 0)
    listeners[0].socket.poll(0)
    monitor = connections._monitors[listeners[0]]
    eventually(lambda: monitor.poll(0))
    connections.read_monitors()
    assert connections._open == {descriptor: second}
    connections.close()
    for listener in listeners:
        listener.socket.close()
    reactor.close()
    context.term()


def test_reconnected_client_is_counted_again(network: NetworkMemory) -> None:
    network.hold(peer(1), 60)
    network.mark_disconnected(peer(1))
    network.hold(peer(1), 20)
    assert network.total == 0
    network.mark_reconnected(peer(1))
    assert network.total == network.held_by(peer(1)) == 80
    network.release(peer(1), 80)
    assert network.total == 0


def test_request_cost_covers_key_objects() -> None:
    keys = [bytes([n % 256]) for n in range(1000)]
    request = wire.Get(1, keys, True)
    assert request_cost(1000, request) > 1000 * 64


def test_network_memory_option_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="network_memory"):
        ClientLimits.of_memory(1 << 30).within(128 * MIB)


def begin(daemon: DaemonProcess, nbytes: int) -> ZmtpClient:
    """Sends the beginning of a message."""
    one = ZmtpClient(daemon.endpoint)
    part = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)
    for _ in range(nbytes // MIB):
        with contextlib.suppress(ConnectionError):
            one.send(part)
    return one


def test_unfinished_messages_beyond_limit_drop_clients(
    start: StartDaemon, connect: Connect
) -> None:
    daemon = start(*LIMIT)
    honest = connect(daemon.endpoint)
    before = daemon.rss_bytes()
    with contextlib.ExitStack() as held:
        for _ in range(40):
            held.enter_context(begin(daemon, 16 * MIB))  # each by itself could be a message
            assert honest.put(blocks(1)) in ([PutResult.STORED], [PutResult.PRESENT])
        eventually(lambda: TOO_MUCH in daemon.logs)
        eventually(lambda: honest.stats()["network_bytes"] <= 64 * MIB)
        assert honest.stats()["dropped_clients"] > 0
        # 640 MiB were sent. Much arrives between two checks.
        assert daemon.peak_rss_bytes() - before < 400 * MIB
        assert honest.get([key(0)]) == blocks(1)


def hello_of(client: ZmtpClient) -> None:
    hello = encode_request(1, wire.Hello(1, "slow", bytes(32), KEY_BYTES, [4096], "test", b""))
    client.send(bytes([0, len(hello)]) + hello)
    client.receive()


_DAEMON_WITH_SHORT_DEADLINE = """
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.net import connections

connections._MAX_MESSAGE_STALLS = 1.5
raise SystemExit(cli.main())
"""


def test_message_that_never_ends_drops_client(folder: Path) -> None:
    """It makes progress all the time."""
    daemon = DaemonProcess(folder, *LIMIT, "--stall-timeout", "1s")
    daemon.program = ["-c", _DAEMON_WITH_SHORT_DEADLINE]
    with daemon, ZmtpClient(daemon.endpoint) as client:
        hello_of(client)
        client.send(b"\x03" + MIB.to_bytes(8, "big") + bytes(8192))

        def is_closed_after_more() -> bool:
            with contextlib.suppress(ConnectionError):
                client.send(bytes(100))
            return client.is_closed()

        eventually(is_closed_after_more)
        eventually(lambda: "a message took more than 1.5 s" in daemon.logs)


def test_stalled_message_drops_client(start: StartDaemon, connect: Connect) -> None:
    daemon = start(*LIMIT, "--stall-timeout", "1s")
    honest = connect(daemon.endpoint)
    client = ZmtpClient(daemon.endpoint)
    with client:
        hello_of(client)
        client.send(b"\x03" + (8192).to_bytes(8, "big") + bytes(8192))
        eventually(client.is_closed)
        eventually(lambda: "no more bytes of an unfinished message for 1 s" in daemon.logs)
    assert honest.stats()["dropped_clients"] == 1
    assert honest.put(blocks(1)) == [PutResult.STORED]


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_client_reading_no_replies_is_dropped_and_counted(
    start: StartDaemon, connect: Connect, over: str
) -> None:
    """The kernel disconnects it over tcp, the daemon over ipc."""
    daemon = start("--memory", "64MiB", "--stall-timeout", "1s", "--log-level", "debug")
    honest = connect(daemon.endpoint, block_bytes=[MIB])
    honest.put({key(0): block(0, MIB)})
    endpoint = daemon.endpoint if over == "tcp" else daemon.ipc
    with RawClient(endpoint, rcvhwm=1, rcvbuf=65536) as stalled:
        stalled.hello(block_bytes=[MIB], client="me\nE forged")
        stalled.send(wire.Get(KEY_BYTES, [key(0)] * 64, True))
        eventually(lambda: honest.stats()["dropped_clients"] == 1)
        assert "hello from 'me\\nE forged'" in daemon.logs
        if over == "ipc":
            eventually(lambda: "dropped client 'me\\nE forged'" in daemon.logs)
        assert "\nE forged" not in daemon.logs
    with RawClient(endpoint) as leaving:  # disconnects by itself
        leaving.hello(block_bytes=[MIB])
        leaving.send(wire.Get(KEY_BYTES, [key(0)], True))
    assert honest.stats()["dropped_clients"] == 1
    assert honest.get([key(0)]) == {key(0): block(0, MIB)}


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_client_reading_no_small_replies_is_dropped_and_counted(
    start: StartDaemon, connect: Connect, over: str
) -> None:
    """These are copied and answered at once, as long as zmq takes them. The kernel may take 4 MiB
    before (tcp_wmem)."""
    daemon = start("--memory", "64MiB", "--stall-timeout", "1s")
    honest = connect(daemon.endpoint, block_bytes=[60000])
    wanted = {key(0): block(0, 60000)}
    honest.put(wanted)
    endpoint = daemon.endpoint if over == "tcp" else daemon.ipc
    with RawClient(endpoint, rcvhwm=1, rcvbuf=65536) as stalled:
        stalled.hello(block_bytes=[60000])
        for _ in range(400):
            stalled.send(wire.Get(KEY_BYTES, [key(0)], False))
        eventually(lambda: honest.stats()["network_bytes"] > 256 << 10)
        assert honest.get([key(0)]) == wanted
        eventually(lambda: honest.stats()["dropped_clients"] == 1)
    eventually(lambda: honest.stats()["network_bytes"] < 16 << 10)
    assert honest.stats()["reply_bytes"] == 0


@pytest.mark.parametrize("over", ["tcp", "ipc"])
def test_requests_beyond_limit_drop_clients(
    start: StartDaemon, connect: Connect, over: str
) -> None:
    """Gets with unread replies keep their keys in memory."""
    daemon = start(*LIMIT)
    endpoint = daemon.endpoint if over == "tcp" else daemon.ipc
    honest = connect(daemon.endpoint, block_bytes=[MIB])
    honest.put({key(0): block(0, MIB)})
    before = daemon.rss_bytes()
    many = wire.Get(KEY_BYTES, [key(0)] * 65536, True)
    with contextlib.ExitStack() as held:
        for _ in range(10):
            stalled = held.enter_context(RawClient(endpoint, rcvhwm=1, rcvbuf=65536))
            stalled.hello(block_bytes=[MIB])
            stalled.send(many)
            assert honest.get([key(0)]) == {key(0): block(0, MIB)}
        eventually(lambda: TOO_MUCH in daemon.logs)
        eventually(lambda: honest.stats()["network_bytes"] <= 64 * MIB)
        assert daemon.rss_bytes() - before < 150 * MIB
        assert honest.get([key(0)]) == {key(0): block(0, MIB)}


def test_unread_replies_beyond_limit_drop_clients(start: StartDaemon, connect: Connect) -> None:
    """Including those that zmq has copied."""
    daemon = start(*LIMIT)
    honest = connect(daemon.endpoint, block_bytes=[60000])
    wanted = {key(0): block(0, 60000)}
    honest.put(wanted)
    with contextlib.ExitStack() as held:
        for _ in range(40):
            mute = held.enter_context(RawClient(daemon.endpoint, rcvhwm=1, rcvbuf=4096))
            mute.timeout_s = 5.0
            try:
                mute.hello(block_bytes=[60000])
            except TimeoutError:  # it was closed with those before it: its first bytes count, too
                break
            for _ in range(100):
                mute.send(wire.Get(KEY_BYTES, [key(0)], False))
        eventually(lambda: TOO_MUCH in daemon.logs)
        eventually(lambda: honest.stats()["network_bytes"] <= 64 * MIB)
        assert honest.get([key(0)]) == wanted


def test_daemon_sheds_clients_as_soon_as_memory_is_exceeded() -> None:
    """Not only with the next check, by when others would have been refused."""
    daemon = Daemon(ServerOptions(memory=64 * MIB))
    daemon._network.hold(peer(1), daemon._network.limit)
    assert not daemon._connections._is_shedding
    daemon._network.hold(peer(1), 1)
    assert daemon._connections._is_shedding
    daemon._close_partly_opened()
    daemon._reactor.close()
