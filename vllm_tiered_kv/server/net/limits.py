"""How much of the daemon's memory one client, and all clients together, may use at a time.

A pinned block cannot be evicted, so every kind of pin is limited to a share of the memory tier:
pins of clients 1/8, leases 1/2, write-behind queues 1/4. The remaining 1/8 is left to ordinary
puts, whatever clients hold and however slow the disk is. Each process may use two thirds of what
the others leave of the leases. Replies are not included: they end by themselves, or with the
connection of a client that does not read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_tiered_kv.core.arena_geometry import default_slab
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES

_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class ClientLimits:
    """Limits for clients, in bytes unless the name says otherwise. The daemon derives them once
    from its options."""

    largest_block: int
    message: int  # payload of one message, in either direction
    replies_per_client: int  # blocks being sent to one client
    replies: int  # blocks being sent to all clients
    puts: int  # payloads received and not yet copied
    pins: int  # blocks pinned by clients
    leases: int  # blocks leased to attached processes, for reading or writing
    lookup_leases: int  # part of `leases`: leased with a lookup, and perhaps never read
    requests_per_session: int = 256  # in flight
    network: int = 2 << 30  # messages of all clients, outside of the memory tier
    queued_replies_per_session: int = 1024  # that the client has not read
    attachments: int = 256  # processes that map the memory
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
            lookup_leases=memory_bytes * 3 // 8,  # a single process gets a quarter of the memory
        )

    def within(self, network: int) -> ClientLimits:
        """The same limits with this much network memory. ConfigError if that is too little."""
        least = 4 * (self.message + MAX_HEADER_BYTES)
        if network < least:
            raise ConfigError(
                "network_memory",
                f"{format_size(network)} is too little for four messages of "
                f"{format_size(self.message)}; use at least {format_size(least)}",
            )
        return replace(self, network=network, puts=min(self.puts, network // 2))

    @property
    def requests_per_client(self) -> int:
        """Network memory that the requests in flight of one client may use."""
        return self.network // 8
