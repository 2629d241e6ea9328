"""IoThreads: every job of a batch has ended when `map` returns or raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from vllm_tiered_kv.stores.io_threads import IoThreads

JOBS = range(40)


@pytest.fixture
def threads() -> Iterator[IoThreads]:
    threads = IoThreads(4, "test")
    yield threads
    threads.close()


def no_more_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_map_returns_results_in_order_of_jobs(threads: IoThreads) -> None:
    helped = set()

    def work(job: int) -> int:
        helped.add(threading.get_ident())
        time.sleep(0.001 * (job % 3))
        return 2 * job

    assert threads.map(work, JOBS) == [2 * job for job in JOBS]
    assert len(helped) > 1
    assert threads.map(work, []) == []


def test_map_raises_only_after_all_jobs_have_ended(threads: IoThreads) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work(job: int) -> None:
        begun.append(job)
        if job == 1:
            raise MemoryError
        time.sleep(0.02)
        ended.append(job)

    with pytest.raises(MemoryError):
        threads.map(work, range(12))
    assert sorted(ended) == [job for job in sorted(begun) if job != 1]


def test_map_without_threads_runs_in_the_caller(
    threads: IoThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    assert threads.map(str, JOBS) == [str(job) for job in JOBS]


def test_map_when_threads_cannot_start_leaves_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool keeps a submitted job even if it raises because no thread can be started."""
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.endswith("_1"):
            no_more_threads(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    threads = IoThreads(4, "test")
    running: set[int] = set()

    def work(job: int) -> int:
        running.add(job)
        time.sleep(0.02)
        running.discard(job)
        return job

    assert threads.map(work, range(8)) == list(range(8))
    assert not running
    threads.close()


def test_map_after_close_runs_in_the_caller(threads: IoThreads) -> None:
    threads.close()
    assert threads.map(str, JOBS) == [str(job) for job in JOBS]


def test_thread_count_is_bounded() -> None:
    for asked, given in ((0, 1), (3, 3), (100_000, 256)):
        threads = IoThreads(asked, "test")
        assert threads.count == given
        threads.close()
