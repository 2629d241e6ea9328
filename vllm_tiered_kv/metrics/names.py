"""Every metric, defined once: name, kind, labels and what it means.

Names appear on vLLM's own `/metrics` with the prefix `vllm:tiered_kv_`; counters get Prometheus'
`_total`. Every event is counted in exactly one place, when it is final.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PREFIX = "vllm:tiered_kv_"


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


class DropReason(str, enum.Enum):
    """Why a block that could have been stored was not."""

    TIER_FULL = "tier_full"  # everything in the tier is pinned or a head of something in use
    REUSED = "reused"  # its request had ended, and the GPU block has been given out again
    NOT_PINNED_YET = "not_pinned_yet"  # the arena is still being pinned in the background
    COPY_FAILED = "copy_failed"
    RESET = "reset"  # the cache was reset while the store was under way
    QUEUE_FULL = "queue_full"  # too many blocks are on their way to the daemon already
    UNAVAILABLE = "unavailable"  # no daemon answers
    UNREPORTED = "unreported"  # not all ranks said in time what became of it
    REFUSED = "refused"  # the daemon did not take it, or sending it failed


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    prefix: str = PREFIX

    @property
    def exposed_name(self) -> str:
        return self.prefix + self.name


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, ("tier", *labels), help)


def _gauge(name: str, help: str) -> Metric:
    return Metric(name, Kind.GAUGE, ("tier",), help)


HIT_TOKENS = _counter(
    "hit_tokens",
    "Prompt tokens that a tier serves instead of being computed, counted as a load begins.",
)
MISS_TOKENS = _counter("miss_tokens", "Prompt tokens in whole blocks no tier held.")
RECOMPUTED_TOKENS = _counter(
    "recomputed_tokens", "Prompt tokens a tier held that were computed: expected to be faster."
)
HIT_BLOCKS = _counter("hit_blocks", "Blocks of admitted requests found in a tier.")
MISS_BLOCKS = _counter("miss_blocks", "Whole blocks of admitted requests not found.")
LOADED_BLOCKS = _counter("loaded_blocks", "Blocks copied back to the GPU by all ranks.")
LOADED_BYTES = _counter("loaded_bytes", "Bytes copied back to the GPU, per rank.")
EARLY_LOADS = _counter(
    "early_loads", "Loads that began while the step that reads them was still being planned."
)
LOAD_FAILURES = _counter("load_failures", "Loads that failed and were recomputed instead.")
STORED_BLOCKS = _counter("stored_blocks", "Blocks that became readable in a tier.")
STORED_BYTES = _counter("stored_bytes", "Bytes of those blocks, per rank.")
DROPPED_BLOCKS = _counter("dropped_blocks", "Blocks not stored, by reason.", "reason")
EVICTED_BLOCKS = _counter("evicted_blocks", "Blocks evicted to make room.")
EVICTED_BYTES = _counter("evicted_bytes", "Bytes of those blocks, per rank.")
LOOKUPS = _counter("lookups", "Questions to a daemon, by what became of them.", "outcome")
LOAD_DECISIONS = _counter(
    "load_decisions",
    "What became of the blocks of an admitted request that a tier held: `load`, `shorten` (only "
    "the part nearer to the head), `recompute`, or `probe` (computed, while a piece of it is "
    "fetched to learn how fast the tier is).",
    "decision",
)
LOAD_SPEED = _gauge(
    "load_bytes_per_second",
    "Estimated speed of loads from the CPU tier, or from a daemon's memory, SSD or backing store; "
    "per rank.",
)
PREFILL_SPEED = _gauge(
    "prefill_tokens_per_second", "Estimated speed of computing the beginning of a prompt."
)
VERIFIED_BLOCKS = _counter(
    "verified_blocks", "Blocks a tier held that were computed again and compared."
)
INEXACT_BLOCKS = _counter(
    "inexact_blocks", "Verified blocks with other bytes, within `verify_tolerance`."
)
DIFFERING_BLOCKS = _counter(
    "differing_blocks", "Verified blocks that differ by more than that; they are evicted."
)
UNVERIFIED_BLOCKS = _counter(
    "unverified_blocks",
    "Blocks that were to be verified and could not be: gone from their tier meanwhile, or the "
    "request ended before there was room to copy them.",
)
USED_BYTES = _gauge("used_bytes", "Bytes of slots in use, per rank.")
CAPACITY_BYTES = _gauge("capacity_bytes", "Capacity of the tier in bytes, per rank.")
PENDING_STORES = _gauge("pending_stores", "Blocks being stored and not yet readable.")
ALL: tuple[Metric, ...] = (
    HIT_TOKENS,
    MISS_TOKENS,
    RECOMPUTED_TOKENS,
    HIT_BLOCKS,
    MISS_BLOCKS,
    LOADED_BLOCKS,
    LOADED_BYTES,
    EARLY_LOADS,
    LOAD_FAILURES,
    STORED_BLOCKS,
    STORED_BYTES,
    DROPPED_BLOCKS,
    EVICTED_BLOCKS,
    EVICTED_BYTES,
    LOOKUPS,
    LOAD_DECISIONS,
    LOAD_SPEED,
    PREFILL_SPEED,
    VERIFIED_BLOCKS,
    INEXACT_BLOCKS,
    DIFFERING_BLOCKS,
    UNVERIFIED_BLOCKS,
    USED_BYTES,
    CAPACITY_BYTES,
    PENDING_STORES,
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in ALL}
