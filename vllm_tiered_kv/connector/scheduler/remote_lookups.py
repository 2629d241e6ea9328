"""Looks up at the daemons which blocks of a request they hold, almost without blocking vLLM.

A lookup runs in a thread and has a deadline. Until then vLLM is told "not known yet" and schedules
other requests; afterwards the lookup counts as a miss. A step waits only for daemons on this host,
for at most two milliseconds in total, because asking again in the next step would take longer. The
daemon pins the blocks it found for as long as a load may take. If a request has waited longer than
that, the daemons are asked again.

A daemon on this host also leases the blocks that are in its memory. Workers that have mapped this
memory copy from it without another request. The lease is released when the load has ended or the
answer is dropped; both go through `RemoteLookup.drop`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_tiered_kv.connector.scheduler.window_search import WindowSearch
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import store_key
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import LeasedBlocks, int64_array, pick
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import LookupOutcome
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.address import model_in
from vllm_tiered_kv.remote.block_server import BlockServer, is_local
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.placement import ServerGroup, placed_runs
from vllm_tiered_kv.remote.shared_memory import LookupLease
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_MAX_KEYS_PER_QUERY = 16384
_MAX_CONCURRENT_QUERIES = 8
_MAX_STEP_WAIT_S = 0.002
"""Time that one step may wait in total for answers of daemons on this host."""
_SPEEDS_RETRY_S = 1.0
_MAX_PIN_THREADS = 2
_COMPARE_TIMEOUT_S = 2.0  # runs in the background, so it may be long
_REMOTE = Tier.REMOTE.value


ChainPart: TypeAlias = tuple[list[BlockKey], int]
"""The keys of a chain from its beginning on, and the first position that is meant."""


@dataclass(frozen=True)
class RemoteSpan:
    """Consecutive positions of one group that one daemon holds. With a lease, workers can copy them
    from the daemon's memory."""

    start: int
    stop: int
    address: str
    lease: LookupLease | None = None
    by_tier: Mapping[Tier, int] = field(default_factory=dict)
    """How many of them the daemon holds in its memory, on its SSD and in its backing store."""
    column: int = 0
    """The index of the first position within the lease."""

    def shares(self) -> dict[Tier, float]:
        """`by_tier` as fractions of the total."""
        total = sum(self.by_tier.values())
        return {tier: count / total for tier, count in self.by_tier.items() if count}


@dataclass(frozen=True)
class RemoteAnswer:
    """What daemons hold of a request: per group, spans without gaps between them."""

    spans: tuple[tuple[RemoteSpan, ...], ...]
    is_known: bool = True
    """False if no daemon answered, so that they may hold more."""
    is_late: bool = False
    """A query had no answer by the deadline, so that daemons may hold more."""

    @property
    def leases(self) -> list[LookupLease]:
        return [span.lease for group in self.spans for span in group if span.lease is not None]

    def positions(self) -> list[range]:
        return [range(s[0].start, s[-1].stop) if s else range(0) for s in self.spans]


@dataclass
class RemoteLookup:
    """One lookup, in flight or answered. `RemoteLookups` builds it; the request's state keeps it.
    Only the scheduler's thread uses it, except for `future`."""

    future: Future[RemoteAnswer]
    asked_at: float
    deadline: float
    fresh_until: float
    answer: RemoteAnswer | None = None
    given_up: bool = False
    outcome: LookupOutcome | None = None  # once it has ended
    was_awaited: bool = False
    renewable: bool = False
    """The lookup started ahead of need, or its answer went to vLLM before, so an outdated answer is
    looked up again. Otherwise an answer is used at any age: if steps take longer than an answer
    stays fresh, the request must not wait forever."""
    firsts: Sequence[int] = ()
    """Per full group: the first position it asks for. The tiers of this engine held the others."""
    windows: WindowSearch | None = None
    repeats: int = 0  # lookups of this request before it whose answers began after a gap

    @property
    def is_pending(self) -> bool:
        return self.answer is None and not self.given_up

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.asked_at

    @property
    def is_outdated(self) -> bool:
        return self.renewable and time.monotonic() > self.fresh_until

    def drop(self) -> None:
        """Releases the leases of the answer, now or when it arrives. No copy may still read the
        leased blocks. Idempotent, never blocks."""
        if not self.future.cancel():
            self.future.add_done_callback(_release_answer)


def _release_answer(future: Future[RemoteAnswer]) -> None:
    if not future.cancelled() and future.exception() is None:
        for lease in future.result().leases:
            lease.release()


def _split_leased(
    positions: range,
    column: int,
    address: str,
    lease: LookupLease | None,
    by_tier: Mapping[Tier, int],
) -> Iterator[RemoteSpan]:
    """Splits positions that a daemon holds into the leased ones and the others. `column` is the
    index of the first position among those the daemon was asked for."""
    leased = 0 if lease is None else lease.blocks
    middle = positions.start + max(0, min(len(positions), leased - column))
    if middle > positions.start:
        in_memory = {Tier.MEMORY: middle - positions.start}
        yield RemoteSpan(positions.start, middle, address, lease, in_memory, column)
    if middle < positions.stop:
        rest = {**by_tier, Tier.MEMORY: by_tier.get(Tier.MEMORY, 0) - leased}
        yield RemoteSpan(middle, positions.stop, address, by_tier=rest)


def _batch_queries(
    runs: Iterable[tuple[int, int, BlockServer]],
) -> tuple[list[tuple[BlockServer, list[range]]], list[tuple[int, int, range]]]:
    """Collects the runs of each daemon into queries of limited length.

    Returns the queries, each a daemon and its positions, and for all parts in order the index of
    their query, of their first position within it, and their positions.
    """
    queries: list[tuple[BlockServer, list[range]]] = []
    parts: list[tuple[int, int, range]] = []
    latest: dict[str, tuple[int, int]] = {}  # by address: a query and its length so far
    for start, stop, server in runs:
        address = str(server.address)
        for begin in range(start, stop, _MAX_KEYS_PER_QUERY):
            part = range(begin, min(stop, begin + _MAX_KEYS_PER_QUERY))
            number, length = latest.get(address, (-1, 0))
            if number < 0 or length + len(part) > _MAX_KEYS_PER_QUERY:
                number, length = len(queries), 0
                queries.append((server, []))
            queries[number][1].append(part)
            parts.append((number, length, part))
            latest[address] = number, length + len(part)
    return queries, parts


def _release(spans: Sequence[RemoteSpan]) -> None:
    for span in spans:
        if span.lease is not None:
            span.lease.release()


class RemoteLookups:
    """Runs lookups at the daemons in its own threads. The remote tier builds lookups and polls them
    in the scheduler's thread."""

    def __init__(
        self,
        cluster: ServerGroup[BlockServer],
        ranks: Sequence[RankTag],
        timeout_s: float,
        pin_s: float,
        recorder: Recorder,
        shards_per_rank: int = 1,
        threads: int = 4,
    ) -> None:
        """`ranks`: the tags of all shards of a block; a worker loads `shards_per_rank` of them."""
        self._cluster = cluster
        self._shards_per_rank = shards_per_rank
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._pin_s = pin_s
        self._pin_ms = int(pin_s * 1000)
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-lookup")
        # Threads start when a prompt is on several daemons.
        self._query_threads = ThreadPoolExecutor(
            _MAX_CONCURRENT_QUERIES, thread_name_prefix="tiered-kv-ask"
        )
        self.answers: deque[tuple[int, int]] = deque(maxlen=64)
        """Blocks asked for and blocks found, of the last answers, dropped lookups included."""
        self._step_wait_left_s = 0.0
        self.read_speeds: dict[Tier, float] = {}
        """Bytes per second and rank at which daemons read their slower tiers, as they report it;
        the slowest daemon counts."""
        self._speeds_requested: dict[str, float] = {}  # time by address; infinity once answered
        self._closing = False
        self._pin_threads = threading.Semaphore(_MAX_PIN_THREADS)
        self._local_daemons: dict[str, LocalDaemon] = {}
        self._local_daemons_lock = threading.Lock()
        self._not_compared = {
            address: server
            for address, server in cluster.stores.items()
            if isinstance(server, RemoteStore)
        }
        """Daemons by address, until they are asked what they hold under other namespaces."""

    def greet(self) -> None:
        """Connects to the daemons in the background, so that the first lookup need not. Never
        blocks."""
        with contextlib.suppress(RuntimeError):  # the system has no thread left
            self._pool.submit(self._greet)

    def _greet(self) -> None:
        """Connects one daemon after the other, which leaves the other threads to lookups."""
        for server in self._cluster.stores.values():
            if self._closing:
                return
            if is_local(server):
                self._local_daemon(server).attach()
            if server.available:  # otherwise attaching has found that it is down
                server.greet()
                self._compare_namespaces()

    def _compare_namespaces(self) -> None:
        """Logs once for each daemon that is up whether it holds blocks of the same model which this
        engine cannot use."""
        for address, server in tuple(self._not_compared.items()):
            if not server.is_up or self._not_compared.pop(address, None) is None:
                continue
            others = server.other_namespaces(time.monotonic() + _COMPARE_TIMEOUT_S)
            if others is None:
                self._not_compared[address] = server  # asked again after a later lookup
            elif others:
                logger.info(
                    "the daemon at %s holds %d blocks of %s under %d other namespaces: engines "
                    "with other model files, dtype, layout or settings, or another release of "
                    "vLLM, stored them, and this engine cannot use them (`tiered-kv ls`)",
                    address,
                    sum(others),
                    model_in(server.identity.client),
                    len(others),
                )

    def start(
        self,
        keys: Sequence[Sequence[BlockKey]],
        firsts: Sequence[int],
        block_bytes: Sequence[int] = (),
        windows: WindowSearch | None = None,
    ) -> RemoteLookup:
        """Starts a lookup of the positions from `firsts` on, per group. Blocks whose size is in
        `block_bytes` are leased if their daemon is on this host. For groups with a window,
        `windows` finds out which positions to ask for."""
        now = time.monotonic()
        deadline = now + self._timeout_s
        wanted = [list(group_keys) for group_keys in keys]
        lengths = list(block_bytes) or [0] * len(wanted)
        # The lookup has its own future: the pool returns none if it queues the task and then fails
        # to start a thread for it.
        lookup = RemoteLookup(
            Future(), now, deadline, deadline + self._pin_s, firsts=firsts, windows=windows
        )
        try:
            self._pool.submit(
                self._answer, lookup.future, wanted, firsts, lengths, deadline, windows
            )
        except RuntimeError as error:  # in the scheduler's thread it would stop the engine
            logger.warning(
                "cannot start a lookup at the daemons, it counts as a miss: %s; raise the limit of "
                "threads or processes if this goes on",
                error,
            )
            self._give_up(lookup, LookupOutcome.MISS)
        return lookup

    def unavailable(self) -> RemoteLookup:
        """A lookup that has already failed because no daemon is up."""
        now = time.monotonic()
        lookup = RemoteLookup(Future(), now, now, now + self._timeout_s + self._pin_s)
        self._give_up(lookup, LookupOutcome.UNAVAILABLE)
        return lookup

    def _give_up(self, lookup: RemoteLookup, outcome: LookupOutcome) -> None:
        lookup.drop()
        lookup.given_up = True
        self._count(lookup, outcome)

    def _count(self, lookup: RemoteLookup, outcome: LookupOutcome) -> None:
        lookup.outcome = outcome
        self._recorder.add(names.LOOKUPS, 1, _REMOTE, outcome.value)
        self._recorder.observe(names.LOOKUP_SECONDS, lookup.age_s, _REMOTE)

    def poll(self, lookup: RemoteLookup) -> None:
        """Takes the answer if it has arrived, or gives up after the deadline. Waits briefly for
        daemons on this host: they mostly answer at once, and the next poll is a step later."""
        if not lookup.is_pending:
            return
        if self._step_wait_left_s > 0 and not lookup.was_awaited and not lookup.future.done():
            lookup.was_awaited = True
            begin = time.monotonic()
            wait([lookup.future], self._step_wait_left_s)
            self._step_wait_left_s -= time.monotonic() - begin
        if lookup.future.done():
            answer = lookup.answer = lookup.future.result()
            outcome = LookupOutcome.TIMEOUT if answer.is_late else LookupOutcome.MISS
            if not answer.is_known:
                outcome = LookupOutcome.UNAVAILABLE
            if any(answer.spans):
                outcome = LookupOutcome.HIT
            self._count(lookup, outcome)
        elif time.monotonic() > lookup.deadline:
            self._give_up(lookup, LookupOutcome.TIMEOUT)

    def step_planned(self) -> None:
        """Renews the time that a step may wait for answers."""
        are_local = all(map(is_local, self._cluster.stores.values()))
        self._step_wait_left_s = _MAX_STEP_WAIT_S if are_local else 0.0

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes these blocks of all ranks at every daemon that is up. Never blocks."""
        with contextlib.suppress(RuntimeError):  # the engine is stopping
            self._pool.submit(self._delete, list(keys))

    def _delete(self, keys: Sequence[BlockKey]) -> None:
        for store in self._cluster.stores.values():
            failed = store.failed_calls
            if store.available:
                namespace = store.identity.namespace
                store.delete([store_key(namespace, k, rank) for k in keys for rank in self._ranks])
            if not store.available or store.failed_calls > failed:
                logger.warning(
                    "daemon %s did not delete %d block(s) that failed verification and may serve "
                    "them again; see its log",
                    store.address,
                    len(keys),
                )

    def pin(self, parts: Sequence[ChainPart], hold_s: float) -> None:
        """Lets daemons pin what they hold of these blocks, and read it into their memory. Never
        blocks. Best effort: a daemon limits its pins, and lookups need most of the threads."""
        if not self._pin_threads.acquire(blocking=False):
            return
        try:
            self._pool.submit(self._pin, parts, max(1, int(hold_s * 1000)))
        except RuntimeError:  # the engine is stopping
            self._pin_threads.release()

    def _pin(self, parts: Sequence[ChainPart], hold_ms: int) -> None:
        try:
            for keys, first in parts:
                for start, stop, server in placed_runs(self._cluster, keys, first):
                    for begin in range(start, stop, _MAX_KEYS_PER_QUERY):
                        part = keys[begin : min(stop, begin + _MAX_KEYS_PER_QUERY)]
                        server.match_all(part, self._ranks, hold_ms)
        finally:
            self._pin_threads.release()

    def close(self) -> None:
        """Releases all leases; no load may be in flight."""
        self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._query_threads.shutdown(wait=True)
        for local_daemon in self._local_daemons.values():
            local_daemon.close()

    def leased(self, span: RemoteSpan, positions: list[int]) -> LeasedBlocks | None:
        """Where workers find these positions of a span in the daemon's memory; None if they are not
        leased."""
        lease = span.lease
        if lease is None:
            return None
        whole = LeasedBlocks(lease.arena_id, tuple(self._ranks), lease.offsets, lease.generations)
        return whole.at(int64_array(positions) - span.start + span.column)

    def _answer(
        self,
        future: Future[RemoteAnswer],
        keys: list[list[BlockKey]],
        firsts: Sequence[int],
        lengths: Sequence[int],
        deadline: float,
        windows: WindowSearch | None,
    ) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(self._query(keys, firsts, lengths, deadline, windows))
            self._compare_namespaces()  # of daemons that were not up before

    def _query(
        self,
        keys: list[list[BlockKey]],
        firsts: Sequence[int],
        lengths: Sequence[int],
        deadline: float,
        windows: WindowSearch | None,
    ) -> RemoteAnswer:
        found: list[list[RemoteSpan]] = [[] for _ in keys]
        try:
            for group, (group_keys, first, nbytes) in enumerate(
                zip(keys, firsts, lengths, strict=True)
            ):
                for span in self._query_group(group_keys, first, nbytes, deadline):
                    found[group].append(span)
            asked = sum(len(group) - first for group, first in zip(keys, firsts, strict=True))
            if windows is not None:
                asked += self._query_windows(windows, keys, firsts, lengths, deadline, found)
            self.answers.append((asked, sum(s.stop - s.start for group in found for s in group)))
            return RemoteAnswer(
                tuple(map(tuple, found)),
                is_known=self._cluster.is_up,
                is_late=time.monotonic() >= deadline,
            )
        except Exception:  # a failed lookup must never stop the engine
            logger.exception("a lookup at the daemons failed and counts as a miss")
            for spans in found:
                _release(spans)
            return RemoteAnswer(((),) * len(keys))

    def _query_windows(
        self,
        windows: WindowSearch,
        keys: list[list[BlockKey]],
        firsts: Sequence[int],
        lengths: Sequence[int],
        deadline: float,
        found: list[list[RemoteSpan]],
    ) -> int:
        """Adds what daemons hold of the windows at the end of the hit to `found`. Returns how many
        blocks the longest hit needs."""

        def query_at(end: int) -> bool:
            wanted = {group.group_id: windows.wanted(group, end) for group in windows.windowed}
            for group in wanted:
                _release(found[group])  # leases are shared between groups
                found[group] = []
            return self._query_together(wanted, keys, lengths, deadline, found)

        end = windows.reach(firsts, found)
        asked = sum(len(windows.wanted(group, end)) for group in windows.windowed)
        if end > windows.computed and not query_at(end):
            present = {
                group.group_id: self._present(
                    keys[group.group_id][: end // group.block_size], deadline
                )
                for group in windows.windowed
            }
            query_at(windows.longest(end, present))
        return asked

    def _query_together(
        self,
        wanted: Mapping[int, range],
        keys: list[list[BlockKey]],
        lengths: Sequence[int],
        deadline: float,
        found: list[list[RemoteSpan]],
    ) -> bool:
        """Adds these positions of several groups to `found` if daemons hold all of them. Asks each
        daemon once per block size."""
        batches: dict[tuple[str, int], tuple[BlockServer, list[tuple[int, range]]]] = {}
        for group, positions in wanted.items():
            reached = positions.start
            for start, stop, server in placed_runs(
                self._cluster, keys[group][: positions.stop], positions.start
            ):
                batch = batches.setdefault((str(server.address), lengths[group]), (server, []))
                batch[1].append((group, range(start, stop)))
                reached = stop
            if reached < positions.stop:
                return False
        spans: dict[int, list[RemoteSpan]] = {group: [] for group in wanted}
        is_whole = False
        try:
            for (address, nbytes), (server, parts) in batches.items():
                some = [key for group, part in parts for key in keys[group][part.start : part.stop]]
                count, lease, by_tier = self._match(server, some, nbytes, deadline)
                if count < len(some):
                    if lease is not None:
                        lease.release()
                    return False
                column = 0
                for group, part in parts:
                    spans[group] += _split_leased(part, column, address, lease, by_tier)
                    column += len(part)
            is_whole = True
        finally:
            if not is_whole:  # spans with gaps must not be taken for complete ones
                for some_spans in spans.values():
                    _release(some_spans)
        for group, of_group in spans.items():
            found[group] += sorted(of_group, key=lambda span: span.start)
        return True

    def _present(self, keys: list[BlockKey], deadline: float) -> list[bool]:
        present = [False] * len(keys)
        shares: dict[str, tuple[BlockServer, list[int]]] = {}
        for start, stop, server in placed_runs(self._cluster, keys, 0):
            shares.setdefault(str(server.address), (server, []))[1].extend(range(start, stop))
        for server, positions in shares.values():
            found = server.contains_all(pick(keys, positions), self._ranks, deadline)
            for position, is_present in zip(positions, found, strict=True):
                present[position] = is_present
        return present

    def _query_group(
        self, keys: list[BlockKey], first: int, nbytes: int, deadline: float
    ) -> Iterator[RemoteSpan]:
        """Yields what daemons hold without a gap. A daemon is asked when its first run is reached,
        for all its runs at once."""
        answers: dict[int, tuple[int, LookupLease | None, Mapping[Tier, int]]] = {}
        queries, parts = _batch_queries(placed_runs(self._cluster, keys, first))

        def query(number: int) -> tuple[int, LookupLease | None, Mapping[Tier, int]]:
            server, runs = queries[number]
            some = [key for each in runs for key in keys[each.start : each.stop]]
            return self._match(server, some, nbytes, deadline)

        for number, column, part in parts:
            if number not in answers:
                # The first alone, because it is all that an unknown prompt costs. The others a few
                # at a time, because a long prompt is on many daemons. Those on this host answer at
                # once, and their leases must not be lost behind a gap.
                ahead = range(number, min(number + _MAX_CONCURRENT_QUERIES, len(queries)))
                together = [n for n in ahead if not is_local(queries[n][0])]
                if number == 0 or number not in together or len(together) == 1:
                    answers[number] = query(number)
                else:
                    answers.update(
                        zip(together, self._query_threads.map(query, together), strict=True)
                    )
            count, lease, by_tier = answers[number]
            held = range(part.start, min(part.stop, part.start + max(0, count - column)))
            address = str(queries[number][0].address)
            yield from _split_leased(held, column, address, lease, by_tier)
            if len(held) < len(part):
                return

    def _match(
        self, server: BlockServer, keys: list[BlockKey], nbytes: int, deadline: float
    ) -> tuple[int, LookupLease | None, Mapping[Tier, int]]:
        if nbytes and is_local(server):
            found = self._local_daemon(server).lookup(keys, self._ranks, nbytes, deadline)
            if found is None:
                return 0, None, {}
            self._request_speeds(server, found.by_tier, deadline)
            return found.count, found.lease, found.by_tier
        # Blocks of a local daemon are leased later, in the load, and need no pin until then.
        pin_ms = 0 if is_local(server) else self._pin_ms
        match = server.match_all(keys, self._ranks, pin_ms, deadline)
        return (0, None, {}) if match is None else (match.count, None, match.by_tier)

    def _request_speeds(
        self, server: RemoteStore, by_tier: Mapping[Tier, int], deadline: float
    ) -> None:
        """Asks a daemon on this host once how fast it reads its slower tiers. Over a network this
        would say little about loads."""
        address, now = str(server.address), time.monotonic()
        is_slow = any(by_tier.get(tier) for tier in (Tier.SSD, Tier.BACKING))
        if not is_slow or now < self._speeds_requested.get(address, 0.0) + _SPEEDS_RETRY_S:
            return
        self._speeds_requested[address] = now
        speeds = server.read_speeds(deadline)
        if speeds:
            self._speeds_requested[address] = math.inf
        for tier, rate in speeds.items():
            share = rate / len(self._ranks) * self._shards_per_rank  # ranks load at the same time
            self.read_speeds[tier] = min(share, self.read_speeds.get(tier, share))

    def _local_daemon(self, server: RemoteStore) -> LocalDaemon:
        with self._local_daemons_lock:
            return self._local_daemons.setdefault(str(server.address), LocalDaemon(server))
