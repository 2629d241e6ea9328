"""Spreading a batch over threads, so that one call keeps the disk busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Job = TypeVar("_Job")


class IoThreads:
    def __init__(self, threads: int) -> None:
        self._threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ssd-io")

    def each(self, work: Callable[[_Job], None], jobs: Sequence[_Job]) -> None:
        """Does all jobs, the calling thread and those of the pool together."""
        todo = deque(jobs)

        def drain() -> None:
            while True:
                try:
                    job = todo.popleft()
                except IndexError:
                    return
                work(job)

        futures = [self._pool.submit(drain) for _ in range(min(self._threads, len(jobs)) - 1)]
        try:
            drain()
        finally:
            for future in futures:
                # One that has not begun is not waited for: all its work is taken.
                if not future.cancel():
                    future.result()

    def close(self) -> None:
        self._pool.shutdown()
