"""Looks up, reads and writes chains of equally long blocks in bulk: at one or several daemons
(`ChainStore`), or in a shared directory without a daemon (`FolderChains`).

A failure counts as a miss, as everywhere in this package. But the outcome also lists the failures,
so that callers can distinguish a daemon without the blocks from an unavailable one.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
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
from vllm_tiered_kv.stores.shared_dir.backing import SharedDirBacking
from vllm_tiered_kv.wire.limits import MAX_KEYS

_RANK = RankTag()
_HELD = (PutResult.STORED, PutResult.PRESENT)
# Limits of one request to a daemon on this host, because a daemon leases at most half of its memory
# to all processes together.
_MAX_REQUEST_BYTES = 128 << 20
_MAX_REQUEST_BLOCKS = 16384

Run = tuple[int, int, RemoteStore]
"""Start and end position of a run of blocks, and the daemon that holds it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a call: the number of leading blocks for which it succeeded."""

    count: int
    failures: Mapping[str, str]
    """Addresses of daemons that could not be used, and why. They may hold more blocks."""


class Chains(ABC):
    """What `TokenCache` needs of the place where its blocks are. Any thread may call it."""

    def __init__(self, namespace: bytes) -> None:
        self._prefix = namespace[:NAMESPACE_BYTES]
        self._suffix = _RANK.encode()

    @abstractmethod
    def match(self, keys: Sequence[BlockKey]) -> Outcome:
        """Returns how many leading blocks are held."""

    @abstractmethod
    def read(self, keys: Sequence[BlockKey], into: ByteRows) -> Outcome:
        """Reads the leading blocks that are held, each into its row. The content of the other rows
        is undefined afterwards."""

    @abstractmethod
    def write(
        self, keys: Sequence[BlockKey], first: int, rows: ByteRows, durability: Durability
    ) -> Outcome:
        """Stores blocks whose chain positions start at `first`. The count of the outcome is the
        number of these blocks that are held now, from `first` without a gap."""

    @abstractmethod
    def flush(self) -> Outcome:
        """Makes everything as durable as possible."""

    @abstractmethod
    def close(self) -> None:
        """Waits for running calls of other threads, then releases everything."""

    def _store_keys(self, keys: Sequence[BlockKey]) -> list[StoreKey]:
        """Like `store_key`, but faster for thousands of keys."""
        return [StoreKey(self._prefix + key + self._suffix) for key in keys]


class FolderChains(Chains):
    """Blocks in a shared directory, which this process uses without a daemon. `TokenCache` calls it
    from any thread; a file system that does not answer blocks the call."""

    def __init__(self, store: SharedDirBacking, namespace: bytes) -> None:
        super().__init__(namespace)
        self._store = store

    def match(self, keys: Sequence[BlockKey]) -> Outcome:
        return Outcome(self._store.match(self._store_keys(keys)), {})

    def read(self, keys: Sequence[BlockKey], into: ByteRows) -> Outcome:
        # Without the match, a query of a long prompt would read every block behind a gap.
        held = self.match(keys).count
        found = self._store.get(self._store_keys(keys[:held]), [row.data for row in into[:held]])
        return Outcome(_leading(found), {})

    def write(
        self, keys: Sequence[BlockKey], first: int, rows: ByteRows, durability: Durability
    ) -> Outcome:
        chain = _chain(self._store_keys(keys), first)
        items = [
            PutItem(key, parent, row.data) for (key, parent), row in zip(chain, rows, strict=True)
        ]
        results = self._store.put(items, durability)
        kept = _leading([result in _HELD for result in results])
        is_failure = PutResult.FAILED in results[kept : kept + 1]
        return Outcome(kept, self._reason("could not be written") if is_failure else {})

    def flush(self) -> Outcome:
        is_flushed = self._store.flush()
        self._store.take_lost()  # what they are is not reported
        return Outcome(int(is_flushed), {} if is_flushed else self._reason("could not be synced"))

    def close(self) -> None:
        self._store.close()

    def _reason(self, what: str) -> Mapping[str, str]:
        return {self._store.settings.root: f"{what}; the log has the error"}


class ChainStore(Chains):
    """The chains of daemons. Thread-safe; failures of a daemon raise no error."""

    def __init__(self, cluster: Cluster, namespace: bytes, timeout_s: float) -> None:
        super().__init__(namespace)
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._local_daemons = {
            store: LocalDaemon(store)
            for store in cluster.stores.values()
            if store.address.arena_path is not None
        }

    def match(self, keys: Sequence[BlockKey]) -> Outcome:
        """Returns how many leading blocks are held, with at most one lookup per daemon."""
        return self._match(keys, self._runs(keys), self._deadline())

    def read(self, keys: Sequence[BlockKey], into: ByteRows) -> Outcome:
        end = self._deadline(into.nbytes)
        runs = self._runs(keys)
        held = self._match(keys, runs, end)
        for start, stop, server in runs:
            stop = min(stop, held.count)
            if start >= stop:
                break
            theirs = self._store_keys(keys[start:stop])
            count = self._read(server, theirs, into[start:stop], end)
            if start + count < stop:
                failures = self._read_failures(server, keys[start + count], end)
                return Outcome(start + count, failures)
        return held

    def write(
        self, keys: Sequence[BlockKey], first: int, rows: ByteRows, durability: Durability
    ) -> Outcome:
        end = self._deadline(rows.nbytes)
        count = 0
        for start, stop, server in self._runs(keys, first):
            before = max(0, start - 1)  # the parent of the first block
            chain = _chain(self._store_keys(keys[before:stop]), start - before)
            results = self._write(
                server, chain, rows[start - first : stop - first], durability, end
            )
            kept = next((n for n, result in enumerate(results) if result not in _HELD), None)
            if kept is None:
                count += len(results)
                continue
            # Blocks after a gap would never be found, so stop here.
            is_failure = results[kept] is PutResult.FAILED
            return Outcome(count + kept, self._reasons([server]) if is_failure else {})
        return Outcome(count, self._unplaced_failures(first + count, keys))

    def flush(self) -> Outcome:
        """Flushes all daemons; the count of the outcome is the number of daemons that succeeded."""
        stores = list(self._cluster.stores.values())
        failed = [store for store in stores if not store.flush()]
        return Outcome(len(stores) - len(failed), self._reasons(failed))

    def close(self) -> None:
        for daemon in self._local_daemons.values():
            daemon.close(waits_for_readers=True)
        self._cluster.close()

    # ---- internals ------------------------------------------------------------------------------

    def _deadline(self, nbytes: int = 0) -> float:
        return time.monotonic() + self._timeout_s + nbytes / SLOWEST_BYTES_PER_S

    def _runs(self, keys: Sequence[BlockKey], first: int = 0) -> list[Run]:
        return list(placed_runs(self._cluster, keys, first))

    def _match(self, keys: Sequence[BlockKey], runs: Sequence[Run], end: float) -> Outcome:
        count = 0
        left: dict[RemoteStore, int] = {}  # held blocks of each daemon that are not counted yet
        for start, stop, server in runs:
            if server not in left:
                theirs = [key for a, b, other in runs if other is server for key in keys[a:b]]
                held = self._lookup(server, theirs, end)
                if held is None:
                    return Outcome(count, self._reasons([server]))
                left[server] = held
            here = min(left[server], stop - start)
            left[server] -= here
            count += here
            if here < stop - start:
                return Outcome(count, {})
        return Outcome(count, self._unplaced_failures(count, keys))

    def _lookup(self, server: RemoteStore, keys: Sequence[BlockKey], end: float) -> int | None:
        """Returns how many leading keys the daemon holds; None if it did not answer."""
        count = 0
        while count < len(keys):
            batch = keys[count : count + MAX_KEYS]
            match = server.match_all(batch, [_RANK], 0, end)
            if match is None:
                return None
            count += match.count
            if match.count < len(batch):
                break
        return count

    def _read(
        self, server: RemoteStore, keys: Sequence[StoreKey], into: ByteRows, end: float
    ) -> int:
        with self._memory_of(server) as memory:
            count = 0 if memory is None else _read_shared(memory, keys, into, end)
        if count == len(keys):
            return count
        # A local daemon may hold the rest too, but cannot lease it now because of its limit.
        found = server.get(keys[count:], [row.data for row in into[count:]], end)
        return count + _leading(found)

    def _write(
        self,
        server: RemoteStore,
        chain: Sequence[tuple[StoreKey, StoreKey | None]],
        rows: ByteRows,
        durability: Durability,
        end: float,
    ) -> list[PutResult]:
        results: list[PutResult] = []
        if durability is not Durability.DISK:  # sealing does not wait for the disk; a put does
            with self._memory_of(server) as memory:
                if memory is not None:
                    results = _write_shared(memory, chain, rows, end)
        held = next((n for n, result in enumerate(results) if result not in _HELD), len(results))
        if results and (held == len(chain) or results[held] is not PutResult.DROPPED):
            return results
        # A local daemon may have room for the rest, but cannot lease it now because of its limit.
        items = [
            PutItem(key, parent, row.data)
            for (key, parent), row in zip(chain[held:], rows[held:], strict=True)
        ]
        return results[:held] + server.put(items, durability, end)

    def _memory_of(
        self, server: RemoteStore
    ) -> contextlib.AbstractContextManager[SharedMemory | None]:
        daemon = self._local_daemons.get(server)
        return contextlib.nullcontext() if daemon is None else daemon.reading()

    def _read_failures(self, server: RemoteStore, key: BlockKey, end: float) -> Mapping[str, str]:
        """Returns no failure if the block was evicted after the match, otherwise the daemon's."""
        return {} if self._lookup(server, [key], end) == 0 else self._reasons([server])

    def _unplaced_failures(self, count: int, keys: Sequence[BlockKey]) -> Mapping[str, str]:
        """Called after all runs: the remaining blocks are in no run if no daemon is available."""
        return self._reasons(self._cluster.stores.values()) if count < len(keys) else {}

    def _reasons(self, servers: Iterable[RemoteStore]) -> Mapping[str, str]:
        return {
            str(server.address): str(server.last_error or "no answer in time") for server in servers
        }


def _chain(keys: list[StoreKey], first: int) -> list[tuple[StoreKey, StoreKey | None]]:
    """Returns the keys from position `first` on, each with the key before it."""
    parents = [None, *keys][first : len(keys)]
    return list(zip(keys[first:], parents, strict=True))


def _leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _blocks_at_once(memory: SharedMemory, nbytes: int) -> int:
    """Returns the blocks per request; the leases of all processes together are limited."""
    max_bytes = min(_MAX_REQUEST_BYTES, memory.arena.capacity_bytes // 16)
    return max(1, min(_MAX_REQUEST_BLOCKS, max_bytes // aligned(nbytes, PAGE)))


def _read_shared(memory: SharedMemory, keys: Sequence[StoreKey], into: ByteRows, end: float) -> int:
    """Reads blocks from the shared memory of a local daemon; returns how many leading ones."""
    size = _blocks_at_once(memory, into.shape[1])
    for start in range(0, len(keys), size):
        batch = keys[start : start + size]
        count = read_rows(memory, batch, into[start : start + size], end)
        if count < len(batch):
            return start + count
    return len(keys)


def _write_shared(
    memory: SharedMemory,
    chain: Sequence[tuple[StoreKey, StoreKey | None]],
    rows: ByteRows,
    end: float,
) -> list[PutResult]:
    """Writes blocks to the shared memory of a local daemon; stops after the first batch that is not
    held completely."""
    size = _blocks_at_once(memory, rows.shape[1])
    results: list[PutResult] = []
    for start in range(0, len(chain), size):
        batch, source = chain[start : start + size], rows[start : start + size]
        blocks = [(key, parent, source.shape[1]) for key, parent in batch]
        results += write_blocks(memory, blocks, partial(copy_rows, memory, source), end)
        if not all(result in _HELD for result in results[start:]):
            break
    return results
