"""Loads blocks from daemons to the device, in threads of its own.

A load is split into pieces for several threads: while one piece is on the network, another one is
being copied to the GPU. Blocks of a daemon on this host are copied directly from shared memory;
others go through a pinned landing buffer. A load is reported when its last piece has ended, so that
nothing is written into GPU blocks that vLLM has taken back. When one piece fails, the remaining
pieces are skipped.

A probe fetches blocks in the same way and discards them, to measure how long a load would take.
Probes have a lower priority than loads, and a load that starts cancels the probe in flight.
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
from functools import partial

from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker.shared_region import Resident, SharedRegions
from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import Fetched, ProbeJob, RemoteTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import Channel, LoadDone
from vllm_tiered_kv.errors import TieredKVError, TransferPending
from vllm_tiered_kv.remote.block_server import BlockServer

logger = logging.getLogger(__name__)

_MIN_PIECE_BYTES = 1 << 20
_LOAD, _PROBE, _END = range(3)  # priorities in the queue of pieces
_PROBE_S = 0.5  # no piece of a probe starts later than this after the first
_PROBE_PIECE_S = 2.0  # a daemon that needs longer for one piece hangs


@dataclass(eq=False)
class _Load:
    request_id: str
    address: str  # of the first server; for messages
    deadline: float
    pieces_left: int
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Probe:
    """A probe in flight. Threads take one piece at a time, and serve loads in between."""

    def __init__(self, job: ProbeJob, pieces: Iterable[tuple[BlockKey, ...]]) -> None:
        self.job = job
        self._waiting = deque(pieces)
        self._left = len(self._waiting)
        self._begun_at: float | None = None
        self._nbytes = 0
        self._is_invalid = False
        self._lock = threading.Lock()

    def invalidate(self) -> None:
        """Discards the measurement: a load shared the bandwidth, or a piece failed."""
        with self._lock:
            self._is_invalid = True

    def take(self) -> tuple[BlockKey, ...] | None:
        """Returns the keys of the next piece, no keys for a piece to skip, None at the end."""
        with self._lock:
            if not self._waiting:
                return None
            keys = self._waiting.popleft()
            now = time.monotonic()
            self._begun_at = self._begun_at or now
            is_wanted = not self._is_invalid and now < self._begun_at + _PROBE_S
            return keys if is_wanted else ()

    def end(self, nbytes: int) -> Fetched | None:
        """Ends a piece that was taken; returns the measurement with the last piece."""
        with self._lock:
            self._nbytes += nbytes
            self._left -= 1
            if self._left:
                return None
            if self._is_invalid or self._begun_at is None:
                return Fetched()
            return Fetched(self._nbytes, time.monotonic() - self._begun_at)


_Piece = tuple[_Load, RemoteTransfer] | _Probe


class RemoteLoader:
    """Runs the asynchronous loads and probes of one worker. `WorkerHalf` calls it from the model's
    thread; the loader's own threads fetch and copy."""

    def __init__(
        self,
        stores: Mapping[str, BlockServer],
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
        self._network_addresses = [a for a in stores if not a.startswith("ipc://")]
        self._timeout_s = timeout_s
        self._closing = False
        self._spare_landings: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        largest = max(map(aligned, shard.block_bytes.values()))
        self._piece_bytes = max(landing_bytes // threads, largest)
        self._pieces: queue.PriorityQueue[tuple[int, int, _Piece | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # keeps pieces of one priority in order
        self._probing: _Probe | None = None
        self._open_loads: set[_Load] = set()
        self._probed: queue.SimpleQueue[tuple[str, Fetched]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[LoadDone] = queue.SimpleQueue()
        # Opened here because the model's thread has the device set as current.
        self._channels = [open_channel() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(n, channel), name=f"tiered-kv-fetch-{n}")
            for n, channel in enumerate(self._channels)
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def load(self, request_id: str, transfers: Sequence[RemoteTransfer]) -> None:
        """Starts a load. The caller has fenced everything that the GPU blocks must wait for."""
        if self._probing is not None:
            self._probing.invalidate()
        pieces = [piece for transfer in transfers for piece in self._cut(transfer)]
        load = _Load(
            request_id, transfers[0].address, time.monotonic() + self._timeout_s, len(pieces)
        )
        self._open_loads.add(load)
        for piece in pieces:
            self._put(_LOAD, (load, piece))

    def probe(self, job: ProbeJob) -> None:
        """Starts a probe."""
        count = self._blocks_in_piece(job.group_id, len(job.keys))
        starts = range(0, len(job.keys), count)
        probe = _Probe(job, (job.keys[n : n + count] for n in starts))
        if self._open_loads:
            probe.invalidate()
        self._probing = probe
        # One thread stays free for loads from other daemons if the probed daemon hangs.
        for _ in range(max(1, min(len(starts), len(self._threads) - 1))):
            self._put(_PROBE, probe)

    def take_probed(self) -> dict[str, Fetched]:
        """Returns the probes that ended since the last call, by name."""
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
        """Waits for pieces in flight; queued pieces fail. Idempotent."""
        self._closing = True
        for _ in self._threads:
            self._put(_END, None)
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()
        while not self._spare_landings.empty():
            self._spare_landings.get().close()
        self._threads, self._channels = [], []

    def _cut(self, transfer: RemoteTransfer) -> list[RemoteTransfer]:
        resident = self._resident(transfer)
        if resident is not None:
            resident.leave()
            return [transfer]  # no request to the daemon is needed, so pieces gain nothing
        nbytes = self._regions.piece_bytes(transfer.address)
        blocks = self._blocks_in_piece(transfer.group_id, len(transfer), nbytes)
        return [transfer.part(start, start + blocks) for start in range(0, len(transfer), blocks)]

    def _resident(self, piece: RemoteTransfer) -> Resident | None:
        return self._regions.resident(piece, self._shard)

    def _blocks_in_piece(self, group_id: int, total: int, nbytes: int | None = None) -> int:
        block = aligned(self._shard.block_bytes[group_id])
        if nbytes is None:
            # A small load is split as well, so that it uses all connections.
            share = total * block // max(1, len(self._threads))
            nbytes = min(self._piece_bytes, max(share, _MIN_PIECE_BYTES))
        return max(1, nbytes // block)

    def _put(self, kind: int, piece: _Piece | None) -> None:
        self._pieces.put((kind, next(self._numbers), piece))

    def _work(self, number: int, channel: Channel) -> None:
        landing = self._prepare(number)
        while (item := self._pieces.get()[2]) is not None:
            if isinstance(item, _Probe):
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
                    region.load(channel, piece, self._shard, load.deadline, end)
                else:
                    landing = landing or self._take_landing()
                    error = self._fetch(channel, landing, piece, load.deadline)
                    channel.finish()
                    end(error)
            except TransferPending as pending:
                self._leave_landing(landing, pending)
                landing = None
                end(str(pending))
            except Exception as failure:  # the request waits until its load is reported
                logger.exception(
                    "load of request %s from daemon %s failed", load.request_id, piece.address
                )
                with contextlib.suppress(TieredKVError):  # the GPU may have failed
                    channel.finish()
                if not ended:
                    end(str(failure) or type(failure).__name__)
        if landing is not None:
            landing.close()

    def _prepare(self, number: int) -> Arena | None:
        """Opens connections and returns a landing buffer ahead of the first load; None if all
        daemons are on this host."""
        try:
            for address in self._network_addresses[number :: len(self._channels)]:
                if self._closing or not self._pieces.empty():
                    break  # a load waits already
                self._stores[address].greet(len(self._channels))
            return self._take_landing() if self._network_addresses else None
        except Exception:  # loads need this thread
            logger.exception("cannot prepare loads from daemons; the first ones will be slower")
            return None

    def _take_landing(self) -> Arena:
        try:
            return self._spare_landings.get_nowait()
        except queue.Empty:
            return self._open_landing(self._piece_bytes)

    def _leave_landing(self, landing: Arena | None, pending: TransferPending) -> None:
        """Leaves a landing buffer to a transfer that may still write to it, until it has ended."""
        if landing is not None:
            pending.on_end(partial(self._spare_landings.put, landing))

    def _copy(
        self, channel: Channel, resident: Resident, end: Callable[[str | None], None]
    ) -> None:
        try:
            try:
                for part in resident.blocks:
                    channel.scatter(part.group_id, part.block_ids, part.region, part.offsets)
            finally:
                channel.finish()  # also after an error: no copy may read memory after `leave`
            end(None if resident.are_intact else "blocks changed while they were copied")
        finally:
            resident.leave()

    def _fetch(
        self, channel: Channel, landing: Arena, piece: RemoteTransfer, deadline: float
    ) -> str | None:
        """Loads a piece over the network; returns the reason if that fails."""
        if len(piece) * aligned(self._shard.block_bytes[piece.group_id]) > landing.nbytes:
            # The piece was cut for shared memory and is larger than the landing buffer.
            return "the daemon's shared memory went away"
        offsets, found = self._get(landing, piece.group_id, piece.address, piece.keys, deadline)
        if not all(found):
            return f"{found.count(False)} of {len(found)} blocks are no longer there"
        channel.scatter(piece.group_id, piece.block_ids, landing.region, int64_array(offsets))
        return None

    def _get(
        self,
        landing: Arena,
        group_id: int,
        address: str,
        keys: Sequence[BlockKey],
        deadline: float,
    ) -> tuple[list[int], list[bool]]:
        """Fetches blocks into the landing buffer; returns the offset of each and whether it was
        found."""
        step = aligned(self._shard.block_bytes[group_id])
        nbytes, shards = self._shard.shard_bytes(group_id), self._shard.count
        offsets = [n * step for n in range(len(keys))]
        buffers = [
            memoryview(landing.bytes_at(offset + number * nbytes, nbytes).data)
            for offset in offsets
            for number in range(shards)
        ]
        found = self._stores[address].get(self._shard.keys(keys), buffers, deadline)
        if shards > 1:
            found = [all(found[n : n + shards]) for n in range(0, len(found), shards)]
        return offsets, found

    def _probe_piece(self, probe: _Probe, landing: Arena | None) -> Arena | None:
        """Fetches one piece of a probe into the landing buffer; returns that buffer."""
        keys = probe.take()
        if keys is None:
            return landing
        job, nbytes = probe.job, 0
        try:
            if keys and not self._closing:
                landing = landing or self._take_landing()
                deadline = time.monotonic() + min(self._timeout_s, _PROBE_PIECE_S)
                _, found = self._get(landing, job.group_id, job.address, keys, deadline)
                nbytes = len(keys) * self._shard.block_bytes[job.group_id]
                if not all(found):
                    probe.invalidate()
        except TransferPending as pending:
            self._leave_landing(landing, pending)
            landing = None
            probe.invalidate()
        except Exception:  # no request waits for a probe
            probe.invalidate()
            logger.debug("probe of daemon %s failed", job.address, exc_info=True)
        fetched = probe.end(nbytes)
        if fetched is not None:
            self._probed.put((job.name, fetched))
        self._put(_PROBE, probe)  # the next piece, behind loads that arrived in the meantime
        return landing

    def _end_piece(self, load: _Load, error: str | None) -> None:
        with load.lock:
            load.error = load.error or error
            load.pieces_left -= 1
            if load.pieces_left:
                return
        if load.error is not None:
            logger.warning(
                "cannot load blocks of request %s from %s (%s); they are recomputed",
                load.request_id,
                load.address,
                load.error,
            )
        self._open_loads.discard(load)
        self._done.put(LoadDone(load.request_id, load.error, time.monotonic()))
