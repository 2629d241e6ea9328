"""The servers of a Redis: connections, breakers, and which server of a cluster has which keys.

A call sends its requests to all servers before it reads the first reply, and ends at its deadline.
A server that does not answer costs its own share of a call: those requests stay unanswered. Its
breaker then keeps later calls from waiting for it.
"""

from __future__ import annotations

import logging
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis

from vllm_tiered_kv.core.breaker import Breaker, BreakerState
from vllm_tiered_kv.stores.redis.resp import (
    Piece,
    Reply,
    ReplyError,
    RespConnection,
    encode,
)
from vllm_tiered_kv.stores.redis.settings import RedisSettings
from vllm_tiered_kv.stores.store_url import Address

logger = logging.getLogger(__name__)

SLOTS = 16384
# In flight on a connection; more makes the server's buffers slow.
_WINDOWS = 2
_WINDOW_BYTES = (4 << 20) + (64 << 10)  # of blocks with their headers
_REFRESH_S = 0.5  # between requests for the slots of a cluster
_MIN_FAIR_S = 0.05  # a server that had less time than this is not to blame for a timeout
_REFUSALS = {"NOAUTH", "WRONGPASS", "NOPERM"}
_MOVES = {"MOVED", "READONLY"}
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
_CLUSTER_SLOTS = encode(b"CLUSTER", b"SLOTS")


class RefusedError(Exception):
    """The server or its certificate is not what the settings say; an operator has to act."""


@dataclass(slots=True, eq=False)
class Request:
    """A command for the server that has a slot. `receive` takes the reply off the connection."""

    slot: int
    pieces: Sequence[Piece]
    receive: Callable[[RespConnection], Reply] = RespConnection.reply
    nbytes: int = 256  # of command and reply, roughly
    is_answered: bool = False
    reply: Reply = None  # if it is answered

    @property
    def error(self) -> ReplyError | None:
        return self.reply if isinstance(self.reply, ReplyError) else None


class Node:
    """One server: its idle connections and its breaker. Any thread may call it."""

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self.breaker = Breaker(f"Redis at {address}")
        self.refusal = ""  # of the last connection
        self._settings = settings
        self._idle: list[RespConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self, deadline: float) -> RespConnection:
        """A connection for one call."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._connect(deadline)
            elif not connection.is_idle():
                connection.close()
                continue
            connection.deadline = deadline
            return connection

    def give_back(self, connection: RespConnection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self, deadline: float) -> RespConnection:
        settings = self._settings
        # A part of the time of a call, so that other servers have some left.
        wait_s = min(deadline - time.monotonic(), settings.timeout_s / 3)
        if wait_s <= 0:
            raise TimeoutError("no time left to connect")
        arguments: dict[str, Any] = {
            "host": self.address.host,
            "port": self.address.port,
            "db": settings.database,
            "username": settings.username,
            "password": settings.password,
            "protocol": 2,
            "socket_connect_timeout": wait_s,
            "socket_timeout": wait_s,
        }
        if settings.tls:
            link = redis.SSLConnection(
                **arguments,
                ssl_ca_certs=settings.cacert,
                ssl_certfile=settings.cert,
                ssl_keyfile=settings.key,
                ssl_cert_reqs="required",
                ssl_check_hostname=True,
            )
        else:
            link = redis.Connection(**arguments)
        try:
            link.connect()
        except redis.AuthenticationError as error:
            raise RefusedError(f"user or password: {error}") from None
        except redis.ResponseError as error:
            raise RefusedError(str(error)) from None
        except (redis.RedisError, OSError) as error:
            raise _cause_of(error) from None
        except ValueError as error:  # redis-py raises it for what is not RESP
            raise ConnectionError(f"is not a Redis: {error}") from None
        # redis-py closes the socket of a connection that is collected, so it is detached.
        sock, link._sock = link._sock, None
        return RespConnection(sock, settings.timeout_s)


def _cause_of(error: Exception) -> Exception:
    """The error of the system behind an error of redis-py."""
    cause = error if isinstance(error, OSError) else error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLError):
        hint = "; does it require a client certificate?" if isinstance(cause, _CUT_OFF) else ""
        return RefusedError(f"TLS: {cause}{hint}")
    if isinstance(cause, FileNotFoundError | PermissionError):
        return RefusedError(f"a file of the TLS options: {cause}")
    if isinstance(cause, OSError):
        return cause
    return (
        TimeoutError(str(error)) if isinstance(error, redis.TimeoutError) else OSError(str(error))
    )


class _Session:
    """The use of one node by one call. After an error it does nothing more."""

    def __init__(self, node: Node, deadline: float) -> None:
        self.node = node
        self._deadline = deadline
        self.connection: RespConnection | None = None
        self._attempt = node.breaker.begin()
        self.is_up = self._attempt is not None

    def run(self, work: Callable[[RespConnection], None], has_waited: bool = False) -> None:
        """`has_waited`: the server had the time of the whole call, so a timeout is its fault."""
        if not self.is_up or self._attempt is None:
            return
        had_time = has_waited or self._deadline - time.monotonic() > _MIN_FAIR_S
        try:
            if self.connection is None:
                self.connection = self.node.take(self._deadline)
            work(self.connection)
        except RefusedError as error:
            self.node.refusal = str(error)
            self.node.breaker.refuse(self._attempt, str(error))
            self._break_off()
        except OSError as error:
            if had_time or not isinstance(error, TimeoutError):
                is_absent = isinstance(error, ConnectionRefusedError)
                self.node.breaker.fail(self._attempt, error.strerror or str(error), is_absent)
            self._break_off()
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.is_up = False
        if self._attempt is not None:
            self.node.breaker.forget(self._attempt)  # no effect after a result

    def close(self, has_ended: bool) -> None:
        """`has_ended`: all replies are received, so another call can use the connection."""
        if not has_ended or not self.is_up or self._attempt is None:
            self._break_off()
            return
        self.node.refusal = ""
        self.node.breaker.succeed(self._attempt)
        if self.connection is not None:
            self.node.give_back(self.connection)


@dataclass(slots=True)
class _Turn:
    """What one call has for one node. While replies to one window arrive, the next is sent."""

    session: _Session
    left: deque[Request]
    sent: deque[list[Request]] = field(default_factory=deque)  # windows without replies

    def send(self) -> None:
        while self.left and len(self.sent) < _WINDOWS and self.session.is_up:
            window = _take_window(self.left)
            self.sent.append(window)
            self.session.run(partial(_send, window))


class Nodes:
    """All servers of a Redis. `RedisStore` calls it from any thread; no call raises an error of the
    network."""

    def __init__(self, settings: RedisSettings, on_unanswered: Callable[[], None]) -> None:
        self._settings = settings
        self._on_unanswered = on_unanswered
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._next_refresh = 0.0
        self._seeds = list(settings.addresses)
        self._nodes: dict[Address, Node] = {}
        self._owners: list[Node | None] | None = None  # by slot; None: nothing is known yet
        self.masters: list[Node] = []  # a walk over all slots takes too long for a step of vLLM
        self.is_cluster = False
        self._is_closed = False

    @property
    def is_known(self) -> bool:
        """Whether any server has answered yet."""
        return self._owners is not None

    @property
    def is_absent(self) -> bool:
        """Whether no server can be asked now."""
        return all(n.breaker.state is not BreakerState.CLOSED for n in self.masters)

    @property
    def refusal(self) -> str:
        """Why a server refuses this client; empty if none does."""
        with self._lock:
            refusals = [f"{n.address}: {n.refusal}" for n in self._nodes.values() if n.refusal]
        return refusals[0] if refusals else ""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    # ---- requests -------------------------------------------------------------------------------

    def exchange(self, requests: Sequence[Request], deadline: float) -> None:
        """Sends every request to its server and receives the replies, in order for each server.
        Requests that got no reply stay unanswered."""
        if not self.is_known:
            self.refresh(deadline)
        self._exchange(requests, deadline)
        moved = [r for r in requests if r.error is not None and r.error.code in _MOVES]
        if moved:
            if not self.is_cluster:
                self.refresh(deadline)
            for request in moved:
                self._follow(request)
            self._exchange(moved, deadline)
        if self.is_cluster and (moved or not all(r.is_answered for r in requests)):
            self.refresh(deadline)

    def ask(self, node: Node, command: bytes, deadline: float) -> Reply:
        """The reply of one server; None if it does not answer."""
        request = Request(0, [command])
        self._exchange_with([(node, [request])], deadline)
        return request.reply

    def _exchange(self, requests: Sequence[Request], deadline: float) -> None:
        owners = self._owners
        by_node: dict[Node, list[Request]] = {}
        for request in requests:
            request.is_answered, request.reply = False, None
            if owners is not None and (node := owners[request.slot]) is not None:
                by_node.setdefault(node, []).append(request)
        self._exchange_with(by_node.items(), deadline)
        if any(not r.is_answered for r in requests):
            self._on_unanswered()

    def _exchange_with(
        self, shares: Iterable[tuple[Node, Sequence[Request]]], deadline: float
    ) -> None:
        turns = [_Turn(_Session(node, deadline), deque(share)) for node, share in shares]
        has_ended = False
        try:
            while True:
                for turn in turns:
                    turn.send()
                waiting = [
                    (t.session, t.sent.popleft()) for t in turns if t.sent and t.session.is_up
                ]
                if not waiting:
                    break
                _receive_all(waiting, deadline, self._settings.timeout_s)
            has_ended = True
        finally:
            for turn in turns:
                turn.session.close(has_ended)

    # ---- slots ----------------------------------------------------------------------------------

    def refresh(self, deadline: float) -> None:
        """Asks the servers, at most twice a second, which of them has which slots."""
        now = time.monotonic()
        if now < self._next_refresh or not self._refreshing.acquire(blocking=False):
            return
        try:
            with self._lock:
                addresses = list(dict.fromkeys([*self._nodes, *self._seeds]))
            for address in addresses:
                until = min(deadline, time.monotonic() + self._settings.timeout_s / 3)
                node = self._node(address)
                reply = self.ask(node, _CLUSTER_SLOTS, until)
                if reply is not None and self._learn(node, reply):
                    return
        finally:
            self._next_refresh = time.monotonic() + _REFRESH_S
            self._refreshing.release()

    def _node(self, address: Address) -> Node:
        with self._lock:
            node = self._nodes.setdefault(address, Node(address, self._settings))
            if self._is_closed:
                node.close()
            return node

    def _learn(self, node: Node, reply: Reply) -> bool:
        """Whether the reply of this node tells who has the slots."""
        if isinstance(reply, ReplyError):
            if reply.code in _REFUSALS - {"NOPERM"}:
                node.refusal = reply
                return False
            if not self.is_cluster:  # not a cluster, or this user may not ask
                self._set_owners([node] * SLOTS)
            return not self.is_cluster
        owners: list[Node | None] = [None] * SLOTS
        members: set[Address] = set()
        ranges: Any = reply
        try:
            for first, last, *servers in ranges:
                found = [
                    Address((host or b"").decode() or node.address.host, port)
                    for host, port, *_ in servers
                ]
                members.update(found)
                owners[first : last + 1] = [self._node(found[0])] * (last + 1 - first)
        except (TypeError, ValueError, AttributeError, IndexError):
            logger.warning("Redis at %s describes its slots in an unknown way", node.address)
            return False
        if not members:
            return False  # a cluster without slots: this server does not belong to it yet
        self.is_cluster = True
        self._set_owners(owners)
        keep = members.union(self._seeds)
        with self._lock:
            gone = [self._nodes.pop(a) for a in list(self._nodes) if a not in keep]
        for one in gone:
            one.close()
        return True

    def _set_owners(self, owners: list[Node | None]) -> None:
        self.masters = list(dict.fromkeys(node for node in owners if node is not None))
        self._owners = owners

    def _follow(self, request: Request) -> None:
        """Takes the new owner of a slot from "MOVED slot host:port"."""
        words = (request.error or "").split()
        host, _, port = words[-1].rpartition(":") if words else ("", "", "")
        if len(words) == 3 and words[0] == "MOVED" and host and port.isdigit() and self._owners:
            node = self._owners[request.slot] = self._node(Address(host, int(port)))
            if node not in self.masters:
                self.masters = [*self.masters, node]


def _take_window(left: deque[Request]) -> list[Request]:
    """The next requests for which a connection has room, at least one."""
    window = [left.popleft()]
    nbytes = window[0].nbytes
    while left and nbytes + left[0].nbytes <= _WINDOW_BYTES:
        nbytes += left[0].nbytes
        window.append(left.popleft())
    return window


def _send(window: Iterable[Request], connection: RespConnection) -> None:
    connection.send([piece for request in window for piece in request.pieces])


def _receive_all(
    windows: Sequence[tuple[_Session, list[Request]]], deadline: float, silence_s: float
) -> None:
    """Receives the replies of each server once they begin to arrive, so that a server that hangs
    takes no time from the others. Gives up those that are all silent for `silence_s`."""
    poll = select.poll()
    waiting: dict[int, tuple[_Session, list[Request]]] = {}
    for session, window in windows:
        if session.connection is None or session.connection.has_received:
            session.run(partial(_receive, window))
        else:
            waiting[session.connection.descriptor] = (session, window)
            poll.register(session.connection.descriptor, select.POLLIN)
    while waiting:
        left_s = max(0.0, deadline - time.monotonic())
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left_s, silence_s))]
        for descriptor in ready or list(waiting):
            session, window = waiting.pop(descriptor)
            poll.unregister(descriptor)
            if ready:
                session.run(partial(_receive, window))
            else:
                session.run(_give_up, has_waited=True)


def _receive(window: Iterable[Request], connection: RespConnection) -> None:
    for request in window:
        request.reply = request.receive(connection)
        request.is_answered = True


def _give_up(connection: RespConnection) -> None:
    raise TimeoutError("no answer in time")
