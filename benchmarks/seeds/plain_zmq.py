"""Blocks through plain zmq sockets, without a protocol of ours: what a transport itself costs.

A peer answers the numbers of blocks with a message of that many frames; they are then copied to
where they belong. The peer is a process of its own, or a thread where the transport is `inproc`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import zmq

from benchmarks.seeds.host_copies import Blocks, Memory

TRANSPORTS = ("tcp", "ipc", "inproc")
_STOP = b"stop"


def _serve(socket: zmq.Socket[bytes], memory: Memory) -> None:
    while (request := socket.recv()) != _STOP:
        numbers = np.frombuffer(request, np.int64)
        socket.send_multipart([memory[number] for number in numbers.tolist()], copy=False)
    socket.send(b"")


def _peer(endpoint_file: str, endpoint: str, count: int, nbytes: int, ready: Event) -> None:
    """Sends edges that the other side can check, as `Blocks` has them."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(endpoint)
        Path(endpoint_file).write_text(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        memory = np.ones((count, nbytes), np.uint8)
        ready.set()
        _fill(socket, memory)
        _serve(socket, memory)


def _fill(socket: zmq.Socket[bytes], memory: Memory) -> None:
    for number in range(len(memory)):
        memory[number] = np.frombuffer(socket.recv(), np.uint8)
        socket.send(b"")


@contextmanager
def transport(kind: str, blocks: Blocks) -> Iterator[Callable[[], None]]:
    """What copies all tasks of `blocks` through this transport, whenever it is called."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder, zmq.Context() as context:
        client = context.socket(zmq.REQ)
        close = _open(kind, blocks, Path(folder), context, client)

        def copy() -> None:
            for sources, targets in blocks.tasks:
                client.send(sources.tobytes())
                frames = client.recv_multipart(copy=False)
                for target, frame in zip(targets.tolist(), frames, strict=True):
                    blocks.target[target] = np.frombuffer(frame.buffer, np.uint8)

        try:
            yield copy
        finally:
            client.send(_STOP)
            client.recv()
            client.close(linger=0)
            close()


def _open(
    kind: str,
    blocks: Blocks,
    folder: Path,
    context: zmq.Context[zmq.Socket[bytes]],
    client: zmq.Socket[bytes],
) -> Callable[[], None]:
    if kind == "inproc":
        server = context.socket(zmq.REP)
        server.bind("inproc://blocks")
        client.connect("inproc://blocks")
        thread = threading.Thread(target=_serve, args=(server, blocks.source))
        thread.start()

        def end_thread() -> None:
            thread.join()
            server.close(linger=0)

        return end_thread
    endpoint = "tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{folder}/plain.sock"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    file = folder / "endpoint"
    arguments = (str(file), endpoint, blocks.count, blocks.shape.block_bytes, ready)
    peer = spawn.Process(target=_peer, args=arguments)
    peer.start()
    assert ready.wait(60), "the peer did not start"
    client.connect(file.read_text())
    for row in blocks.source:
        client.send(row, copy=False)
        client.recv()
    return peer.join
