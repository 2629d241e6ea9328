"""Brings the blocks of a session up the tiers before its next request.

A client that calls a tool says how long that takes (`tool_pending`). Shortly before the pause ends,
daemons read those blocks of the session that are on their disk into their memory, and the CPU tier
gets those that it has lost to others in the meantime. Blocks of a daemon on this host stay there:
its memory is as near as the CPU tier.

It never is in the way of a request. Nothing is planned while a request loads from a daemon, few
bytes are in flight, and all prefetches of a few seconds take at most `pin_share` of the CPU tier.
They evict what a store would evict next, and no pinned block.

An idle engine takes no steps, so it cannot do anything at a later time. It prefetches when it
becomes idle, while nothing else needs its connections.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.cache.planner import Group, plan_store
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.remote_lookups import (
    ChainPart,
    RemoteLookup,
    RemoteLookups,
)
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import FetchJob, int64_array, pick

_LEAD_S = 5.0  # how long before the expected end of a pause
_BUDGET_S = 2 * _LEAD_S
_MAX_JOB_BYTES = 32 << 20  # per rank
_MAX_JOBS = 2  # in flight


@dataclass
class _Pause:
    """A session that is expected to continue."""

    parts: Sequence[ChainPart]  # per group
    due: float  # when to prefetch
    until: float  # when nobody expects it any more
    into_cpu: bool
    is_new: bool = True  # the engine was not idle since


@dataclass
class _Run:
    """Consecutive blocks of a group that one daemon holds, from position `start` on."""

    group: Group
    address: str
    keys: list[BlockKey]
    start: int


class Prefetch:
    """Plans the prefetches of one engine. The retention tells it of pauses; the scheduler half
    takes its jobs. Both call it in the scheduler's thread."""

    def __init__(self, tier: CpuTier, lookups: RemoteLookups, share: float, into_cpu: bool) -> None:
        """`share`: of the CPU tier, for all prefetches of a few seconds. `into_cpu`: False if all
        daemons are on this host."""
        self._groups = tier.groups
        self._index = tier.index
        self._ledger = tier.ledger
        self._lookups = lookups
        geometry = tier.index.geometry
        self._bytes_of = [geometry.slot_bytes[group.size_class] for group in tier.groups]
        self._max_bytes = int(share * geometry.capacity_bytes)
        self._max_keys = 2 * geometry.capacity_bytes // min(self._bytes_of)
        self._into_cpu = into_cpu
        self._pauses: dict[Hashable, _Pause] = {}
        self._num_keys = 0
        self._next_due = math.inf
        self._names = itertools.count()
        self._waiting: deque[tuple[list[list[BlockKey]], list[int]]] = deque()  # for a lookup
        self._asked: RemoteLookup | None = None
        self._asked_keys: list[list[BlockKey]] = []
        self._runs: deque[_Run] = deque()
        self._spent: deque[tuple[float, int]] = deque()  # time and bytes of recent jobs

    @property
    def is_busy(self) -> bool:
        """Whether there is more to do than to wait for the reports of jobs."""
        has_next = bool(self._waiting or self._asked or self._runs)
        return has_next and self._ledger.open_fetches < _MAX_JOBS

    def is_wanted(self, is_idle: bool) -> bool:
        """Whether an engine should step to prefetch."""
        return self.is_busy or (is_idle and any(p.is_new for p in self._pauses.values()))

    def expect(
        self, session: Hashable | None, parts: Sequence[ChainPart], after_s: float, into_cpu: bool
    ) -> None:
        """The next request with this prefix is expected after so many seconds, or later. A session
        has one pause."""
        if session is not None:
            self.returned(session)
        num_keys = sum(len(keys) for keys, _ in parts)
        if self._num_keys + num_keys > self._max_keys:
            return  # the memory for pauses is bounded
        now = time.monotonic()
        due = now + max(0.0, after_s - _LEAD_S)
        name = next(self._names) if session is None else session
        into_cpu &= self._into_cpu
        self._pauses[name] = _Pause(parts, due, now + 2 * after_s, into_cpu)
        self._num_keys += num_keys
        self._next_due = min(self._next_due, due)

    def returned(self, session: Hashable) -> None:
        """The session continues: its request loads what it needs."""
        pause = self._pauses.pop(session, None)
        if pause is not None:
            self._num_keys -= sum(len(keys) for keys, _ in pause.parts)

    def reset(self) -> None:
        """The tier was cleared, and all keys have changed."""
        self._pauses.clear()
        self._num_keys = 0
        self._waiting.clear()
        self._runs.clear()
        self._drop_lookup()

    def step(self, is_idle: bool) -> list[FetchJob]:
        """Returns the jobs of this step. The stores of the step are planned: they go first."""
        now = time.monotonic()
        if now >= self._next_due:
            self._begin_due(now)
        if is_idle:
            for pause in self._pauses.values():
                if pause.is_new:
                    pause.is_new = False
                    self._begin(pause)
        if not self.is_busy:
            return []
        self._look_up()
        return self._plan(now)

    def close(self) -> None:
        self._drop_lookup()

    # ---- inside ---------------------------------------------------------------------------------

    def _begin_due(self, now: float) -> None:
        due = []
        for name in [name for name, pause in self._pauses.items() if pause.due <= now]:
            due.append(self._pauses[name])
            self.returned(name)
        due = [pause for pause in due if now < pause.until]
        if due:
            # Again: other sessions may have had the room for pins when these paused. In one call,
            # because few run at a time.
            parts = [part for pause in due for part in pause.parts]
            self._lookups.pin(parts, min(pause.until for pause in due) - now)
        for pause in due:
            self._begin(pause)
        self._next_due = min((pause.due for pause in self._pauses.values()), default=math.inf)

    def _begin(self, pause: _Pause) -> None:
        """Asks the daemons for what the CPU tier lacks of a session."""
        if not pause.into_cpu:
            return
        firsts = []
        for keys, first in pause.parts:
            self._index.touch(keys[first:])
            firsts.append(self._index.first_missing(keys, first, len(keys)))
        chains = [keys for keys, _ in pause.parts]
        if any(first < len(keys) for keys, first in zip(chains, firsts, strict=True)):
            self._waiting.append((chains, firsts))

    def _look_up(self) -> None:
        """Asks daemons about one session at a time. They answer, or not, by a deadline."""
        if self._asked is not None and self._asked.future.done():
            self._take_answer(self._asked)
            self._asked = None
        if self._asked is None and self._waiting and not self._runs:
            self._asked_keys, firsts = self._waiting.popleft()
            self._asked = self._lookups.start(self._asked_keys, firsts)

    def _take_answer(self, lookup: RemoteLookup) -> None:
        if lookup.future.cancelled():
            return  # there was no thread for it
        spans = lookup.future.result().spans
        for group, keys, of_group in zip(self._groups, self._asked_keys, spans, strict=True):
            self._runs.extend(
                _Run(group, span.address, keys[: span.stop], span.start)
                for span in of_group
                if not span.address.startswith("ipc://")
            )

    def _plan(self, now: float) -> list[FetchJob]:
        jobs: list[FetchJob] = []
        while self._spent and self._spent[0][0] < now - _BUDGET_S:
            self._spent.popleft()
        left = self._max_bytes - sum(nbytes for _, nbytes in self._spent)
        is_free = not self._ledger.has_open_remote_loads
        while is_free and self._runs and self._ledger.open_fetches < _MAX_JOBS:
            run = self._runs[0]
            block = self._bytes_of[run.group.group_id]
            count = min(left // block, max(1, _MAX_JOB_BYTES // block))
            stop = min(len(run.keys), run.start + count)
            plan = plan_store(self._index, run.group, run.keys, run.start, stop)
            run.start = stop
            if plan.slots:
                nbytes = len(plan.slots) * block
                left -= nbytes
                self._spent.append((now, nbytes))
                jobs.append(
                    FetchJob(
                        self._ledger.open_fetch(plan.slots),
                        run.address,
                        run.group.group_id,
                        int64_array(plan.slots),
                        tuple(pick(run.keys, plan.positions)),
                    )
                )
            if plan.dropped or not count:
                self._runs.clear()  # the rest of the tier, or of the budget, belongs to others
            elif run.start == len(run.keys):
                self._runs.popleft()
        return jobs

    def _drop_lookup(self) -> None:
        if self._asked is not None:
            self._asked.drop()
            self._asked = None
