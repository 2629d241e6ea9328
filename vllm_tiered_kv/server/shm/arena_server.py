"""Hands the memory tier to processes of this host: a socket beside each ipc:// endpoint.

zmq cannot carry descriptors, so the arena's travels over a plain AF_UNIX socket (SOCK_SEQPACKET):

    client  {"protocol": 1, "client": name}
    daemon  {"ok": true, "protocol": 1, "token", "capacity", "instance"} and the descriptor, or
            {"ok": false, "code", "message"}

each one msgpack packet. The connection then stays open. Its end, together with the end of the
process, tells that the process can no longer touch the memory.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import socket
import struct
from typing import Any

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.shm.leases import Attachment, Leases
from vllm_tiered_kv.stores.memory import MemoryStore
from vllm_tiered_kv.wire.header import pack_map, unpack_map
from vllm_tiered_kv.wire.limits import MAX_TEXT

logger = logging.getLogger(__name__)

ATTACH_PROTOCOL = 1

_MAX_PACKET = 4096
_PATIENCE_S = 10.0  # for the first packet
_MAX_STRANGERS = 64  # connections that have not said anything yet
_PAUSE_S = 1.0  # after one could not be accepted
_SO_PEERPIDFD = 77  # Linux 6.5; not yet named by Python
_CREDENTIALS = struct.Struct("3i")


class ArenaServer:
    """Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        memory: MemoryStore,
        leases: Leases,
        allowances: ClientLimits,
        instance: bytes,
    ) -> None:
        self._reactor = reactor
        self._memory = memory
        self._leases = leases
        self._most = allowances.attachments
        self._instance = instance
        self._listening: list[socket.socket] = []
        self._strangers: set[socket.socket] = set()
        self._connections: dict[Attachment, socket.socket] = {}
        self._is_pausing = False
        leases.on_nothing_left = self._died

    def serve(self, listening: socket.socket) -> None:
        self._listening.append(listening)
        self._resume(listening)

    def close(self) -> None:
        for listening in self._listening:
            self._reactor.forget(listening.fileno())
            listening.close()
        self._listening.clear()
        for connection in [*self._strangers, *self._connections.values()]:
            self._reactor.forget(connection.fileno())
            connection.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # out of descriptors, say
            self._pause(listening, error)
            return
        self._is_pausing = False
        connection.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            connection.close()
            return
        self._strangers.add(connection)
        self._reactor.watch(connection.fileno(), lambda: self._greet(connection))
        self._reactor.after(_PATIENCE_S, lambda: self._lose_patience(connection))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """The connection stays in the queue, where it would be found again at once."""
        if not self._is_pausing:
            logger.warning("processes cannot attach for now: %s", error.strerror)
        self._is_pausing = True
        self._reactor.forget(listening.fileno())
        self._reactor.after(_PAUSE_S, lambda: self._resume(listening))

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._reactor.watch(listening.fileno(), lambda: self._accept(listening))

    def _lose_patience(self, connection: socket.socket) -> None:
        if connection in self._strangers:
            self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        self._strangers.discard(connection)
        self._reactor.forget(connection.fileno())
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(_MAX_PACKET + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        if not packet:
            self._turn_away(connection)
            return
        try:
            attachment = self._admit(connection, packet)
        except ProtocolError as error:
            logger.info("a process could not attach: %s", error.message)
            refusal = {"ok": False, "code": error.code.value, "message": error.message}
            with contextlib.suppress(OSError):
                connection.send(pack_map(refusal))
            self._turn_away(connection)
            return
        self._hand_over(connection, attachment)

    def _admit(self, connection: socket.socket, packet: bytes) -> Attachment:
        if len(packet) > _MAX_PACKET:
            raise ProtocolError(ErrorCode.TOO_LARGE, "the packet is too large")
        hello = unpack_map(packet)
        client = _client_of(hello)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(
                ErrorCode.UNAUTHORIZED, f"user {uid} may not share the memory of this daemon"
            )
        if self._leases.attachments >= self._most:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE, f"{self._most} processes are attached already"
            )
        return Attachment(secrets.token_bytes(16), pid, _pidfd_of(connection, pid), client)

    def _hand_over(self, connection: socket.socket, attachment: Attachment) -> None:
        answer = pack_map(
            {
                "ok": True,
                "protocol": ATTACH_PROTOCOL,
                "token": attachment.token,
                "capacity": self._memory.arena.capacity_bytes,
                "instance": self._instance,
            }
        )
        rights = (
            socket.SOL_SOCKET,
            socket.SCM_RIGHTS,
            array.array("i", [self._memory.arena.fd]),
        )
        try:
            connection.sendmsg([answer], [rights])
        except OSError:
            os.close(attachment.pidfd)
            self._turn_away(connection)
            return
        self._strangers.discard(connection)
        self._connections[attachment] = connection
        self._leases.attach(attachment)
        self._reactor.forget(connection.fileno())
        self._reactor.watch(connection.fileno(), lambda: self._heard(attachment))
        self._reactor.watch(attachment.pidfd, lambda: self._died(attachment))
        logger.info("process %d (%r) shares the memory", attachment.pid, attachment.client)

    def _heard(self, attachment: Attachment) -> None:
        connection = self._connections[attachment]
        try:
            is_open = bool(connection.recv(1))  # whatever a process sends here is ignored
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_open = False  # reset: as good as closed
        if is_open:
            return
        self._reactor.forget(connection.fileno())
        connection.close()
        del self._connections[attachment]
        attachment.is_disconnected = True
        if not attachment.leases:
            self._died(attachment)  # it may live on, but has nothing of ours and gets no more
            return
        self._leases.end_if_gone(attachment)

    def _died(self, attachment: Attachment) -> None:
        self._reactor.forget(attachment.pidfd)
        attachment.is_dead = True
        self._leases.end_if_gone(attachment)


def _client_of(hello: dict[Any, Any]) -> str:
    if hello.get("protocol") != ATTACH_PROTOCOL:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"version {str(hello.get('protocol'))[:16]} is not spoken here, "
            f"only version {ATTACH_PROTOCOL}",
        )
    client = hello.get("client")
    if not isinstance(client, str) or len(client) > MAX_TEXT or len(hello) != 2:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "expected the fields protocol and client")
    return client


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    """A handle of the process at the other end, which no later process of that number can be."""
    with contextlib.suppress(OSError):
        fd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise ProtocolError(
            ErrorCode.UNAVAILABLE,
            f"the process cannot be seen from here (another PID namespace?): {error.strerror}",
        ) from None
