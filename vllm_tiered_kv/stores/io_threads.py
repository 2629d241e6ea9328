"""Spreads the I/O of a batch over threads, so that one call keeps the disk busy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

_MAX_THREADS = 256  # limit of the native calls

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class IoThreads:
    """A thread pool for the disk I/O of one store. `map` may be called from any thread."""

    def __init__(self, threads: int, name: str) -> None:
        self.count = min(max(1, threads), _MAX_THREADS)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=name)

    def map(self, work: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """Runs all jobs, in the calling thread and in those of the pool. If some failed, raises the
        exception of one.

        No job is still running when this returns or raises, because the caller may then reuse the
        memory they write to.
        """
        queue = deque(enumerate(jobs))
        results: dict[int, _Result] = {}
        errors: list[BaseException] = []
        ended = threading.Semaphore(0)  # counts the jobs

        def run_jobs() -> None:
            while True:
                try:
                    position, job = queue.popleft()
                except IndexError:
                    return
                try:
                    results[position] = work(job)
                except BaseException as error:
                    errors.append(error)
                ended.release()

        # RuntimeError: closed, or no more threads can be started; the running ones do the work.
        with suppress(RuntimeError):
            for _ in range(min(self.count, len(jobs)) - 1):
                self._pool.submit(run_jobs)
        run_jobs()
        for _ in jobs:
            ended.acquire()
        if errors:
            raise errors[0]
        return [results[position] for position in range(len(jobs))]

    def close(self) -> None:
        self._pool.shutdown()
