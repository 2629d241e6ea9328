"""Asks the daemons what they hold of a request, without the scheduler ever waiting for them.

A lookup runs in a thread and has a deadline; until then vLLM is told "not known yet" and goes on
with other requests, afterwards it counts as a miss. Blocks that were found are pinned by the daemon
for as long as a load may take; of a request that has waited longer the daemons are asked anew.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

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


@dataclass
class RemoteLookup:
    """One question under way or answered."""

    future: Future[RemoteAnswer]
    deadline: float
    fresh_until: float
    answer: RemoteAnswer | None = None
    given_up: bool = False
    renewable: bool = False
    """Asked for ahead of need, or given to vLLM before. Otherwise the answer is used however old it
    is: steps that take longer than an answer stays fresh must not keep a request waiting."""

    @property
    def is_pending(self) -> bool:
        return self.answer is None and not self.given_up

    @property
    def is_outdated(self) -> bool:
        return self.renewable and time.monotonic() > self.fresh_until


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
        self._pin_s = pin_s
        self._pin_ms = int(pin_s * 1000)
        self._recorder = recorder
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-lookup")

    def start(self, keys: Sequence[Sequence[BlockKey]], firsts: Sequence[int]) -> RemoteLookup:
        """Asks for the positions from `firsts` on, per group."""
        deadline = time.monotonic() + self._timeout_s
        wanted = [list(group_keys) for group_keys in keys]
        future = self._pool.submit(self._ask, wanted, firsts, deadline)
        return RemoteLookup(future, deadline, deadline + self._pin_s)

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
        try:
            return RemoteAnswer(
                tuple(
                    tuple(self._ask_group(group_keys, first, deadline))
                    for group_keys, first in zip(keys, firsts, strict=True)
                )
            )
        except Exception:  # whatever it was, it must not end the engine
            logger.exception("what daemons hold could not be asked")
            return RemoteAnswer(((),) * len(keys))

    def _ask_group(self, keys: list[BlockKey], first: int, deadline: float) -> Iterator[RemoteSpan]:
        for start, stop, server in placed_runs(self._cluster, keys, first):
            for begin in range(start, stop, _MAX_KEYS_PER_QUESTION):
                end = min(stop, begin + _MAX_KEYS_PER_QUESTION)
                # A neighbour's blocks are lent a moment later: not worth pinning them twice.
                pin_ms = 0 if str(server.address).startswith("ipc://") else self._pin_ms
                match = server.match_all(keys[begin:end], self._ranks, pin_ms, deadline)
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
