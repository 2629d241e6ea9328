"""Threads for a tier that may hang, so that nothing else hangs with it.

A call to a network file system whose server is gone returns when the server is back, and cannot be
ended before. So whoever asks is answered after a while without it, and a thread whose call hangs is
left to it. While all of the threads hang, the tier counts as absent: nobody waits for it any more.
The threads do not keep the process from ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

THREADS = 8
_MOST_WAITING = 4096  # questions; more are not taken

_Answer = TypeVar("_Answer")


@dataclass(slots=True, eq=False)
class _Question:
    work: Callable[[], Any]
    done: Callable[[Any], None]
    late: Callable[[], None]
    due: float
    is_running: bool = False


class BackingThreads:
    """From any thread; answers come from threads of its own, or from the one that asks."""

    def __init__(self, timeout_s: float, recorder: Recorder, threads: int = THREADS) -> None:
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._count = threads
        self._queue: deque[_Question] = deque()  # not begun
        self._open: dict[_Question, None] = {}  # begun or not, and not answered; oldest first
        self._hanging = 0  # threads whose question was answered without them
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        for n in range(threads):
            self._start(self._run, f"tiered-kv-backing-{n}")
        self._start(self._watch, "tiered-kv-backing-watch")

    @staticmethod
    def _start(run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def is_absent(self) -> bool:
        """Whether all threads hang, so that nothing is asked."""
        return self._hanging == self._count

    def ask(
        self,
        work: Callable[[], _Answer],
        done: Callable[[_Answer], None],
        late: Callable[[], None],
    ) -> None:
        """Calls `done` with what `work` returns, or else `late`: when that takes too long, fails or
        is not even begun. What work returns later is dropped, but it goes on to its end."""
        question = _Question(work, done, late, time.monotonic() + self._timeout_s)
        with self._lock:
            is_taken = not (self._closed or self.is_absent or len(self._queue) >= _MOST_WAITING)
            if is_taken:
                self._queue.append(question)
                self._open[question] = None
                self._work.notify()
        if not is_taken:
            self._give_up([question])

    def close(self) -> bool:
        """Takes no more, and answers all who wait. Whether no thread hangs. Idempotent."""
        with self._lock:
            self._closed = True
            unbegun = self._drop_queue()
            self._work.notify_all()
            self._ended.notify_all()
        self._give_up(unbegun)
        with self._lock:
            while self._open:
                self._ended.wait()
            return not self._hanging

    # ---- inside ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (question := self._next()) is not None:
            has_failed, answer = False, None
            try:
                answer = question.work()
            except Exception:
                logger.exception("a question to the backing tier failed")
                has_failed = True
            if not self._end(question):
                continue
            try:
                if has_failed:
                    question.late()
                else:
                    question.done(answer)
            except Exception:
                logger.exception("an answer of the backing tier could not be handed over")

    def _next(self) -> _Question | None:
        with self._lock:
            while not self._queue:
                if self._closed:
                    return None
                self._work.wait()
            question = self._queue.popleft()
            question.is_running = True
            return question

    def _end(self, question: _Question) -> bool:
        """Whether somebody still waits for the answer."""
        with self._lock:
            is_awaited = question in self._open
            if is_awaited:
                del self._open[question]
            else:
                if self.is_absent:
                    logger.warning("the backing tier answers again")
                self._hanging -= 1
            if self._closed:
                self._ended.notify_all()
            return is_awaited

    def _watch(self) -> None:
        while True:
            with self._lock:
                while (left_s := self._until_first()) > 0:
                    if self._closed and not self._open:
                        return
                    self._ended.wait(left_s)
                overdue = self._overdue()
                self._ended.notify_all()
            self._give_up(overdue)

    def _until_first(self) -> float:
        """How long until a question is to be answered. None that comes is due before the last."""
        oldest = next(iter(self._open), None)
        return self._timeout_s if oldest is None else oldest.due - time.monotonic()

    def _overdue(self) -> list[_Question]:
        """Those not to be waited for any longer; all of them, where no thread is left."""
        now = time.monotonic()
        overdue = [question for question in self._open if question.due <= now]
        for question in overdue:
            del self._open[question]
            if question.is_running:
                self._hanging += 1
            else:
                self._queue.remove(question)
        if self.is_absent:
            if any(question.is_running for question in overdue):
                logger.warning(
                    "the backing tier has not answered for %g s; it counts as absent until it does",
                    self._timeout_s,
                )
            overdue += self._drop_queue()
        return overdue

    def _drop_queue(self) -> list[_Question]:
        unbegun = list(self._queue)
        self._queue.clear()
        for question in unbegun:
            del self._open[question]
        return unbegun

    def _give_up(self, questions: list[_Question]) -> None:
        for question in questions:
            self._recorder.add(names.BACKING_LATE, 1)
            try:
                question.late()
            except Exception:
                logger.exception("that the backing tier is late could not be told")
