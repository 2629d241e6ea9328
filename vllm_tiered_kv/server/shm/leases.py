"""Slots that attached processes use directly: leased for reading, or reserved for writing.

A lease ends when the process releases it or is dead, never by time: a stopped process may have
copies queued that still read or write the slot. All blocks leased by one request share a lease,
because a prompt has hundreds of blocks; each reservation has a lease of its own.

So a process that is stopped or hangs keeps what it holds. Each process may therefore use at most
two thirds of what the others leave of the limit: one that is stopped leaves a third of it, two a
ninth. Processes that hold leases and are silent are named in the log and in `status`.

A block leased with a lookup may wait a long time until its request is scheduled. Lookup leases
therefore have a smaller limit of their own, so that there is always room for leases that are about
to be copied.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """Slots that one request leased, or one reserved slot."""

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
    nbytes: int = 0  # of all leases
    lookup_nbytes: int = 0  # of those from lookups
    last_seen: float = field(default_factory=time.monotonic)  # its last request
    is_named_silent: bool = False  # in the log, since its last request
    is_disconnected: bool = False
    is_dead: bool = False

    @property
    def held(self) -> str:
        """What it holds, for people. A client's name may contain line breaks."""
        return f"process {self.pid} ({self.client!r}) holds leases of {self.nbytes} bytes"

    def was_seen(self) -> None:
        """Must be called for every request of the process."""
        self.last_seen = time.monotonic()
        if self.is_named_silent:
            self.is_named_silent = False
            logger.warning("process %d (%r) sends again", self.pid, self.client)

    @property
    def is_gone(self) -> bool:
        """Neither the process, nor one that inherited its connection, can access the memory."""
        return self.is_disconnected and self.is_dead


class Leases:
    """All leases of attached processes, and their limits. Used on the reactor's thread only."""

    def __init__(
        self,
        memory: MemoryStore,
        limits: ClientLimits,
        stall_s: float,
        on_last_lease_released: Callable[[Attachment], None],
    ) -> None:
        """A process that holds leases counts as silent after `stall_s` without a request.
        `on_last_lease_released` is called when one that has disconnected holds none any more."""
        self._memory = memory
        self._on_last_lease_released = on_last_lease_released
        self._stall_s = stall_s
        self._max_bytes = limits.leases
        self._max_lookup_bytes = limits.lookup_leases
        self._lookup_bytes = 0
        self._bytes = 0
        self._count = 0  # leased slots; other threads read this and the bytes
        self._ids = itertools.count(1)
        self._attachments: dict[bytes, Attachment] = {}

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

    def room_bytes(self, attachment: Attachment) -> int:
        """How much more this process may lease."""
        return _share_left(self._max_bytes, self._bytes, attachment.nbytes)

    def reserve(self, attachment: Attachment, slot: PinnedSlot) -> int | None:
        """Leases a reserved slot; returns the lease id. None, with the slot freed, if the lease
        limit is reached."""
        if attachment.is_gone or slot.nbytes > self.room_bytes(attachment):
            self._memory.abort(slot)
            return None
        return self._open(attachment, Lease([slot], slot.nbytes, is_reservation=True))

    def lease(
        self, attachment: Attachment, slots: Sequence[PinnedSlot], lease_id: int | None
    ) -> int:
        """Adds blocks to this lease, or to a new one; returns the lease id. 0, with all blocks
        released, if the lease limit is reached."""
        nbytes = sum(slot.nbytes for slot in slots)
        if attachment.is_gone or nbytes > self.room_bytes(attachment):
            self._memory.let_go(slots)
            return 0
        lease = attachment.leases.get(lease_id) if lease_id is not None else None
        if lease is None or lease_id is None:
            return self._open(attachment, Lease(list(slots), nbytes))
        lease.slots.extend(slots)
        lease.nbytes += nbytes
        attachment.nbytes += nbytes
        self._bytes += nbytes
        self._count += len(slots)
        return lease_id

    def lookup_room_bytes(self, attachment: Attachment) -> int:
        """How much more this process may lease with lookups."""
        share = _share_left(self._max_lookup_bytes, self._lookup_bytes, attachment.lookup_nbytes)
        return min(self.room_bytes(attachment), share)

    def lease_lookup(self, attachment: Attachment, slots: list[PinnedSlot]) -> int:
        """Like `lease`, for blocks found by a lookup, which have their own limit. 0 also if there
        are no slots."""
        nbytes = sum(slot.nbytes for slot in slots)
        if not slots or attachment.is_gone or nbytes > self.lookup_room_bytes(attachment):
            self._memory.let_go(slots)
            return 0
        return self._open(attachment, Lease(slots, nbytes, is_from_lookup=True))

    def _open(self, attachment: Attachment, lease: Lease) -> int:
        lease_id = next(self._ids)
        attachment.leases[lease_id] = lease
        self._account(attachment, lease, 1)
        return lease_id

    def _account(self, attachment: Attachment, lease: Lease, sign: int) -> None:
        """Adds (1) or subtracts (-1) a whole lease."""
        nbytes = sign * lease.nbytes
        attachment.nbytes += nbytes
        self._bytes += nbytes
        if lease.is_from_lookup:
            attachment.lookup_nbytes += nbytes
            self._lookup_bytes += nbytes
        self._count += sign * len(lease.slots)

    def release(self, attachment: Attachment, lease_ids: Sequence[int]) -> int:
        """Ends leases and returns how many; unsealed reservations are dropped."""
        ended = [
            lease
            for lease_id in lease_ids
            if (lease := attachment.leases.pop(lease_id, None)) is not None
        ]
        for lease in ended:
            self._account(attachment, lease, -1)
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
        self._account(attachment, lease, -1)
        (slot,) = lease.slots
        self._notify_if_last_released(attachment)
        return slot

    def _notify_if_last_released(self, attachment: Attachment) -> None:
        if attachment.is_disconnected and not attachment.is_dead and not attachment.leases:
            self._on_last_lease_released(attachment)

    def end_if_gone(self, attachment: Attachment) -> None:
        """Ends all leases of a process that is dead and disconnected."""
        if not attachment.is_gone:
            return
        self._attachments.pop(attachment.token, None)
        count = self.release(attachment, list(attachment.leases))
        os.close(attachment.pidfd)
        logger.info(
            "process %d (%r) has ended; released %d leases",
            attachment.pid,
            attachment.client,
            count,
        )

    # ---- silent processes -----------------------------------------------------------------------

    def silent(self) -> list[Attachment]:
        """Processes that hold leases and have sent nothing for the stall timeout, those with the
        most first. From any thread."""
        limit = time.monotonic() - self._stall_s
        attached = list(self._attachments.values())
        silent = [one for one in attached if one.nbytes and one.last_seen < limit]
        return sorted(silent, key=lambda one: -one.nbytes)

    def log_silent(self) -> None:
        """Logs each process once that has become silent."""
        for attachment in self.silent():
            if not attachment.is_named_silent:
                attachment.is_named_silent = True
                logger.warning(
                    "%s and has sent nothing for %g s: if it is stopped or hangs, continue or kill "
                    "it; its memory cannot be reused before",
                    attachment.held,
                    self._stall_s,
                )


def _share_left(limit: int, used: int, own: int) -> int:
    """How much more may be added to `own` so that it stays within two thirds of what the others
    leave of the limit; `used` includes `own`."""
    return max(0, (limit - (used - own)) * 2 // 3 - own)
