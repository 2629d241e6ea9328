"""Copies of 512 blocks in memory, through plain zmq, and to and from the daemon.

    python -m benchmarks.seeds.memory_and_wire --out result.json

Needs no GPU; where there is one, blocks are swapped too. Wire and daemon are told as multiples of
the plain copy, block by block, in the same round. Server: `set` that is acknowledged when the block
can be read, or already when its bytes have arrived (deferred); `get` with one reply for all that
fits a message, and `stream_get`, whose replies are copied while the next ones arrive.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.seeds import block_swap, host_copies, plain_zmq
from benchmarks.seeds.command_line import run_table
from benchmarks.seeds.host_copies import Blocks
from benchmarks.seeds.record import Record
from benchmarks.seeds.shapes import SHAPES
from benchmarks.seeds.workbench import Workbench
from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey, store_key
from vllm_tiered_kv.native import cuda
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.messages import Get, GetReply

_NAMESPACE = bytes(range(32))
_TIMEOUT_S = 120.0
_MEMORY_FACTOR = 4  # replies and messages get a share of the daemon's memory each


@dataclass(frozen=True)
class Sizes:
    batches: int = 8
    blocks: int = 64
    repetitions: int = 2


SIZES = Sizes()
TINY_SIZES = Sizes(batches=2, blocks=8, repetitions=2)


def measure(bench: Workbench, record: Record, sizes: Sizes) -> None:
    bench.engines([], record)  # the memory is needed here
    for shape in SHAPES:
        if record.over:
            return
        if cuda.available():  # beside the copies in memory, as the originals have it
            swaps = block_swap.measure(shape, sizes.batches, sizes.blocks, sizes.repetitions)
            for what, times_of_one in swaps.items():
                for seconds in times_of_one:
                    record.add(seconds, shape=shape.name, what=what)
        blocks = Blocks(shape, sizes.batches, sizes.blocks)
        with ExitStack() as stack:
            ways = dict(host_copies.ways(blocks))
            for kind in plain_zmq.TRANSPORTS:
                ways[kind] = stack.enter_context(plain_zmq.transport(kind, blocks))
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
