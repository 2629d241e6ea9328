"""Every metric of the daemon, defined once; the connector's are in `names`.

They appear on the daemon's own `/metrics` with the prefix `tiered_kv_server_`.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics.names import SECONDS, Kind, Metric

PREFIX = "tiered_kv_server_"

_MEMORY, _SSD, _BACKING = Tier.MEMORY.value, Tier.SSD.value, Tier.BACKING.value
_OPS = (
    *("hello", "match", "contains", "get", "put", "pin", "claim", "delete", "delete_namespace"),
    *("flush", "info", "stats", "lend", "borrow", "release", "reserve", "seal"),
)


def _counter(name: str, help: str) -> Metric:
    return Metric(name, Kind.COUNTER, (), help, PREFIX)


def _counter_by(name: str, help: str, label: str, values: Iterable[str]) -> Metric:
    series = tuple((value,) for value in values)
    return Metric(name, Kind.COUNTER, (label,), help, PREFIX, series)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, help, PREFIX)


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, labels, help, PREFIX, buckets=SECONDS)


HITS = _counter_by(
    "hit_blocks",
    "Requested blocks that were found, by the tier that held them.",
    "tier",
    (_MEMORY, _SSD, _BACKING),
)
MISSES = _counter(
    "missed_blocks",
    "Requested blocks that no tier held; a lookup counts all blocks from its first gap on.",
)
PUTS = _counter_by(
    "put_blocks",
    "Blocks offered by clients, by result.",
    "result",
    (result.name.lower() for result in PutResult),
)
PROMOTED = _counter_by(
    "promoted_blocks", "Blocks read from a slower tier into memory.", "tier", (_SSD, _BACKING)
)
NOT_PROMOTED = _counter_by(
    "not_promoted_blocks",
    "Blocks found in a slower tier while memory had no room for them.",
    "tier",
    (_SSD, _BACKING),
)
NOT_WRITTEN = _counter_by(
    "not_written_blocks",
    "Blocks that a slower tier did not take because its write queue was full.",
    "tier",
    (_SSD, _BACKING),
)
EVICTED = _counter_by("evicted_blocks", "Blocks evicted to make room.", "tier", (_MEMORY, _SSD))
DAMAGED = _counter_by(
    "damaged_blocks",
    "Blocks that could not be read or failed their checksum.",
    "tier",
    (_SSD, _BACKING),
)
NOT_KEPT = _counter_by(
    "failed_writes",
    "Blocks that a tier could not write or had no room for.",
    "tier",
    (_SSD, _BACKING),
)
BACKING_LATE = _counter(
    "backing_timeouts",
    "Calls to the backing tier that got no answer in time, or were not made because it does "
    "not answer.",
)
REQUESTS = _counter_by("requests", "Requests received, by op.", "op", _OPS)
ERRORS = _counter_by(
    "errors",
    "Requests answered with an error, by code.",
    "code",
    (code.value for code in ErrorCode),
)
BYTES_IN = _counter("received_bytes", "Bytes of requests: headers and payload.")
BYTES_OUT = _counter("sent_bytes", "Bytes of replies: headers and payload.")
CLIENTS_DROPPED = _counter(
    "dropped_clients",
    "Clients disconnected because they stalled while sending a message or reading replies, or used "
    "too much network memory.",
)
CLIENTS_REFUSED = _counter(
    "refused_clients", "Connections refused because their key is not listed."
)

CAPACITY_BYTES = _gauge("capacity_bytes", "Capacity of a tier. 0: no limit.", "tier")
USED_BYTES = _gauge("used_bytes", "Bytes in use in a tier.", "tier")
BLOCKS = _gauge("blocks", "Readable blocks in a tier.", "tier")
PENDING_BLOCKS = _gauge("pending_write_blocks", "Blocks that wait to be written to a tier.", "tier")
PENDING_BYTES = _gauge("pending_write_bytes", "Bytes that wait to be written to a tier.", "tier")
READ_SPEED = _gauge(
    "read_bytes_per_second",
    "Recent read speed of a tier, or the speed measured when the daemon opened it. "
    "Engines use it until they have loaded from the tier themselves.",
    "tier",
)
BACKING_ABSENT = _gauge(
    "backing_absent", "1 while the backing tier does not answer and is not used."
)
SESSIONS = _gauge(
    "sessions",
    "Client sockets that have sent hello, including those gone for less than a day, but not those "
    "over `ipc://` that are closed because they are idle.",
)
ATTACHMENTS = _gauge("attached_processes", "Processes that have mapped the memory tier.")
NAMESPACES = _gauge("namespaces", "Namespaces whose block sizes and layout are known.")
LEASES = _gauge("leases", "Slots leased for reading or reserved for writing by attached processes.")
LEASED_BYTES = _gauge("leased_bytes", "Bytes of the leased and reserved slots.")
SILENT_LEASED_BYTES = _gauge(
    "silent_leased_bytes",
    "The part of these bytes held by processes that have sent nothing for `stall_timeout`; "
    "`tiered-kv status` names them.",
)
CLAIMS = _gauge("claims", "Blocks that clients have announced to compute (`compute_once`).")
PINS = _gauge("pins", "Blocks pinned by clients.")
PINNED_BYTES = _gauge("pinned_bytes", "Bytes of the pinned blocks.")
REPLY_BYTES = _gauge("reply_bytes", "Bytes of blocks in flight to clients.")
PUT_BYTES = _gauge("put_bytes", "Bytes received and not yet copied into memory.")
NETWORK_BYTES = _gauge(
    "network_bytes",
    "Memory used by client messages, limited by `network_memory`: messages being "
    "received, requests in flight and replies not read.",
)

# On the page for monitors alone, not in `stats`.
BUILD_INFO = _gauge("build_info", "1, with the version of the daemon.", "version")
START_TIME = _gauge("start_time_seconds", "When the daemon started, in seconds since 1970.")
HEALTHY = _gauge("up", "1 while the daemon is healthy, 0 while `/healthz` says that it is not.")
NAMESPACE_BYTES = _gauge(
    "namespace_bytes",
    "Bytes of the 100 largest namespaces in a tier. `model` is that of the last engine that wrote "
    "to it, or the name of another client.",
    *("namespace", "model", "tier"),
)
REQUEST_SECONDS = _histogram(
    "request_seconds", "From the receipt of a request to its reply, by op.", "op"
)
SSD_READ_SECONDS = _histogram(
    "ssd_read_seconds", "Reading the blocks of a batch from the SSD, in parallel."
)
SSD_WRITE_SECONDS = _histogram(
    "ssd_write_seconds", "Writing the blocks of a batch to the SSD, in parallel, without a sync."
)
ALL = tuple(one for one in tuple(vars().values()) if isinstance(one, Metric))
