"""The last warnings and errors in the daemon's log, for those who look at its status page."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

_LOGGER = "vllm_tiered_kv"  # not those of libraries: what they log is not ours to show
_MAX_PROBLEMS = 50
_MAX_TEXT = 500


@dataclass
class _Problem:
    time: float
    level: str
    text: str
    count: int = 1


class RecentProblems(logging.Handler):
    """Remembers what the package logs while attached. The daemon creates one; any thread may read
    it. The log holds no secrets, so neither does this."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._problems: deque[_Problem] = deque(maxlen=_MAX_PROBLEMS)

    def attach(self) -> None:
        logging.getLogger(_LOGGER).addHandler(self)

    def detach(self) -> None:
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        try:
            text = _text_of(record)
        except Exception:  # a message that cannot be formatted must not fail what logs it
            self.handleError(record)
            return
        last = self._problems[-1] if self._problems else None
        if last is not None and last.text == text:  # one that repeats must not push out others
            last.time, last.count = record.created, last.count + 1
        else:
            self._problems.append(_Problem(record.created, record.levelname.lower(), text))

    def facts(self) -> list[dict[str, Any]]:
        """The latest first."""
        self.acquire()
        try:
            return [asdict(problem) for problem in reversed(self._problems)]
        finally:
            self.release()


def _text_of(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info is not None and (error := record.exc_info[1]) is not None:
        text += f": {type(error).__name__}: {error}"
    return text[:_MAX_TEXT]
