"""Tells daemons which prefixes this engine computes, and learns which ones other engines compute.

All calls run in a thread of their own; the scheduler's thread never waits for them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.placement import ServerGroup, placed_runs
from vllm_tiered_kv.remote.store import ClaimResult


class RemoteClaims:
    """The claims of one engine at its daemons. `ComputeOnce` calls it, in the scheduler's
    thread."""

    def __init__(self, cluster: ServerGroup[BlockServer], timeout_s: float) -> None:
        self._cluster = cluster
        self.timeout_s = timeout_s
        self._owner = os.urandom(16)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-claims")

    def claim(self, keys: Sequence[BlockKey], first: int, ttl_s: float) -> Future[ClaimResult]:
        """Claims the blocks from position `first` on, for others to wait for, and extends claims
        that this engine has."""
        future: Future[ClaimResult] = Future()
        try:
            self._pool.submit(self._claim, future, list(keys), first, ttl_s)
        except RuntimeError:  # no thread, or the engine is stopping
            future.set_result(ClaimResult())
        return future

    def release(self, keys: Sequence[BlockKey], first: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._pool.submit(self._claim, Future(), list(keys), first, 0.0)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _claim(
        self, future: Future[ClaimResult], keys: list[BlockKey], first: int, ttl_s: float
    ) -> None:
        try:
            future.set_result(self._claim_at_daemons(keys, first, ttl_s))
        except Exception as error:  # whoever asks takes it for no answer
            future.set_exception(error)

    def _claim_at_daemons(self, keys: list[BlockKey], first: int, ttl_s: float) -> ClaimResult:
        """Asks each daemon once for the blocks that are placed there. The one with the first block
        decides whether this engine computes; if it does, the others are told."""
        deadline = time.monotonic() + self.timeout_s
        placed: dict[BlockServer, list[int]] = {}
        for start, stop, server in placed_runs(self._cluster, keys, first):
            placed.setdefault(server, []).extend(range(start, stop))
        answer: ClaimResult | None = None
        for server, positions in placed.items():
            result = server.claim([keys[p] for p in positions], self._owner, ttl_s, deadline)
            answer = answer or result
            if ttl_s and not answer.count:
                # Blocks between these positions lie elsewhere, and are claimed by the same engine.
                stop = positions[answer.others - 1] + 1 if answer.others else first
                return ClaimResult(0, stop - first, answer.wait_s)
        return answer or ClaimResult()
