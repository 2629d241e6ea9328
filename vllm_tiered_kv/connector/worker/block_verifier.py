"""A worker's comparisons of recomputed blocks with those a tier holds.

The recomputed block leaves the GPU as a store does, into a spare slot of the arena. When it has
arrived, a thread compares it with the block in the CPU tier, or reads the daemon's and compares
that. Every job is reported exactly once, whatever happens to it: the scheduler holds slots until
then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.block_compare import LayerNumbers, Likeness, compare
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import Int64Array, StoreJob
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import StoreDone

logger = logging.getLogger(__name__)

ReadRemote = Callable[[str, BlockKey, memoryview], bool]
"""Reads this rank's part of a block of the daemon at an address."""

_VERDICTS = {
    Likeness.EQUAL: Verdict.EQUAL,
    Likeness.CLOSE: Verdict.CLOSE,
    Likeness.DIFFERENT: Verdict.DIFFERENT,
}
_NOT_COMPARED = BlockVerdict(Verdict.NOT_COMPARED)
_NOTHING_TO_SAY = BlockVerdict(Verdict.EQUAL)  # the mildest: the worst of all ranks counts


@dataclass(frozen=True)
class _Arrived:
    job: VerifyJob
    copied: int
    arena: Arena
    read_remote: ReadRemote | None


class BlockVerifier:
    def __init__(self, geometry: ArenaGeometry, tolerance: float) -> None:
        self.is_ours: Callable[[BlockKey], bool] = lambda first: True
        """Whether to compare the job whose first block this is: of ranks that share an arena only
        one does, as there is one place for the copy."""
        self._geometry = geometry
        self._tolerance = tolerance
        self._layers: Mapping[int, Sequence[LayerNumbers]] = {}
        self._due: list[VerifyJob] = []  # of this step: its forward has to precede them
        self._copying: dict[int, VerifyJob] = {}
        self._arrived: queue.SimpleQueue[_Arrived | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, list[BlockVerdict]]] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def describe(self, layers: Mapping[int, Sequence[LayerNumbers]]) -> None:
        """What blocks of each group look like; without that, only equal bytes are equal."""
        self._layers = layers

    def begin_step(self, jobs: Sequence[VerifyJob]) -> None:
        """Jobs of the coming step. Those of a step that vLLM has not finished are given up."""
        for job in self._due:
            self._done.put((job.job_id, [_NOT_COMPARED] * len(job.keys)))
        self._due = []
        for job in jobs:
            if self.is_ours(job.keys[0]):
                self._due.append(job)
            else:
                # What is wrong with them the rank that compares them says.
                self._done.put((job.job_id, [_NOTHING_TO_SAY] * len(job.keys)))

    def take_copies(self) -> list[StoreJob]:
        """The forward is enqueued: what is to be copied out behind it."""
        due, self._due = self._due, []
        self._copying.update({job.job_id: job for job in due})
        return [StoreJob(job.job_id, job.copy) for job in due]

    def copied(self, done: StoreDone, arena: Arena, read_remote: ReadRemote | None) -> bool:
        """A copy has ended; False if it is none of ours."""
        job = self._copying.pop(done.job_id, None)
        if job is None:
            return False
        if self._thread is None and not self._stopping and not self._start_thread():
            self._done.put((job.job_id, [_NOT_COMPARED] * len(job.keys)))
            return True
        self._arrived.put(_Arrived(job, done.stored, arena, read_remote))
        return True

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name="tiered-kv-verify", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # this is the model's thread: the engine would end
            logger.warning("blocks are not verified now: %s", error)
            return False
        self._thread = thread
        return True

    def __bool__(self) -> bool:
        """Whether there is something to report."""
        return not self._done.empty()

    def take_verdicts(self) -> dict[int, list[list[BlockVerdict]]]:
        verdicts = {}
        while not self._done.empty():
            job_id, of_blocks = self._done.get()
            verdicts[job_id] = [of_blocks]
        return verdicts

    def close(self) -> None:
        """Nothing reads the arena any more. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._arrived.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._arrived.get()) is not None:
            verdicts: list[BlockVerdict] = []
            try:
                while len(verdicts) < item.copied and not self._stopping:
                    verdicts.append(self._judge(item, len(verdicts)))
            except Exception:  # whatever it was, the scheduler must hear of the job
                logger.exception("blocks could not be verified")
            missing = len(item.job.keys) - len(verdicts)
            self._done.put((item.job.job_id, verdicts + [_NOT_COMPARED] * missing))

    def _judge(self, item: _Arrived, number: int) -> BlockVerdict:
        job = item.job
        computed = self._block(item.arena, job, job.copy.slots, number)
        if job.held_slots is not None:
            held = self._block(item.arena, job, job.held_slots, number)
        else:
            assert job.address is not None
            held = np.empty(job.block_bytes, np.uint8)
            into = memoryview(held.data)
            if item.read_remote is None or not item.read_remote(
                job.address, job.keys[number], into
            ):
                return _NOT_COMPARED
        layers = self._layers.get(job.copy.group_id, ())
        found = compare(held, computed, layers, self._tolerance)
        return BlockVerdict(_VERDICTS[found.likeness], found.largest, found.overall, found.layer)

    def _block(self, arena: Arena, job: VerifyJob, slots: Int64Array, number: int) -> np.ndarray:
        size_class = self._geometry.class_of_block(job.block_bytes)
        (offset,) = self._geometry.offsets(slots[number : number + 1], size_class).tolist()
        return arena.bytes_at(offset, job.block_bytes)
