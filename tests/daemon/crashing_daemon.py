"""A daemon that is killed over and over while clients write, and looked at after each restart."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from tests.daemon.crash_promises import CHAIN, LASTING, PASSING, QUOTA, SPACE, Family, Promises
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, key
from vllm_tiered_kv.core.store import Durability
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.folder import read_superblock
from vllm_tiered_kv.stores.ssd.journal import read_journal
from vllm_tiered_kv.wire import messages as wire

UNDER_WAY = 10  # requests of one client
BATCH = 8  # blocks read at once: more would not fit into memory
LAST_REPLIES_S = 0.02  # what a daemon had sent before it died arrives

OnReply = Callable[[Any, list[bytes]], None]


class Client:
    """Asks for this and that without waiting, and holds every reply against the truth."""

    def __init__(
        self, endpoint: str, family: Family, promises: Promises | None, rng: random.Random
    ) -> None:
        self.raw = RawClient(endpoint)
        self.raw.hello(family.sizes, family.namespace)
        self.stats: dict[str, Any] = {}
        self._family = family
        self._promises = promises
        self._rng = rng
        self._under_way: dict[int, OnReply] = {}

    # ---- while it writes ------------------------------------------------------------------------

    def keep_busy(self) -> None:
        while len(self._under_way) < UNDER_WAY:
            chain = self._rng.choice(self._family.chains)
            numbers = chain[: self._rng.randint(1, CHAIN)]
            ask = self._rng.choices(
                [self._put, self._put_twice, self._get, self._delete, self._other],
                [60, 15, 15, 5, 5],
            )[0]
            ask(numbers)

    def take_reply(self) -> None:
        request_id, reply, payload = self.raw.receive()
        on_reply = self._under_way[request_id]
        if isinstance(reply, wire.ErrorReply):
            assert reply.code is ErrorCode.UNAVAILABLE, reply  # while it stops
        else:
            on_reply(reply, payload)
        if not getattr(reply, "more", False):
            del self._under_way[request_id]

    def _send(self, request: Any, on_reply: OnReply, payload: Sequence[bytes] = ()) -> None:
        self._under_way[self.raw.send(request, payload)] = on_reply

    def _put(self, numbers: range, durability: Durability | None = None) -> None:
        if durability is None:
            durability = self._rng.choices(list(Durability), [1, 3, 6])[0]
        promises = self._promises if durability is Durability.DISK else None
        asked = promises.asked_to_put(numbers) if promises else []

        def on_reply(reply: wire.PutReply, payload: list[bytes]) -> None:
            if promises:
                promises.put_answered(asked, wire.put_results(reply.results))

        contents = [self._family.content(n) for n in numbers]
        request = wire.Put(
            KEY_BYTES,
            [key(n) for n in numbers],
            self._family.parents(numbers),
            [len(content) for content in contents],
            [xxh3_64(content) for content in contents],
            durability,
        )
        self._send(request, on_reply, contents)

    def _put_twice(self, numbers: range) -> None:
        """Durable while it is already on its way to be less than that."""
        self._put(numbers, Durability.MEMORY)
        self._put(numbers, Durability.DISK)

    def _get(self, numbers: range) -> None:
        def on_reply(reply: wire.GetReply, payload: list[bytes]) -> None:
            for position, content in zip(reply.positions, payload, strict=True):
                self._require_right(numbers[position], content)

        self._send(wire.Get(KEY_BYTES, [key(n) for n in numbers], True), on_reply)

    def _delete(self, numbers: range) -> None:
        promises = self._promises
        if promises:
            promises.asked_to_delete(numbers)

        def on_reply(reply: wire.DeleteReply, payload: list[bytes]) -> None:
            if promises:
                promises.delete_answered(numbers)

        self._send(wire.Delete(KEY_BYTES, [key(n) for n in numbers]), on_reply)

    def _other(self, numbers: range) -> None:
        def on_reply(reply: Any, payload: list[bytes]) -> None:
            if isinstance(reply, wire.StatsReply):
                self.stats = reply.facts

        match = wire.Match(KEY_BYTES, [key(n) for n in numbers], [], 0)
        self._send(self._rng.choice([wire.Stats(), wire.Flush(), match]), on_reply)

    # ---- while nothing is under way -------------------------------------------------------------

    def look(self, may_be_damaged: bool) -> set[int]:
        """Reads every block the daemon says it has. Those that are there."""
        reported = self._reported()
        found: set[int] = set()
        for start in range(0, len(reported), BATCH):
            found |= self._read(reported[start : start + BATCH])
        for n in set(reported) - found:  # another reply may have taken the room in memory
            found |= self._read([n])
        if not may_be_damaged:
            assert found == set(reported), "it says that it has blocks which it does not have"
        assert set(self._reported()) == found, "a damaged block is still reported"
        if may_be_damaged:  # or it would be found once more if the daemon died before it is written
            self.raw.ask(wire.Flush())
        for chain in self._family.chains:
            leading = next((at for at, n in enumerate(chain) if n not in found), CHAIN)
            assert self.raw.match([key(n) for n in chain]).count == leading
        return found

    def _reported(self) -> list[int]:
        numbers = self._family.numbers
        tiers = self.raw.tiers([key(n) for n in numbers])
        return [n for n, tier in zip(numbers, tiers, strict=True) if tier]

    def _read(self, numbers: Sequence[int]) -> set[int]:
        number_of = {key(n): n for n in numbers}
        found = self.raw.get(list(number_of), stream=True)
        for k, content in found.items():
            self._require_right(number_of[k], content)
        return {number_of[k] for k in found}

    def _require_right(self, n: int, content: bytes) -> None:
        assert content == self._family.content(n), f"block {n} has wrong bytes"

    def close(self) -> None:
        self.raw.close()


class CrashingDaemon:
    """One folder, and all the daemons that open it one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.ssd = folder / "ssd"
        self.kills: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()  # blocks evicted, promoted …: the tiers were busy
        self.compactions = 0
        self.promises = Promises()
        self._start_s = 0.0  # what the daemon needed: how fast this machine is now
        self._rng = random.Random(seed)
        arguments = (*SPACE, *QUOTA, "--ssd", str(self.ssd))
        self._daemon = DaemonProcess(folder, *arguments, listen=[f"ipc://{folder}/kv.sock"])
        self._clients: list[Client] = []

    @property
    def logs(self) -> str:
        return self._daemon.logs

    def recover(self) -> None:
        """Starts it, and looks at every block."""
        damaged = self.promises.may_lose_all or bool(self.promises.may_lose)
        begin = time.monotonic()
        self._daemon.start()
        self._start_s = time.monotonic() - begin
        families = ((LASTING, self.promises), (PASSING, None))
        self._clients = [
            Client(self._daemon.endpoint, family, promises, self._rng)
            for family, promises in families
        ]
        lasting, passing = (client.look(damaged) for client in self._clients)
        self.promises.check(lasting)
        self.seen["recovered lasting"] += len(lasting)
        self.seen["recovered passing"] += len(passing)

    # ---- ends -----------------------------------------------------------------------------------

    def die_while_writing(self) -> None:
        self._write_for(self._rng.uniform(0.02, 2.0) * self._start_s)
        self._kill("writing")

    def die_while_stopping(self) -> None:
        self._write_for(self._rng.uniform(0.03, 0.2) * self._start_s)
        self._daemon.signal(signal.SIGTERM)
        self._take_replies_for(self._rng.choice((0.005, 0.05, 0.2)) * self._rng.random())
        self._kill("stopping")

    def die_while_starting(self) -> None:
        self._daemon.launch()
        time.sleep(self._rng.uniform(0.05, 0.6))
        self._kill("starting")

    def end(self) -> None:
        self._forget_clients()
        self._daemon.end()

    def _write_for(self, seconds: float) -> None:
        generation = self._generation()
        self._take_replies_for(seconds, Client.keep_busy)
        self.compactions += self._generation() - generation

    def _take_replies_for(
        self, seconds: float, before: Callable[[Client], None] = lambda client: None
    ) -> None:
        end = time.monotonic() + seconds
        poller = zmq.Poller()
        of_socket = {client.raw.socket: client for client in self._clients}
        for socket in of_socket:
            poller.register(socket, zmq.POLLIN)
        while (left := end - time.monotonic()) > 0:
            for client in self._clients:
                before(client)
            for socket, _ in poller.poll(int(left * 1000)):
                of_socket[socket].take_reply()

    def _kill(self, when: str) -> None:
        self.kills[when] += self._daemon.is_running()
        self._daemon.end()
        if self._clients:
            self._take_replies_for(LAST_REPLIES_S)
        self._forget_clients()
        self.promises.crashed()

    def _forget_clients(self) -> None:
        for client in self._clients:
            for fact in ("evicted_blocks", "promoted_blocks"):
                for tier, count in client.stats.get(fact, {}).items():
                    self.seen[f"{fact} {tier}"] += count
            client.close()
        self._clients = []

    def _generation(self) -> int:
        superblock = read_superblock(self.ssd)
        assert superblock is not None
        header = read_journal(OsDisk(), self.ssd, superblock.store).header
        return header.generation if header else 0
