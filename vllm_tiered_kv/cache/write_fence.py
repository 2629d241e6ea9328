"""The write fence: determines which stores a step must wait for before it writes GPU blocks.

Stores read GPU blocks in place and hold no reference to them, so vLLM may allocate a block again
while a store still reads it. A full block changes only after vLLM's block pool has allocated it
again. So every allocated block is looked up here, and the step that writes it waits on the device
for the newest store that reads it. A rank's stores finish in the order of their job ids, so one job
id is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.core.transfer import Int64Array, int64_array

_NEVER = -1


class WriteFence:
    """Tracks which jobs read which GPU blocks. Only the scheduler half calls it.

    A read lasts until all ranks have reported its job.
    """

    def __init__(self) -> None:
        self._last_read = np.full(0, _NEVER, np.int64)  # GPU block -> newest job that reads it
        self._open: dict[int, None] = {}  # open jobs, oldest first
        self._newest = _NEVER  # newest job that reads a block allocated since the last step

    def begin_read(self, job_id: int, block_ids: Int64Array) -> None:
        """Records a planned job that copies these blocks from the GPU."""
        end = int(block_ids.max(initial=-1)) + 1
        if end > len(self._last_read):
            grown = np.full(max(end, 2 * len(self._last_read)), _NEVER, np.int64)
            grown[: len(self._last_read)] = self._last_read
            self._last_read = grown
        self._last_read[block_ids] = job_id
        self._open[job_id] = None

    def end_read(self, job_id: int) -> None:
        """Ends the reads of a job that all ranks have reported."""
        del self._open[job_id]

    def hand_out(self, block_ids: Sequence[int]) -> bool:
        """Records blocks that the next step writes; returns whether a store may still read one."""
        oldest = next(iter(self._open), None)
        if oldest is None:
            return False
        ids = int64_array(block_ids)
        readers = self._last_read[ids[ids < len(self._last_read)]]
        newest = int(readers.max(initial=_NEVER))
        self._newest = max(self._newest, newest)
        return newest >= oldest

    @property
    def newest(self) -> int | None:
        """The newest store that the next step must wait for; None if it need not wait."""
        oldest = next(iter(self._open), None)
        # The newest reader of a block may be closed while an earlier job that also reads the block
        # is still open. Waiting for all jobs up to the newest one covers that.
        return self._newest if oldest is not None and self._newest >= oldest else None

    def take(self) -> int | None:
        """Returns `newest` for the step that was planned, and starts over for the next step."""
        newest, self._newest = self.newest, _NEVER
        return newest
