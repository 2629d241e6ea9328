"""Shared memory of daemons on this host, pinned for the device: blocks move without a socket.

`LocalDaemon` maps the memory in the background, also when a daemon restarts; this module pins it,
in the background too. Puts write into the memory as soon as it is mapped, and step loads read
leased blocks from the part that is pinned. Other loads use the socket until all of it is pinned,
and when the daemon is gone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.transfer import RemoteTransfer, UInt64Array, int64_array
from vllm_tiered_kv.device.copier import Channel, PinnedBlocks
from vllm_tiered_kv.device.pinning import BackgroundPinner, Pin, Unpin
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.block_server import BlockServer, is_local
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.shared_memory import BlockLease, SharedMemory
from vllm_tiered_kv.remote.shm_copy import read_block, write_items

logger = logging.getLogger(__name__)

_PIECE_BYTES = 128 << 20
_KEPT_S = 15.0
"""How long the memory of a dead daemon stays mapped at least: far longer than MAX_LEASE_AGE_S plus
the time until a planned step starts, unless the step before it takes that long."""
_STEPS_AHEAD = 16
"""More steps than vLLM ever plans before the first of them reports which memory is mapped."""


@dataclass(frozen=True)
class Resident:
    """Leased blocks in a daemon's memory, ready to be copied without a request to the daemon.

    `SharedRegions.resident` makes it. The memory stays mapped and pinned until `leave`, which the
    caller calls when the copies have ended.
    """

    blocks: tuple[PinnedBlocks, ...]  # one entry per shard
    _generations: tuple[UInt64Array, ...]
    _memory: SharedMemory

    @property
    def are_intact(self) -> bool:
        """Whether the slots still hold the leased blocks. Read it after the copy, before `leave`.

        It is False only if the holder of the lease died or released it too early.
        """
        return all(
            self._memory.arena.have_generations(part.offsets, generations)
            for part, generations in zip(self.blocks, self._generations, strict=True)
        )

    def leave(self) -> None:
        """Lets the memory be unmapped. Call it exactly once."""
        self._memory.leave()


class SharedRegion:
    """One daemon's memory, pinned for the device from its start to its end. `SharedRegions` makes
    it; the threads of loads and puts call it."""

    def __init__(self, memory: SharedMemory, pin: Pin | None, unpin: Unpin | None) -> None:
        self.memory = memory
        self._pinner = BackgroundPinner(
            memory.arena.region, pin, unpin, "blocks of this daemon use the socket instead"
        )
        self._departure: tuple[float, int] | None = None

    def departure(self, step: int) -> tuple[float, int]:
        """The time and the step at which this process noticed that the daemon is gone. The first
        call notices it, in the given step."""
        self._departure = self._departure or (time.monotonic(), step)
        return self._departure

    @property
    def is_pinned(self) -> bool:
        return self.pinned_bytes == self.memory.arena.region.nbytes

    @property
    def pinned_bytes(self) -> int:
        """How many bytes are pinned, from the start of the memory."""
        return self._pinner.ready_bytes

    def load(
        self,
        channel: Channel,
        piece: RemoteTransfer,
        shard: Shard,
        deadline: float,
        end: Callable[[str | None], None],
    ) -> None:
        """Leases blocks and copies them to the device.

        Calls `end` when the copy has ended, with the reason if it failed. The lease is released
        after that, so that the request does not wait for the release.
        """
        if not self.memory.enter():
            end("the daemon's shared memory went away")
            return
        try:
            lease = self.memory.lease(shard.keys(piece.keys), deadline)
            try:
                try:
                    error = self._copy(channel, piece, lease, shard)
                finally:
                    channel.finish()  # also after an error: no copy may read a released block
                end(error)
            finally:
                lease.release()
        finally:
            self.memory.leave()

    def _copy(
        self, channel: Channel, piece: RemoteTransfer, lease: BlockLease, shard: Shard
    ) -> str | None:
        nbytes, wanted = shard.shard_bytes(piece.group_id), len(piece) * shard.count
        there = sum(length == nbytes for length in lease.lengths)
        if there < wanted or not lease.is_complete:
            return f"{wanted - there} of {wanted} blocks are no longer there"
        region = self.memory.arena.region
        offsets = int64_array(lease.offsets)
        for number, layout in enumerate(shard.layouts(piece.group_id)):
            of_shard = np.ascontiguousarray(offsets[number :: shard.count])
            channel.scatter(layout, piece.block_ids, region, of_shard)
        channel.finish()
        if not self.memory.are_still_valid(lease):
            return "blocks changed while they were copied"
        return None

    def read(self, key: StoreKey, into: memoryview, deadline: float) -> bool:
        """Copies one block into the buffer; False if the daemon does not have it."""
        if not self.memory.enter():
            return False
        try:
            return read_block(self.memory, key, into, deadline)
        finally:
            self.memory.leave()

    def store(self, items: Sequence[PutItem], deadline: float) -> list[PutResult] | None:
        """Copies blocks into the daemon's memory; None if that memory cannot be used."""
        if not self.memory.enter():
            return None
        try:
            return write_items(self.memory, items, deadline)
        finally:
            self.memory.leave()

    def unpin(self) -> None:
        self._pinner.close()


class SharedRegions:
    """The shared memory of all daemons on this host, by address. `RemoteIO` makes it; any thread
    may call it."""

    def __init__(
        self, stores: Mapping[str, BlockServer], pin: Pin | None, unpin: Unpin | None
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._regions: dict[SharedMemory, SharedRegion] = {}  # all mapped memory, in use or not
        self._steps = 0
        self._is_stepping = False
        self._stepped_at = -math.inf
        self._daemons = {
            address: LocalDaemon(
                store, partial(self._pin_memory, address), self._unpin_memory, self._may_be_planned
            )
            for address, store in stores.items()
            if is_local(store)
        }
        for daemon in self._daemons.values():
            daemon.keep_attached()

    def step_begins(self) -> None:
        """Notes that a step runs; it may take long, and its loads may read shared memory."""
        self._steps += 1
        self._is_stepping = True

    def step_ends(self) -> None:
        self._stepped_at = time.monotonic()
        self._is_stepping = False

    def attached(self, address: str) -> SharedRegion | None:
        """Returns the daemon's memory if it is mapped. The CPU can copy to and from it at once; a
        device needs it pinned, which takes a while for tens of gigabytes."""
        daemon = self._daemons.get(address)
        memory = None if daemon is None else daemon.current
        return None if memory is None else self._regions.get(memory)

    def of(self, address: str) -> SharedRegion | None:
        """Returns the daemon's memory if it is mapped and fully pinned."""
        region = self.attached(address)
        return region if region is not None and region.is_pinned else None

    def resident(self, transfer: RemoteTransfer, shard: Shard) -> Resident | None:
        """Returns the blocks of a transfer if they are leased and this process has them mapped and
        pinned, else None. A daemon may have died since: then nothing writes its memory any more."""
        daemon = self._daemons.get(transfer.address)
        if transfer.leased is None or daemon is None:
            return None
        memory = daemon.mapped(transfer.leased.arena_id)
        region = None if memory is None else self._regions.get(memory)
        if region is None:
            return None
        nbytes = shard.shard_bytes(transfer.group_id)
        blocks, generations = [], []
        for rank, layout in zip(shard.ranks, shard.layouts(transfer.group_id), strict=True):
            places = transfer.leased.of_rank(rank)
            if places is None or int(places[0].max(initial=-nbytes)) + nbytes > region.pinned_bytes:
                return None
            pinned = region.memory.arena.region
            blocks.append(PinnedBlocks(layout, transfer.block_ids, pinned, places[0]))
            generations.append(places[1])
        if not region.memory.enter():
            return None
        return Resident(tuple(blocks), tuple(generations), region.memory)

    @property
    def ready_arenas(self) -> dict[bytes, int]:
        """How many bytes of each daemon's memory are pinned, by arena id, from its start. A daemon
        may die at any time after that; `resident` then returns None."""
        regions = [self.attached(address) for address in self._daemons]
        return {r.memory.arena_id: r.pinned_bytes for r in regions if r is not None}

    def piece_bytes(self, address: str) -> int | None:
        """Returns how many bytes of a load to lease at a time; None if nothing can be leased.

        With pieces, one is copied while the next is being leased, and no load exceeds what a
        daemon leases to one process.
        """
        region = self.of(address)
        if region is None:
            return None
        return min(_PIECE_BYTES, region.memory.arena.capacity_bytes // 16)

    def close(self) -> None:
        """Detaches from all daemons. Memory that a copy still reads is unmapped when it ends."""
        for daemon in self._daemons.values():
            daemon.close()

    def _pin_memory(self, address: str, memory: SharedMemory) -> bool:
        try:
            region = SharedRegion(memory, self._pin, self._unpin)
        except CudaError as error:
            logger.warning(
                "cannot pin the memory of daemon %s (%s); its blocks use the socket", address, error
            )
            return False
        self._regions[memory] = region
        logger.info(
            "attached to %s of shared memory of daemon %s",
            format_size(memory.arena.capacity_bytes),
            address,
        )
        return True

    def _unpin_memory(self, memory: SharedMemory) -> None:
        region = self._regions.get(memory)  # not if pinning failed
        if region is not None:
            region.unpin()
            self._regions.pop(memory, None)

    def _may_be_planned(self, memory: SharedMemory) -> bool:
        """Whether a step that was planned before the daemon died may still read its memory."""
        region = self._regions.get(memory)
        if region is None:
            return False
        departed_at, departed_step = region.departure(self._steps)
        now = time.monotonic()
        if now <= departed_at + _KEPT_S:
            return True
        # A long step, such as one that compiles, may be followed by one that was planned before the
        # daemon died.
        is_idle = not self._is_stepping and now > self._stepped_at + _KEPT_S
        return not is_idle and self._steps < departed_step + _STEPS_AHEAD
