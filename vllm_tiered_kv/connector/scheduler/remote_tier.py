"""The remote tier: the scheduler's view of all daemons that may hold blocks of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.cache.planner import Group, loadable_tokens
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.remote_lookups import (
    RemoteLookups,
    RemoteSpan,
)
from vllm_tiered_kv.connector.scheduler.remote_puts import RemotePuts
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.window_search import WindowSearch
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import (
    MAX_LEASE_AGE_S,
    ProbeJob,
    PutJob,
    RemoteTransfer,
    int64_array,
    pick,
)
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.placement import ServerGroup
from vllm_tiered_kv.remote.shared_memory import LookupLease

_MAX_QUIET_TOKENS = 32  # per request, in a step that is cheap to launch
_MAX_PROBE_DELAY_S = 1.0  # how long a probe waits for a cheap step


@dataclass(frozen=True)
class LoadSplit:
    """Where one group's load comes from: positions in the CPU tier, and transfers from daemons."""

    local: Sequence[int]
    remote: list[RemoteTransfer]

    @property
    def num_remote(self) -> int:
        return sum(len(transfer) for transfer in self.remote)


class RemoteTier:
    """Lookups, loads, probes and puts at the daemons, as the scheduler plans them. The load planner
    and the scheduler half call it, in the scheduler's thread."""

    def __init__(
        self,
        cluster: ServerGroup[BlockServer],
        lookups: RemoteLookups,
        puts: RemotePuts,
        tier: CpuTier,
        keep_copies: bool,
        num_workers: int = 1,
        shards_per_rank: int = 1,
        on_missing: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        """`keep_copies`: blocks loaded from a daemon are stored in the CPU tier too. `num_workers`
        exceeds the number of shards if workers hold replicas. Daemons hold a rank's block in
        `shards_per_rank` pieces. `on_missing` is called with blocks that daemons lack, or hold
        after a gap, so that no request can load them."""
        self._num_workers = num_workers
        self._cluster = cluster
        self._lookups = lookups
        self.puts = puts
        self._tier = tier
        self._groups = tier.groups
        self._shard_bytes = [group.block_bytes // shards_per_rank for group in tier.groups]
        self._alignment = tier.alignment
        self.keep_copies = keep_copies
        self._has_windows = any(group.window is not None for group in tier.groups)
        self._arenas_of_rank: dict[int, Mapping[bytes, int]] = {}
        self._on_missing = on_missing
        self._probes: list[ProbeJob] = []
        self._probe_deadline = 0.0

    @property
    def identity(self) -> EngineIdentity:
        """The engine's identity at the daemons."""
        return self._cluster.identity

    def begin(self, state: RequestState, limit: int) -> None:
        """Starts the lookup of a request that has just arrived, ahead of need."""
        self._look_up(state, 0, limit)
        if state.remote.lookup is not None:
            state.remote.lookup.renewable = True

    def _look_up(
        self, state: RequestState, computed: int, limit: int, leave_out_held: bool = True
    ) -> None:
        """Starts a lookup if the CPU tier lacks blocks: of those, or of all after `computed`."""
        if state.remote.lookup is not None or state.remote.has_failed:
            return
        held_here = self._tier.held_for(state.control)
        keys, firsts = [], []
        lacks_some = False
        tail = int(state.loadable_tail is not None)  # part of a lookup, never its only reason
        for group, group_keys in zip(self._groups, state.loadable_keys, strict=True):
            first, stop = computed // group.block_size, limit // group.block_size
            is_full = group.window is None
            found = held_here.match_prefix(group_keys, first, stop) if is_full else stop - first
            lacks_some |= first + found < stop
            firsts.append(first + found if leave_out_held or not is_full else first)
            keys.append(group_keys[: stop + tail])
        missing = lacks_some
        windows = None
        if self._has_windows:
            held = [held_here.are_readable(group_keys) for group_keys in keys]
            if not leave_out_held:
                held = [[False] * len(group) for group in held]
            windows = WindowSearch(self._groups, held, computed, limit, self._alignment)
            alone = loadable_tokens(held_here, self._groups, keys, computed, limit, self._alignment)
            missing = computed + alone < limit
        if not missing:
            return
        if self._cluster.server_for(keys[0][0]) is None:
            state.remote.lookup = self._lookups.unavailable()
            return
        state.remote.lookup = self._lookups.start(keys, firsts, self._shard_bytes, windows)

    def _has_lost_blocks(self, state: RequestState, computed: int) -> bool:
        """Whether the GPU or the CPU tier has evicted blocks that the lookup left out because they
        were held. Its answer then begins after a gap."""
        lookup = state.remote.lookup
        if lookup is None or lookup.given_up:
            return False
        held_here = self._tier.held_for(state.control)
        for group, keys in zip(self._groups, state.loadable_keys, strict=True):
            first, stop = computed // group.block_size, lookup.firsts[group.group_id]
            if group.window is not None:
                held = lookup.windows.held[group.group_id] if lookup.windows is not None else ()
                left_out = [keys[n] for n, was_held in enumerate(held) if was_held]
                if not all(held_here.are_readable(left_out)):
                    return True
            elif first < stop and held_here.match_prefix(keys, first, stop) < stop - first:
                return True
        return False

    def _look_up_again(self, state: RequestState, computed: int, limit: int) -> None:
        """Repeats a lookup, because a request may wait in vLLM's queue for seconds after the first.
        The second repeat asks for all blocks, so that it depends on no other tier and is the
        last."""
        assert state.remote.lookup is not None
        repeats = state.remote.lookup.repeats + 1
        state.remote.drop_lookup()
        if repeats == 1:
            self._look_up(state, computed, limit)
        else:
            self._look_up(state, 0, limit, leave_out_held=False)
        if state.remote.lookup is not None:
            state.remote.lookup.repeats = repeats

    def positions(self, state: RequestState, computed: int, limit: int) -> list[range] | None:
        """The positions that daemons hold of a request, per group; None while the lookup runs."""
        if computed >= limit:
            return [range(0)] * len(self._groups)  # the GPU has all blocks
        if state.remote.lookup is not None and state.remote.lookup.is_outdated:
            state.remote.drop_lookup()
        if self._has_lost_blocks(state, computed):
            self._look_up_again(state, computed, limit)
        else:
            self._look_up(state, computed, limit)
        if state.remote.lookup is None:
            return [range(0)] * len(self._groups)
        was_pending = state.remote.lookup.is_pending
        self._lookups.poll(state.remote.lookup)
        if state.remote.lookup.is_pending:
            return None
        if was_pending and self._on_missing is not None:
            self._report_missing(state, limit, self._on_missing)
        state.remote.lookup.renewable = True
        answer = state.remote.answer
        return answer.positions() if answer is not None else [range(0)] * len(self._groups)

    def _report_missing(
        self,
        state: RequestState,
        limit: int,
        on_missing: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        answer, lookup = state.remote.answer, state.remote.lookup
        if answer is None or lookup is None or not answer.is_known or answer.is_late:
            return
        for group, keys in zip(self._groups, state.loadable_keys, strict=True):
            if group.window is None:
                spans = answer.spans[group.group_id]
                reached = spans[-1].stop if spans else lookup.firsts[group.group_id]
                on_missing(keys[reached : limit // group.block_size])

    def split(
        self, state: RequestState, group: Group, span: range, block_ids: Sequence[int]
    ) -> LoadSplit:
        """Where each block of an admitted load comes from. The CPU tier is preferred."""
        answer = state.remote.answer
        keys = state.loadable_keys[group.group_id]
        if answer is None:
            return LoadSplit(span, [])
        # Vectorised, because a long prompt has thousands of positions.
        held_here = self._tier.held_for(state.control)
        is_here = np.array(held_here.are_readable(keys[span.start : span.stop]), dtype=bool)
        local = (np.flatnonzero(is_here) + span.start).tolist()
        by_part: list[tuple[RemoteSpan, list[int]]] = []
        for part in answer.spans[group.group_id]:
            start = max(part.start, span.start)
            inside = is_here[start - span.start : max(part.stop - span.start, 0)]
            positions = (np.flatnonzero(~inside) + start).tolist()
            if positions:
                by_part.append((part, positions))
        found = len(local) + sum(len(positions) for _, positions in by_part)
        assert found == len(span), f"no tier holds {len(span) - found} of these blocks"
        if by_part and not self.keep_copies:
            held = answer.positions()[group.group_id]
            # Without the tail: a full block takes its position later.
            full = len(state.keys.of_group[group.group_id])
            state.remote.copies[group.group_id] = range(held.start, min(held.stop, full))
        return LoadSplit(
            local,
            [
                RemoteTransfer(
                    group.group_id,
                    part.address,
                    int64_array(block_ids)[int64_array(positions) - span.start],
                    tuple(pick(keys, positions)),
                    self._lookups.leased(part, positions),
                )
                for part, positions in by_part
            ],
        )

    def probe(self, state: RequestState, group: Group, tokens: range, nbytes: int) -> None:
        """Plans a probe: workers fetch `nbytes` of what a daemon holds of these tokens and discard
        them. All blocks come from one group and end with the last of the tokens."""
        answer = state.remote.answer
        if answer is None:
            return
        position, end = tokens.start // group.block_size, -(-tokens.stop // group.block_size)
        count = max(1, -(-nbytes // group.block_bytes))
        for part in answer.spans[group.group_id]:
            if max(part.start, position) < part.stop:
                # A window's blocks represent the tokens before them.
                stop = min(part.stop, max(end, part.start + 1))
                first = max(part.start, stop - count)
                keys = state.loadable_keys[group.group_id][first : min(part.stop, first + count)]
                # Only the newest probe is kept, because one measurement is enough.
                name = state.request.request_id
                self._probes = [ProbeJob(name, group.group_id, part.address, tuple(keys))]
                self._probe_deadline = time.monotonic() + _MAX_PROBE_DELAY_S
                return

    def take_jobs(self, scheduled: Mapping[str, int]) -> tuple[list[PutJob], list[ProbeJob]]:
        """Returns the jobs planned since the last call; `scheduled`: this step's tokens by request.

        Probes wait a while for a cheap step, because their threads would compete for the
        interpreter lock with the launch of a prefill."""
        self._lookups.step_planned()
        probes: list[ProbeJob] = []
        is_quiet = max(scheduled.values(), default=0) <= _MAX_QUIET_TOKENS
        if is_quiet or time.monotonic() > self._probe_deadline:
            probes, self._probes = self._probes, []
        return self.puts.take(), probes

    @property
    def has_planned(self) -> bool:
        """Whether a probe or a put waits for a step."""
        return bool(self._probes) or self.puts.has_next

    def update_mapped_arenas(self, by_rank: Mapping[int, Mapping[bytes, int]]) -> None:
        """Records which daemon memory the workers have mapped (`SharedRegions.ready_arenas`)."""
        self._arenas_of_rank.update(by_rank)

    def is_resident(self, state: RequestState) -> bool:
        """Whether everything that daemons hold of a request is leased, in memory that every rank
        has mapped. Its load then waits for no daemon.

        This holds even if the daemon goes down now: it was up when it granted the lease, and
        workers keep its memory mapped for a while after it is gone.
        """
        answer = state.remote.answer
        if answer is None or not any(answer.spans):
            return True
        if state.remote.lookup is None or state.remote.lookup.age_s > MAX_LEASE_AGE_S:
            return False
        if len(self._arenas_of_rank) < self._num_workers:
            return False
        return all(
            span.lease is not None and self._is_usable(span.lease, nbytes)
            for spans, nbytes in zip(answer.spans, self._shard_bytes, strict=True)
            for span in spans
        )

    def _is_usable(self, lease: LookupLease, nbytes: int) -> bool:
        """Whether every rank has mapped the memory of this lease, up to its last block."""
        ready = min(arenas.get(lease.arena_id, 0) for arenas in self._arenas_of_rank.values())
        return int(lease.offsets.max(initial=-nbytes)) + nbytes <= ready

    def record(self, recorder: Recorder) -> None:
        """Writes to the metrics which daemons are up, and how many calls to them have failed."""
        for address, store in self._cluster.stores.items():
            recorder.set(names.DAEMON_UP, int(store.is_up), address)
            recorder.show(names.DAEMON_ERRORS, address)
            failed = store.failed_calls - recorder.total(names.DAEMON_ERRORS, address)
            recorder.add(names.DAEMON_ERRORS, failed, address)

    def close(self) -> None:
        self._lookups.close()
        self._cluster.close()
