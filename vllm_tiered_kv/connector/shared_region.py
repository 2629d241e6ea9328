"""Memory of daemons on this host, made fit for the device: blocks move without a socket.

Attaching and pinning happen in a background thread. Blocks of the CPU tier are written there as
soon as it is mapped, and steps load what was lent from the part that is pinned; until all of it is,
and when a daemon is gone, other loads take the network path. A
daemon that comes back is attached to anew. Memory in use by a copy is kept mapped until that copy
has ended, whatever becomes of its daemon.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.transfer import RemoteTransfer, UInt64Array, int64_array
from vllm_tiered_kv.device.copier import Channel, PinnedBlocks
from vllm_tiered_kv.device.pinning import BackgroundPinner, Pin, Unpin
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native.bytes_copy import copy_and_hash, copy_bytes
from vllm_tiered_kv.option_values import format_size
from vllm_tiered_kv.remote.in_place import write_in_place
from vllm_tiered_kv.remote.shared_memory import Lent, Reservation, SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_PIECE_BYTES = 128 << 20
LENT_FOR_SURE_S = 2.0
"""How old the word of a daemon may be for a step to rely on its memory."""
_KEPT_S = 15.0
"""How long the memory of a daemon that has gone stays mapped: far longer than that, and than a
step that was planned meanwhile takes to begin. Unless the step before it takes that long."""
_STEPS_AHEAD = 16
"""More steps than are ever planned before the first of them has said what is mapped."""


@dataclass(frozen=True)
class Resident:
    """Blocks that a daemon has lent, to be copied from where they lie without asking anybody.

    The memory stays mapped and pinned until `leave`, to be called when the copies have ended.
    """

    blocks: PinnedBlocks
    _generations: UInt64Array
    _region: SharedRegion

    @property
    def are_intact(self) -> bool:
        """Whether what was copied is those blocks. To be asked after the copy, before `leave`.

        Always, unless the process that borrowed them has died or given them back too early.
        """
        return self._region.memory.arena.have_generations(self.blocks.offsets, self._generations)

    def leave(self) -> None:
        """Once."""
        self._region.leave()


class SharedRegion:
    """One daemon's arena, attached and pinned."""

    def __init__(self, memory: SharedMemory, pin: Pin | None, unpin: Unpin | None) -> None:
        self.memory = memory
        self._pinner = BackgroundPinner(
            memory.arena.region, pin, unpin, "blocks go through a socket instead"
        )
        self._users = 0
        self.departed_at = 0.0
        self.departed_step = 0
        self._retired = False
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        return self.memory.alive and self.is_pinned

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

        `end` is told when the copy has ended, with the reason if it is of no use. The blocks are
        given back after that: nobody has to wait for it.
        """
        if not self.enter():
            end("the daemon's shared memory went away")
            return
        try:
            lent = self.memory.lend(keys, deadline)
            try:
                try:
                    error = self._copy(channel, piece, lent, nbytes)
                finally:
                    channel.finish()  # also after an error: nothing may read what is given back
                end(error)
            finally:
                lent.release()
        finally:
            self.leave()

    def _copy(self, channel: Channel, piece: RemoteTransfer, lent: Lent, nbytes: int) -> str | None:
        there = sum(length == nbytes for length in lent.lengths)
        if there < len(piece) or not lent.is_complete:
            return f"{len(piece) - there} of {len(piece)} blocks are no longer there"
        region = self.memory.arena.region
        channel.scatter(piece.group_id, piece.block_ids, region, int64_array(lent.offsets))
        channel.finish()
        if not self.memory.are_still_valid(lent):
            return "blocks changed while they were copied"
        return None

    def read(self, key: StoreKey, into: memoryview, deadline: float) -> bool:
        """Copies one block to ordinary memory; False when it is not to be had."""
        if not self.enter():
            return False
        try:
            lent = self.memory.lend([key], deadline)
            try:
                if not lent.is_complete or list(lent.lengths) != [into.nbytes]:
                    return False
                copy_bytes(into, self.memory.arena.view(lent.offsets[0], into.nbytes))
                return self.memory.are_still_valid(lent)
            finally:
                lent.release()
        finally:
            self.leave()

    def store(self, items: Sequence[PutItem], deadline: float) -> list[PutResult] | None:
        """Copies blocks into the daemon's memory; None when it is not to be had."""
        if not self.enter():
            return None
        try:
            return write_in_place(
                self.memory,
                [(item.key, item.parent, item.payload.nbytes) for item in items],
                lambda places: self._fill(items, places),
                deadline,
            )
        finally:
            self.leave()

    def _fill(self, items: Sequence[PutItem], places: Mapping[int, Reservation]) -> None:
        # One call for all of them: to get the interpreter back after each block takes longer than
        # its copy while an engine is busy.
        views = [self.memory.arena.view(place.offset, place.nbytes) for place in places.values()]
        copy_and_hash(views, [items[index].payload for index in places])

    def retire(self) -> None:
        """No new copies; the memory is given up when the last one has ended."""
        with self._lock:
            already, self._retired = self._retired, True
            idle = not self._users
        if idle and not already:
            self._close()

    def enter(self) -> bool:
        """Keeps the memory mapped until `leave`; False if it is being given up."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self._close()

    def _close(self) -> None:
        self._pinner.close()
        self.memory.close()


class SharedRegions:
    """The regions of all daemons that can be attached to, by address."""

    def __init__(
        self, stores: Mapping[str, RemoteStore], pin: Pin | None, unpin: Unpin | None
    ) -> None:
        self._stores = {a: s for a, s in stores.items() if a.startswith("ipc://")}
        self._pin, self._unpin = pin, unpin
        self._regions: dict[str, SharedRegion] = {}
        self._departed: dict[str, SharedRegion] = {}  # of daemons that have gone
        self._steps = 0
        self._is_stepping = False
        self._stepped_at = -math.inf
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._stores:
            self._thread = threading.Thread(
                target=self._keep_attached, name="tiered-kv-attach", daemon=True
            )
            self._thread.start()

    def step_begins(self) -> None:
        self._steps += 1
        self._is_stepping = True

    def step_ends(self) -> None:
        self._stepped_at = time.monotonic()
        self._is_stepping = False

    def attached(self, address: str) -> SharedRegion | None:
        """The daemon's memory if it is mapped. The CPU can copy to and from it; a device waits
        until it is pinned, which takes a while for tens of gigabytes."""
        region = self._regions.get(address)
        return region if region is not None and region.memory.alive else None

    def of(self, address: str) -> SharedRegion | None:
        """The daemon's memory if blocks can be moved between it and the device right now."""
        region = self._regions.get(address)
        return region if region is not None and region.is_ready else None

    def resident(self, transfer: RemoteTransfer, rank: RankTag, nbytes: int) -> Resident | None:
        """The blocks of a transfer, of `nbytes` each, if they were lent and this process can copy
        them right now, or None. Also of a daemon that has died since: nobody writes its memory any
        more."""
        if transfer.lent is None:
            return None
        region = next(
            (
                region
                for region in (
                    self._regions.get(transfer.address),
                    self._departed.get(transfer.address),
                )
                if region is not None and region.memory.arena_id == transfer.lent.arena_id
            ),
            None,
        )
        places = transfer.lent.of_rank(rank)
        if region is None or places is None:
            return None
        offsets, generations = places
        end = int(offsets.max(initial=-nbytes)) + nbytes
        if end > region.pinned_bytes or not region.enter():
            return None
        blocks = PinnedBlocks(
            transfer.group_id, transfer.block_ids, region.memory.arena.region, offsets
        )
        return Resident(blocks, generations, region)

    @property
    def ready_arenas(self) -> dict[bytes, int]:
        """Memories from which blocks that are lent can be copied right now: so many bytes of each,
        from its beginning on."""
        regions = list(self._regions.values())
        return {r.memory.arena_id: r.pinned_bytes for r in regions if r.memory.alive}

    def covers(self, address: str) -> bool:
        return self.of(address) is not None

    def piece_bytes(self, address: str) -> int | None:
        """How much of a load to borrow at a time; None where nothing can be borrowed.

        In pieces the first one is copied while the next is asked for, and no load needs more than
        a daemon lends to one process.
        """
        region = self.of(address)
        if region is None:
            return None
        return min(_PIECE_BYTES, region.memory.arena.capacity_bytes // 16)

    def close(self) -> None:
        self._stop.set()
        self._retire_all()  # ends what the thread may be waiting for
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._retire_all()
        self._regions, self._departed = {}, {}

    def _retire_all(self) -> None:
        for region in (*self._regions.values(), *self._departed.values()):
            region.retire()

    def _keep_attached(self) -> None:
        while not self._stop.is_set():
            for address, store in self._stores.items():
                try:
                    self._look_after(address, store)
                except Exception:  # a thread that ends would leave all daemons to the socket
                    logger.exception("memory of %s could not be seen to", address)
            self._stop.wait(_RETRY_S)

    def _look_after(self, address: str, store: RemoteStore) -> None:
        region = self._regions.get(address)
        if region is not None and region.memory.alive:
            # What came too late, or could not be given back, must not wait for the next load: of
            # an idle engine there is none.
            region.memory.settle()
            return
        if region is not None:
            # Steps that were planned while it was there may still read from it.
            region.departed_at, region.departed_step = time.monotonic(), self._steps
            self._departed[address] = region
            del self._regions[address]
        self._let_go(address)
        if address not in self._departed:
            # Not two memories of a daemon at a time; until then blocks take the socket.
            self._attach(address, store)

    def _let_go(self, address: str) -> None:
        region = self._departed.get(address)
        now = time.monotonic()
        if region is None or now <= region.departed_at + _KEPT_S:
            return
        # A step that takes long, as one that compiles, may be followed by one that was planned when
        # the daemon was there.
        is_idle = not self._is_stepping and now > self._stepped_at + _KEPT_S
        if is_idle or self._steps >= region.departed_step + _STEPS_AHEAD:
            del self._departed[address]
            region.retire()

    def _attach(self, address: str, store: RemoteStore) -> None:
        memory = store.attach()
        if memory is None:
            return
        try:
            self._regions[address] = SharedRegion(memory, self._pin, self._unpin)
        except CudaError as error:
            logger.warning("memory of %s cannot be used by this GPU: %s", address, error)
            self._stores = {a: s for a, s in self._stores.items() if a != address}
            memory.close()
            return
        logger.info(
            "attached to %s of memory of %s", format_size(memory.arena.capacity_bytes), address
        )
