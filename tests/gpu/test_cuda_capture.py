"""vLLM captures CUDA graphs while the CPU tier is still being pinned in the background."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest

from vllm_tiered_kv.native import cuda

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

_DEVICE = 0
_CAPTURES = 30
_REGION_BYTES = 64 << 20


def _pin_and_unpin() -> Callable[[], None]:
    region = np.frombuffer(mmap.mmap(-1, _REGION_BYTES), np.uint8)
    address = region.ctypes.data

    def work() -> None:
        cuda.host_register(address, region.nbytes, _DEVICE)
        cuda.host_unregister(address, _DEVICE)

    return work


def _record_and_query() -> Callable[[], None]:
    stream, event = cuda.Stream(_DEVICE), cuda.Event(_DEVICE)

    def work() -> None:
        event.record(stream.handle)
        event.query()
        event.synchronize()
        stream.synchronize()

    return work


def _capture_while(work: Callable[[], None]) -> tuple[int, int]:
    """Captures and replays graphs; how many were right, and how often `work` ran meanwhile."""
    stop, calls = threading.Event(), 0
    failures: list[BaseException] = []

    def repeat() -> None:
        nonlocal calls
        try:
            while not stop.is_set():
                work()
                calls += 1
        except BaseException as error:  # shown by the test
            failures.append(error)

    left = torch.eye(512, device="cuda", dtype=torch.bfloat16) * 2
    right = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    thread = threading.Thread(target=repeat)
    thread.start()
    done = 0
    try:
        for _ in range(_CAPTURES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = right
                for _ in range(50):
                    found = (left @ found) / 2
            graph.replay()
            torch.cuda.current_stream().synchronize()
            done += int(torch.equal(found, right))
    finally:
        stop.set()
        thread.join()
    assert not failures, failures
    return done, calls


@pytest.mark.parametrize("calls", [_pin_and_unpin, _record_and_query])
def test_background_cuda_calls_do_not_break_a_capture(
    calls: Callable[[], Callable[[], None]],
) -> None:
    captured, repeated = _capture_while(calls())
    assert captured == _CAPTURES
    assert repeated > _CAPTURES // 3, "the background thread hardly ran"
