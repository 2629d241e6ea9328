"""Daemons as a secondary tier of vLLM's own OffloadingConnector, for engines that stay with it.

vLLM loads the class by the `type` and `module_path` of a secondary tier (`TieringOffloadingSpec`).
Its CPU tier stays in charge: it hands out chunks to store and slots to load into, and this tier
moves them over the socket of the daemons. A failure is a miss. docs/configuration.md is the
user documentation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import vllm
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_tiered_kv.core.key import (
    CONTENT_BYTES,
    FORMAT_VERSION,
    BlockKey,
    RankTag,
    canonical,
    group_suffix,
)
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey, store_key
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_HELD = (PutResult.STORED, PutResult.PRESENT)


@dataclass(frozen=True)
class _Moved:
    """The result of a transfer, made in its thread."""

    is_moved: Sequence[bool]  # for each key
    seconds: float


@dataclass(frozen=True)
class _Job:
    keys: Sequence[OffloadKey]
    is_load: bool
    future: Future[_Moved]


class DaemonTier(SecondaryTierManager):
    """A secondary tier in one or several daemons.

    vLLM creates it in the scheduler's process and calls it from the scheduler's thread; threads of
    its own ask the daemons and move chunks.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        servers: str | Sequence[str],
        namespace: str,
        timeout: float = 2.0,
        connect_timeout: float = 0.5,
        client_key: str | None = None,
        server_key: str | None = None,
        threads: int = 4,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        """`namespace` stands for what vLLM does not tell a tier and what makes blocks incompatible:
        the content of the weights above all. The other options are those of `TokenCache.connect`;
        `threads` move chunks in each direction."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not namespace or not isinstance(namespace, str):
            raise ConfigError("namespace", "expected a name for the model and its weights")
        if (client_key is None) != (server_key is None):
            raise ConfigError("client_key", "set both client_key and server_key, or neither")
        self._rows: NDArray[np.uint8] | None = np.asarray(primary_kv_view).view(np.uint8)
        # Where the bytes of workers do not depend on the topology, vLLM's own tiers share them.
        settings = FileMapper.from_offloading_spec(
            "", offloading_spec, offloading_spec.blocks_per_chunk, parallel_agnostic=True
        ).get_run_config()
        settings["kv_cache_layout"] = offloading_spec.config.kv_cache_layout
        described = json.dumps(settings, sort_keys=True, default=str)
        self._namespace = hashlib.sha256(
            b"tiered-kv offloading tier\0"
            + canonical((FORMAT_VERSION, vllm.__version__, namespace, described))
        ).digest()
        self._epoch = b""
        self._cluster = Cluster(
            [servers] if isinstance(servers, str) else list(servers),
            EngineIdentity(
                self._namespace,
                (self.block_size_bytes,),
                f"offloading tier: chunks of {self.block_size_bytes} bytes",
                f"offloading tier {namespace!r} of process {os.getpid()}"[:256],
            ),
            timeout_s=timeout,
            connect_timeout_s=connect_timeout,
            curve=None
            if client_key is None or server_key is None
            else CurveKeys.load(client_key, server_key),
            max_connections=2 * threads + 1,
        )
        self._loading = ThreadPoolExecutor(threads, "tiered-kv-tier-load")
        self._storing = ThreadPoolExecutor(threads, "tiered-kv-tier-store")
        self._jobs: dict[int, _Job] = {}
        self._lookups = _Lookups(tier_type, self._contains)

    # ---- calls of vLLM's scheduler --------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_held = self._lookups.lookup(key, req_context)
        if is_held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_held else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        position = job_metadata.req_context.get_offload_key_position
        # Sequences of one group, heads first: parents let a daemon evict tails before heads.
        order = sorted(range(len(keys)), key=lambda at: (keys[at][-4:], position(keys[at]) or 0))
        ours, slots = self._store_keys(keys), job_metadata.chunk_ids.tolist()
        parents = {
            ours[at]: ours[before]
            for before, at in pairwise(order)
            if keys[before][-4:] == keys[at][-4:]
        }

        def store() -> list[bool]:
            return self._at_daemons(
                [ours[at] for at in order],
                [slots[at] for at in order],
                lambda server, theirs, rows: [
                    result in _HELD
                    for result in server.put(
                        [
                            PutItem(key, parents.get(key), row)
                            for key, row in zip(theirs, rows, strict=True)
                        ]
                    )
                ],
            )

        self._submit(self._storing, job_metadata, store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        ours, slots = self._store_keys(job_metadata.keys), job_metadata.chunk_ids.tolist()

        def load() -> list[bool]:
            return self._at_daemons(
                ours, slots, lambda server, theirs, rows: server.get(theirs, rows)
            )

        self._submit(self._loading, job_metadata, load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = [job_id for job_id, job in self._jobs.items() if job.future.done()]
        return [self._result(job_id, self._jobs.pop(job_id)) for job_id in finished]

    def drain_jobs(self) -> None:
        """vLLM calls this when it resets its cache, for example because it gets other weights, and
        does not reset its tiers. What this engine stored before must not be found any more."""
        wait([job.future for job in self._jobs.values()])
        self._epoch = secrets.token_bytes(16)

    def shutdown(self) -> None:
        for pool in (self._loading, self._storing):
            pool.shutdown(cancel_futures=True)
        self._lookups.shutdown()
        self._cluster.close()
        self._rows = None  # vLLM cannot unmap the memory while something refers to it

    # ---- in threads of the tier -----------------------------------------------------------------

    def _contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._at_daemons(
            self._store_keys(keys), None, lambda server, theirs, rows: server.contains(theirs)
        )

    def _at_daemons(
        self,
        keys: Sequence[StoreKey],
        slots: Sequence[int] | None,
        call: Callable[[RemoteStore, list[StoreKey], list[memoryview]], list[bool]],
    ) -> list[bool]:
        """Calls each daemon with its share of the keys, and the memory of their slots; returns the
        answer for each key. Without a daemon it is False."""
        shares: dict[RemoteStore, list[int]] = {}
        for at, key in enumerate(keys):
            server = self._cluster.server_for(key)
            if server is not None:
                shares.setdefault(server, []).append(at)
        answers = [False] * len(keys)
        for server, share in shares.items():
            rows = [] if slots is None else [self._row(slots[at]) for at in share]
            found = call(server, [keys[at] for at in share], rows)
            for at, answer in zip(share, found, strict=True):
                answers[at] = answer
        return answers

    def _row(self, slot: int) -> memoryview:
        assert self._rows is not None
        return self._rows[slot].data

    # ---- internals ------------------------------------------------------------------------------

    def _store_keys(self, keys: Collection[OffloadKey]) -> list[StoreKey]:
        """Hashes vLLM's keys, whose length depends on its hash function, to the length of ours."""
        return [
            store_key(
                self._namespace,
                BlockKey(
                    hashlib.sha256(self._epoch + key).digest()[:CONTENT_BYTES] + group_suffix(0)
                ),
                RankTag(),
            )
            for key in keys
        ]

    def _submit(
        self, pool: ThreadPoolExecutor, job: TransferJob, work: Callable[[], list[bool]]
    ) -> None:
        def timed() -> _Moved:
            begin = time.monotonic()
            return _Moved(work(), time.monotonic() - begin)

        self._jobs[job.job_id] = _Job(list(job.keys), pool is self._loading, pool.submit(timed))

    def _result(self, job_id: int, job: _Job) -> JobResult:
        if job.future.exception() is not None:
            logger.error("a transfer of the tier failed", exc_info=job.future.exception())
            moved = _Moved([False] * len(job.keys), 0.0)
        else:
            moved = job.future.result()
        loaded = [key for key, is_moved in zip(job.keys, moved.is_moved, strict=True) if is_moved]
        if job.is_load and len(loaded) < len(job.keys):
            # Otherwise vLLM would ask for the same chunks again and again.
            held = set(loaded)
            self._lookups.mark_miss([key for key in job.keys if key not in held])
        return JobResult(
            job_id,
            all(moved.is_moved),
            tuple(loaded) if job.is_load and loaded else None,
            moved.seconds,
            len(job.keys) * self.block_size_bytes,
        )


class _Lookups(AsyncLookupManager):
    """Asks the daemons in a thread; the scheduler's thread gets the answers a step later."""

    def __init__(self, tier_type: str, ask: Callable[[Sequence[OffloadKey]], list[bool]]) -> None:
        self._ask = ask
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._ask(keys)
