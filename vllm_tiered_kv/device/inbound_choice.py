"""Selects the copy strategy of each load: the fastest as measured once, or the configured one."""

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
from vllm_tiered_kv.device.inbound import Direct, Staged, Strategy, WholeBlocks
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.native import cuda as native

logger = logging.getLogger(__name__)

_REPEATS = 3


@dataclass(frozen=True)
class TuningFile:
    """The device that is measured, the configured strategy, and the file that saves the result."""

    device_name: str
    strategy: CopyStrategy = CopyStrategy.AUTO
    file: Path | None = None


class ChosenInbound:
    """Copies blocks to the device with the best strategy for the size of the load.

    `CudaCopier` calls it from the worker's main thread.
    """

    def __init__(
        self,
        device: int,
        runs: Mapping[int, BlockRuns],
        layouts: Mapping[int, native.CudaBlockLayout],
        staging_bytes: int,
        tuning: TuningFile | None,
    ) -> None:
        """Without `tuning` nothing is measured, and the `Direct` kernel copies everything."""
        self._runs = runs
        self._block_bytes = {group_id: group.block_bytes for group_id, group in runs.items()}
        self._tuning = tuning
        self._staging_bytes = staging_bytes
        self._direct = Direct(layouts)
        self._strategies: dict[str, Strategy] = {"direct": self._direct}
        wanted = tuning.strategy if tuning is not None else CopyStrategy.DIRECT
        if WholeBlocks.fits(runs) and wanted in (CopyStrategy.AUTO, CopyStrategy.DMA):
            self._strategies["dma"] = WholeBlocks(device, runs)
        elif Staged.fits(staging_bytes, self._block_bytes) and wanted in (
            CopyStrategy.AUTO,
            CopyStrategy.STAGED,
        ):
            try:
                staging = native.DeviceBuffer(device, staging_bytes)
            except CudaError as error:
                logger.warning(
                    "no GPU memory for staging loads (%s); they use the direct kernel. Lower "
                    "gpu_memory_utilization to leave more GPU memory free",
                    error,
                )
            else:
                self._strategies["staged"] = Staged(device, layouts, self._block_bytes, staging)
        # The configured strategy is used if this layout allows it.
        forced = wanted.value if wanted.value in self._strategies else "direct"
        self._plan = CopyPlan(forced, forced)

    def tune(self, stream: native.Stream, arena: Arena, is_fresh: bool) -> None:
        """Measures copies between the first slots of the arena and the first blocks of the device.

        It measures only if the arena is fresh. The blocks keep their bytes, because they are copied
        to the slots first.
        """
        if self._tuning is None or self._tuning.strategy is not CopyStrategy.AUTO:
            return
        group_id = min(self._runs)
        runs, nbytes = self._runs[group_id], self._block_bytes[group_id]
        slots = min(arena.ready_bytes, arena.nbytes) // aligned(nbytes)

        def measure(strategy: str, total: int) -> float:
            count = max(1, min(total // nbytes, slots, runs.num_blocks))
            blocks = PinnedBlocks(
                group_id,
                np.arange(count, dtype=np.int64),
                arena.region,
                np.arange(count, dtype=np.int64) * aligned(nbytes),
            )
            self._direct.gather(blocks, stream)
            stream.synchronize()
            fastest = min(self._time(strategy, blocks, stream) for _ in range(_REPEATS))
            return count * nbytes / fastest

        self._plan = tuned_plan(
            self._signature(),
            list(self._strategies),
            measure if is_fresh and slots else None,
            self._tuning.file,
        )

    def enqueue(self, blocks: PinnedBlocks, stream: native.Stream) -> None:
        if not len(blocks.block_ids):
            return
        nbytes = len(blocks.block_ids) * self._block_bytes[blocks.group_id]
        self._strategies[self._plan.choose(nbytes)].enqueue(blocks, stream)

    def enqueue_part(
        self, blocks: PinnedBlocks, stream: native.Stream, begin: int, end: int | None
    ) -> None:
        """Copies only these bytes of every slot, which only the kernel can do."""
        self._direct.enqueue_part(blocks, stream, begin, end)

    def synchronize(self) -> None:
        for strategy in self._strategies.values():
            strategy.synchronize()

    def close(self) -> None:
        for strategy in self._strategies.values():
            strategy.close()

    def _time(self, strategy: str, blocks: PinnedBlocks, stream: native.Stream) -> float:
        begin = time.perf_counter()
        self._strategies[strategy].enqueue(blocks, stream)
        stream.synchronize()
        return time.perf_counter() - begin

    def _signature(self) -> str:
        assert self._tuning is not None
        shapes = ";".join(
            f"{group.block_bytes}/{len(group.runs)}" for _, group in sorted(self._runs.items())
        )
        names = [
            f"{name} {self._staging_bytes}" if name == "staged" else name
            for name in self._strategies
        ]
        return f"{self._tuning.device_name}|{shapes}|{','.join(names)}"
