"""Takes the fastest way in for each load: measured once, or as configured."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_tiered_kv.config import CopyStrategy
from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.copy_tuning import CopyPlan, tuned_plan
from vllm_tiered_kv.device.inbound import Direct, Inbound, Staged, WholeBlocks
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native import cuda as native

logger = logging.getLogger(__name__)

_REPEATS = 3


@dataclass(frozen=True)
class TuningFile:
    """Where measurements are remembered, on which device they are made, and what is configured."""

    device_name: str
    strategy: CopyStrategy = CopyStrategy.AUTO
    file: Path | None = None


class ChosenInbound:
    def __init__(
        self,
        device: int,
        runs: Mapping[int, BlockRuns],
        layouts: Mapping[int, native.CudaBlockLayout],
        staging_bytes: int,
        tuning: TuningFile | None,
    ) -> None:
        """Without `tuning` nothing is measured and the kernel does it all."""
        self._runs = runs
        self._block_bytes = {group_id: group.block_bytes for group_id, group in runs.items()}
        self._tuning = tuning
        self._staging_bytes = staging_bytes
        self._direct = Direct(layouts)
        self._ways: dict[str, Inbound] = {"direct": self._direct}
        wanted = tuning.strategy if tuning is not None else CopyStrategy.DIRECT
        if WholeBlocks.fits(runs) and wanted in (CopyStrategy.AUTO, CopyStrategy.DMA):
            self._ways["dma"] = WholeBlocks(device, runs)
        elif Staged.fits(staging_bytes, self._block_bytes) and wanted in (
            CopyStrategy.AUTO,
            CopyStrategy.STAGED,
        ):
            try:
                staging = native.DeviceBuffer(device, staging_bytes)
            except CudaError as error:
                logger.warning("loads are not staged, as there is no memory for it: %s", error)
            else:
                self._ways["staged"] = Staged(device, layouts, self._block_bytes, staging)
        # What is asked for is taken where this layout allows it.
        forced = wanted.value if wanted.value in self._ways else "direct"
        self._plan = CopyPlan(forced, forced)

    def tune(self, stream: native.Stream, arena: Arena, is_fresh: bool) -> None:
        """Measures with the first slots of the arena, if nobody uses it yet, and the first blocks
        of the device, whose bytes stay as they are: they are copied out first."""
        if self._tuning is None or self._tuning.strategy is not CopyStrategy.AUTO:
            return
        group_id = min(self._runs)
        runs, nbytes = self._runs[group_id], self._block_bytes[group_id]
        room = min(arena.ready_bytes, arena.nbytes) // aligned(nbytes)

        def measure(way: str, total: int) -> float:
            count = max(1, min(total // nbytes, room, runs.num_blocks))
            blocks = PinnedBlocks(
                group_id,
                np.arange(count, dtype=np.int64),
                arena.region,
                np.arange(count, dtype=np.int64) * aligned(nbytes),
            )
            self._direct.gather(blocks, stream)
            stream.synchronize()
            fastest = min(self._time(way, blocks, stream) for _ in range(_REPEATS))
            return count * nbytes / fastest

        self._plan = tuned_plan(
            self._signature(),
            list(self._ways),
            measure if is_fresh and room else None,
            self._tuning.file,
        )

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        if not len(blocks.block_ids):
            return
        nbytes = len(blocks.block_ids) * self._block_bytes[blocks.group_id]
        self._ways[self._plan.choose(nbytes)].enqueue(blocks, stream)

    def enqueue_part(
        self, blocks: PinnedBlocks, stream: native.Stream, begin: int, end: int | None
    ) -> None:
        """Only these bytes of every slot: what the kernel alone can do."""
        self._direct.enqueue_part(blocks, stream, begin, end)

    def synchronize(self) -> None:
        for way in self._ways.values():
            way.synchronize()

    def close(self) -> None:
        for way in self._ways.values():
            way.close()

    def _time(self, way: str, blocks: PinnedBlocks, stream: native.Stream) -> float:
        begin = time.perf_counter()
        self._ways[way].enqueue(blocks, stream)
        stream.synchronize()
        return time.perf_counter() - begin

    def _signature(self) -> str:
        assert self._tuning is not None
        shapes = ";".join(
            f"{group.block_bytes}/{len(group.runs)}" for _, group in sorted(self._runs.items())
        )
        ways = [f"{way} {self._staging_bytes}" if way == "staged" else way for way in self._ways]
        return f"{self._tuning.device_name}|{shapes}|{','.join(ways)}"
