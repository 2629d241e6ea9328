"""Every metric, defined once: name, kind, labels and what it means.

Names appear on vLLM's own `/metrics` with the prefix `vllm:tiered_kv_`; counters get Prometheus'
`_total`. Every event is counted in exactly one place, when it is final.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_tiered_kv.core.tiers import Tier

PREFIX = "vllm:tiered_kv_"


class Kind(enum.Enum):
    """The type of a metric, in the words of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds


LabelValues = tuple[str, ...]

SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
"""Bounds of the buckets of all histograms: from a lookup in memory to a timeout."""


class DropReason(str, enum.Enum):
    """Why a block that could have been stored was not."""

    TIER_FULL = "tier_full"  # everything in the tier is pinned or a head of something in use
    REUSED = "reused"  # its request had ended, and the GPU block has been given out again
    NOT_PINNED_YET = "not_pinned_yet"  # the arena is still being pinned in the background
    COPY_FAILED = "copy_failed"
    RESET = "reset"  # the cache was reset while the block was on its way
    QUEUE_FULL = "queue_full"  # evicted from the CPU tier before it could be sent to the daemon
    UNAVAILABLE = "unavailable"  # no daemon answers, or the one it was sent to did not
    UNREPORTED = "unreported"  # not all ranks said in time what became of it
    REFUSED = "refused"  # the daemon did not take it: no room, a failed write, not in time


_NOT_SENT = (DropReason.QUEUE_FULL, DropReason.UNAVAILABLE, DropReason.REFUSED)


class Decision(str, enum.Enum):
    """What became of the blocks of a request that one tier held."""

    LOAD = "load"
    SHORTEN = "shorten"  # only the part nearer to the head
    PROBE = "probe"  # a piece was fetched to learn how fast the tier is, the rest was computed
    RECOMPUTE = "recompute"


class LookupOutcome(str, enum.Enum):
    """How a lookup of one request at the daemons ended."""

    HIT = "hit"
    MISS = "miss"
    TIMEOUT = "timeout"  # no answer within `remote_lookup_timeout`
    UNAVAILABLE = "unavailable"  # no daemon could be reached


class WaitOutcome(str, enum.Enum):
    """What became of a request that waited while another computed a prefix that both share."""

    SERVED = "served"  # the prefix was there when the request was admitted
    LEADER_ENDED = "leader_ended"  # the other one ended, was preempted, or its load failed
    STALLED = "stalled"  # the other one got no tokens in many steps
    DEADLINE = "deadline"  # the other one took longer than its prefill should
    NOT_FOUND = "not_found"  # it was computed, but neither the GPU nor a tier had it
    ABORTED = "aborted"  # the request itself ended


class MissCause(str, enum.Enum):
    """Why prompt tokens were computed instead of loaded. A prefix hit ends at its first missing
    block, so the cause of that block counts for the tokens behind it too."""

    NEVER_STORED = "never_stored"  # as far as the engine remembers
    OTHER_ADAPTER = "other_adapter"  # the CPU tier holds the first block with another adapter
    OTHER_SALT = "other_salt"  # the same with another salt; only the debug log tells
    EVICTED = "evicted"  # from the CPU tier, and no daemon holds it
    DROPPED = "dropped"  # it was to be stored, see `DropReason`
    PENDING = "pending"  # it is being stored, or another request is computing it
    INCOMPLETE = "incomplete"  # a sliding window or a recurrent state is missing, not the tokens
    LOOKUP_TIMEOUT = "lookup_timeout"  # no daemon answered in time
    UNAVAILABLE = "daemon_unavailable"  # no daemon could be reached
    POLICY = "policy"  # held, but computing was expected to be faster; or `load_policy` is never
    CONTROL = "control"  # the request asked for it
    VERIFICATION = "verification"  # held, and computed to be compared
    LOAD_FAILED = "load_failed"  # the load failed, or is not tried again after it failed
    ADAPTER_REPLACED = "adapter_replaced"  # another LoRA adapter took the place of the request's
    OTHER_CONNECTOR = "other_connector"  # another connector of a MultiConnector loads them
    PARTIAL_BLOCK = "partial_block"  # behind the last whole block, so that nothing can hold them


@dataclass(frozen=True)
class Metric:
    """A metric of the engine or, with another prefix, of the daemon."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    prefix: str = PREFIX
    series: tuple[LabelValues, ...] = ()
    """Of a counter or histogram: the label values it can have, as far as they are known ahead. They
    are shown as 0 from the start: `rate()` takes what first appears with a value for no
    increase."""
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    @property
    def exposed_name(self) -> str:
        return self.prefix + self.name

    @property
    def exposed_names(self) -> tuple[str, ...]:
        """The names of its samples on a page for Prometheus."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(self.exposed_name + end for end in ("_bucket", "_sum", "_count"))
        return (self.exposed_name + ("_total" if self.kind is Kind.COUNTER else ""),)


_CPU, _REMOTE = Tier.CPU.value, Tier.REMOTE.value


def _counter(name: str, help: str, *tiers: str) -> Metric:
    return Metric(name, Kind.COUNTER, ("tier",), help, series=tuple((tier,) for tier in tiers))


def _counter_by(name: str, help: str, label: str, series: Iterable[tuple[str, str]]) -> Metric:
    return Metric(name, Kind.COUNTER, ("tier", label), help, series=tuple(series))


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, help)


def _histogram(name: str, help: str, *tiers: str) -> Metric:
    series = tuple((tier,) for tier in tiers)
    return Metric(name, Kind.HISTOGRAM, ("tier",), help, series=series, buckets=SECONDS)


HIT_TOKENS = _counter(
    "hit_tokens",
    "Prompt tokens served by a tier instead of being computed; counted when the load begins.",
    *(_CPU, _REMOTE),
)
SAVED_SECONDS = _counter(
    "saved_prefill_seconds",
    "Estimated time to compute the tokens in `hit_tokens`, by the prefill speed that was measured; "
    "0 until then, and with another `load_policy` than `auto`.",
    *(_CPU, _REMOTE),
)
MISS_TOKENS = _counter("miss_tokens", "Prompt tokens in whole blocks that no tier held.", _CPU)
COMPUTED_TOKENS = Metric(
    "computed_tokens",
    Kind.COUNTER,
    ("cause",),
    "Prompt tokens that were computed, by the reason why they were not loaded; counted when the "
    "request is admitted, after a preemption or a failed load again.",
    series=tuple((cause.value,) for cause in MissCause if cause is not MissCause.OTHER_SALT),
)
WOULD_HIT_TOKENS = Metric(
    "would_hit_tokens",
    Kind.COUNTER,
    ("capacity",),
    "Computed tokens with the cause `evicted` that a CPU tier with this multiple of the "
    "capacity would still have held.",
    series=(("2x",), ("4x",)),
)
RECOMPUTED_TOKENS = _counter(
    "recomputed_tokens",
    "Prompt tokens that a tier held but that were computed, because that was expected to "
    "be faster, to verify the tier or to measure the prefill speed.",
    *(_CPU, _REMOTE),
)
HIT_BLOCKS = _counter(
    "hit_blocks", "Blocks of admitted requests that were found in a tier.", _CPU, _REMOTE
)
MISS_BLOCKS = _counter(
    "miss_blocks", "Whole blocks of admitted requests that were not found.", _CPU
)
LOADED_BLOCKS = _counter(
    "loaded_blocks", "Blocks that all ranks copied back to the GPU.", _CPU, _REMOTE
)
LOADED_BYTES = _counter("loaded_bytes", "Bytes copied back to the GPU, per rank.", _CPU, _REMOTE)
EARLY_LOADS = _counter(
    "early_loads",
    "Loads that began while the step that reads them was still being planned.",
    *(_CPU, _REMOTE),
)
LOAD_FAILURES = _counter(
    "load_failures", "Loads that failed; their requests were recomputed.", _CPU, _REMOTE
)
STORED_BLOCKS = _counter("stored_blocks", "Blocks that became readable in a tier.", _CPU, _REMOTE)
STORED_BYTES = _counter("stored_bytes", "Bytes of those blocks, per rank.", _CPU, _REMOTE)
DROPPED_BLOCKS = _counter_by(
    "dropped_blocks",
    "Blocks that were not stored, by reason.",
    "reason",
    (
        *((_REMOTE if reason in _NOT_SENT else _CPU, reason.value) for reason in DropReason),
        (_REMOTE, DropReason.UNREPORTED.value),
        (_REMOTE, DropReason.RESET.value),
    ),
)
PREFETCHED_BLOCKS = _counter(
    "prefetched_blocks",
    "Blocks that the CPU tier got from daemons ahead of a request (`tool_pending`).",
    _CPU,
)
EVICTED_BLOCKS = _counter("evicted_blocks", "Blocks evicted to make room.", _CPU)
EVICTED_BYTES = _counter("evicted_bytes", "Bytes of those blocks, per rank.", _CPU)
LOOKUPS = _counter_by(
    "lookups",
    "Lookups of requests at daemons, by outcome.",
    "outcome",
    ((_REMOTE, outcome.value) for outcome in LookupOutcome),
)
LOOKUP_SECONDS = _histogram(
    "lookup_seconds",
    "From the start of a request's lookup at daemons until the scheduler sees its end or gives up.",
    _REMOTE,
)
LOAD_SECONDS = _histogram(
    "load_seconds",
    "From the plan of a load to its last report: `remote` if a part of it is from daemons. A load "
    "within a step is reported with the output of the step.",
    *(_CPU, _REMOTE),
)
STORE_SECONDS = _histogram(
    "store_seconds",
    "From the plan of a store to its last report: `cpu` until blocks are readable, `remote` until "
    "daemons have them. The step that fills the blocks is part of it.",
    *(_CPU, _REMOTE),
)
DAEMON_ERRORS = Metric(
    "daemon_errors",
    Kind.COUNTER,
    ("daemon",),
    "Calls of the scheduler to a daemon that failed: timeouts, broken connections, refusals.",
)
LOAD_DECISIONS = _counter_by(
    "load_decisions",
    "Decisions about the blocks of an admitted request that a tier held: `load`, "
    "`shorten` (load only the part nearer to the head), `recompute`, or `probe` "
    "(recompute, and fetch a piece to measure the speed of the tier).",
    "decision",
    ((tier, decision.value) for tier in (_CPU, _REMOTE) for decision in Decision),
)
LOAD_SPEED = _gauge(
    "load_bytes_per_second",
    "Speed of recent loads from the CPU tier, or from a daemon's memory, SSD or backing "
    "tier, from start to end of a load; per rank.",
    "tier",
)
PREFILL_SPEED = _gauge(
    "prefill_tokens_per_second", "Estimated prefill speed at the beginning of a prompt."
)
SHARED_PREFIX_WAITS = Metric(
    "shared_prefix_waits",
    Kind.COUNTER,
    ("outcome",),
    "Requests that waited while another one computed a prefix that both share, by outcome "
    "(`compute_once`).",
    series=tuple((outcome.value,) for outcome in WaitOutcome),
)
SHARED_PREFIX_TOKENS = Metric(
    "shared_prefix_tokens",
    Kind.COUNTER,
    (),
    "Prompt tokens that these requests did not compute, because they had waited.",
    series=((),),
)
VERIFIED_BLOCKS = _counter(
    "verified_blocks",
    "Cached blocks that were recomputed and compared.",
    *(_CPU, _REMOTE),
)
INEXACT_BLOCKS = _counter(
    "inexact_blocks",
    "Verified blocks whose bytes differ within `verify_tolerance`.",
    *(_CPU, _REMOTE),
)
DIFFERING_BLOCKS = _counter(
    "differing_blocks",
    "Verified blocks that differ by more than `verify_tolerance`; they are evicted.",
    *(_CPU, _REMOTE),
)
UNVERIFIED_BLOCKS = _counter(
    "unverified_blocks",
    "Blocks chosen for verification that could not be compared: they left their tier, or "
    "their request ended before there was room to copy them.",
    *(_CPU, _REMOTE),
)
DAEMON_UP = _gauge(
    "daemon_up",
    "1 while a daemon answers the scheduler, 0 while it cannot be reached or refuses this"
    " engine; as of the last call to it.",
    "daemon",
)
USED_BYTES = _gauge("used_bytes", "Bytes of slots in use, per rank.", "tier")
CAPACITY_BYTES = _gauge("capacity_bytes", "Capacity of the tier in bytes, per rank.", "tier")
PENDING_STORES = _gauge(
    "pending_stores", "Blocks that are being stored and are not yet readable.", "tier"
)
REQUEST_CONTROLS = Metric(
    "request_controls",
    Kind.COUNTER,
    ("control",),
    "Requests with `tiered_kv` in their `kv_transfer_params`, by key; `ignored`: with a key or "
    "value that is none.",
    series=tuple(
        (name,)
        for name in (
            "store",
            "load",
            "tiers",
            "max_load_tokens",
            "max_store_tokens",
            "pin_seconds",
            "session",
            "session_ended",
            "tool_pending",
            "compute_once",
            "explain",
            "ignored",
        )
    ),
)
PINNED_BYTES = _gauge(
    "pinned_bytes", "Bytes of blocks that requests have pinned for a time, per rank.", "tier"
)
UNPINNED_BLOCKS = _counter(
    "unpinned_blocks",
    "Blocks that a request asked to pin, beyond `pin_share` of the tier.",
    _CPU,
)
ENDED_BLOCKS = _counter(
    "ended_blocks", "Blocks that are evicted first because their session has ended.", _CPU
)
ALL = tuple(one for one in tuple(vars().values()) if isinstance(one, Metric))
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in ALL}
