"""Asks the daemons what they hold of a request, without the scheduler ever waiting for them.

A lookup runs in a thread and has a deadline; until then vLLM is told "not known yet" and goes on
with other requests, afterwards it counts as a miss. Blocks that were found are pinned by the daemon
for as long as a load may take.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.placement import Cluster, spans
from vllm_tiered_kv.remote.store import RemoteStore

_MAX_KEYS_PER_QUESTION = 16384
_REMOTE = Tier.REMOTE.value


@dataclass(frozen=True)
class RemoteSpan:
    """Positions of one group that one daemon holds."""

    start: int
    stop: int
    address: str


@dataclass(frozen=True)
class RemoteAnswer:
    """What daemons hold, per group: spans without a gap between them."""

    spans: tuple[tuple[RemoteSpan, ...], ...]

    def positions(self) -> list[range]:
        return [range(s[0].start, s[-1].stop) if s else range(0) for s in self.spans]

    def address_of(self, group_id: int, position: int) -> str:
        return next(
            span.address for span in self.spans[group_id] if span.start <= position < span.stop
        )


@dataclass
class RemoteLookup:
    """One question under way or answered."""

    future: Future[RemoteAnswer]
    deadline: float
    answer: RemoteAnswer | None = None
    given_up: bool = False

    @property
    def is_pending(self) -> bool:
        return self.answer is None and not self.given_up


class RemoteLookups:
    def __init__(
        self,
        cluster: Cluster,
        ranks: Sequence[RankTag],
        timeout_s: float,
        pin_s: float,
        recorder: Recorder,
        threads: int = 4,
    ) -> None:
        self._cluster = cluster
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._pin_ms = int(pin_s * 1000)
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-lookup")

    def start(self, keys: Sequence[Sequence[BlockKey]], firsts: Sequence[int]) -> RemoteLookup:
        """Asks for the positions from `firsts` on, per group."""
        deadline = time.monotonic() + self._timeout_s
        wanted = [list(group_keys) for group_keys in keys]
        return RemoteLookup(self._pool.submit(self._ask, wanted, firsts, deadline), deadline)

    def poll(self, lookup: RemoteLookup) -> None:
        """Notes an answer that has come, or that it is too late for one."""
        if not lookup.is_pending:
            return
        if lookup.future.done():
            lookup.answer = lookup.future.result()
            found = any(lookup.answer.spans)
            self._recorder.add(names.LOOKUPS, 1, _REMOTE, "hit" if found else "miss")
        elif time.monotonic() > lookup.deadline:
            lookup.future.cancel()
            lookup.given_up = True
            self._recorder.add(names.LOOKUPS, 1, _REMOTE, "timeout")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(
        self, keys: list[list[BlockKey]], firsts: Sequence[int], deadline: float
    ) -> RemoteAnswer:
        return RemoteAnswer(
            tuple(
                tuple(self._ask_group(group_keys, first, deadline))
                for group_keys, first in zip(keys, firsts, strict=True)
            )
        )

    def _ask_group(self, keys: list[BlockKey], first: int, deadline: float) -> Iterator[RemoteSpan]:
        for start, stop, server in placed_runs(self._cluster, keys, first):
            for begin in range(start, stop, _MAX_KEYS_PER_QUESTION):
                end = min(stop, begin + _MAX_KEYS_PER_QUESTION)
                match = server.match_all(keys[begin:end], self._ranks, self._pin_ms, deadline)
                if match is None or not match.count:
                    return
                yield RemoteSpan(begin, begin + match.count, str(server.address))
                if match.count < end - begin:
                    return


def placed_runs(
    cluster: Cluster, keys: Sequence[BlockKey], first: int
) -> Iterator[tuple[int, int, RemoteStore]]:
    """Runs of positions from `first` on that lie on one daemon; ends where none is available."""
    run: tuple[int, int, RemoteStore] | None = None
    for anchor, start, stop in spans(first, len(keys)):
        server = cluster.server_for(keys[anchor])
        if run is not None and run[2] is server:
            run = (run[0], stop, server)
            continue
        if run is not None:
            yield run
        if server is None:
            return
        run = (start, stop, server)
    if run is not None:
        yield run
