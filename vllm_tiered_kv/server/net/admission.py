"""Decides who gets a session: the keys of clients, the lengths of blocks, and namespaces."""

from __future__ import annotations

import logging

from vllm_tiered_kv import __version__
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.net.curve import Clients
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.receiver import Message
from vllm_tiered_kv.server.net.sessions import Peer, Session, Sessions
from vllm_tiered_kv.server.shm.leases import Leases
from vllm_tiered_kv.server.tiers.namespaces import Namespaces
from vllm_tiered_kv.wire.limits import PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import (
    BORROW_CAPABILITY,
    CLAIM_CAPABILITY,
    DELETE_NAMESPACE_CAPABILITY,
    Hello,
    HelloReply,
    Limits,
)

logger = logging.getLogger(__name__)

_CAPABILITIES = ("streaming", "pins", CLAIM_CAPABILITY, DELETE_NAMESPACE_CAPABILITY)
_ARENA_CAPABILITIES = ("shared_memory", BORROW_CAPABILITY)


class Admission:
    """Answers `hello` and tells which client a message is from. The gateway calls it. Runs on the
    reactor's thread."""

    def __init__(
        self,
        sessions: Sessions,
        namespaces: Namespaces,
        leases: Leases,
        clients: Clients | None,
        limits: ClientLimits,
        instance: bytes,
        shares_memory: bool,
    ) -> None:
        self._sessions = sessions
        self._namespaces = namespaces
        self._leases = leases
        self._clients = clients
        self._limits = limits
        self._instance = instance
        self._capabilities = [*_CAPABILITIES, *(_ARENA_CAPABILITIES if shares_memory else ())]

    def user(self, peer: Peer, message: Message) -> str:
        """The public key of an authenticated client; local clients have and need none."""
        if self._clients is None or peer.listener.is_local:
            return ""
        if message.user not in self._clients:
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "the key of this client is not allowed")
        return message.user

    def open_session(self, peer: Peer, user: str, hello: Hello) -> HelloReply:
        """Opens a session and returns the answer; ProtocolError if the client gets none."""
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
        # Local processes have no key; the permissions of the socket file admit them.
        read_only = self._clients is not None and self._clients.get(user, False)
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
        logger.debug("hello from %r at %s", hello.client, peer.listener.endpoint)
        return HelloReply(
            protocol=PROTOCOL_VERSION,
            server=f"tiered-kv-server {__version__}",
            capabilities=self._capabilities,
            instance=self._instance,
            session=session.session_id,
            limits=Limits(message_bytes=self._limits.message),
        )
