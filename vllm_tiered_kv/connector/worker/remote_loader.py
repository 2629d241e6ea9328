"""Brings blocks from daemons to the device, in threads beside the model's.

A load is cut into pieces, and several threads work on them: while one piece is on the network,
another is on its way to the GPU. Blocks of a daemon on this host are read where they lie, in shared
memory; others land in pinned memory first. A load is reported when its last piece has ended, so
that nothing is ever written into GPU blocks that vLLM has taken back; when one piece fails, the
rest is not even begun.

A probe fetches blocks in the same way and for nobody, to tell how long a load would take. It
comes behind all loads, and is given up when one comes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker.shared_region import Resident, SharedRegions
from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import Fetched, ProbeJob, RemoteTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import Channel, LoadDone
from vllm_tiered_kv.errors import TieredKVError
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_MIN_PIECE_BYTES = 1 << 20
_LOAD, _REHEARSAL, _END = range(3)  # which pieces come first
_PROBE_S = 0.5  # no further piece of a probe is begun after that
_PROBE_PIECE_S = 2.0  # a daemon that takes longer for a piece hangs


@dataclass(eq=False)
class _Load:
    request_id: str
    deadline: float
    pieces_left: int
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Probed:
    """A probe under way. Threads take its pieces one after the other, and look for loads in
    between."""

    def __init__(self, what: ProbeJob, pieces: Iterable[tuple[BlockKey, ...]]) -> None:
        self.what = what
        self._waiting = deque(pieces)
        self._left = len(self._waiting)
        self._begun_at: float | None = None
        self._nbytes = 0
        self._is_disturbed = False
        self._lock = threading.Lock()

    def disturb(self) -> None:
        """Its time is not its own, or tells nothing."""
        with self._lock:
            self._is_disturbed = True

    def take(self) -> tuple[BlockKey, ...] | None:
        """The keys of a piece to fetch; none of them if it is to be left out; None: no more."""
        with self._lock:
            if not self._waiting:
                return None
            keys = self._waiting.popleft()
            now = time.monotonic()
            self._begun_at = self._begun_at or now
            is_wanted = not self._is_disturbed and now < self._begun_at + _PROBE_S
            return keys if is_wanted else ()

    def end(self, nbytes: int) -> Fetched | None:
        """Of a piece that was taken. What came of it all, with the last one."""
        with self._lock:
            self._nbytes += nbytes
            self._left -= 1
            if self._left:
                return None
            if self._is_disturbed or self._begun_at is None:
                return Fetched()
            return Fetched(self._nbytes, time.monotonic() - self._begun_at)


_Piece = tuple[_Load, RemoteTransfer] | _Probed


class RemoteLoader:
    def __init__(
        self,
        stores: Mapping[str, RemoteStore],
        shard: Shard,
        regions: SharedRegions,
        open_channel: Callable[[], Channel],
        open_landing: Callable[[int], Arena],
        landing_bytes: int,
        threads: int,
        timeout_s: float,
    ) -> None:
        self._stores = stores
        self._shard = shard
        self._regions = regions
        self._open_landing = open_landing
        self._far = [a for a in stores if not a.startswith("ipc://")]
        self._timeout_s = timeout_s
        self._closing = False
        largest = max(map(aligned, shard.block_bytes.values()))
        self._piece_bytes = max(landing_bytes // threads, largest)
        self._pieces: queue.PriorityQueue[tuple[int, int, _Piece | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # pieces of a kind in their order
        self._probing: _Probed | None = None
        self._open_loads: set[_Load] = set()
        self._probed: queue.SimpleQueue[tuple[str, Fetched]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[LoadDone] = queue.SimpleQueue()
        # Made here, on the thread of the model: a device is current there.
        self._channels = [open_channel() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(n, channel), name=f"tiered-kv-fetch-{n}")
            for n, channel in enumerate(self._channels)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def load(self, request_id: str, transfers: Sequence[RemoteTransfer]) -> None:
        """Starts to load. Everything the blocks must wait for has been fenced before."""
        if self._probing is not None:
            self._probing.disturb()
        pieces = [piece for transfer in transfers for piece in self._cut(transfer)]
        load = _Load(request_id, time.monotonic() + self._timeout_s, len(pieces))
        self._open_loads.add(load)
        for piece in pieces:
            self._put(_LOAD, (load, piece))

    def probe(self, probe: ProbeJob) -> None:
        """Starts to fetch blocks for nobody."""
        count = self._blocks_in_piece(probe.group_id, len(probe.keys))
        starts = range(0, len(probe.keys), count)
        run = _Probed(probe, (probe.keys[n : n + count] for n in starts))
        if self._open_loads:
            run.disturb()
        self._probing = run
        # One thread stays free for loads: a daemon that hangs just now may be another's.
        for _ in range(max(1, min(len(starts), len(self._threads) - 1))):
            self._put(_REHEARSAL, run)

    def take_probed(self) -> dict[str, Fetched]:
        """Probes that ended since the last call."""
        ended = {}
        while not self._probed.empty():
            name, fetched = self._probed.get()
            ended[name] = fetched
        return ended

    def poll(self) -> list[LoadDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Ends what is under way; waiting pieces fail. Idempotent."""
        self._closing = True
        for _ in self._threads:
            self._put(_END, None)
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
        self._threads, self._channels = [], []

    def _cut(self, transfer: RemoteTransfer) -> list[RemoteTransfer]:
        resident = self._resident(transfer)
        if resident is not None:
            resident.leave()
            return [transfer]  # nothing has to be asked for: one copy is as fast as several
        nbytes = self._regions.piece_bytes(transfer.address)
        blocks = self._blocks_in_piece(transfer.group_id, len(transfer), nbytes)
        return [transfer.part(start, start + blocks) for start in range(0, len(transfer), blocks)]

    def _resident(self, piece: RemoteTransfer) -> Resident | None:
        nbytes = self._shard.block_bytes[piece.group_id]
        return self._regions.resident(piece, self._shard.rank, nbytes)

    def _blocks_in_piece(self, group_id: int, total: int, nbytes: int | None = None) -> int:
        block = aligned(self._shard.block_bytes[group_id])
        if nbytes is None:
            # A load that is smaller than its pieces could be still uses all connections.
            share = total * block // max(1, len(self._threads))
            nbytes = min(self._piece_bytes, max(share, _MIN_PIECE_BYTES))
        return max(1, nbytes // block)

    def _put(self, kind: int, piece: _Piece | None) -> None:
        self._pieces.put((kind, next(self._numbers), piece))

    def _work(self, number: int, channel: Channel) -> None:
        landing = self._prepare(number)
        while (item := self._pieces.get()[2]) is not None:
            if isinstance(item, _Probed):
                landing = self._probe_piece(item, landing)
                continue
            load, piece = item
            ended = False

            def end(error: str | None, load: _Load = load) -> None:
                nonlocal ended
                ended = True
                self._end_piece(load, error)

            try:
                if load.error is not None or self._closing:
                    end(load.error or "the engine is stopping")
                elif time.monotonic() >= load.deadline:
                    end("it took longer than remote_load_timeout")
                elif (resident := self._resident(piece)) is not None:
                    self._copy(channel, resident, end)
                elif (region := self._regions.of(piece.address)) is not None:
                    keys = self._shard.keys(piece.keys)
                    nbytes = self._shard.block_bytes[piece.group_id]
                    region.load(channel, piece, keys, nbytes, load.deadline, end)
                else:
                    landing = landing or self._open_landing(self._piece_bytes)
                    error = self._fetch(channel, landing, piece, load.deadline)
                    channel.finish()
                    end(error)
            except Exception as failure:  # whatever it was, the request must hear of it
                logger.exception("a load from %s failed", piece.address)
                with contextlib.suppress(TieredKVError):  # of a GPU that has failed altogether
                    channel.finish()
                if not ended:
                    end(str(failure) or type(failure).__name__)
        if landing is not None:
            landing.close()

    def _prepare(self, number: int) -> Arena | None:
        """Does at the start what the first load would wait for; memory to land in, if any."""
        try:
            for address in self._far[number :: len(self._channels)]:
                if self._closing or not self._pieces.empty():
                    break  # there is something better to do
                self._stores[address].greet(len(self._channels))
            return self._open_landing(self._piece_bytes) if self._far else None
        except Exception:  # without this thread loads would never be answered
            logger.exception("loads could not be prepared; the first ones will take longer")
            return None

    def _copy(
        self, channel: Channel, resident: Resident, end: Callable[[str | None], None]
    ) -> None:
        blocks = resident.blocks
        try:
            try:
                channel.scatter(blocks.group_id, blocks.block_ids, blocks.region, blocks.offsets)
            finally:
                channel.finish()  # also after an error: nothing may read what is given up
            end(None if resident.are_intact else "blocks changed while they were copied")
        finally:
            resident.leave()

    def _fetch(
        self, channel: Channel, landing: Arena, piece: RemoteTransfer, deadline: float
    ) -> str | None:
        """Brings a piece over the network; the reason if it could not be had."""
        if len(piece) * aligned(self._shard.block_bytes[piece.group_id]) > landing.nbytes:
            return "the daemon's shared memory went away"  # it was not cut to land here
        offsets, found = self._bring(landing, piece.group_id, piece.address, piece.keys, deadline)
        if not all(found):
            return f"{found.count(False)} of {len(found)} blocks are no longer there"
        channel.scatter(piece.group_id, piece.block_ids, landing.region, int64_array(offsets))
        return None

    def _bring(
        self,
        landing: Arena,
        group_id: int,
        address: str,
        keys: Sequence[BlockKey],
        deadline: float,
    ) -> tuple[list[int], list[bool]]:
        """Fetches blocks: where each is to land, and whether it has."""
        nbytes = self._shard.block_bytes[group_id]
        offsets = [n * aligned(nbytes) for n in range(len(keys))]
        buffers = [memoryview(landing.bytes_at(offset, nbytes).data) for offset in offsets]
        return offsets, self._stores[address].get(self._shard.keys(keys), buffers, deadline)

    def _probe_piece(self, run: _Probed, landing: Arena | None) -> Arena | None:
        """Fetches a piece into the memory to land in, which is returned."""
        keys = run.take()
        if keys is None:
            return landing
        what, nbytes = run.what, 0
        try:
            if keys and not self._closing:
                landing = landing or self._open_landing(self._piece_bytes)
                deadline = time.monotonic() + min(self._timeout_s, _PROBE_PIECE_S)
                _, found = self._bring(landing, what.group_id, what.address, keys, deadline)
                nbytes = len(keys) * self._shard.block_bytes[what.group_id]
                if not all(found):
                    run.disturb()
        except Exception:  # nobody waits for it
            run.disturb()
            logger.debug("a probe with %s failed", what.address, exc_info=True)
        ended = run.end(nbytes)
        if ended is not None:
            self._probed.put((what.name, ended))
        self._put(_REHEARSAL, run)  # behind loads that have come meanwhile
        return landing

    def _end_piece(self, load: _Load, error: str | None) -> None:
        with load.lock:
            load.error = load.error or error
            load.pieces_left -= 1
            if load.pieces_left:
                return
        if load.error is not None:
            logger.warning(
                "blocks of request %s could not be loaded from a daemon (%s); they are recomputed",
                load.request_id,
                load.error,
            )
        self._open_loads.discard(load)
        self._done.put(LoadDone(load.request_id, load.error, time.monotonic()))
