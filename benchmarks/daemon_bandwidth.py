"""Blocks to and from the daemon on one host, beside plain sockets and plain memory copies.

    python -m benchmarks.daemon_bandwidth --out result.json
    python -m benchmarks.daemon_bandwidth --modes bare_put,tcp_put --connections 4   # only these

Every repetition runs all modes after each other; ratios are medians over repetitions of the two
modes' times in the same one. `bare` is a pair of processes with as many plain tcp sockets as the
client has connections: one sends preallocated blocks, the other receives into preallocated memory,
and neither checks anything. `memcpy` copies the same blocks in one thread. Processes share the
cores: with few of them, what our checksums and copies cost cannot be hidden behind the wire.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save
from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey, store_key
from vllm_tiered_kv.native.cpu import copy_bytes
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.shared_memory import Reservation
from vllm_tiered_kv.remote.store import RemoteStore

NAMESPACE = bytes(range(32))
TIMEOUT_S = 120.0

Blocks = list[memoryview]


class Workload:
    """So many blocks, as the threads of one client share them."""

    def __init__(self, block_bytes: int, blocks: int, connections: int) -> None:
        self.block_bytes = block_bytes
        self.connections = connections
        rng = np.random.default_rng(0)
        data = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
        landing = np.ones_like(data)  # touched, so that no page is missing
        self.source: Blocks = [memoryview(row) for row in data]
        self.landing: Blocks = [memoryview(row) for row in landing]
        self.keys = self.fresh_keys()

    @property
    def nbytes(self) -> int:
        return len(self.source) * self.block_bytes

    def fresh_keys(self) -> list[StoreKey]:
        return [
            store_key(NAMESPACE, BlockKey(os.urandom(16) + b"\0"), RankTag()) for _ in self.source
        ]

    def shares(self) -> list[slice]:
        return [slice(n, None, self.connections) for n in range(self.connections)]

    def forget(self) -> None:
        for block in self.landing:
            block[:64] = bytes(64)

    def check(self) -> None:
        for block, expected in zip(self.landing, self.source, strict=True):
            assert block[:64] == expected[:64], "a block did not arrive"


def in_threads(work: Callable[[int], None], count: int) -> float:
    """Seconds until all have done it."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return seconds


# ---- plain sockets ------------------------------------------------------------------------------


def bare_peer(block_bytes: int, blocks: int, connections: int, pipe: Pipe) -> None:
    """The other end: for each byte it is told, sends or receives its share of the blocks."""
    memory = np.ones((blocks, block_bytes), dtype=np.uint8)
    listening = socket.create_server(("127.0.0.1", 0), backlog=connections)
    pipe.send(listening.getsockname())

    def serve(link: socket.socket, rows: Blocks) -> None:
        while order := link.recv(1):
            if order == b"g":
                for row in rows:
                    link.sendall(row)
            else:
                for row in rows:
                    receive_all(link, row)
                link.sendall(b"k")

    threads = []
    for number in range(connections):
        link, _ = listening.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rows = [memoryview(row) for row in memory[number::connections]]
        threads.append(threading.Thread(target=serve, args=(link, rows)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def receive_all(link: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        count = link.recv_into(into)
        if not count:
            raise ConnectionError("the peer is gone")
        into = into[count:]


class BarePair:
    def __init__(self, work: Workload) -> None:
        self._work = work
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        arguments = (work.block_bytes, len(work.source), work.connections, theirs)
        self._peer = spawn.Process(target=bare_peer, args=arguments)
        self._peer.start()
        theirs.close()
        address = ours.recv()
        self._links = []
        for _ in range(work.connections):  # one at a time: accepted in this order
            link = socket.create_connection(address)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links.append(link)

    def get(self) -> float:
        def work(number: int) -> None:
            link = self._links[number]
            link.sendall(b"g")
            for block in self._work.landing[number :: self._work.connections]:
                receive_all(link, block)

        return in_threads(work, self._work.connections)

    def put(self) -> float:
        def work(number: int) -> None:
            link = self._links[number]
            link.sendall(b"p")
            for block in self._work.source[number :: self._work.connections]:
                link.sendall(block)
            receive_all(link, memoryview(bytearray(1)))

        return in_threads(work, self._work.connections)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._peer.join()


# ---- ours ---------------------------------------------------------------------------------------


class Client:
    def __init__(self, address: str, work: Workload) -> None:
        identity = EngineIdentity(NAMESPACE, (work.block_bytes,), "any", "benchmark")
        self._work = work
        self.store = RemoteStore(
            address,
            identity,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=TIMEOUT_S,  # a busy machine is not what is measured
            max_connections=work.connections,
        )

    def get(self) -> float:
        work = self._work
        work.forget()

        def read(number: int) -> None:
            share = work.shares()[number]
            found = self.store.get(work.keys[share], work.landing[share])
            assert all(found), f"{found.count(False)} misses"

        seconds = in_threads(read, work.connections)
        work.check()
        return seconds

    def put(self) -> float:
        work = self._work
        keys = work.fresh_keys()

        def write(number: int) -> None:
            share = work.shares()[number]
            items = [
                PutItem(k, None, b) for k, b in zip(keys[share], work.source[share], strict=True)
            ]
            assert set(self.store.put(items)) == {PutResult.STORED}

        seconds = in_threads(write, work.connections)
        assert self.store.delete(keys) == len(keys)
        return seconds

    def shared_get(self) -> float:
        """Leased, copied out, checked again and released, by one thread."""
        work, memory = self._work, self.store.attach()
        assert memory is not None
        work.forget()
        start = time.perf_counter()
        lease = memory.lease(work.keys)
        assert lease.is_complete
        places = zip(lease.offsets, lease.lengths, work.landing, strict=True)
        for offset, nbytes, into in places:
            copy_bytes(into, memory.arena.view(offset, nbytes))
        assert memory.are_still_valid(lease)
        lease.release()
        seconds = time.perf_counter() - start
        work.check()
        return seconds

    def shared_put(self) -> float:
        work, memory = self._work, self.store.attach()
        assert memory is not None
        keys = work.fresh_keys()
        start = time.perf_counter()
        blocks = memory.reserve([(key, None, work.block_bytes) for key in keys])
        reserved = [block for block in blocks if isinstance(block, Reservation)]
        for block, source in zip(reserved, work.source, strict=True):
            copy_bytes(memory.arena.view(block.offset, block.nbytes), source)
        assert set(memory.seal(reserved)) == {PutResult.STORED}
        seconds = time.perf_counter() - start
        assert self.store.delete(keys) == len(keys)
        return seconds


def memcpy(work: Workload) -> float:
    start = time.perf_counter()
    for source, into in zip(work.source, work.landing, strict=True):
        copy_bytes(into, source)
    return time.perf_counter() - start


# ---- the run ------------------------------------------------------------------------------------


@contextmanager
def modes(work: Workload) -> Iterator[dict[str, Callable[[], float]]]:
    with tempfile.TemporaryDirectory() as folder:
        memory = str(4 * work.nbytes + (64 << 20))  # leases and replies get a share each
        with DaemonProcess(Path(folder), "--memory", memory) as daemon:
            tcp, ipc = Client(daemon.endpoint, work), Client(daemon.ipc, work)
            bare = BarePair(work)
            items = [PutItem(k, None, b) for k, b in zip(work.keys, work.source, strict=True)]
            assert set(tcp.store.put(items)) == {PutResult.STORED}
            try:
                yield {
                    "memcpy": lambda: memcpy(work),
                    "bare_get": bare.get,
                    "tcp_get": tcp.get,
                    "ipc_get": ipc.get,
                    "shared_get": ipc.shared_get,
                    "bare_put": bare.put,
                    "tcp_put": tcp.put,
                    "ipc_put": ipc.put,
                    "shared_put": ipc.shared_put,
                }
            finally:
                bare.close()
                ipc.store.close()
                tcp.store.close()


def measure(work: Workload, repetitions: int, wanted: set[str]) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    with modes(work) as by_name:
        if wanted - by_name.keys():
            raise SystemExit(f"--modes: there are {', '.join(by_name)}")
        for repetition in range(repetitions + 1):
            for name, mode in by_name.items():
                if wanted and name not in wanted:
                    continue
                seconds = mode()
                if repetition:  # the first one warms up
                    times.setdefault(name, []).append(seconds)

    def ratio(one: str, other: str) -> float:
        pairs = zip(times[one], times[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "block_bytes": work.block_bytes,
        "connections": work.connections,
        "total_bytes": work.nbytes,
        "repetitions": repetitions,
        "gb_per_s": {
            name: {
                "median": round(work.nbytes / statistics.median(values) / 1e9, 3),
                "best": round(work.nbytes / min(values) / 1e9, 3),
                "worst": round(work.nbytes / max(values) / 1e9, 3),
            }
            for name, values in times.items()
        },
        "of_bare_pair": {  # of its speed
            ours: ratio(bare, ours)
            for bare, ours in (("bare_get", "tcp_get"), ("bare_put", "tcp_put"))
            if bare in times and ours in times
        },
        "multiple_of_memcpy": {  # of its time
            name: ratio(name, "memcpy") for name in times if name != "memcpy" and "memcpy" in times
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-kib", default="1024,4096", help="sizes, comma-separated")
    parser.add_argument("--connections", default="1,4", help="numbers, comma-separated")
    parser.add_argument("--total-mib", type=int, default=1024, help="moved in each measurement")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--modes", default="", help="only these, comma-separated; all otherwise")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe_environment(), "results": []}
    for kib in map(int, args.block_kib.split(",")):
        for connections in map(int, args.connections.split(",")):
            work = Workload(kib << 10, (args.total_mib << 10) // kib, connections)
            result = measure(work, args.repetitions, set(filter(None, args.modes.split(","))))
            report["results"].append(result)
            print(json.dumps(result, indent=1), file=sys.stderr, flush=True)
            save(args.out, report)


if __name__ == "__main__":
    main()
