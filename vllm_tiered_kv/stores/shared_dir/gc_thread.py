"""Collections at intervals, in a thread of the daemon."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from vllm_tiered_kv.stores.shared_dir.gc import GcReport, SharedDirGc

logger = logging.getLogger(__name__)


class GcThread:
    """Runs until `stop`. All hosts may run one: a round is left out where another began lately."""

    def __init__(
        self,
        gc: SharedDirGc,
        interval_s: float,
        on_report: Callable[[GcReport], None] = lambda report: None,
    ) -> None:
        self._gc = gc
        self._interval_s = interval_s
        self._on_report = on_report
        self._stopping = threading.Event()
        self._wake = threading.Event()
        gc.stop = self._stopping.is_set
        self._thread = threading.Thread(target=self._run, name="tiered-kv-gc", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Collects soon, whoever else does: a put found the disk full."""
        self._wake.set()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends a collection under way at its next file. False where that took too long."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Hosts that started together should not all scan together.
            asked = self._wake.wait(self._interval_s * random.uniform(0.9, 1.1))
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                if asked or self._gc.due(self._interval_s / 2):
                    self._collect_all()
            except Exception:
                logger.exception("a collection of the shared directory failed")

    def _collect_all(self) -> None:
        more = True
        while more and not self._stopping.is_set():
            report = self._gc.collect()
            self._on_report(report)
            more = report.more
