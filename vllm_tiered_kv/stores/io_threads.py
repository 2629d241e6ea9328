"""Spreads the I/O of a batch over threads, so that one call keeps the disk busy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

_MAX_THREADS = 256  # limit of the native calls

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class IoThreads:
    """A thread pool for the disk I/O of one store. `map` may be called from any thread."""

    def __init__(self, threads: int, name: str) -> None:
        self.count = min(max(1, threads), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=name)

    def map(self, work: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """Runs all jobs, in the calling thread and in those of the pool.

        No job is still running when this returns or raises, because the caller may then reuse the
        memory they write to.
        """
        batch = _Batch(work, jobs)
        try:
            for _ in range(min(self.count, len(jobs)) - 1):
                self._pool.submit(batch.help)
        except RuntimeError:
            pass  # closed, or no more threads can be started; the running ones do the work
        batch.help()
        return batch.results()

    def close(self) -> None:
        self._pool.shutdown()


class _Batch(Generic[_Job, _Result]):
    """Jobs that any number of threads take from one queue."""

    def __init__(self, work: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> None:
        self._work = work
        self._queue = deque(enumerate(jobs))
        self._ended = threading.Condition()
        self._left = len(jobs)
        self._results: dict[int, _Result] = {}
        self._error: BaseException | None = None

    def help(self) -> None:
        """Runs jobs until the queue is empty."""
        while True:
            try:
                position, job = self._queue.popleft()
            except IndexError:
                return
            try:
                self._results[position] = self._work(job)
            except BaseException as error:
                self._error = error
            with self._ended:
                self._left -= 1
                if not self._left:
                    self._ended.notify_all()

    def results(self) -> list[_Result]:
        """Waits for the jobs of all threads. If some failed, raises the exception of one."""
        with self._ended:
            while self._left:
                self._ended.wait()
        if self._error is not None:
            raise self._error
        return [result for _, result in sorted(self._results.items())]
