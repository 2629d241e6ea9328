"""The file server's time.

Ages of files are differences between times the server wrote. The clocks of the hosts that use the
directory may disagree by any amount, so none of them is asked: one file is touched, which makes
the server write its present, and read back.
"""

from __future__ import annotations

import os
import threading
import time

from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent

REMEASURE_S = 300.0


class ServerClock:
    """Seconds since the epoch, by the clock that dates the files."""

    def __init__(self, ops: FileOps, path: str) -> None:
        self._ops = ops
        self._path = path
        self._lock = threading.Lock()
        self._offset = 0.0  # server's time less our monotonic clock
        self._measured_at: float | None = None

    def measure(self) -> float:
        """The server's present. OSError where the directory cannot be written."""
        try:
            self._ops.touch(self._path)
        except OSError as error:
            if not is_absent(error):
                raise
            self._ops.close(self._ops.open(self._path, os.O_WRONLY | os.O_CREAT))
            self._ops.touch(self._path)
        now = self._ops.lstat(self._path).st_mtime_ns / 1e9
        with self._lock:
            self._measured_at = time.monotonic()
            self._offset = now - self._measured_at
        return now

    def estimate(self) -> float:
        """About the server's present, mostly without asking it.

        Good enough to decide whether a use is worth noting; nothing is deleted by it.
        """
        with self._lock:
            measured_at, offset = self._measured_at, self._offset
        if measured_at is None or time.monotonic() - measured_at > REMEASURE_S:
            try:
                return self.measure()
            except OSError:
                if measured_at is None:
                    return time.time()
        return time.monotonic() + offset
