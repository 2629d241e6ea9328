"""How much of the daemon one client, and all of them together, may take up at a time.

Memory that is pinned by someone cannot hold anything new, so every use of it is bounded by a share
of the memory tier: pins an eighth, leases a half, the write queues a quarter. An eighth is left to
ordinary puts whatever clients hold and however slow the disk is. Replies are not counted in: they
leave by themselves, or with a client that does not take them.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.arena_geometry import default_slab
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.wire.messages import Limits

_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Allowances:
    """Bytes, unless the name says otherwise."""

    largest_block: int
    message: int  # payload of one message, in either direction
    replies_per_client: int  # blocks on their way to one client
    replies: int  # blocks on their way to all of them
    puts: int  # payloads received and not yet copied
    pins: int  # blocks pinned by clients
    leases: int  # blocks lent and reserved
    loans: int  # of these, blocks lent with a lookup: nobody may ever come to read them
    requests_per_session: int = 256  # under way
    request_bytes_per_session: int = 16 << 20  # of their headers: keys are kept meanwhile
    request_bytes: int = 128 << 20  # of all of them
    queued_replies_per_session: int = 1024  # that the client does not take
    attachments: int = 256  # processes that share the memory
    namespaces: int = 4096

    @classmethod
    def of_memory(cls, memory_bytes: int) -> Allowances:
        slab = default_slab(memory_bytes, PAGE)
        message = max(slab, min(_MESSAGE_BYTES, memory_bytes // 4))
        return cls(
            largest_block=slab,
            message=message,
            replies_per_client=max(message, memory_bytes // 8),
            replies=memory_bytes // 2,
            puts=max(2 * message, min(memory_bytes // 2, 1 << 30)),
            pins=memory_bytes // 8,
            leases=memory_bytes // 2,
            loans=memory_bytes // 4,
        )

    def announced(self) -> Limits:
        return Limits(message_bytes=self.message)
