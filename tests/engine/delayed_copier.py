"""Copies that take their time, for a model whose every read is checked.

A store reads its source polls later, when it lands, or when somebody waits for it; a load reads its
slots and writes its blocks polls later. Whatever is reused too early is caught.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.core.transfer import GroupTransfer
from vllm_tiered_kv.device.copier import LoadDone, PinnedBlocks, StoreDone
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native.cpu import HostRegion


class BrokenOrder(BaseException):
    """A rule of `device.copier` was broken: nothing in the connector may take it for a failure."""


LAYERS = ("layer.0", "layer.1", "layer.2")


class DelayedCopier:
    """A back-end with the ordering contract of `device.copier` and copies that take their time."""

    def __init__(self, caches: list[np.ndarray], arena: np.ndarray, rng: random.Random) -> None:
        self._caches, self._arena, self._rng = caches, arena, rng
        self._stores: deque[tuple[int, int, GroupTransfer, np.ndarray | None]] = deque()
        self._loads: deque[tuple[int, str, Sequence[GroupTransfer]]] = deque()
        self.max_delay = 3
        self.store_delay: int | None = None
        self.fail_loads_of: set[str] = set()
        self.fail_every = 0.0
        self.drop_stores = 0.0
        self.fenced = False
        self.waited_for = 0  # blocks read because somebody was about to write
        self.fail_ahead = 0.0
        self.ahead_blocks = 0
        self._step_loads: deque[tuple[int, list[int]]] = deque()
        self.early = 1.0  # how often a load may begin before its step
        self.early_blocks = 0
        self._begun: list[PinnedBlocks] = []
        self._awaited: dict[str, list[PinnedBlocks]] = {}  # by layer: what it waits for
        self.last_writes: dict[
            int, tuple[np.ndarray, np.ndarray]
        ] = {}  # by layer, of the step under way
        self._late_writes: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.overtaking_blocks = 0

    def open_channel(self) -> DelayedChannel:
        return DelayedChannel(self._caches, random.Random(self._rng.random()))

    def fence(self) -> None:
        self.fenced = True

    def settle_sources(self) -> None:
        self._read_sources(self._stores[-1][1] if self._stores else -1)

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        delay = self.store_delay
        if delay is None:
            delay = self._rng.randint(0, self.max_delay)
        self._stores.append((delay, job_id, transfer, None))

    def wait_for_stores(self, newest: int) -> None:
        self.fenced = False  # loads have to come after what was waited for
        self.waited_for += self._read_sources(newest)

    def _read_sources(self, newest: int) -> int:
        """Reads what stores up to this job have not read yet; how many blocks that were."""
        last = max((n for n, store in enumerate(self._stores) if store[1] <= newest), default=-1)
        count = 0
        for number in range(last + 1):
            _, job_id, transfer, read = self._stores[number]
            if read is None:
                self._stores[number] = (0, job_id, transfer, self._blocks_of(transfer))
                count += len(transfer)
        return count

    def _blocks_of(self, transfer: GroupTransfer) -> np.ndarray:
        return np.stack([cache[transfer.block_ids] for cache in self._caches], axis=1)

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        self._pass_fence()
        self._loads.append((self._rng.randint(0, self.max_delay), request_id, transfers))

    def locate(self, transfer: GroupTransfer) -> PinnedBlocks:
        # The toy's slots are rows of its arena.
        return PinnedBlocks(transfer.group_id, transfer.block_ids, HostRegion(0, 0), transfer.slots)

    def step_load(
        self,
        job_ids: Sequence[int],
        blocks: Sequence[PinnedBlocks],
        by_layer: bool,
        overtakes: bool = False,
    ) -> None:
        """Layers that nobody waits for stay as they were: a forgotten wait is a wrong read. What
        a step under way writes comes after a load that overtakes it."""
        if not overtakes:
            self._pass_fence()
        self._late_writes = self.last_writes if overtakes else {}
        self.overtaking_blocks += overtakes * sum(len(part.block_ids) for part in blocks)
        if self._awaited:
            raise BrokenOrder("the last forward was not finished")
        for part in blocks:
            for cache in self._caches:
                cache[part.block_ids] = -1
        if self._rng.random() < self.fail_ahead:
            raise CudaError("planted")
        self._awaited = {name: list(blocks) for name in LAYERS}
        self.ahead_blocks += sum(len(part.block_ids) for part in blocks)
        if not by_layer:
            self.finish_step_loads()
        self._step_loads.append((self._rng.randint(0, self.max_delay), list(job_ids)))

    def can_load_early(self) -> bool:
        return self._rng.random() < self.early

    def load_early(self, job_ids: Sequence[int], blocks: Sequence[PinnedBlocks]) -> None:
        """Overwrites at once; what was to be brought is there when the step begins."""
        self._pass_fence()
        self.fenced = False
        for part in blocks:
            for cache in self._caches:
                cache[part.block_ids] = -1
        if self._rng.random() < self.fail_ahead:
            raise CudaError("planted")
        self._begun += blocks
        self.early_blocks += sum(len(part.block_ids) for part in blocks)
        self._step_loads.append((self._rng.randint(0, self.max_delay), list(job_ids)))

    def begin_step(self) -> None:
        self.fenced = False
        for part in self._begun:
            blocks = self._read(part)
            for layer, cache in enumerate(self._caches):
                cache[part.block_ids] = blocks[:, layer]
        self._begun = []

    def wait_for_layer(self, name: str) -> None:
        layer = LAYERS.index(name)
        for part in self._awaited.pop(name, ()):
            self._caches[layer][part.block_ids] = self._read(part)[:, layer]
        if layer in self._late_writes:
            places, written = self._late_writes.pop(layer)
            self._caches[layer][places] = written

    def _pass_fence(self) -> None:
        if not self.fenced:
            raise BrokenOrder("a load without a fence")

    def _read(self, part: PinnedBlocks) -> np.ndarray:
        """Blocks as they are now, of the toy's arena or of a daemon's."""
        if not part.region.nbytes:
            return self._arena[part.offsets]
        shape = (len(self._caches), self._caches[0].shape[1])
        blocks = []
        for offset in part.offsets.tolist():
            assert 0 <= offset <= offset + 8 * shape[0] * shape[1] <= part.region.nbytes
            raw = (ctypes.c_int64 * (shape[0] * shape[1])).from_address(
                part.region.address + offset
            )
            blocks.append(np.array(raw).reshape(shape))
        return np.stack(blocks)

    def finish_step_loads(self) -> None:
        for name in list(self._awaited):
            self.wait_for_layer(name)

    def settle(self) -> None:
        for under_way in (self._stores, self._loads, self._step_loads):
            for number, job in enumerate(under_way):
                under_way[number] = (0, *job[1:])

    def poll_step_loads(self) -> list[int]:
        done: list[int] = []
        while self._step_loads and self._due(self._step_loads):
            done += self._step_loads.popleft()[1]
        return done

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        stores, loads = [], []
        while self._stores and self._due(self._stores):
            _, job_id, transfer, read = self._stores.popleft()
            blocks = self._blocks_of(transfer) if read is None else read
            stored = len(transfer)
            if self._rng.random() < self.drop_stores:
                stored = self._rng.randint(0, stored)
            self._arena[transfer.slots[:stored]] = blocks[:stored]
            reason = DropReason.COPY_FAILED if stored < len(transfer) else None
            stores.append(StoreDone(job_id, stored, reason))
        while self._loads and self._due(self._loads):
            _, request_id, transfers = self._loads.popleft()
            failed = request_id in self.fail_loads_of or self._rng.random() < self.fail_every
            for transfer in transfers:
                for block, slot in zip(transfer.block_ids, transfer.slots, strict=True):
                    for layer, cache in enumerate(self._caches):
                        cache[block] = -1 if failed else self._arena[slot][layer]
            loads.append(LoadDone(request_id, "planted" if failed else None))
        return stores, loads

    def close(self) -> None:
        pass

    @staticmethod
    def _due(queue: deque) -> bool:
        if queue[0][0] <= 0:
            return True
        queue[0] = (queue[0][0] - 1, *queue[0][1:])
        return False


class DelayedChannel:
    """Scatters from any memory, a little later: what must not change meanwhile had better not."""

    def __init__(self, caches: list[np.ndarray], rng: random.Random) -> None:
        self._caches, self._rng = caches, rng

    def scatter(
        self, group_id: int, block_ids: np.ndarray, region: HostRegion, offsets: np.ndarray
    ) -> None:
        time.sleep(self._rng.random() / 500)
        shape = (len(self._caches), self._caches[0].shape[1])
        for block, offset in zip(block_ids.tolist(), offsets.tolist(), strict=True):
            assert 0 <= offset <= offset + 8 * shape[0] * shape[1] <= region.nbytes
            raw = (ctypes.c_int64 * (shape[0] * shape[1])).from_address(region.address + offset)
            for cache, layer in zip(self._caches, np.array(raw).reshape(shape), strict=True):
                cache[block] = layer

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
