"""`attach` validates the answer at a daemon's arena socket."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from tests.patience import eventually
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.errors import ArenaError
from vllm_tiered_kv.remote import shared_memory


class ArenaPeer:
    """A server at an arena socket: `reply` gets the client's packet and the connection."""

    def __init__(self, path: Path, reply: Callable[[socket.socket], None]) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        self._listening.listen(4)
        self._thread = threading.Thread(target=self._run, args=(reply,), daemon=True)
        self._thread.start()

    def _run(self, reply: Callable[[socket.socket], None]) -> None:
        connection, _ = self._listening.accept()
        with connection:
            connection.recv(4096)
            reply(connection)
            if connection.fileno() >= 0:
                connection.settimeout(30)
                connection.recv(1)  # until the client closes

    def close(self) -> None:
        self._listening.close()
        self._thread.join(30)


ANSWER = {
    "ok": True,
    "protocol": 1,
    "token": bytes(16),
    "capacity": 4 * PAGE,
    "instance": bytes(16),
}


def send_with(connection: socket.socket, packet: bytes, *descriptors: int) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([packet], [rights] if descriptors else [])


@pytest.mark.parametrize(
    "change",
    [
        {"ok": False, "code": "unavailable", "message": "no"},
        {"ok": 1},
        {"ok": None},
        {"protocol": 2},
        {"protocol": "1"},
        {"token": b"short"},
        {"token": "x" * 16},
        {"instance": None},
        {"capacity": 0},
        {"capacity": -PAGE},
        {"capacity": 4 * PAGE + 1},
        {"capacity": 1 << 62},
        {"capacity": 8 << 20},
        {"capacity": True},
        {"capacity": "4096"},
    ],
    ids=str,
)
def test_attach_malformed_answer_raises(tmp_path: Path, change: dict[str, object]) -> None:
    arena = SharedArena.create(4 * PAGE)
    packet = msgpack.packb({**ANSWER, **change})
    peer = ArenaPeer(tmp_path / "arena", lambda link: send_with(link, packet, arena.fd))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArenaError):
        shared_memory.attach(str(tmp_path / "arena"), "test", 30.0)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    peer.close()
    arena.close()


@pytest.mark.parametrize(
    "reply",
    [
        lambda link: send_with(link, msgpack.packb(ANSWER)),
        lambda link: send_with(link, msgpack.packb(ANSWER), 0, 1),
        lambda link: send_with(link, msgpack.packb(ANSWER), 0),
        lambda link: send_with(link, b"\xc1"),
        lambda link: send_with(link, b"\xdd\xff\xff\xff\xff"),
        lambda link: send_with(link, msgpack.packb([1, 2])),
        lambda link: send_with(link, bytes(100_000)),
        lambda link: link.close(),
        lambda link: None,
    ],
    ids=[
        "no descriptor",
        "two descriptors",
        "no memory",
        "no msgpack",
        "a huge array",
        "a list",
        "too long",
        "the end",
        "silence",
    ],
)
def test_attach_answer_without_memfd_raises(
    tmp_path: Path, reply: Callable[[socket.socket], None]
) -> None:
    peer = ArenaPeer(tmp_path / "arena", reply)
    with pytest.raises(ArenaError):
        shared_memory.attach(str(tmp_path / "arena"), "test", 0.5)
    peer.close()


def test_attach_unsealed_memfd_raises(tmp_path: Path) -> None:
    descriptor = os.memfd_create("unsealed")
    os.ftruncate(descriptor, 4 << 20)
    packet = msgpack.packb(ANSWER)
    peer = ArenaPeer(tmp_path / "arena", lambda link: send_with(link, packet, descriptor))
    with pytest.raises(ArenaError):
        shared_memory.attach(str(tmp_path / "arena"), "test", 30.0)
    peer.close()
    os.close(descriptor)


def test_attach_valid_answer_maps_memory(tmp_path: Path) -> None:
    arena = SharedArena.create(4 * PAGE)
    arena.view(PAGE, 5)[:] = b"bytes"
    packet = msgpack.packb(ANSWER)
    peer = ArenaPeer(tmp_path / "arena", lambda link: send_with(link, packet, arena.fd))
    attached = shared_memory.attach(str(tmp_path / "arena"), "test", 30.0)
    assert attached.alive
    assert bytes(attached.arena.view(PAGE, 5)) == b"bytes"
    assert os.get_inheritable(attached.arena.fd) is False
    attached.close()
    assert not attached.alive
    peer.close()
    arena.close()
