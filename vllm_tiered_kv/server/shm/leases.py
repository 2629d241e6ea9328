"""Slots that attached processes use directly: leased for reading, or reserved for writing.

A lease ends when the process releases it or is dead, never by time: a stopped process may have
copies queued that still read or write the slot. All blocks leased by one request share a lease,
because a prompt has hundreds of blocks; each reservation has a lease of its own.

A block leased with a lookup may wait a long time until its request is scheduled. Lookup leases
therefore have a smaller limit of their own, so that there is always room for leases that are about
to be copied.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    slots: list[PinnedSlot]
    nbytes: int
    is_reservation: bool = False
    is_from_lookup: bool = False


@dataclass(slots=True, eq=False)
class Attachment:
    """A process that maps the arena, with its leases."""

    token: bytes
    pid: int
    pidfd: int
    client: str
    leases: dict[int, Lease] = field(default_factory=dict)
    is_disconnected: bool = False
    is_dead: bool = False

    @property
    def is_gone(self) -> bool:
        """Neither the process, nor one that inherited its connection, can access the memory."""
        return self.is_disconnected and self.is_dead


class Leases:
    """All leases of attached processes, and their limits. Used on the reactor's thread only."""

    def __init__(self, memory: MemoryStore, limits: ClientLimits) -> None:
        self._memory = memory
        self._max_bytes = limits.leases
        self._max_lookup_bytes = limits.lookup_leases
        self._lookup_bytes = 0
        self._bytes = 0
        self._count = 0  # leased slots; other threads read this and the bytes
        self._ids = itertools.count(1)
        self._attachments: dict[bytes, Attachment] = {}
        self.on_last_lease_released: Callable[[Attachment], None] = lambda attachment: None
        """Called when a process that has disconnected has released its last lease."""

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def attachments(self) -> int:
        return len(self._attachments)

    def __len__(self) -> int:
        return self._count

    def attach(self, attachment: Attachment) -> None:
        self._attachments[attachment.token] = attachment

    def find(self, token: bytes) -> Attachment | None:
        return self._attachments.get(token)

    @property
    def room_bytes(self) -> int:
        return max(0, self._max_bytes - self._bytes)

    def has_room(self, nbytes: int) -> bool:
        return nbytes <= self.room_bytes

    def reserve(self, attachment: Attachment, slot: PinnedSlot) -> int | None:
        """Leases a reserved slot; returns the lease id. None, with the slot freed, if the lease
        limit is reached."""
        if attachment.is_gone or not self.has_room(slot.nbytes):
            self._memory.abort(slot)
            return None
        return self._open(attachment, Lease([slot], slot.nbytes, is_reservation=True))

    def lease(
        self, attachment: Attachment, slots: Sequence[PinnedSlot], lease_id: int | None
    ) -> int:
        """Adds blocks to this lease, or to a new one; returns the lease id. 0, with all blocks
        released, if the lease limit is reached."""
        nbytes = sum(slot.nbytes for slot in slots)
        if attachment.is_gone or not self.has_room(nbytes):
            self._memory.let_go(slots)
            return 0
        lease = attachment.leases.get(lease_id) if lease_id is not None else None
        if lease is None or lease_id is None:
            return self._open(attachment, Lease(list(slots), nbytes))
        lease.slots.extend(slots)
        lease.nbytes += nbytes
        self._bytes += nbytes
        self._count += len(slots)
        return lease_id

    @property
    def lookup_room_bytes(self) -> int:
        return max(0, min(self.room_bytes, self._max_lookup_bytes - self._lookup_bytes))

    def lease_lookup(self, attachment: Attachment, slots: list[PinnedSlot]) -> int:
        """Like `lease`, for blocks found by a lookup, which have their own limit. 0 also if there
        are no slots."""
        nbytes = sum(slot.nbytes for slot in slots)
        if not slots or attachment.is_gone or nbytes > self.lookup_room_bytes:
            self._memory.let_go(slots)
            return 0
        return self._open(attachment, Lease(slots, nbytes, is_from_lookup=True))

    def _open(self, attachment: Attachment, lease: Lease) -> int:
        lease_id = next(self._ids)
        attachment.leases[lease_id] = lease
        self._bytes += lease.nbytes
        self._lookup_bytes += lease.nbytes if lease.is_from_lookup else 0
        self._count += len(lease.slots)
        return lease_id

    def release(self, attachment: Attachment, lease_ids: Sequence[int]) -> int:
        """Ends leases and returns how many; unsealed reservations are dropped."""
        ended = [
            lease
            for lease_id in lease_ids
            if (lease := attachment.leases.pop(lease_id, None)) is not None
        ]
        self._bytes -= sum(lease.nbytes for lease in ended)
        self._lookup_bytes -= sum(lease.nbytes for lease in ended if lease.is_from_lookup)
        self._count -= sum(len(lease.slots) for lease in ended)
        for lease in ended:
            if lease.is_reservation:
                self._memory.abort(lease.slots[0])
            else:
                self._memory.let_go(lease.slots)
        self._notify_if_last_released(attachment)
        return len(ended)

    def take_reserved(self, attachment: Attachment, lease_id: int) -> PinnedSlot | None:
        """Ends a reservation and returns its slot; None if it is not one."""
        lease = attachment.leases.get(lease_id)
        if lease is None or not lease.is_reservation:
            return None
        del attachment.leases[lease_id]
        (slot,) = lease.slots
        self._bytes -= slot.nbytes
        self._count -= 1
        self._notify_if_last_released(attachment)
        return slot

    def _notify_if_last_released(self, attachment: Attachment) -> None:
        if attachment.is_disconnected and not attachment.is_dead and not attachment.leases:
            self.on_last_lease_released(attachment)

    def end_if_gone(self, attachment: Attachment) -> bool:
        """Ends all leases of a process that is dead and disconnected."""
        if not attachment.is_gone:
            return False
        self._attachments.pop(attachment.token, None)
        count = self.release(attachment, list(attachment.leases))
        os.close(attachment.pidfd)
        logger.info(
            "process %d (%r) has ended; released %d leases",
            attachment.pid,
            attachment.client,
            count,
        )
        return True
