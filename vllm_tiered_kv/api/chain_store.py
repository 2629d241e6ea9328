"""Chains of equally long blocks at one or several daemons, asked for and moved in bulk.

What cannot be asked or moved is a miss, as everywhere; but the outcome says so, for those who want
to tell a daemon that has nothing from one that is not there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import NAMESPACE_BYTES, Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.placement import Cluster, placed_runs
from vllm_tiered_kv.remote.shared_memory import SharedMemory
from vllm_tiered_kv.remote.shm_copy import ByteRows, copy_rows, read_rows, write_blocks
from vllm_tiered_kv.remote.store import SLOWEST_BYTES_PER_S, RemoteStore
from vllm_tiered_kv.wire.limits import MAX_KEYS

_RANK = RankTag()
_HELD = (PutResult.STORED, PutResult.PRESENT)
# Of one question to a local daemon: it leases half of its memory to all processes together.
_PIECE_BYTES = 128 << 20
_PIECE_BLOCKS = 16384

Run = tuple[int, int, RemoteStore]
"""Positions from one up to another, and the daemon they are placed at."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many leading blocks it was done for."""

    count: int
    failures: Mapping[str, str]
    """Daemons that could not be used, and why: there might have been more."""


class ChainStore:
    """All calls may be made from any thread, and none raises for what happens to a daemon."""

    def __init__(self, cluster: Cluster, namespace: bytes, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._prefix = namespace[:NAMESPACE_BYTES]
        self._suffix = _RANK.encode()
        self._local_daemons = {
            store: LocalDaemon(store)
            for store in cluster.stores.values()
            if store.address.arena_path is not None
        }

    def match(self, keys: Sequence[BlockKey]) -> Outcome:
        """How many leading blocks are held: at most one question to each daemon."""
        return self._match(keys, self._runs(keys), self._deadline())

    def read(self, keys: Sequence[BlockKey], into: ByteRows) -> Outcome:
        """Reads the leading blocks that are held, each into its row. The other rows may hold
        anything."""
        end = self._deadline(into.nbytes)
        runs = self._runs(keys)
        held = self._match(keys, runs, end)
        for start, stop, server in runs:
            stop = min(stop, held.count)
            if start >= stop:
                break
            count = self._read(server, self._named(keys[start:stop]), into[start:stop], end)
            if start + count < stop:
                why = self._why_not_read(server, keys[start + count], end)
                return Outcome(start + count, why)
        return held

    def write(
        self, keys: Sequence[BlockKey], first: int, rows: ByteRows, durability: Durability
    ) -> Outcome:
        """Stores the blocks from position `first` of their chain on. The count is that of blocks
        which are held now, from the first of them without a gap."""
        end = self._deadline(rows.nbytes)
        count = 0
        for start, stop, server in self._runs(keys, first):
            named = self._named(keys[max(0, start - 1) : stop])
            parents = [None, *named[:-1]] if start == 0 else named[:-1]
            chain = list(zip(named[-(stop - start) :], parents, strict=True))
            results = self._write(
                server, chain, rows[start - first : stop - first], durability, end
            )
            kept = next((n for n, result in enumerate(results) if result not in _HELD), None)
            if kept is None:
                count += len(results)
                continue
            # What follows would never be found.
            is_failure = results[kept] is PutResult.FAILED
            return Outcome(count + kept, self._reasons([server]) if is_failure else {})
        return Outcome(count, self._nobody(first + count, keys))

    def flush(self) -> Outcome:
        """At how many daemons all that was acknowledged is as durable as they can make it."""
        stores = list(self._cluster.stores.values())
        failed = [store for store in stores if not store.flush()]
        return Outcome(len(stores) - len(failed), self._reasons(failed))

    def close(self) -> None:
        """Waits for calls under way in other threads."""
        for local_daemon in self._local_daemons.values():
            local_daemon.close(waits_for_readers=True)
        self._cluster.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _deadline(self, nbytes: int = 0) -> float:
        return time.monotonic() + self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def _runs(self, keys: Sequence[BlockKey], first: int = 0) -> list[Run]:
        return list(placed_runs(self._cluster, keys, first))

    def _named(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        """As `store_key` does, without its cost for each of thousands."""
        return [StoreKey(self._prefix + key + self._suffix) for key in keys]

    def _match(self, keys: Sequence[BlockKey], runs: Sequence[Run], end: float) -> Outcome:
        count = 0
        left: dict[RemoteStore, int] = {}  # of what each daemon holds, those not counted yet
        for start, stop, server in runs:
            if server not in left:
                theirs = [key for a, b, other in runs if other is server for key in keys[a:b]]
                held = self._ask(server, theirs, end)
                if held is None:
                    return Outcome(count, self._reasons([server]))
                left[server] = held
            here = min(left[server], stop - start)
            left[server] -= here
            count += here
            if here < stop - start:
                return Outcome(count, {})
        return Outcome(count, self._nobody(count, keys))

    def _ask(self, server: RemoteStore, keys: Sequence[BlockKey], end: float) -> int | None:
        count = 0
        while count < len(keys):
            some = keys[count : count + MAX_KEYS]
            match = server.match_all(some, [_RANK], 0, end)
            if match is None:
                return None
            count += match.count
            if match.count < len(some):
                break
        return count

    def _read(
        self, server: RemoteStore, keys: Sequence[StoreKey], into: ByteRows, end: float
    ) -> int:
        with self._memory_of(server) as memory:
            local = 0 if memory is None else _read_local(memory, keys, into, end)
        if local == len(keys):
            return local
        # Also what a local daemon holds but cannot lease now, having leased too much.
        found = server.get(keys[local:], [row.data for row in into[local:]], end)
        return local + (found.index(False) if False in found else len(found))

    def _write(
        self,
        server: RemoteStore,
        chain: Sequence[tuple[StoreKey, StoreKey | None]],
        rows: ByteRows,
        durability: Durability,
        end: float,
    ) -> list[PutResult]:
        local: list[PutResult] = []
        if durability is not Durability.DISK:  # what is sealed is in memory; only a put waits
            with self._memory_of(server) as memory:
                if memory is not None:
                    local = _write_local(memory, chain, rows, end)
        held = next((n for n, result in enumerate(local) if result not in _HELD), len(local))
        if local and (held == len(chain) or local[held] is not PutResult.DROPPED):
            return local
        # Also what a local daemon has room for but cannot lease now, having leased too much.
        items = [
            PutItem(key, parent, row.data)
            for (key, parent), row in zip(chain[held:], rows[held:], strict=True)
        ]
        return local[:held] + server.put(items, durability, end)

    def _memory_of(
        self, server: RemoteStore
    ) -> contextlib.AbstractContextManager[SharedMemory | None]:
        local_daemon = self._local_daemons.get(server)
        return contextlib.nullcontext() if local_daemon is None else local_daemon.reading()

    def _why_not_read(self, server: RemoteStore, key: BlockKey, end: float) -> Mapping[str, str]:
        """Nothing, if the block has left since it was matched; otherwise it should have come."""
        return {} if self._ask(server, [key], end) == 0 else self._reasons([server])

    def _nobody(self, count: int, keys: Sequence[BlockKey]) -> Mapping[str, str]:
        """After all runs: fewer than all blocks are left where no daemon is available."""
        return self._reasons(self._cluster.stores.values()) if count < len(keys) else {}

    def _reasons(self, servers: Iterable[RemoteStore]) -> Mapping[str, str]:
        return {
            str(server.address): str(server.last_error or "no answer in time") for server in servers
        }


def _blocks_at_once(memory: SharedMemory, nbytes: int) -> int:
    """What all processes hold of a daemon's memory together is limited."""
    room = min(_PIECE_BYTES, memory.arena.capacity_bytes // 16)
    return max(1, min(_PIECE_BLOCKS, room // aligned(nbytes, PAGE)))


def _read_local(memory: SharedMemory, keys: Sequence[StoreKey], into: ByteRows, end: float) -> int:
    piece = _blocks_at_once(memory, into.shape[1])
    for start in range(0, len(keys), piece):
        some = keys[start : start + piece]
        count = read_rows(memory, some, into[start : start + piece], end)
        if count < len(some):
            return start + count
    return len(keys)


def _write_local(
    memory: SharedMemory,
    chain: Sequence[tuple[StoreKey, StoreKey | None]],
    rows: ByteRows,
    end: float,
) -> list[PutResult]:
    """Ends with the first piece that is not held as a whole."""
    piece = _blocks_at_once(memory, rows.shape[1])
    results: list[PutResult] = []
    for start in range(0, len(chain), piece):
        some, source = chain[start : start + piece], rows[start : start + piece]
        blocks = [(key, parent, source.shape[1]) for key, parent in some]
        results += write_blocks(memory, blocks, partial(copy_rows, memory, source), end)
        if not all(result in _HELD for result in results[start:]):
            break
    return results
