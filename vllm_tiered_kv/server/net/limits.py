"""How much of the daemon one client, and all of them together, may take up at a time.

Memory that is pinned by someone cannot hold anything new, so every use of it is bounded by a share
of the memory tier: pins an eighth, leases a half, the write queues a quarter. An eighth is left to
ordinary puts whatever clients hold and however slow the disk is. Replies are not counted in: they
leave by themselves, or with a client that does not take them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_tiered_kv.core.arena_geometry import default_slab
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES
from vllm_tiered_kv.wire.messages import Limits

_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class ClientLimits:
    """Bytes, unless the name says otherwise."""

    largest_block: int
    message: int  # payload of one message, in either direction
    replies_per_client: int  # blocks on their way to one client
    replies: int  # blocks on their way to all of them
    puts: int  # payloads received and not yet copied
    pins: int  # blocks pinned by clients
    leases: int  # blocks leased to attached processes, for reading or writing
    lookup_leases: int  # of these, leased with a lookup: nobody may ever come to read them
    requests_per_session: int = 256  # under way
    network: int = 2 << 30  # messages of all clients, beside the memory tier
    queued_replies_per_session: int = 1024  # that the client does not take
    attachments: int = 256  # processes that share the memory
    namespaces: int = 4096

    @classmethod
    def of_memory(cls, memory_bytes: int) -> ClientLimits:
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
            lookup_leases=memory_bytes // 4,
        )

    def within(self, network: int) -> ClientLimits:
        """The same with so much for messages. ConfigError where that is too little."""
        least = 4 * (self.message + MAX_HEADER_BYTES)
        if network < least:
            raise ConfigError(
                "network_memory",
                f"{format_size(network)} are too little for four messages of "
                f"{format_size(self.message)}; give it at least {format_size(least)}",
            )
        return replace(self, network=network, puts=min(self.puts, network // 2))

    @property
    def requests_per_client(self) -> int:
        """What requests of one client that are under way may take up."""
        return self.network // 8

    def announced(self) -> Limits:
        return Limits(message_bytes=self.message)
