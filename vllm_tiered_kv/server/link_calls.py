"""Questions over the connection that keeps a process attached: one packet there, one back.

A zmq message passes a thread of zmq's on either side, each of which has to be woken up. A process
of this host that asks where blocks lie waits for that longer than for the answer; so it may ask
here, and is answered by the thread that reads. What it may ask is what needs no payload.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.allowances import Allowances
from vllm_tiered_kv.server.call import Call
from vllm_tiered_kv.server.handlers import Handlers
from vllm_tiered_kv.server.leases import Attachment
from vllm_tiered_kv.server.reactor import Reactor
from vllm_tiered_kv.server.sessions import Peer, Session, Sessions
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.limits import MAX_LINK_BYTES
from vllm_tiered_kv.wire.messages import (
    UNREADABLE_ID,
    Borrow,
    ErrorReply,
    Release,
    decode_request,
    encode_reply,
)

logger = logging.getLogger(__name__)

_TOO_LONG = ProtocolError(ErrorCode.TOO_LARGE, "too long for this connection; ask over zmq")


class LinkCalls:
    """Runs on the reactor's thread. Whatever the bytes, nothing is left behind by them."""

    def __init__(
        self,
        reactor: Reactor,
        handlers: Handlers,
        sessions: Sessions,
        allowances: Allowances,
        recorder: Recorder,
        is_closing: Callable[[], bool],
    ) -> None:
        self._reactor = reactor
        self._handlers = handlers
        self._sessions = sessions
        self._allowances = allowances
        self._recorder = recorder
        self._is_closing = is_closing

    def take(self, attachment: Attachment, connection: socket.socket, packet: bytes) -> None:
        """Serves one packet of an attached process."""
        self._recorder.add(names.BYTES_IN, len(packet))
        replies = _Replies(connection, self._recorder)
        try:
            self._serve(attachment, replies, packet)
        except ProtocolError as error:
            replies.refuse(error)
        except Exception:
            logger.exception("a packet could not be handled")
            request_id = peek_request_id(packet)
            replies.refuse(ProtocolError(ErrorCode.INTERNAL, "the daemon failed", request_id))

    def _serve(self, attachment: Attachment, replies: _Replies, packet: bytes) -> None:
        if len(packet) > MAX_LINK_BYTES:
            raise ProtocolError(_TOO_LONG.code, _TOO_LONG.message, peek_request_id(packet))
        request_id, request = decode_request(packet, ())
        self._recorder.add(names.REQUESTS, 1, request.op)
        try:
            if not isinstance(request, (Borrow, Release)):
                raise ProtocolError(ErrorCode.UNKNOWN_OP, f"{request.op} is asked over zmq")
            session = self._session_of(attachment)
        except ProtocolError as error:
            raise ProtocolError(error.code, error.message, request_id, request.op) from None
        call = Call(session, request_id, request.op, replies, self._reactor, self._recorder)
        self._handlers.serve(call, request, ())

    def _session_of(self, attachment: Attachment) -> Session:
        if self._is_closing():
            raise ProtocolError(ErrorCode.UNAVAILABLE, "the daemon is shutting down")
        session = self._sessions.attached(attachment)
        if session is None:
            raise ProtocolError(ErrorCode.NO_HELLO, "say hello first, over zmq")
        session.require_room(self._allowances.requests_per_session)
        return session


class _Replies:
    """The way back of one packet. What the process does not take at once is lost."""

    def __init__(self, connection: socket.socket, recorder: Recorder) -> None:
        self._connection = connection
        self._recorder = recorder

    def send(
        self,
        peer: Peer,
        header: bytes,
        payload: Sequence[PinnedSlot] = (),
        lost: Callable[[], None] | None = None,
    ) -> None:
        assert not payload, "nothing that is asked here is answered with blocks"
        failed = self._send(header)
        if failed is None:
            return
        if lost is not None:
            lost()
        if failed == errno.EMSGSIZE:
            self.refuse(ProtocolError(_TOO_LONG.code, _TOO_LONG.message, peek_request_id(header)))

    def let_go(self, peer: Peer, blocks: Sequence[PinnedSlot]) -> None:
        assert not blocks, "nothing that is asked here is answered with blocks"

    def refuse(self, error: ProtocolError) -> None:
        self._recorder.add(names.ERRORS, 1, error.code.value)
        request_id = UNREADABLE_ID if error.request_id is None else error.request_id
        self._send(encode_reply(request_id, ErrorReply.of(error)))

    def _send(self, header: bytes) -> int | None:
        """Why it could not be sent, if it could not."""
        if len(header) > MAX_LINK_BYTES:
            return errno.EMSGSIZE
        try:
            self._connection.send(header)
        except OSError as error:  # also where the process reads nothing, or has gone
            return error.errno or errno.EIO
        self._recorder.add(names.BYTES_OUT, len(header))
        return None
