"""Spreading a batch over threads, so that one call keeps the disk busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class IoThreads:
    def __init__(self, threads: int) -> None:
        self.count = max(1, threads)
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="ssd-io")

    def map(self, work: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
        """Does all jobs, the calling thread and those of the pool together."""
        todo = deque(enumerate(jobs))
        results: dict[int, _Result] = {}

        def drain() -> None:
            while True:
                try:
                    position, job = todo.popleft()
                except IndexError:
                    return
                results[position] = work(job)

        futures = [self._pool.submit(drain) for _ in range(min(self.count, len(jobs)) - 1)]
        try:
            drain()
        finally:
            for future in futures:
                # One that has not begun is not waited for: all its work is taken.
                if not future.cancel():
                    future.result()
        return [results[position] for position in range(len(jobs))]

    def close(self) -> None:
        self._pool.shutdown()
