"""Opening something that may not answer, so that whoever needs it need not wait for that."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_OPEN_AGAIN_S = 30.0  # after that failed, and nobody could be told

_Thing = TypeVar("_Thing")


class OpenedLater(Generic[_Thing]):
    """Opened by a thread of its own, which does not keep the process from ending."""

    def __init__(
        self,
        name: str,
        open_it: Callable[[], _Thing],
        close_it: Callable[[_Thing], None],
        patience_s: float,
    ) -> None:
        """Returns when it is open, or after `patience_s`; raises what opening raises until then.
        Later it is logged and tried again."""
        self._name = name
        self._open_it = open_it
        self._close_it = close_it
        self._news = threading.Condition()
        self._thing: _Thing | None = None
        self._error: Exception | None = None
        self._is_late = False
        self._closed = False
        threading.Thread(target=self._open, name="tiered-kv-opening", daemon=True).start()
        with self._news:
            self._news.wait_for(
                lambda: self._thing is not None or self._error is not None,
                min(patience_s, threading.TIMEOUT_MAX),
            )
            if self._error is not None:
                raise self._error
            self._is_late = self._thing is None

    @property
    def now(self) -> _Thing | None:
        """None while it is not open."""
        return self._thing

    def wait(self) -> _Thing:
        """Returns when it is open: never, where it is closed before."""
        with self._news:
            while self._thing is None:
                self._news.wait()
            return self._thing

    def close(self) -> None:
        """Waits for nothing: what opens later is closed then. Idempotent, if closing it is."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thing is not None:
            self._close_it(self._thing)

    def _open(self) -> None:
        while True:
            try:
                thing = self._open_it()
            except Exception as error:
                if self._has_told(error):
                    return
                continue
            with self._news:
                if not self._closed:
                    self._thing = thing
                    self._news.notify_all()
                    if self._is_late:
                        logger.warning("%s answers; it is used from now on", self._name)
                    return
            self._close_it(thing)
            return

    def _has_told(self, error: Exception) -> bool:
        """Whether nothing is left to do; False when it is time to open it again."""
        with self._news:
            if not self._is_late:
                self._error = error
                self._news.notify_all()
                return True
            logger.error("%s; tried again in %g s", error, _OPEN_AGAIN_S)
            return self._news.wait_for(lambda: self._closed, _OPEN_AGAIN_S)
