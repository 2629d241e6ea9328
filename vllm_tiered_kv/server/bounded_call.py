"""Calls that may hang, made so that whoever makes them goes on after a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BoundedCalls:
    """One at a time: while a call hangs no other is begun, so that hung threads do not pile up."""

    def __init__(self, timeout_s: float, name: str) -> None:
        self._timeout_s = timeout_s
        self._name = name
        self._under_way: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, work: Callable[[], bool]) -> bool:
        """What `work` says; False where it fails or does not end in time."""
        said: list[bool] = []

        def run() -> None:
            try:
                said.append(work())
            except Exception:
                logger.exception("a call to the backing tier failed")

        timeout_s = min(self._timeout_s, threading.TIMEOUT_MAX)
        with self._lock:
            if self._under_way is not None:
                self._under_way.join(timeout_s)
                if self._under_way.is_alive():
                    return False
            thread = threading.Thread(target=run, name=self._name, daemon=True)
            thread.start()
            self._under_way = thread
            thread.join(timeout_s)
        return said == [True]
