"""A BlockStore over one daemon.

Failures of the daemon or the network raise no exceptions here: a lookup or read that is not
answered in time is a miss, a failed write is FAILED, and the breaker limits the cost of a dead
daemon to a few deadlines. Any thread may call the store; each call uses one connection. Deadlines
are times of `time.monotonic`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.core.breaker import Breaker
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import (
    NAMESPACE_BYTES,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ArenaError, ConnectionLost
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress, model_in
from vllm_tiered_kv.remote.calls import Caller
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.shared_memory import SharedMemory, attach
from vllm_tiered_kv.remote.transfers import ReadTask, WriteTask, hash_first_request, read, write
from vllm_tiered_kv.wire.limits import MAX_CLAIM_KEYS, MAX_CLAIM_MS, MAX_KEYS, MAX_LOOKUPS
from vllm_tiered_kv.wire.messages import (
    CLAIM_CAPABILITY,
    Claim,
    ClaimReply,
    Contains,
    ContainsReply,
    Delete,
    DeleteReply,
    Flush,
    FlushReply,
    Info,
    InfoReply,
    Match,
    MatchReply,
    Stats,
    StatsReply,
    TierCode,
)

SLOWEST_BYTES_PER_S = 64 << 20  # default deadlines assume at least this bandwidth
_FLUSH_S = 60.0
_SLOWER = (Tier.SSD, Tier.BACKING)
_ATTACH_AGAIN_S = 1.0  # a stopped daemon must not cost every call the connect timeout


@dataclass(frozen=True, slots=True)
class RemoteMatch:
    """How many leading blocks a daemon has, in total and by the tier of their fastest copy."""

    count: int
    by_tier: dict[Tier, int]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What became of a claim, see `wire.messages.ClaimReply`."""

    count: int = 0
    others: int = 0
    wait_s: float = 0.0


class RemoteStore:
    """The client of one daemon; it connects with the first call. `Cluster` makes one per daemon.
    Any thread may call it."""

    def __init__(
        self,
        address: str,
        identity: EngineIdentity,
        *,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 0.5,
        curve: CurveKeys | None = None,
        breaker: Breaker | None = None,
        max_connections: int = 8,
    ) -> None:
        """`timeout_s` is the time for calls without a deadline; calls that move blocks get another
        second for every 64 MiB."""
        self.address = ServerAddress.parse(address)
        self.identity = identity
        self.breaker = breaker or Breaker(f"the daemon at {self.address}")
        self._timeout = timeout_s
        largest = max(identity.block_bytes, default=0)
        settings = Settings(self.address, connect_timeout_s, curve, largest)
        self._caller = Caller(identity, settings, self.breaker, max_connections)
        self._attaching = threading.Lock()
        self._memory: list[SharedMemory] = []
        self._attach_not_before = 0.0

    @property
    def available(self) -> bool:
        """Whether the breaker would admit a call now. Never waits."""
        return not self._caller.pool.closing.is_set() and self.breaker.available

    @property
    def is_up(self) -> bool:
        """Whether the daemon answered the last call; False before the first one."""
        return self.breaker.is_up

    @property
    def failed_calls(self) -> int:
        """How many calls were ended by a timeout, a broken connection or a refusal."""
        return self._caller.failed_calls

    @property
    def last_error(self) -> Exception | None:
        """The error of the last failed call, over the socket or about shared memory, for messages;
        None if no call has failed."""
        return self._caller.last_error

    def greet(self, connections: int = 1) -> None:
        """Opens connections in advance, so that the first calls do not wait for them.

        Gives up after the connect timeout and leaves the rest to those calls: a daemon that has
        bound its address may still be reading its disk.
        """
        end = time.monotonic() + min(self._timeout, self._caller.settings.connect_timeout_s)

        def open_more(left: int) -> Callable[[Connection], None]:
            def work(_: Connection) -> None:  # nested, so that each one holds its connection
                if left > 1:
                    self._caller.attempt(open_more(left - 1), end)

            return work

        self._caller.attempt(open_more(connections), end)

    # ---- lookups --------------------------------------------------------------------------------

    def match_all(
        self,
        keys: Sequence[BlockKey],
        ranks: Sequence[RankTag],
        pin_ms: int = 0,
        deadline: float | None = None,
    ) -> RemoteMatch | None:
        """Counts the leading blocks that are there for all ranks, in one round trip; None if the
        daemon does not answer.

        It asks for at most as many keys as fit one message: 65536, or less with very many ranks.
        """
        if not keys or not ranks:
            return RemoteMatch(0, {})
        end = self._deadline(deadline)
        suffixes = [rank.encode() for rank in ranks]
        answer: MatchReply | None = None
        asked = 0

        def ask(connection: Connection) -> None:
            nonlocal answer, asked
            batch: list[bytes] = list(keys[: _max_keys(connection, len(suffixes))])
            request = Match(len(keys[0]), batch, suffixes, pin_ms)
            answer = connection.call(request, MatchReply, deadline=end)
            asked = len(batch)

        if not self._caller.attempt(ask, end) or answer is None:
            return None
        counts = dict(zip((Tier.MEMORY, Tier.SSD, Tier.BACKING), answer.tiers, strict=True))
        by_tier = {tier: count for tier, count in counts.items() if count}
        return RemoteMatch(min(answer.count, asked), by_tier)

    def contains_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], deadline: float
    ) -> list[bool]:
        """Returns for each block whether it is there for all ranks; False if the daemon does not
        answer."""
        suffixes = [rank.encode() for rank in ranks]
        present = self._find([key + suffix for key in keys for suffix in suffixes], deadline)
        return [all(key + suffix in present for suffix in suffixes) for key in keys]

    def match(self, keys: Sequence[StoreKey]) -> int:
        end = self._deadline()
        ours: list[bytes] = []
        for key in keys:
            wire = self.identity.wire_key(key)
            if wire is None:
                break
            ours.append(wire)
        count = 0

        def ask(connection: Connection) -> None:
            nonlocal count
            for batch in _batches(ours, connection):
                request = Match(self.identity.key_bytes, batch, [], 0)
                matched = connection.call(request, MatchReply, deadline=end).count
                count += min(matched, len(batch))
                if matched < len(batch):
                    return

        if ours:
            self._caller.attempt(ask, end)
        return count

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        ours = [self.identity.wire_key(key) for key in keys]
        present = self._find([key for key in ours if key is not None], self._deadline())
        return [key in present for key in ours]

    def _find(self, keys: Sequence[bytes], deadline: float) -> set[bytes]:
        """Returns which of these wire keys the daemon has; none if it does not answer."""
        present: set[bytes] = set()

        def ask(connection: Connection) -> None:
            present.update(self._present(connection, keys, deadline))

        if keys:
            self._caller.attempt(ask, deadline)
        return present

    # ---- claims ---------------------------------------------------------------------------------

    def claim(
        self, keys: Sequence[BlockKey], owner: bytes, ttl_s: float, deadline: float
    ) -> ClaimResult:
        """Announces that this client computes these blocks, or with `ttl_s` 0 that it no longer
        does. Without an answer, or at a daemon without claims, no client has a claim."""
        result = ClaimResult()

        def ask(connection: Connection) -> None:
            nonlocal result
            greeting = connection.greeting
            if greeting is None or CLAIM_CAPABILITY not in greeting.capabilities:
                return
            some: list[bytes] = list(keys[: min(MAX_CLAIM_KEYS, connection.limits.keys)])
            ttl_ms = min(MAX_CLAIM_MS, max(int(ttl_s > 0), round(ttl_s * 1000)))
            request = Claim(len(keys[0]), some, owner, ttl_ms)
            reply = connection.call(request, ClaimReply, deadline=deadline)
            others = min(reply.others, len(some))
            result = ClaimResult(min(reply.count, len(some)), others, reply.wait_ms / 1000)

        if keys:
            self._caller.attempt(ask, deadline)
        return result

    # ---- blocks ---------------------------------------------------------------------------------

    def get(
        self,
        keys: Sequence[StoreKey],
        into: Sequence[memoryview],
        deadline: float | None = None,
    ) -> list[bool]:
        """See BlockStore. A block that has not arrived by the deadline is a miss. Nothing writes to
        the buffers after the return."""
        tasks: list[ReadTask | None] = []
        for key, buffer in zip(keys, into, strict=True):
            ours = self.identity.wire_key(key) if buffer.nbytes else None
            tasks.append(None if ours is None else ReadTask(ours, buffer))
        wanted = [task for task in tasks if task is not None]
        if wanted:
            end = self._deadline(deadline, sum(task.into.nbytes for task in wanted))
            self._caller.attempt(lambda connection: self._read(connection, wanted, end), end)
        return [task is not None and task.found for task in tasks]

    def put(
        self,
        items: Sequence[PutItem],
        durability: Durability = Durability.MEMORY,
        deadline: float | None = None,
    ) -> list[PutResult]:
        """See BlockStore. A block that is not acknowledged by the deadline is FAILED, although the
        daemon may have stored it. Nothing reads the payloads after the return."""
        tasks: list[WriteTask | None] = []
        for item in items:
            key = self.identity.wire_key(item.key) if item.payload.nbytes else None
            parent = None if item.parent is None else self.identity.wire_key(item.parent)
            tasks.append(None if key is None else WriteTask(key, parent, item))
        offered = [task for task in tasks if task is not None]
        if offered:
            end = self._deadline(deadline, sum(task.item.payload.nbytes for task in offered))
            self._caller.attempt(
                lambda connection: self._write(connection, offered, durability, end), end
            )
        return [PutResult.FAILED if task is None else task.result for task in tasks]

    def delete(self, keys: Sequence[StoreKey]) -> int:
        end = self._deadline()
        distinct = dict.fromkeys(keys)
        ours = [wire for key in distinct if (wire := self.identity.wire_key(key)) is not None]
        count = 0

        def ask(connection: Connection) -> None:
            nonlocal count
            for batch in _batches(ours, connection):
                request = Delete(self.identity.key_bytes, batch)
                count += connection.call(request, DeleteReply, deadline=end).count

        if ours:
            self._caller.attempt(ask, end)
        return count

    # ---- flush, usage, shared memory ------------------------------------------------------------

    def flush(self, deadline: float | None = None) -> bool:
        """See BlockStore; also False if the daemon does not answer. Waits up to a minute for the
        daemon's disk."""
        end = time.monotonic() + _FLUSH_S if deadline is None else deadline

        def ask(connection: Connection) -> None:
            connection.call(Flush(), FlushReply, deadline=end)

        return self._caller.attempt(ask, end)

    def usage(self) -> StoreUsage:
        """Returns the usage of the daemon's memory tier by all engines; zeros if it is unknown."""
        facts = self._stats(self._deadline())
        return StoreUsage(
            *(_number(facts, name) for name in ("blocks", "used_bytes", "capacity_bytes"))
        )

    def read_speeds(self, deadline: float) -> dict[Tier, float]:
        """Returns the bytes per second at which the daemon reads its slower tiers, as far as the
        daemon announces them."""
        facts = self._stats(deadline)
        rates = {tier: _number(facts, "read_bytes_per_second", tier) for tier in _SLOWER}
        return {tier: float(rate) for tier, rate in rates.items() if rate > 0}

    def other_namespaces(self, deadline: float) -> list[int] | None:
        """Returns how many blocks the daemon holds of each other namespace whose engines name the
        same model; None if it does not answer. At least, because a block may be in memory and on
        the SSD."""
        facts: dict[str, Any] = {}

        def ask(connection: Connection) -> None:
            facts.update(connection.call(Info(), InfoReply, deadline=deadline).facts)

        if not self._caller.attempt(ask, deadline):
            return None
        rows = facts.get("by_namespace")
        own, model = self.identity.namespace[:NAMESPACE_BYTES].hex(), model_in(self.identity.client)
        counts = [
            max(n for n in (row.get("memory_blocks"), row.get("ssd_blocks"), 0) if type(n) is int)
            for name, row in (rows.items() if isinstance(rows, dict) else ())
            if name != own and isinstance(row, dict) and model_in(str(row.get("client"))) == model
        ]
        return [count for count in counts if count]

    def _stats(self, deadline: float) -> dict[str, Any]:
        """Returns the daemon's statistics; none if it does not answer."""
        facts: dict[str, Any] = {}

        def ask(connection: Connection) -> None:
            facts.update(connection.call(Stats(), StatsReply, deadline=deadline).facts)

        self._caller.attempt(ask, deadline)
        return facts

    def attach(
        self,
        on_unsettled: Callable[[], None] = lambda: None,
        on_unmap: Callable[[SharedMemory], None] = lambda memory: None,
    ) -> SharedMemory | None:
        """Returns the daemon's memory if the daemon runs on this host and shares it, else None.

        Calls return the same object while the daemon lives, with the callbacks of the first one.
        After a restart they return the new daemon's memory; the old memory stays mapped until it is
        closed or retired. `on_unsettled` is called when the memory's `settle` has something to do,
        and must not wait; `on_unmap` before the memory is unmapped, to unpin it.
        """
        path = self.address.arena_path
        if path is None or not self.available:
            return None
        with self._attaching:
            if self._caller.pool.closing.is_set():  # closed while this waited for the lock
                return None
            self._memory = [memory for memory in self._memory if not memory.closed]
            for memory in self._memory:
                if memory.alive:
                    return memory
            if time.monotonic() < self._attach_not_before:
                return None
            try:
                settings = self._caller.settings
                memory = SharedMemory(
                    attach(path, self.identity.client, settings.connect_timeout_s),
                    self.identity,
                    settings,
                    self.breaker,
                    self._timeout,
                    self._caller.record_error,
                    on_unsettled,
                    on_unmap,
                )
            except ArenaError as error:
                absent = self.address.why_absent()
                attempt = self.breaker.begin() if absent is not None else None
                if absent is not None and attempt is not None:
                    self.breaker.fail(attempt, absent, is_absent=True)
                elif absent is None:
                    self._caller.warn_once(
                        f"does not share its memory ({error}); blocks use the socket instead"
                    )
                    self._attach_not_before = time.monotonic() + _ATTACH_AGAIN_S
                return None
            self._memory.append(memory)
            return memory

    def close(self) -> None:
        """Ends calls in flight and retires shared memory, which is unmapped when its last reader
        has left."""
        with self._attaching:
            for memory in self._memory:
                memory.retire()
            self._caller.pool.close(self._timeout)

    # ---- internals ------------------------------------------------------------------------------

    def _deadline(self, deadline: float | None = None, nbytes: int = 0) -> float:
        if deadline is not None:
            return deadline
        return time.monotonic() + self._timeout + nbytes / SLOWEST_BYTES_PER_S

    def _read(self, connection: Connection, tasks: list[ReadTask], deadline: float) -> None:
        try:
            read(connection, tasks, deadline)
        finally:
            damaged = list(dict.fromkeys(task.key for task in tasks if task.damaged))
            if damaged:
                self._caller.warn_once("sent damaged blocks; they count as misses and are deleted")
        for batch in _batches(damaged, connection):
            connection.call(Delete(self.identity.key_bytes, batch), DeleteReply, deadline=deadline)

    def _write(
        self,
        connection: Connection,
        tasks: list[WriteTask],
        durability: Durability,
        deadline: float,
    ) -> None:
        # Blocks that the daemon has are not sent again, except with DISK: they may be in memory
        # only.
        if durability is not Durability.DISK:
            keys = [task.key for task in tasks]
            present = self._present(connection, keys, deadline, lambda: hash_first_request(tasks))
            for task in tasks:
                if task.key in present:
                    task.result = PutResult.PRESENT
            tasks = [task for task in tasks if task.key not in present]
        if tasks:
            write(connection, tasks, durability, deadline)

    def _present(
        self,
        connection: Connection,
        keys: Sequence[bytes],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> set[bytes]:
        """Returns which of the keys the daemon has, in any tier. `meanwhile` runs while the request
        is in flight."""
        present: set[bytes] = set()
        for batch in _batches(keys, connection):
            connection.send(Contains(self.identity.key_bytes, batch), deadline=deadline)
            meanwhile()
            reply = connection.receive(deadline=deadline).reply
            assert isinstance(reply, ContainsReply)
            tiers = reply.tiers
            if len(tiers) != len(batch):
                raise ConnectionLost(f"{len(tiers)} tiers for {len(batch)} keys")
            present.update(
                key for key, tier in zip(batch, tiers, strict=True) if tier != TierCode.MISS
            )
        return present


def _max_keys(connection: Connection, suffixes: int = 1) -> int:
    return max(1, min(MAX_KEYS, connection.limits.keys, MAX_LOOKUPS // suffixes))


def _batches(keys: Sequence[bytes], connection: Connection) -> Iterator[list[bytes]]:
    max_keys = _max_keys(connection)
    for start in range(0, len(keys), max_keys):
        yield list(keys[start : start + max_keys])


def _number(facts: dict[str, Any], name: str, tier: Tier = Tier.MEMORY) -> int:
    """Returns a fact about a tier; 0 if this daemon does not report it."""
    by_tier = facts.get(name)
    value = by_tier.get(tier.value) if isinstance(by_tier, dict) else None
    return value if type(value) is int else 0
