"""What eight client processes get of one daemon, beside a bare zmq ROUTER that sends as many bytes.

    python -m benchmarks.daemon_clients --out result.json

A request asks for one block or for several, as engines do: theirs ask for all blocks of a prompt.
Rounds of the daemon and of the router take turns, so that whatever else the machine does concerns
both; the result is the median of their ratios. In the rounds of two endpoints one client uses the
second, all others the first; its share is compared with a client's fair one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import zmq

from benchmarks.result_files import describe_environment, save
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, block, key
from vllm_tiered_kv.wire import messages as wire

CLIENTS = 8
WARM_S = 0.3
SPAWN = multiprocessing.get_context("spawn")


def bare_router(endpoints: list[str], blocks: int, nbytes: int, stop: Any) -> None:
    """Answers every message with a header and as many frames and bytes as the daemon."""
    context = zmq.Context(8)
    poller = zmq.Poller()
    for endpoint in endpoints:
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(endpoint)
        poller.register(router, zmq.POLLIN)
    # Written memory: untouched zeros would all be one cached page.
    payloads = [block(number, nbytes) for number in range(blocks)]
    while not stop.is_set():
        for router, _ in poller.poll(100):
            for _ in range(32):
                try:
                    identity, header = router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                router.send_multipart([identity, header, *payloads], copy=nbytes <= 65536)
    context.destroy(linger=0)


class Turns:
    """Lets client processes run one case after another, all at the same time.

    The parent enters `run`; each client asks `next` which case to run, and runs it until `is_over`.
    """

    def __init__(self) -> None:
        self._start = SPAWN.Barrier(CLIENTS + 1)
        self._end = SPAWN.Barrier(CLIENTS + 1)
        self._case: Synchronized[int] = SPAWN.Value("i", -1, lock=False)
        self.counts = SPAWN.Array("q", CLIENTS, lock=False)
        """Replies received by each client so far."""

    @contextmanager
    def run(self, case: int) -> Iterator[None]:
        self._case.value = case
        self._start.wait()
        try:
            yield
        finally:
            self._case.value = -1
            self._end.wait()

    def stop(self) -> None:
        self._case.value = -1
        self._start.wait()

    def next(self) -> int | None:
        """Waits for the next case; None after the last."""
        self._start.wait()
        return None if self._case.value < 0 else self._case.value

    @property
    def is_over(self) -> bool:
        return self._case.value < 0

    def ended(self) -> None:
        self._end.wait()


def ask(
    number: int, endpoints: list[str], turns: Turns, blocks: int, nbytes: int, depth: int
) -> None:
    """Client `number`: keeps `depth` requests to the endpoint of the case in flight and counts the
    replies."""
    clients = {endpoint: RawClient(endpoint) for endpoint in endpoints}
    for endpoint, client in clients.items():
        if "bare" not in endpoint:
            client.hello(block_bytes=[nbytes])
    request = wire.Get(KEY_BYTES, [key(number) for number in range(blocks)], False)
    counts = turns.counts
    while (case := turns.next()) is not None:
        client = clients[endpoints[case]]
        for _ in range(depth):
            client.send(request)
        while not turns.is_over:
            if client.socket.poll(100):
                client.socket.recv_multipart(copy=False)
                counts[number] += 1
                client.send(request)
        for _ in range(depth):
            client.socket.recv_multipart(copy=False)
        turns.ended()
    for client in clients.values():
        client.close()


def cpu_seconds(pid: int) -> float:
    """Of a process so far. What it needs for a request depends less on what else the machine does
    than its speed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(blocks: int, nbytes: int, depth: int, rounds: int, seconds: float) -> dict[str, Any]:
    names = ("daemon", "bare", "daemon_two", "bare_two")
    results: dict[str, list[list[float]]] = {name: [] for name in names}
    cpus: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        own = Path(folder) / "daemon"
        own.mkdir()
        bare = [f"ipc://{folder}/bare{n}" for n in range(2)]
        stop = SPAWN.Event()
        router = SPAWN.Process(target=bare_router, args=(bare, blocks, nbytes, stop))
        router.start()
        second = f"ipc://{folder}/second"
        with DaemonProcess(own, "--memory", "1GiB", "--listen", second) as daemon:
            first = daemon.ipc
            with RawClient(first) as client:
                client.hello(block_bytes=[nbytes])
                client.put({key(n): block(n, nbytes) for n in range(blocks)})
            turns = Turns()
            clients = [
                SPAWN.Process(
                    target=ask,
                    args=(
                        number,
                        [first, bare[0], *((first, bare[0]) if number else (second, bare[1]))],
                        turns,
                        blocks,
                        nbytes,
                        depth,
                    ),
                )
                for number in range(CLIENTS)
            ]
            for process in clients:
                process.start()
            for _ in range(rounds):
                for case, name in enumerate(names):
                    pid = daemon.pid if name.startswith("daemon") else router.pid
                    assert pid is not None
                    with turns.run(case):
                        time.sleep(WARM_S)
                        before = list(turns.counts)
                        cpu = cpu_seconds(pid)
                        time.sleep(seconds)
                        done = [
                            count - start for count, start in zip(turns.counts, before, strict=True)
                        ]
                        cpus[name].append((cpu_seconds(pid) - cpu) / max(1, sum(done)) * 1e6)
                        results[name].append([count / seconds for count in done])
            turns.stop()
            for process in clients:
                process.join()
        stop.set()
        router.join()
    ratios = [sum(a) / sum(b) for a, b in zip(results["daemon"], results["bare"], strict=True)]
    shares = {
        name: [one[0] / (sum(one) / CLIENTS) for one in results[name]]
        for name in ("daemon_two", "bare_two")
    }
    return {
        "blocks": blocks,
        "nbytes": nbytes,
        "depth": depth,
        "requests_per_s": {
            name: round(statistics.median(sum(one) for one in results[name])) for name in names
        },
        "cpu_us_per_request": {name: round(statistics.median(cpus[name])) for name in names},
        "of_bare_zmq": statistics.median(ratios),
        "of_fair_share": statistics.median(shares["daemon_two"]),
        "of_fair_share_bare": statistics.median(shares["bare_two"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--requests",
        nargs="+",
        default=["1x4096", "1x65536", "1x1048576", "64x65536", "8x1048576"],
        help="blocks of a request, and bytes of a block",
    )
    parser.add_argument(
        "--depth", type=int, default=4, help="requests that each client keeps in flight"
    )
    given = parser.parse_args()
    found = []
    for request in given.requests:
        blocks, nbytes = map(int, request.split("x"))
        found.append(measure(blocks, nbytes, given.depth, given.rounds, given.seconds))
        print(json.dumps(found[-1]), flush=True)
        result = {"environment": describe_environment(), "clients": CLIENTS, "results": found}
        save(given.out, result)


if __name__ == "__main__":
    main()
