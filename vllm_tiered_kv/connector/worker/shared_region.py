"""Memory of daemons on this host, pinned for the device: blocks move without a socket.

`LocalDaemon` attaches to the memory in the background, and to that of a daemon that comes back;
here it is pinned, in the background too. Blocks of the CPU tier are written there as soon as it is
mapped, and steps load leased blocks from the part that is pinned. Until all of it is, and when a
daemon is gone, other loads take the network path.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.transfer import RemoteTransfer, UInt64Array, int64_array
from vllm_tiered_kv.device.copier import Channel, PinnedBlocks
from vllm_tiered_kv.device.pinning import BackgroundPinner, Pin, Unpin
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.shared_memory import BlockLease, SharedMemory
from vllm_tiered_kv.remote.shm_copy import read_block, write_items
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_PIECE_BYTES = 128 << 20
_KEPT_S = 15.0
"""How long the memory of a daemon that has gone stays mapped: far longer than `MAX_LEASE_AGE_S`,
and than a step that was planned meanwhile takes to begin, unless the step before it takes that
long."""
_STEPS_AHEAD = 16
"""More steps than are ever planned before the first of them has said what is mapped."""


@dataclass(frozen=True)
class Resident:
    """Leased blocks of a daemon, to be copied from where they lie without asking anybody.

    The memory stays mapped and pinned until `leave`, to be called when the copies have ended.
    """

    blocks: PinnedBlocks
    _generations: UInt64Array
    _memory: SharedMemory

    @property
    def are_intact(self) -> bool:
        """Whether what was copied is those blocks. To be asked after the copy, before `leave`.

        Always, unless the process that holds the lease has died or released it too early.
        """
        return self._memory.arena.have_generations(self.blocks.offsets, self._generations)

    def leave(self) -> None:
        """Once."""
        self._memory.leave()


class SharedRegion:
    """One daemon's memory, pinned for the device from its beginning on. From `SharedRegions`; the
    threads of loads and writes call it."""

    def __init__(self, memory: SharedMemory, pin: Pin | None, unpin: Unpin | None) -> None:
        self.memory = memory
        self._pinner = BackgroundPinner(
            memory.arena.region, pin, unpin, "blocks go through a socket instead"
        )
        self.departed_at: float | None = None  # when the daemon was found to be gone
        self.departed_step = 0

    @property
    def is_pinned(self) -> bool:
        return self.pinned_bytes == self.memory.arena.region.nbytes

    @property
    def pinned_bytes(self) -> int:
        """How much of it is, from its beginning on."""
        return self._pinner.ready_bytes

    def load(
        self,
        channel: Channel,
        piece: RemoteTransfer,
        keys: Sequence[StoreKey],
        nbytes: int,
        deadline: float,
        end: Callable[[str | None], None],
    ) -> None:
        """Copies blocks to the device from where they lie.

        `end` is told when the copy has ended, with the reason if it is of no use. The lease is
        released after that: nobody has to wait for it.
        """
        if not self.memory.enter():
            end("the daemon's shared memory went away")
            return
        try:
            lease = self.memory.lease(keys, deadline)
            try:
                try:
                    error = self._copy(channel, piece, lease, nbytes)
                finally:
                    channel.finish()  # also after an error: nothing may read what is released
                end(error)
            finally:
                lease.release()
        finally:
            self.memory.leave()

    def _copy(
        self, channel: Channel, piece: RemoteTransfer, lease: BlockLease, nbytes: int
    ) -> str | None:
        there = sum(length == nbytes for length in lease.lengths)
        if there < len(piece) or not lease.is_complete:
            return f"{len(piece) - there} of {len(piece)} blocks are no longer there"
        region = self.memory.arena.region
        channel.scatter(piece.group_id, piece.block_ids, region, int64_array(lease.offsets))
        channel.finish()
        if not self.memory.are_still_valid(lease):
            return "blocks changed while they were copied"
        return None

    def read(self, key: StoreKey, into: memoryview, deadline: float) -> bool:
        """Copies one block to ordinary memory; False when it is not to be had."""
        if not self.memory.enter():
            return False
        try:
            return read_block(self.memory, key, into, deadline)
        finally:
            self.memory.leave()

    def store(self, items: Sequence[PutItem], deadline: float) -> list[PutResult] | None:
        """Copies blocks into the daemon's memory; None when it is not to be had."""
        if not self.memory.enter():
            return None
        try:
            return write_items(self.memory, items, deadline)
        finally:
            self.memory.leave()

    def unpin(self) -> None:
        self._pinner.close()


class SharedRegions:
    """The regions of all daemons of this host, by address. All calls from any thread."""

    def __init__(
        self, stores: Mapping[str, RemoteStore], pin: Pin | None, unpin: Unpin | None
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._regions: dict[SharedMemory, SharedRegion] = {}  # of all memory that is mapped
        self._steps = 0
        self._is_stepping = False
        self._stepped_at = -math.inf
        self._daemons = {
            address: LocalDaemon(store, partial(self._pin_memory, address), self._may_be_planned)
            for address, store in stores.items()
            if address.startswith("ipc://")
        }
        for daemon in self._daemons.values():
            daemon.keep_attached()

    def step_begins(self) -> None:
        self._steps += 1
        self._is_stepping = True

    def step_ends(self) -> None:
        self._stepped_at = time.monotonic()
        self._is_stepping = False

    def attached(self, address: str) -> SharedRegion | None:
        """The daemon's memory if it is mapped. The CPU can copy to and from it; a device waits
        until it is pinned, which takes a while for tens of gigabytes."""
        daemon = self._daemons.get(address)
        memory = None if daemon is None else daemon.current
        return None if memory is None else self._regions.get(memory)

    def of(self, address: str) -> SharedRegion | None:
        """The daemon's memory if blocks can be moved between it and the device right now."""
        region = self.attached(address)
        return region if region is not None and region.is_pinned else None

    def resident(self, transfer: RemoteTransfer, rank: RankTag, nbytes: int) -> Resident | None:
        """The blocks of a transfer, of `nbytes` each, if they are leased and this process can copy
        them right now, or None. Also of a daemon that has died since: nobody writes its memory any
        more."""
        daemon = self._daemons.get(transfer.address)
        if transfer.leased is None or daemon is None:
            return None
        memory = daemon.mapped(transfer.leased.arena_id)
        region = None if memory is None else self._regions.get(memory)
        places = transfer.leased.of_rank(rank)
        if region is None or places is None:
            return None
        offsets, generations = places
        end = int(offsets.max(initial=-nbytes)) + nbytes
        if end > region.pinned_bytes or not region.memory.enter():
            return None
        blocks = PinnedBlocks(
            transfer.group_id, transfer.block_ids, region.memory.arena.region, offsets
        )
        return Resident(blocks, generations, region.memory)

    @property
    def ready_arenas(self) -> dict[bytes, int]:
        """Memories from which leased blocks can be copied right now: so many bytes of each, from
        its beginning on."""
        regions = [self.attached(address) for address in self._daemons]
        return {r.memory.arena_id: r.pinned_bytes for r in regions if r is not None}

    def covers(self, address: str) -> bool:
        return self.of(address) is not None

    def piece_bytes(self, address: str) -> int | None:
        """How much of a load to lease at a time; None where nothing can be leased.

        In pieces the first one is copied while the next is asked for, and no load needs more than
        a daemon leases to one process.
        """
        region = self.of(address)
        if region is None:
            return None
        return min(_PIECE_BYTES, region.memory.arena.capacity_bytes // 16)

    def close(self) -> None:
        """Memory that a copy still reads is unpinned and unmapped when that has ended."""
        for daemon in self._daemons.values():
            daemon.close()

    def _pin_memory(self, address: str, memory: SharedMemory) -> bool:
        try:
            region = SharedRegion(memory, self._pin, self._unpin)
        except CudaError as error:
            logger.warning("memory of %s cannot be used by this GPU: %s", address, error)
            return False

        def unpin() -> None:
            region.unpin()
            self._regions.pop(memory, None)

        self._regions[memory] = region
        memory.on_unmap = unpin
        logger.info(
            "attached to %s of memory of %s", format_size(memory.arena.capacity_bytes), address
        )
        return True

    def _may_be_planned(self, memory: SharedMemory) -> bool:
        """Whether a step that was planned while the daemon was there may still read its memory."""
        region = self._regions.get(memory)
        if region is None:
            return False
        now = time.monotonic()
        if region.departed_at is None:
            region.departed_at, region.departed_step = now, self._steps
        if now <= region.departed_at + _KEPT_S:
            return True
        # A step that takes long, as one that compiles, may be followed by one that was planned when
        # the daemon was there.
        is_idle = not self._is_stepping and now > self._stepped_at + _KEPT_S
        return not is_idle and self._steps < region.departed_step + _STEPS_AHEAD
