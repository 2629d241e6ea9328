"""Decodes and checks every message of a client and passes valid requests to the handlers.

Whatever bytes arrive, the outcome is a request, an error reply or nothing. Only a valid `hello`
changes the daemon's state.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.admission import Admission
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory, request_cost
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.receiver import Message, Receiver
from vllm_tiered_kv.server.net.sessions import Listener, Peer, Sessions, make_peer
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.requests.handlers import Handlers
from vllm_tiered_kv.wire.codec import UNREADABLE_ID, decode_request, encode_reply
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.messages import (
    ErrorReply,
    Get,
    Hello,
)

logger = logging.getLogger(__name__)

_PENDING_READ_BYTES = 8192  # more than `request_cost` of a read that is answered at once


class Gateway:
    """Receives from the listeners, keeps the sessions and dispatches requests. The daemon creates
    one. Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        outbox: Outbox,
        handlers: Handlers,
        sessions: Sessions,
        admission: Admission,
        connections: Connections,
        network: NetworkMemory,
        limits: ClientLimits,
        recorder: Recorder,
        durations: Histogram,
    ) -> None:
        self._reactor = reactor
        self._outbox = outbox
        self._handlers = handlers
        self._sessions = sessions
        self._admission = admission
        self._connections = connections
        self._limits = limits
        self._network = network
        self._recorder = recorder
        self._durations = durations
        self._counts: Counter[str] = Counter()  # requests of this turn by op
        self._at_once = 0  # reads of this turn that were answered without a `Call`
        self.is_closing = False

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
            session = self._sessions.find(peer, self._admission.user(peer, message))
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
            session.attachment.was_seen()
        self._at_once += 1
        return True

    def _handle(self, peer: Peer, message: Message) -> None:
        header = message.header
        payload = [frame.buffer for frame in message.payload]
        request_id, request = decode_request(header, [part.nbytes for part in payload])
        self._counts[request.op] += 1
        try:
            user = self._admission.user(peer, message)
            if self.is_closing:
                raise ProtocolError(ErrorCode.UNAVAILABLE, "the daemon is shutting down")
            if isinstance(request, Hello):
                reply = self._admission.open_session(peer, user, request)
                self._outbox.send(peer, encode_reply(request_id, reply))
                return
            session = self._sessions.find(peer, user)
            if session is None:
                raise ProtocolError(ErrorCode.NO_HELLO, "this connection has no session; say hello")
            if session.attachment is not None:
                session.attachment.was_seen()
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

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        self._recorder.add(names.ERRORS, 1, error.code.value)
        request_id = UNREADABLE_ID if error.request_id is None else error.request_id
        self._outbox.send(peer, encode_reply(request_id, ErrorReply.of(error)))

    def drop_client(self, peer: Peer, why: str) -> None:
        """Closes the session of a client and discards its replies."""
        session = self._sessions.get(peer)
        if session is not None:
            logger.info("dropped client %r: %s", session.client, why)
            self._sessions.drop(peer)
        self._outbox.drop(peer)
