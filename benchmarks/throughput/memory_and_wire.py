"""Copies of 512 blocks in memory, through plain zmq, and to and from the daemon.

    python -m benchmarks.throughput.memory_and_wire --out result.json

Needs no GPU; where there is one, blocks are swapped too. Wire and daemon are told as multiples of
the plain copy, block by block, in the same round. Server: `set` that is acknowledged when the block
can be read, or already when its bytes have arrived (deferred); `get` with one reply for all that
fits a message, and `stream_get`, whose replies are copied while the next ones arrive.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.throughput import block_swap
from benchmarks.throughput.engine_pool import EnginePool, run_table
from benchmarks.throughput.engines import SHAPES, Shape
from benchmarks.throughput.record import Record
from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.layout import StridedView, block_runs
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey, store_key
from vllm_tiered_kv.native import cpu, cuda
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.messages import Get, GetReply

Memory = NDArray[np.uint8]
Tasks = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Batches of blocks: numbers in the source, numbers in the target."""


class Blocks:
    """Source and target of one shape, block after block, and batches of random blocks to copy."""

    def __init__(self, shape: Shape, batches: int, blocks: int) -> None:
        count = batches * blocks
        rng = np.random.default_rng(0)
        self.shape = shape
        self.source = _random_bytes(rng, count, shape.block_bytes)
        self.target = np.ones_like(self.source)  # touched, so that no page is missing
        self.tasks: Tasks = []
        # No block is a target twice: what arrived can be told by looking at it once.
        sources, targets = rng.permutation(count), rng.permutation(count)
        for start in range(0, count, blocks):
            self.tasks.append((sources[start : start + blocks], targets[start : start + blocks]))

    @property
    def count(self) -> int:
        return len(self.source)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of copying everything; that it was copied is checked outside of them."""
        return self._timed(work, self.source, self.target)

    def layer_by_layer(self) -> float:
        """Seconds of the same bytes as the engine has them: keys and values of each layer apart,
        which makes many small copies."""
        shape = (2 * self.shape.layers, self.count, self.shape.page_bytes)
        source, target = self.source.reshape(shape), self.target.reshape(shape)

        def copy() -> None:
            for sources, targets in self.tasks:
                pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
                for plane in range(shape[0]):
                    for one, other in pairs:
                        target[plane, other] = source[plane, one]

        return self._timed(copy, source.swapaxes(0, 1), target.swapaxes(0, 1))

    def _timed(self, work: Callable[[], object], source: Memory, target: Memory) -> float:
        """Blocks are the first dimension of `source` and `target`."""
        self.target[:, :: self.shape.page_bytes] = 0
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        for sources, targets in self.tasks:
            for edge in (slice(0, 64), slice(-64, None)):
                arrived = target[targets, ..., edge] == source[sources, ..., edge]
                assert arrived.all(), "a block did not arrive"
        return seconds


def _random_bytes(rng: np.random.Generator, count: int, nbytes: int) -> Memory:
    """Cheaply: the same bytes in all blocks but for the edges, which are looked at."""
    memory = np.empty((count, nbytes), np.uint8)
    memory[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    memory[:, :64] = rng.integers(0, 256, (count, 64), dtype=np.uint8)
    memory[:, -64:] = rng.integers(0, 256, (count, 64), dtype=np.uint8)
    return memory


def host_copies(blocks: Blocks) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "b2b naive": lambda: naive(blocks),
        "b2b fancy index": lambda: _fancy_index(blocks),
        "b2b native": lambda: _native(blocks, threads=1),
        "b2b native, all cores": lambda: _native(blocks, threads=0),
    }
    index_copy = _index_copy(blocks)
    if index_copy is not None:
        found["b2b index_copy_"] = index_copy
    return found


def naive(blocks: Blocks) -> None:
    for sources, targets in blocks.tasks:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            blocks.target[target] = blocks.source[source]


def _fancy_index(blocks: Blocks) -> None:
    for sources, targets in blocks.tasks:
        blocks.target[targets] = blocks.source[sources]


def _native(blocks: Blocks, threads: int) -> None:
    """The extension's block copy, whole blocks: what the CPU tier uses."""
    nbytes = blocks.shape.block_bytes
    view = StridedView("blocks", blocks.source.ctypes.data, blocks.source.shape, (nbytes, 1), 1)
    layout = cpu.BlockLayout(*block_runs([view], blocks.count).arrays(), blocks.count)
    region = cpu.HostRegion(blocks.target.ctypes.data, blocks.target.nbytes)
    for sources, targets in blocks.tasks:
        cpu.gather(layout, sources, region, targets * nbytes, threads)


def _index_copy(blocks: Blocks) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    source, target = torch.from_numpy(blocks.source), torch.from_numpy(blocks.target)
    tasks = [(torch.from_numpy(one), torch.from_numpy(other)) for one, other in blocks.tasks]

    def copy() -> None:
        for sources, targets in tasks:
            target.index_copy_(0, targets, source[sources])

    return copy


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


_NAMESPACE = bytes(range(32))
_TIMEOUT_S = 120.0
_MEMORY_FACTOR = 4  # replies and messages get a share of the daemon's memory each
_COPIES_HELD = 2 + 2 + 2 * _MEMORY_FACTOR  # both ends, both peers, the daemon; twice for safety


@dataclass(frozen=True)
class Sizes:
    batches: int = 8
    blocks: int = 64
    repetitions: int = 2


SIZES = Sizes()
TINY_SIZES = Sizes(batches=2, blocks=8, repetitions=2)


def measure(pool: EnginePool, record: Record, sizes: Sizes) -> None:
    pool.engines([], record)  # the memory is needed here
    for shape in SHAPES:
        if record.over:
            return
        needed = _COPIES_HELD * sizes.batches * sizes.blocks * shape.block_bytes
        if needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
            record.note(
                shape.name, f"{shape.name} is left out: it needs more memory than there is."
            )
            continue
        if cuda.why_unavailable() is None:  # beside the copies in memory, as the originals have it
            swaps = block_swap.measure(shape, sizes.batches, sizes.blocks, sizes.repetitions)
            for what, times_of_one in swaps.items():
                for seconds in times_of_one:
                    record.add(seconds, shape=shape.name, what=what)
        blocks = Blocks(shape, sizes.batches, sizes.blocks)
        with ExitStack() as stack:
            ways = dict(host_copies(blocks))
            for kind in TRANSPORTS:
                ways[kind] = stack.enter_context(transport(kind, blocks))
            puts, gets = stack.enter_context(_server(blocks))
            for repetition in range(sizes.repetitions + 1):
                times = {"l2l naive": blocks.layer_by_layer()}
                times |= {name: blocks.timed(work) for name, work in ways.items()}
                times |= {name: put() for name, put in puts.items()}
                times |= {name: blocks.timed(get) for name, get in gets.items()}
                for name, seconds in times.items():
                    if repetition:  # the first round warms up
                        record.add(seconds, shape=shape.name, what=name)


@contextmanager
def _server(
    blocks: Blocks,
) -> Iterator[tuple[dict[str, Callable[[], float]], dict[str, Callable[[], None]]]]:
    nbytes = blocks.shape.block_bytes
    memory = max(_MEMORY_FACTOR * blocks.source.nbytes, 64 * nbytes) + (64 << 20)
    identity = EngineIdentity(_NAMESPACE, (nbytes,), "any", "benchmark")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", str(memory)) as daemon:
            store = RemoteStore(daemon.endpoint, identity, timeout_s=_TIMEOUT_S, max_connections=1)
            keys = _fresh_keys(blocks.count)
            _put(store, keys, blocks, Durability.MEMORY)
            settings = Settings(ServerAddress.parse(daemon.endpoint), largest_block=nbytes)
            connection = Connection(settings, identity.hello())
            try:
                yield (
                    {
                        "set": lambda: _set(store, blocks, Durability.MEMORY),
                        "set deferred": lambda: _set(store, blocks, Durability.RECEIVED),
                    },
                    {
                        "get": lambda: _get(connection, identity, keys, blocks),
                        "stream_get": lambda: _stream_get(store, keys, blocks),
                    },
                )
            finally:
                connection.close()
                store.close()


def _fresh_keys(count: int) -> list[StoreKey]:
    return [
        store_key(_NAMESPACE, BlockKey(os.urandom(16) + b"\0"), RankTag()) for _ in range(count)
    ]


def _set(store: RemoteStore, blocks: Blocks, durability: Durability) -> float:
    """The time until all is acknowledged; what was written is removed again."""
    keys = _fresh_keys(blocks.count)
    begin = time.perf_counter()
    _put(store, keys, blocks, durability)
    seconds = time.perf_counter() - begin
    deadline = time.monotonic() + _TIMEOUT_S
    while not all(store.contains(keys)):  # what was only received is written now
        assert time.monotonic() < deadline, "blocks that were acknowledged never came"
        time.sleep(0.001)
    assert store.delete(keys) == len(keys)
    return seconds


def _put(store: RemoteStore, keys: list[StoreKey], blocks: Blocks, durability: Durability) -> None:
    for sources, _ in blocks.tasks:
        items = [PutItem(keys[n], None, memoryview(blocks.source[n])) for n in sources.tolist()]
        results = store.put(items, durability)
        assert set(results) == {PutResult.STORED}, f"some were not stored: {set(results)}"


def _stream_get(store: RemoteStore, keys: list[StoreKey], blocks: Blocks) -> None:
    for sources, targets in blocks.tasks:
        into = [memoryview(blocks.target[n]) for n in targets.tolist()]
        found = store.get([keys[n] for n in sources.tolist()], into)
        assert all(found), f"{found.count(False)} misses"


def _get(
    connection: Connection, identity: EngineIdentity, keys: list[StoreKey], blocks: Blocks
) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    connection.open(deadline)
    fitting = max(1, connection.limits.message_bytes // blocks.shape.block_bytes)
    for sources, targets in blocks.tasks:
        for start in range(0, len(sources), fitting):
            asked = [identity.wire_key(keys[n]) for n in sources[start : start + fitting].tolist()]
            places = targets[start : start + fitting].tolist()
            wanted = [key for key in asked if key is not None]
            connection.send(Get(len(wanted[0]), wanted, stream=False), deadline=deadline)
            incoming = connection.receive(deadline=deadline)
            assert isinstance(incoming.reply, GetReply)
            assert len(incoming.payload) == len(wanted), "misses"
            for position, payload in zip(incoming.reply.positions, incoming.payload, strict=True):
                blocks.target[places[position]] = np.frombuffer(payload, np.uint8)


def main() -> None:
    run_table("memory_and_wire", measure, SIZES, TINY_SIZES, __doc__)


if __name__ == "__main__":
    main()
