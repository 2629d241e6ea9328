"""How a process gets a daemon's memory: a descriptor over an AF_UNIX socket.

zmq cannot carry descriptors. One packet goes out, one comes back with the memfd; then the
connection stays open for as long as the memory is used. The daemon sees by its end that we are
gone, and we see by it that the daemon is. What is asked over it meanwhile: see `Link`. Nothing the
peer says is believed unchecked.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from array import array
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.errors import ArenaError, ProtocolError
from vllm_tiered_kv.wire.header import pack_map, unpack_map
from vllm_tiered_kv.wire.limits import MAX_TEXT, PROTOCOL_VERSION

_MAX_PACKET = 4096
_ID_BYTES = 16
_MAX_CAPACITY = 1 << 50


@dataclass(slots=True)
class Attachment:
    """A daemon's memory, mapped, and the connection that keeps it ours."""

    link: socket.socket
    arena: SharedArena
    token: bytes  # names this attachment in `hello`
    instance: bytes  # of the daemon

    @property
    def alive(self) -> bool:
        """False once the daemon has closed its end, be it by dying."""
        descriptor = self.link.fileno()  # once: it may be closed meanwhile
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLRDHUP)  # not what it says: replies may lie there
        return not poll.poll(0)

    def close(self) -> None:
        self.link.close()
        self.arena.close()


def attach(path: str, client: str, timeout_s: float) -> Attachment:
    """Raises ArenaError, with the reason, when there is no memory to be had."""
    try:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:  # no descriptors left, for now
        raise ArenaError(str(error)) from None
    descriptors: list[int] = []
    try:
        link.settimeout(timeout_s)
        link.connect(path)
        link.send(pack_map({"protocol": PROTOCOL_VERSION, "client": client[:MAX_TEXT]}))
        packet, flags = _receive(link, descriptors)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ArenaError("the daemon's answer is too long")
        if not packet:
            raise ArenaError("the daemon closed the connection")
        capacity, token, instance = _read_answer(unpack_map(packet))
        if len(descriptors) != 1:
            raise ArenaError("the daemon sent no memory")
        arena = SharedArena.attach(descriptors.pop(), capacity)
        link.setblocking(False)
        return Attachment(link, arena, token, instance)
    except (OSError, ProtocolError) as error:
        link.close()
        raise ArenaError(str(error)) from None
    except BaseException:
        link.close()
        raise
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _receive(link: socket.socket, descriptors: list[int]) -> tuple[bytes, int]:
    """One packet and its flags. `socket.recv_fds` would leave descriptors to child processes."""
    room = socket.CMSG_LEN(array("i").itemsize)
    packet, controls, flags, _ = link.recvmsg(_MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array("i")
            received.frombytes(data[: len(data) // received.itemsize * received.itemsize])
            descriptors += received
    return packet, flags


def _read_answer(fields: dict[Any, Any]) -> tuple[int, bytes, bytes]:
    ok = fields.get("ok")
    if ok is False:
        code, message = fields.get("code"), fields.get("message")
        raise ArenaError(f"the daemon refuses: {str(code)[:MAX_TEXT]}: {str(message)[:MAX_TEXT]}")
    protocol, capacity = fields.get("protocol"), fields.get("capacity")
    token, instance = fields.get("token"), fields.get("instance")
    if ok is not True or type(protocol) is not int:
        raise ArenaError("the daemon's answer cannot be understood")
    if protocol != PROTOCOL_VERSION:
        raise ArenaError(f"the daemon speaks version {protocol}, not {PROTOCOL_VERSION}")
    if type(capacity) is not int or not 0 < capacity <= _MAX_CAPACITY:
        raise ArenaError("the daemon stated an impossible capacity")
    for value in (token, instance):
        if type(value) is not bytes or len(value) != _ID_BYTES:
            raise ArenaError("the daemon's answer lacks its identity")
    assert isinstance(token, bytes)
    assert isinstance(instance, bytes)
    return capacity, token, instance
