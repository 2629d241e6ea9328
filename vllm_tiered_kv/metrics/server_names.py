"""Every metric of the daemon, defined once; the connector's are in `names`.

They appear on the daemon's own `/metrics` with the prefix `tiered_kv_server_`.
"""

from __future__ import annotations

from vllm_tiered_kv.metrics.names import Kind, Metric

PREFIX = "tiered_kv_server_"


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, labels, help, PREFIX)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, help, PREFIX)


HITS = _counter("hit_blocks", "Blocks asked for and found, by the tier they lay in.", "tier")
MISSES = _counter(
    "missed_blocks",
    "Blocks asked for and not found in any tier; of a lookup, all from the first gap on.",
)
PUTS = _counter("put_blocks", "Blocks offered by clients, by what became of them.", "result")
PROMOTED = _counter("promoted_blocks", "Blocks read from a slower tier into memory.", "tier")
NOT_PROMOTED = _counter(
    "not_promoted_blocks", "Blocks found in a slower tier while memory had no room.", "tier"
)
NOT_WRITTEN = _counter(
    "not_written_blocks", "Blocks a slower tier's full queue did not take.", "tier"
)
EVICTED = _counter("evicted_blocks", "Blocks evicted to make room.", "tier")
DAMAGED = _counter("damaged_blocks", "Blocks that read back wrong or not at all.", "tier")
NOT_KEPT = _counter("failed_writes", "Blocks a tier could not write, or had no room for.", "tier")
BACKING_LATE = _counter(
    "backing_timeouts", "Questions the backing tier did not answer in time, or was not asked."
)
REQUESTS = _counter("requests", "Requests received, by op.", "op")
ERRORS = _counter("errors", "Requests answered with an error, by code.", "code")
BYTES_IN = _counter("received_bytes", "Bytes of requests, headers and payload.")
BYTES_OUT = _counter("sent_bytes", "Bytes of replies, headers and payload.")
CLIENTS_DROPPED = _counter("dropped_clients", "Clients that did not take their replies.")
CLIENTS_REFUSED = _counter("refused_clients", "Greetings with a key that is not allowed.")

CAPACITY_BYTES = _gauge("capacity_bytes", "Capacity of a tier. 0: no limit of its own.", "tier")
USED_BYTES = _gauge("used_bytes", "Bytes in use in a tier.", "tier")
BLOCKS = _gauge("blocks", "Readable blocks in a tier.", "tier")
PENDING_BLOCKS = _gauge("pending_write_blocks", "Blocks waiting to be written to a tier.", "tier")
PENDING_BYTES = _gauge("pending_write_bytes", "Bytes waiting to be written to a tier.", "tier")
READ_SPEED = _gauge(
    "read_bytes_per_second",
    "How fast a tier was read lately, or when the daemon opened it. Engines go by it until they "
    "have loaded from it themselves.",
    "tier",
)
BACKING_ABSENT = _gauge(
    "backing_absent", "1 while the backing tier answers nothing and is not asked."
)
SESSIONS = _gauge(
    "sessions", "Client sockets that have said hello, those gone for less than a day included."
)
ATTACHMENTS = _gauge("attached_processes", "Processes that share the memory tier.")
NAMESPACES = _gauge("namespaces", "Namespaces whose shape is known.")
LEASES = _gauge("leases", "Slots leased to attached processes, for reading or writing.")
LEASED_BYTES = _gauge("leased_bytes", "Bytes of these slots.")
PINS = _gauge("pins", "Blocks pinned by clients.")
PINNED_BYTES = _gauge("pinned_bytes", "Bytes of these blocks.")
REPLY_BYTES = _gauge("reply_bytes", "Bytes of blocks on their way to clients.")
PUT_BYTES = _gauge("put_bytes", "Bytes received and not yet copied into memory.")
NETWORK_BYTES = _gauge(
    "network_bytes",
    "Bytes that messages of clients take up, of `network_memory`: those being received, requests "
    "under way and replies not taken.",
)

ALL: tuple[Metric, ...] = (
    HITS,
    MISSES,
    PUTS,
    PROMOTED,
    NOT_PROMOTED,
    NOT_WRITTEN,
    EVICTED,
    DAMAGED,
    NOT_KEPT,
    BACKING_LATE,
    REQUESTS,
    ERRORS,
    BYTES_IN,
    BYTES_OUT,
    CLIENTS_DROPPED,
    CLIENTS_REFUSED,
    CAPACITY_BYTES,
    USED_BYTES,
    BLOCKS,
    PENDING_BLOCKS,
    PENDING_BYTES,
    READ_SPEED,
    BACKING_ABSENT,
    SESSIONS,
    ATTACHMENTS,
    NAMESPACES,
    LEASES,
    LEASED_BYTES,
    PINS,
    PINNED_BYTES,
    REPLY_BYTES,
    PUT_BYTES,
    NETWORK_BYTES,
)
