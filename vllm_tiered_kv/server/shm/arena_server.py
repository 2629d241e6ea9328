"""Lets processes of this host map the memory tier, over a socket beside each ipc:// endpoint.

zmq cannot carry descriptors, so the arena's is sent over a plain AF_UNIX socket (SOCK_SEQPACKET):

    client  {"protocol": 1, "client": name}
    daemon  {"ok": true, "protocol": 1, "token", "capacity", "instance"} and the descriptor, or
            {"ok": false, "code", "message"}

each one msgpack packet. The connection then stays open. When both the connection and the process
have ended, the process can no longer access the memory.
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

_MAX_PACKET_BYTES = 4096
_HELLO_TIMEOUT_S = 10.0  # for the first packet
_MAX_PENDING = 64  # connections that have not sent their first packet
_ACCEPT_RETRY_S = 1.0  # after accept failed
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet
_CREDENTIALS = struct.Struct("3i")


class ArenaServer:
    """Attaches processes: sends them the arena's descriptor and ends their leases when they exit.
    The daemon creates one. Runs on the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        memory: MemoryStore,
        limits: ClientLimits,
        instance: bytes,
        stall_s: float,
    ) -> None:
        self._reactor = reactor
        self._memory = memory
        self.leases = Leases(memory, limits, stall_s, self._on_process_exit)
        self._max_attachments = limits.attachments
        self._instance = instance
        self._listening: list[socket.socket] = []
        self._pending: set[socket.socket] = set()
        self._connections: dict[Attachment, socket.socket] = {}
        self._is_pausing = False

    def serve(self, listening: socket.socket) -> None:
        self._listening.append(listening)
        self._resume(listening)

    def close(self) -> None:
        for listening in self._listening:
            self._reactor.unwatch(listening.fileno())
            listening.close()
        self._listening.clear()
        for connection in [*self._pending, *self._connections.values()]:
            self._reactor.unwatch(connection.fileno())
            connection.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # for example, out of descriptors
            self._pause(listening, error)
            return
        self._is_pausing = False
        connection.setblocking(False)
        if len(self._pending) >= _MAX_PENDING:
            connection.close()
            return
        self._pending.add(connection)
        self._reactor.watch(connection.fileno(), lambda: self._read_hello(connection))
        self._reactor.after(_HELLO_TIMEOUT_S, lambda: self._close_if_pending(connection))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Stops watching for a while: the connection stays in the backlog, so that the loop would
        wake up at once and fail again."""
        if not self._is_pausing:
            logger.warning("processes cannot attach for now: %s; retrying", error.strerror)
        self._is_pausing = True
        self._reactor.unwatch(listening.fileno())
        self._reactor.after(_ACCEPT_RETRY_S, lambda: self._resume(listening))

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._reactor.watch(listening.fileno(), lambda: self._accept(listening))

    def _close_if_pending(self, connection: socket.socket) -> None:
        if connection in self._pending:
            self._close_pending(connection)

    def _close_pending(self, connection: socket.socket) -> None:
        self._pending.discard(connection)
        self._reactor.unwatch(connection.fileno())
        connection.close()

    def _read_hello(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(_MAX_PACKET_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        if not packet:
            self._close_pending(connection)
            return
        try:
            attachment = self._admit(connection, packet)
        except ProtocolError as error:
            logger.info("refused to attach a process: %s", error.message)
            refusal = {"ok": False, "code": error.code.value, "message": error.message}
            with contextlib.suppress(OSError):
                connection.send(pack_map(refusal))
            self._close_pending(connection)
            return
        self._send_descriptor(connection, attachment)

    def _admit(self, connection: socket.socket, packet: bytes) -> Attachment:
        if len(packet) > _MAX_PACKET_BYTES:
            raise ProtocolError(ErrorCode.TOO_LARGE, "the packet is too large")
        hello = unpack_map(packet)
        client = _parse_client(hello)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in (os.geteuid(), 0):
            raise ProtocolError(
                ErrorCode.UNAUTHORIZED, f"user {uid} may not map the memory of this daemon"
            )
        if self.leases.attachments >= self._max_attachments:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE, f"{self._max_attachments} processes are attached already"
            )
        return Attachment(secrets.token_bytes(16), pid, _open_pidfd(connection, pid), client)

    def _send_descriptor(self, connection: socket.socket, attachment: Attachment) -> None:
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
            self._close_pending(connection)
            return
        self._pending.discard(connection)
        self._connections[attachment] = connection
        self.leases.attach(attachment)
        self._reactor.unwatch(connection.fileno())
        self._reactor.watch(connection.fileno(), lambda: self._on_readable(attachment))
        self._reactor.watch(attachment.pidfd, lambda: self._on_process_exit(attachment))
        logger.info("process %d (%r) shares the memory", attachment.pid, attachment.client)

    def _on_readable(self, attachment: Attachment) -> None:
        connection = self._connections[attachment]
        try:
            is_open = bool(connection.recv(1))  # nothing is expected here; bytes are ignored
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_open = False  # reset by the process
        if is_open:
            return
        self._reactor.unwatch(connection.fileno())
        connection.close()
        del self._connections[attachment]
        attachment.is_disconnected = True
        if not attachment.leases:
            # The process may still run, but it has no leases and cannot get new ones.
            self._on_process_exit(attachment)
            return
        self.leases.end_if_gone(attachment)

    def _on_process_exit(self, attachment: Attachment) -> None:
        self._reactor.unwatch(attachment.pidfd)
        attachment.is_dead = True
        self.leases.end_if_gone(attachment)


def _parse_client(hello: dict[Any, Any]) -> str:
    if hello.get("protocol") != ATTACH_PROTOCOL:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"attach protocol {str(hello.get('protocol'))[:16]!r} is not supported, "
            f"only {ATTACH_PROTOCOL}",
        )
    client = hello.get("client")
    if not isinstance(client, str) or len(client) > MAX_TEXT or len(hello) != 2:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "expected the fields protocol and client")
    return client


def _open_pidfd(connection: socket.socket, pid: int) -> int:
    """A descriptor of the process at the other end; unlike a pid it is never reused."""
    with contextlib.suppress(OSError):
        fd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise ProtocolError(
            ErrorCode.UNAVAILABLE,
            f"cannot find the process (is it in another PID namespace?): {error.strerror}",
        ) from None
