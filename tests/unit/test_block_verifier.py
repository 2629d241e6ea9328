"""A worker's comparisons: each job is reported exactly once, whatever happens to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_tiered_kv.connector.worker.block_verifier import BlockVerifier
from vllm_tiered_kv.connector.worker.kv_layout import StatePart
from vllm_tiered_kv.connector.worker.number_formats import layer_numbers, number_format
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.block_compare import LayerNumbers, NumberFormat
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.layout import BlockRuns
from vllm_tiered_kv.core.transfer import GroupTransfer, int64_array
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import StoreDone

NBYTES = 256
GEOMETRY = ArenaGeometry(16 * NBYTES, (NBYTES,))


class Bench:
    def __init__(self) -> None:
        self.arena = Arena(GEOMETRY.capacity_bytes)
        self.blocks = self.arena.bytes_at(0, self.arena.nbytes).reshape(16, NBYTES)
        self.blocks[:] = np.arange(16, dtype=np.uint8)[:, None]
        self.verifier = BlockVerifier(GEOMETRY, 0.05)
        self.remote: dict[tuple[str, bytes], bytes] = {}

    def local(self, job_id: int, spare: list[int], held: list[int]) -> VerifyJob:
        copy = GroupTransfer(0, int64_array([7] * len(spare)), int64_array(spare))
        keys = tuple(BlockKey(bytes([slot])) for slot in held)
        return VerifyJob(job_id, copy, keys, NBYTES, int64_array(held))

    def at_daemon(self, job_id: int, spare: list[int], keys: list[bytes]) -> VerifyJob:
        copy = GroupTransfer(0, int64_array([7] * len(spare)), int64_array(spare))
        return VerifyJob(job_id, copy, tuple(map(BlockKey, keys)), NBYTES, None, "tcp://h:1")

    def read(self, address: str, key: BlockKey, into: memoryview) -> bool:
        if key == b"bad":
            raise OSError("planted")
        content = self.remote.get((address, key))
        if content is not None:
            into[:] = content
        return content is not None

    def verdicts(self, jobs: int = 1) -> dict[int, list[Verdict]]:
        found: dict[int, list[list[BlockVerdict]]] = {}
        end = time.monotonic() + 30
        while len(found) < jobs:
            found |= self.verifier.take_verdicts()
            assert time.monotonic() < end, "a job was never reported"
            time.sleep(0.001)
        assert all(len(reports) == 1 for reports in found.values())
        return {job: [v.verdict for v in reports[0]] for job, reports in found.items()}

    def run(self, job: VerifyJob, copied: int | None = None) -> list[Verdict]:
        self.verifier.begin_step([job])
        (copy,) = self.verifier.take_copies()
        assert (copy.job_id, copy.transfer) == (job.job_id, job.copy)
        done = StoreDone(job.job_id, len(job.keys) if copied is None else copied)
        assert self.verifier.copied(done, self.arena, self.read)
        return self.verdicts()[job.job_id]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.verifier.close()
    bench.arena.close()


def test_blocks_of_the_cpu_tier(bench: Bench) -> None:
    bench.blocks[8], bench.blocks[9] = bench.blocks[1], bench.blocks[2]
    bench.blocks[2, 100] ^= 1
    assert bench.run(bench.local(1, [8, 9], [1, 2])) == [Verdict.EQUAL, Verdict.DIFFERENT]


def test_blocks_of_a_daemon(bench: Bench) -> None:
    bench.remote["tcp://h:1", b"same"] = bench.blocks[8].tobytes()
    bench.remote["tcp://h:1", b"other"] = bench.blocks[3].tobytes()
    job = bench.at_daemon(1, [8, 8, 8], [b"same", b"other", b"gone"])
    assert bench.run(job) == [Verdict.EQUAL, Verdict.DIFFERENT, Verdict.NOT_COMPARED]


def test_numbers_are_compared_where_their_format_is_known(bench: Bench) -> None:
    values = np.linspace(1, 2, NBYTES // 4, dtype=np.float32)
    bench.blocks[8] = values.view(np.uint8)
    bench.blocks[1] = (values * np.float32(1.001)).view(np.uint8)
    assert bench.run(bench.local(1, [8], [1])) == [Verdict.DIFFERENT]
    bench.verifier.describe({0: [LayerNumbers("layer", NBYTES, NumberFormat.FLOAT32)]})
    assert bench.run(bench.local(2, [8], [1])) == [Verdict.CLOSE]


def test_blocks_not_copied_are_not_compared(bench: Bench) -> None:
    bench.blocks[8] = bench.blocks[1]
    assert bench.run(bench.local(1, [8, 9], [1, 2]), copied=1) == [
        Verdict.EQUAL,
        Verdict.NOT_COMPARED,
    ]


def test_comparison_that_breaks_is_reported_too(bench: Bench) -> None:
    bench.remote["tcp://h:1", b"same"] = bench.blocks[8].tobytes()
    job = bench.at_daemon(1, [8, 8, 8], [b"same", b"bad", b"same"])
    assert bench.run(job) == [Verdict.EQUAL, Verdict.NOT_COMPARED, Verdict.NOT_COMPARED]
    assert bench.run(bench.local(2, [8], [8])) == [Verdict.EQUAL]


def test_step_without_an_end_is_reported(bench: Bench) -> None:
    bench.verifier.begin_step([bench.local(1, [8, 9], [1, 2])])
    bench.verifier.begin_step([])
    assert bench.verdicts() == {1: [Verdict.NOT_COMPARED] * 2}
    assert bench.verifier.take_verdicts() == {}


def test_copies_of_other_jobs_are_ignored(bench: Bench) -> None:
    assert not bench.verifier.copied(StoreDone(5, 1), bench.arena, None)
    assert bench.verifier.take_verdicts() == {}


def test_closing_twice_and_unused(bench: Bench) -> None:
    BlockVerifier(GEOMETRY, 0).close()
    bench.run(bench.local(1, [8], [1]))
    bench.verifier.close()
    bench.verifier.close()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "expected"),
    [
        ("torch.float32", "auto", NumberFormat.FLOAT32),
        ("torch.bfloat16", "auto", NumberFormat.BFLOAT16),
        ("torch.float16", "float16", NumberFormat.FLOAT16),
        ("torch.uint8", "fp8", NumberFormat.FP8_E4M3),
        ("torch.uint8", "fp8_e5m2", NumberFormat.FP8_E5M2),
        ("torch.float8_e4m3fn", "fp8", NumberFormat.FP8_E4M3),
        ("torch.bfloat16", "fp8", NumberFormat.BFLOAT16),  # a layer left out of it
        ("torch.uint8", "fp8_ds_mla", NumberFormat.OPAQUE),
        ("torch.uint8", "nvfp4", NumberFormat.OPAQUE),
        ("torch.int8", "int8_per_token_head", NumberFormat.OPAQUE),
    ],
)
def test_formats(dtype: str, cache_dtype: str, expected: NumberFormat) -> None:
    assert number_format(dtype, cache_dtype) is expected


def test_job_without_a_thread_is_not_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is, if there is one by then: nothing of it may end the engine."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert bench.run(bench.local(1, [0, 1], [0, 1])) == [Verdict.NOT_COMPARED] * 2
    assert bench.run(bench.local(2, [0, 1], [0, 1])) == [Verdict.EQUAL] * 2


def test_parts_of_a_recurrent_state_have_number_formats_of_their_own() -> None:
    """vLLM registers a recurrent layer as bytes. Compared as bytes, a state that was rounded
    differently would count as wrong."""
    caches = {
        "attention": SimpleNamespace(dtype="torch.float16"),
        "one": SimpleNamespace(dtype="torch.int8"),
        "two": SimpleNamespace(dtype="torch.int8"),
    }
    runs = {
        0: BlockRuns((), 1, (("attention", 64),)),
        1: BlockRuns((), 1, (("one", 40), ("two", 80))),
    }
    state = [StatePart(8, "torch.bfloat16"), StatePart(32, "torch.float32")]
    assert layer_numbers(caches, runs, "auto", {"one": state, "two": state}) == {
        0: [LayerNumbers("attention", 64, NumberFormat.FLOAT16)],
        1: [
            LayerNumbers("one", 8, NumberFormat.BFLOAT16),
            LayerNumbers("one", 40, NumberFormat.FLOAT32),
            LayerNumbers("two", 48, NumberFormat.BFLOAT16),
            LayerNumbers("two", 80, NumberFormat.FLOAT32),
        ],
    }


def test_undefined_part_of_a_state_is_not_compared() -> None:
    """A convolution keeps the inputs of drafts behind those that count."""
    caches = {"one": SimpleNamespace(dtype="torch.int8")}
    runs = {0: BlockRuns((), 1, (("one", 40),))}
    state = [StatePart(8, "torch.bfloat16", False), StatePart(32, "torch.float32")]
    assert layer_numbers(caches, runs, "auto", {"one": state}) == {
        0: [
            LayerNumbers("one", 8, NumberFormat.BFLOAT16, False),
            LayerNumbers("one", 40, NumberFormat.FLOAT32),
        ]
    }
