"""Decodes and checks every message of a client and passes valid requests to the handlers.

Whatever bytes arrive, the outcome is a request, an error reply or nothing. Only a valid `hello`
changes the daemon's state.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from vllm_tiered_kv import __version__
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.curve import Clients
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory, request_cost
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.receiver import Message, Receiver
from vllm_tiered_kv.server.net.sessions import Listener, Peer, Session, Sessions, make_peer
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.requests.handlers import Handlers
from vllm_tiered_kv.server.shm.leases import Leases
from vllm_tiered_kv.server.tiers.namespaces import Namespaces
from vllm_tiered_kv.wire.codec import UNREADABLE_ID, decode_request, encode_reply
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.limits import PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import (
    BORROW_CAPABILITY,
    CLAIM_CAPABILITY,
    DELETE_NAMESPACE_CAPABILITY,
    ErrorReply,
    Get,
    Hello,
    HelloReply,
)

logger = logging.getLogger(__name__)

CAPABILITIES = ("streaming", "pins", CLAIM_CAPABILITY, DELETE_NAMESPACE_CAPABILITY)
_PENDING_READ_BYTES = 8192  # more than `request_cost` of a read that is answered at once
ARENA_CAPABILITIES = ("shared_memory", BORROW_CAPABILITY)


class Gateway:
    """Receives from the listeners, keeps the sessions and dispatches requests. The daemon creates
    one. Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        outbox: Outbox,
        handlers: Handlers,
        sessions: Sessions,
        namespaces: Namespaces,
        leases: Leases,
        connections: Connections,
        network: NetworkMemory,
        clients: Clients | None,
        limits: ClientLimits,
        recorder: Recorder,
        instance: bytes,
        capabilities: Sequence[str],
        durations: Histogram,
    ) -> None:
        self._reactor = reactor
        self._outbox = outbox
        self._handlers = handlers
        self._sessions = sessions
        self._namespaces = namespaces
        self._leases = leases
        self._connections = connections
        self._clients = clients
        self._limits = limits
        self._network = network
        self._recorder = recorder
        self._instance = instance
        self._capabilities = list(capabilities)
        self._durations = durations
        self._counts: Counter[str] = Counter()  # requests of this turn by op
        self._at_once = 0  # reads of this turn that were answered without a `Call`
        self.is_closing = False
        outbox.on_client_lost = self._drop_client
        connections.on_client_shed = self._drop_client
        connections.on_closed = outbox.connection_closed

    def serve(self, listener: Listener) -> None:
        receiver = Receiver(listener.socket)
        self._reactor.watch(listener.socket, lambda: self._receive(listener, receiver))

    def _receive(self, listener: Listener, receiver: Receiver) -> None:
        begun_at = time.monotonic()
        nbytes = messages = 0
        self._at_once = 0
        self._counts.clear()
        for message in receiver.turn():
            peer = make_peer((listener, message.identity))
            self._connections.message_received(peer, message)
            nbytes += message.nbytes
            messages += 1
            try:
                if message.fault is not None:
                    raise message.fault
                if not self._answer_from_memory(peer, message):
                    self._handle(peer, message)
            except ProtocolError as error:
                self._refuse(peer, error)
            except Exception:
                logger.exception("cannot handle a message because of an internal error")
                request_id = peek_request_id(message.header)
                failed = ProtocolError(ErrorCode.INTERNAL, "the daemon failed", request_id)
                self._refuse(peer, failed)
        self._connections.turn_ended(listener, messages)
        self._counts[Get.op] += self._at_once
        self._recorder.add(names.BYTES_IN, nbytes)
        for op, count in self._counts.items():
            self._recorder.add(names.REQUESTS, count, op)
        if self._at_once:  # a clock for each would cost more than it tells
            mean_s = (time.monotonic() - begun_at) / messages
            self._durations.observe(mean_s, Get.op, times=self._at_once)

    def _answer_from_memory(self, peer: Peer, message: Message) -> bool:
        """Answers a read that has to wait for nothing, without most steps of `_handle`. If it
        returns False, nothing has happened, and `_handle` answers."""
        if message.payload or self.is_closing:
            return False
        try:
            session = self._sessions.find(peer, self._user(peer, message))
        except ProtocolError:
            return False
        if (
            session is None
            or session.in_flight >= self._limits.requests_per_session
            or not self._network.has_room(_PENDING_READ_BYTES)
            or not self._handlers.transfers.answer_from_memory(session, message.header)
        ):
            return False
        if session.attachment is not None:
            self._leases.was_seen(session.attachment)
        self._at_once += 1
        return True

    def _handle(self, peer: Peer, message: Message) -> None:
        header = message.header
        payload = [frame.buffer for frame in message.payload]
        request_id, request = decode_request(header, [part.nbytes for part in payload])
        self._counts[request.op] += 1
        try:
            user = self._user(peer, message)
            if self.is_closing:
                raise ProtocolError(ErrorCode.UNAVAILABLE, "the daemon is shutting down")
            if isinstance(request, Hello):
                self._hello(peer, user, request_id, request)
                return
            session = self._sessions.find(peer, user)
            if session is None:
                raise ProtocolError(ErrorCode.NO_HELLO, "this connection has no session; say hello")
            if session.attachment is not None:
                self._leases.was_seen(session.attachment)
            session.require_inflight_room(self._limits.requests_per_session)
            cost = request_cost(len(header), request)
            self._network.admit_request(peer, cost)
        except ProtocolError as error:
            raise ProtocolError(error.code, error.message, request_id, request.op) from None
        call = Call(
            session,
            request_id,
            request.op,
            self._outbox,
            self._reactor,
            self._recorder,
            partial(self._request_ended, peer, cost, request.op, time.monotonic()),
        )
        self._handlers.serve(call, request, payload)

    def _request_ended(self, peer: Peer, cost: int, op: str, begun_at: float) -> None:
        self._network.end_request(peer, cost)
        self._durations.observe(time.monotonic() - begun_at, op)

    def _hello(self, peer: Peer, user: str, request_id: int, hello: Hello) -> None:
        largest = max(hello.block_bytes, default=0)
        if largest > self._limits.largest_block:
            raise ProtocolError(
                ErrorCode.TOO_LARGE,
                f"blocks of {largest} bytes are too large; this daemon accepts blocks of up to "
                f"{self._limits.largest_block} bytes, 1/32 of its memory: raise --memory",
            )
        attachment = None
        if hello.arena:
            attachment = self._leases.find(hello.arena)
            if attachment is None:
                raise ProtocolError(
                    ErrorCode.NO_ARENA, "no process is attached with this token; attach again"
                )
        read_only = self._clients is not None and self._clients.is_read_only(user)
        session = Session(
            peer=peer,
            client=hello.client,
            user=user,
            read_only=read_only,
            namespace=hello.namespace,
            shape=self._namespaces.admit(hello, read_only),
            attachment=attachment,
        )
        self._sessions.open(session)
        reply = HelloReply(
            protocol=PROTOCOL_VERSION,
            server=f"tiered-kv-server {__version__}",
            capabilities=self._capabilities,
            instance=self._instance,
            session=session.session_id,
            limits=self._limits.announced(),
        )
        logger.debug("hello from %r at %s", hello.client, peer.listener.endpoint)
        self._outbox.send(peer, encode_reply(request_id, reply))

    def _user(self, peer: Peer, message: Message) -> str:
        """The public key of an authenticated client; local clients have and need none."""
        if self._clients is None or peer.listener.is_local:
            return ""
        if message.user not in self._clients:
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "the key of this client is not allowed")
        return message.user

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        self._recorder.add(names.ERRORS, 1, error.code.value)
        request_id = UNREADABLE_ID if error.request_id is None else error.request_id
        self._outbox.send(peer, encode_reply(request_id, ErrorReply.of(error)))

    def _drop_client(self, peer: Peer, why: str) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            logger.info("dropped client %r: %s", session.client, why)
            self._sessions.drop(peer)
        self._outbox.drop(peer)
