"""The CUDA copier: pieces of pinned memory, stages, and the order it promises.

The compute stream is kept busy by a long kernel, so that whatever does not wait shows.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from vllm_tiered_kv.config import CopyStrategy  # noqa: E402
from vllm_tiered_kv.connector.worker.replica_striping import ReplicaStriping  # noqa: E402
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry  # noqa: E402
from vllm_tiered_kv.core.layout import StridedView, block_runs  # noqa: E402
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob, int64_array  # noqa: E402
from vllm_tiered_kv.device import cuda_copier  # noqa: E402
from vllm_tiered_kv.device.arena import Arena  # noqa: E402
from vllm_tiered_kv.device.cuda_copier import CudaCopier  # noqa: E402
from vllm_tiered_kv.device.pinning import BackgroundPinner  # noqa: E402
from vllm_tiered_kv.device.shared_arena import SharedArena  # noqa: E402
from vllm_tiered_kv.errors import CudaError  # noqa: E402
from vllm_tiered_kv.metrics.names import DropReason  # noqa: E402
from vllm_tiered_kv.native import cuda  # noqa: E402

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, PAGE, SLOTS = 5, 64, 20_000, 48
PER_STAGE = 3  # blocks: stores and loads take many rounds
BUSY_CYCLES = 400_000_000  # about 0.2 s


class Bench:
    """A device with layers of random bytes, an arena pinned in odd pieces, and a copier."""

    def __init__(
        self,
        way: str = "layers-direct",
        fd: int | None = None,
    ) -> None:
        layout, strategy = way.split("-")
        # Made on the host: a sanitizer that follows our kernels alone sees no others write.
        if layout == "blocks":  # all layers of a block together
            together = torch.randint(0, 255, (BLOCKS, LAYERS, PAGE), dtype=torch.uint8).cuda()
            self.layers = [together[:, n] for n in range(LAYERS)]
        else:
            self.layers = [
                torch.randint(0, 255, (BLOCKS, PAGE), dtype=torch.uint8).cuda()
                for _ in range(LAYERS)
            ]
        views = [
            StridedView(f"l{i}", t.data_ptr(), tuple(t.shape), t.stride(), 1)
            for i, t in enumerate(self.layers)
        ]
        runs = block_runs(views, BLOCKS)
        assert len(runs.runs) == (1 if layout == "blocks" else LAYERS)
        self.geometry = ArenaGeometry.for_blocks(SLOTS * 100_032, [runs.block_bytes])
        # 7 pages a piece: most slots lie across two pieces.
        self.arena = Arena(
            self.geometry.capacity_bytes,
            functools.partial(cuda.host_register, device=0),
            functools.partial(cuda.host_unregister, device=0),
            chunk_bytes=7 * 4096 * 4,
            fd=fd,
        )
        while self.arena.ready_bytes < self.arena.nbytes:
            time.sleep(0.001)
        self.stream = torch.cuda.Stream()
        self.copier = CudaCopier(
            {0: runs},
            self.geometry,
            self.arena,
            0,
            lambda: int(self.stream.cuda_stream),
            2 * PER_STAGE * 100_032 + 4,
            CopyStrategy(strategy),
        )
        torch.cuda.synchronize()

    def block(self, number: int) -> bytes:
        torch.cuda.synchronize()
        return b"".join(layer[number].cpu().numpy().tobytes() for layer in self.layers)

    def slot(self, number: int) -> bytes:
        return self.arena.bytes_at(number * self.geometry.slab_bytes, LAYERS * PAGE).tobytes()

    def finish(self) -> tuple[list, list]:
        torch.cuda.synchronize()
        return self.copier.poll()


WAYS = (
    "layers-direct",
    "layers-staged",
    "layers-auto",
    "blocks-direct",
    "blocks-dma",
    "blocks-auto",
)


@pytest.fixture(params=WAYS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.copier.close()
    bench.copier.close()
    bench.arena.close()


def pairs(blocks: list[int], slots: list[int]) -> GroupTransfer:
    return GroupTransfer(0, int64_array(blocks), int64_array(slots))


def test_blocks_go_out_and_come_back_across_pieces(bench: Bench) -> None:
    rng = np.random.default_rng(1)
    truth = {n: bench.block(n) for n in range(BLOCKS)}
    where: dict[int, int] = {}
    for job in range(12):
        blocks = rng.choice(BLOCKS, 4, replace=False).tolist()
        slots = [job * 4 + i for i in range(4)]
        bench.copier.store(job, pairs(blocks, slots))
        (done,), _ = bench.finish()
        assert (done.job_id, done.stored, done.reason) == (job, 4, None)
        where.update(zip(slots, blocks, strict=True))
    for slot, block in where.items():
        assert bench.slot(slot) == truth[block]
    targets = rng.permutation(BLOCKS)[:SLOTS].tolist()
    bench.copier.fence()
    bench.copier.load("r", [pairs(targets, list(range(SLOTS)))])
    _, (load,) = bench.finish()
    assert (load.request_id, load.error) == ("r", None)
    for slot, target in enumerate(targets):
        assert bench.block(target) == truth[where[slot]]
    untouched = set(range(BLOCKS)) - set(targets)
    assert all(bench.block(n) == truth[n] for n in untouched)


def test_neighbouring_slots_travel_together_across_pieces(bench: Bench) -> None:
    truth = [bench.block(n) for n in range(40)]
    bench.copier.store(0, pairs(list(range(40)), list(range(5, 45))))
    (done,), _ = bench.finish()
    assert done.stored == 40
    assert [bench.slot(5 + n) for n in range(40)] == truth


def test_store_reads_after_earlier_compute_and_before_writers_that_wait(bench: Bench) -> None:
    """Nothing waits on the host; the source may be overwritten behind `wait_for_stores`."""
    with torch.cuda.stream(bench.stream):
        bench.layers[0][0].fill_(1)  # loading a kernel for the first time waits for the device
        bench.copier.store(0, pairs([0], [1]))
        bench.finish()
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in bench.layers:
            layer[3].fill_(77)  # what the forward writes
        bench.copier.store(1, pairs([3], [0]))
        bench.copier.wait_for_stores(1)
        for layer in bench.layers:
            layer[3].fill_(99)  # what the next one overwrites it with
    assert bench.copier.poll() == ([], [])
    (done,), _ = bench.finish()
    assert done.stored == 1
    assert bench.slot(0) == bytes([77]) * (LAYERS * PAGE)


def hold_stores_up(bench: Bench) -> None:
    """Stores from now on begin late."""
    with torch.cuda.stream(torch.cuda.ExternalStream(bench.copier._store_stream.handle)):
        torch.cuda._sleep(BUSY_CYCLES)


def warm_up(bench: Bench) -> None:
    """Loading a kernel for the first time waits for the device."""
    bench.copier.store(0, pairs([0, 1], [SLOTS - 2, SLOTS - 1]))
    hold_stores_up(bench)
    bench.copier.fence()
    bench.copier.load("warm", [pairs([0, 1], [SLOTS - 2, SLOTS - 1])])
    with torch.cuda.stream(bench.stream):
        for layer in bench.layers:
            layer[BLOCKS - 1].fill_(1)
    bench.finish()


@pytest.mark.parametrize("waits", [True, False])
def test_store_may_read_what_writers_that_do_not_wait_write(bench: Bench, waits: bool) -> None:
    warm_up(bench)
    before = bench.block(3)
    hold_stores_up(bench)
    bench.copier.store(1, pairs([3], [0]))
    with torch.cuda.stream(bench.stream):
        if waits:
            bench.copier.wait_for_stores(1)
        for layer in bench.layers:
            layer[3].fill_(99)
    bench.finish()
    assert bench.slot(0) == (before if waits else bytes([99]) * (LAYERS * PAGE))


def test_wait_for_an_earlier_store_does_not_wait_for_later_ones(bench: Bench) -> None:
    warm_up(bench)
    bench.copier.store(1, pairs([3], [0]))
    hold_stores_up(bench)
    bench.copier.store(2, pairs([4], [1]))
    with torch.cuda.stream(bench.stream):
        bench.copier.wait_for_stores(1)
        passed = torch.cuda.Event()
        passed.record()
    passed.synchronize()
    assert [store.job_id for store in bench.copier.poll()[0]] == [1]
    assert [store.job_id for store in bench.finish()[0]] == [2]


@pytest.mark.parametrize("waits", [True, False])
def test_load_after_a_fence_follows_awaited_stores(bench: Bench, waits: bool) -> None:
    warm_up(bench)
    loaded, before = bench.slot(SLOTS - 1), bench.block(3)
    hold_stores_up(bench)
    bench.copier.store(1, pairs([3], [0]))
    if waits:
        bench.copier.wait_for_stores(1)
    bench.copier.fence()
    bench.copier.load("r", [pairs([3], [SLOTS - 1])])
    bench.finish()
    assert bench.slot(0) == (before if waits else loaded)
    assert bench.block(3) == loaded


def test_forward_waits_for_the_oldest_of_too_large_a_backlog(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copier, "_MAX_BACKLOG_BYTES", LAYERS * PAGE)
    warm_up(bench)
    bench.copier.store(1, pairs([3], [0]))
    bench.copier.store(2, pairs([4], [1]))
    hold_stores_up(bench)
    bench.copier.store(3, pairs([5], [2]))
    with torch.cuda.stream(bench.stream):
        bench.copier.begin_step()
        began = torch.cuda.Event()
        began.record()
    began.synchronize()
    assert [store.job_id for store in bench.copier.poll()[0]] == [1, 2]
    assert [store.job_id for store in bench.finish()[0]] == [3]


def test_load_waits_for_the_fence_and_not_for_the_forward(bench: Bench) -> None:
    content = bench.block(5)
    bench.copier.store(1, pairs([5], [0]))
    bench.finish()
    with torch.cuda.stream(bench.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in bench.layers:
            layer[9].fill_(1)  # a step in flight still writes the block that was given away
        bench.copier.fence()
        torch.cuda._sleep(BUSY_CYCLES)  # the forward of this step
        forward_done = torch.cuda.Event()
        forward_done.record()
    bench.copier.load("r", [pairs([9], [0])])
    while not (loads := bench.copier.poll()[1]):
        time.sleep(0.001)
    overlapped = not forward_done.query()
    assert loads[0].error is None
    assert bench.block(9) == content  # not what the step in flight wrote
    assert overlapped


def in_slots(bench: Bench, count: int) -> list[bytes]:
    """The first blocks lie in the slots of their numbers, and are gone from the device."""
    truth = [bench.block(n) for n in range(count)]
    bench.copier.store(0, pairs(list(range(count)), list(range(count))))
    bench.finish()
    return truth


def read_once(bench: Bench, targets: torch.Tensor) -> None:
    """Loading a kernel for the first time waits for the device, and so may the allocation of what
    it returns: torch keeps that memory for the same stream."""
    with torch.cuda.stream(bench.stream):
        for layer in bench.layers:
            layer[0].clone(), layer[targets].clone()
    torch.cuda.synchronize()


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by-layer"])
def test_forward_waits_for_its_early_load(bench: Bench, by_layer: bool) -> None:
    truth = in_slots(bench, SLOTS)
    seen = [torch.zeros(SLOTS, PAGE, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    targets = torch.arange(BLOCKS - SLOTS, BLOCKS, device="cuda")
    read_once(bench, targets)
    with torch.cuda.stream(bench.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in bench.layers:
            layer[BLOCKS - SLOTS :].fill_(1)  # a step in flight still writes these blocks
        bench.copier.fence()
        order = np.random.default_rng(1).permutation(SLOTS)
        located = [
            bench.copier.locate(pairs((BLOCKS - SLOTS + part).tolist(), part.tolist()))
            for part in np.split(order, 3)
        ]
        bench.copier.step_load([7, 8], located, by_layer)
        assert bench.copier.poll_step_loads() == []
        for n, layer in enumerate(bench.layers):
            if by_layer:
                bench.copier.wait_for_layer(f"l{n}")
            seen[n].copy_(layer[targets])
        bench.copier.finish_step_loads()
    assert not bench.stream.query(), "the host waited"
    torch.cuda.synchronize()
    assert bench.copier.poll_step_loads() == [7, 8]
    for slot in range(SLOTS):
        assert b"".join(layer[slot].cpu().numpy().tobytes() for layer in seen) == truth[slot]
        assert bench.block(BLOCKS - SLOTS + slot) == truth[slot]
    assert bench.copier.poll() == ([], [])


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by-layer"])
def test_load_may_overtake_the_step_under_way_but_not_stores(bench: Bench, by_layer: bool) -> None:
    truth = in_slots(bench, 4)
    read = [bench.block(n) for n in (50, 51)]
    held_up = torch.cuda.Event()
    with torch.cuda.stream(bench.stream):
        bench.copier.store(5, pairs([50, 51], [10, 11]))  # what the load overwrites
        torch.cuda._sleep(BUSY_CYCLES)
        held_up.record()
        bench.copier.wait_for_stores(5)
        located = bench.copier.locate(pairs([50, 51, 52, 53], [0, 1, 2, 3]))
        bench.copier.step_load([1], [located], by_layer, overtakes=True)
        end = time.monotonic() + 10
        while not bench.copier.poll_step_loads():
            assert time.monotonic() < end
        assert not held_up.query(), "it waited for the step under way"
        bench.copier.finish_step_loads()
    bench.stream.synchronize()
    assert [bench.block(n) for n in range(50, 54)] == truth
    assert [bench.slot(n) for n in (10, 11)] == read


def test_step_waits_for_loads_that_began_before_it(bench: Bench) -> None:
    truth = in_slots(bench, SLOTS)
    seen = [torch.zeros(SLOTS, PAGE, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    targets = torch.arange(BLOCKS - SLOTS, BLOCKS, device="cuda")
    read_once(bench, targets)
    assert not bench.copier.can_load_early(), "no step has told its stream yet"
    bench.copier.begin_step()
    assert bench.copier.can_load_early()
    third = SLOTS // 3
    with torch.cuda.stream(bench.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in bench.layers:
            layer[BLOCKS - SLOTS :].fill_(1)  # an earlier step still writes these blocks
        parts = [
            bench.copier.locate(
                pairs(list(range(BLOCKS - SLOTS + start, BLOCKS - SLOTS + start + third)), slots)
            )
            for start in range(0, SLOTS, third)
            for slots in [list(range(start, start + third))]
        ]
        for number, part in enumerate(parts[:-1]):
            bench.copier.fence()
            bench.copier.load_early([number], [part])
        bench.copier.begin_step()
        bench.copier.fence()
        bench.copier.step_load([2], parts[-1:], True)
        for n, layer in enumerate(bench.layers):
            bench.copier.wait_for_layer(f"l{n}")
            seen[n].copy_(layer[targets])
        bench.copier.finish_step_loads()
    assert not bench.stream.query(), "the host waited"
    torch.cuda.synchronize()
    assert bench.copier.poll_step_loads() == [0, 1, 2]
    for slot in range(SLOTS):
        assert b"".join(layer[slot].cpu().numpy().tobytes() for layer in seen) == truth[slot]


def test_early_load_is_refused_while_another_stream_computes(bench: Bench) -> None:
    bench.copier.begin_step()
    bench.stream = torch.cuda.Stream()
    assert not bench.copier.can_load_early()


def test_work_after_a_forward_waits_for_layers_that_were_not_awaited(bench: Bench) -> None:
    truth = in_slots(bench, 4)
    with torch.cuda.stream(bench.stream):
        bench.copier.fence()
        located = bench.copier.locate(pairs([50, 51, 52, 53], [0, 1, 2, 3]))
        bench.copier.step_load([1], [located], True)
        bench.copier.wait_for_layer("l0")
        bench.copier.wait_for_layer("a layer that does not exist")
        bench.copier.finish_step_loads()
        bench.copier.wait_for_layer("l1")  # long over
    bench.stream.synchronize()
    assert [bench.block(n) for n in range(50, 54)] == truth


def test_many_loads_of_all_sizes(bench: Bench) -> None:
    truth = in_slots(bench, SLOTS)
    rng = np.random.default_rng(3)
    for round_ in range(20):
        count = int(rng.integers(1, SLOTS + 1))
        targets = rng.permutation(BLOCKS)[:count]
        slots = rng.permutation(SLOTS)[:count]
        bench.copier.fence()
        half = count // 2
        bench.copier.load("a", [pairs(targets[:half].tolist(), slots[:half].tolist())])
        bench.copier.load("b", [pairs(targets[half:].tolist(), slots[half:].tolist())])
        _, loads = bench.finish()
        assert [(load.request_id, load.error) for load in loads] == [("a", None), ("b", None)]
        for target, slot in zip(targets, slots, strict=True):
            assert bench.block(int(target)) == truth[slot], round_


def test_failing_copy_ahead_is_done_in_the_simplest_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = in_slots(bench, 2)

    def fail(*args: object) -> None:
        raise CudaError("planted")

    for way in ("enqueue", "enqueue_part"):
        monkeypatch.setattr(bench.copier._inbound, way, fail)
    with torch.cuda.stream(bench.stream):
        bench.copier.fence()
        bench.copier.load_early([2], [bench.copier.locate(pairs([58, 59], [0, 1]))])
        bench.copier.begin_step()
        bench.copier.step_load([3], [bench.copier.locate(pairs([61, 60], [1, 0]))], True)
    bench.stream.synchronize()
    assert [bench.block(60), bench.block(61)] == truth
    assert [bench.block(58), bench.block(59)] == truth
    assert bench.copier.poll_step_loads() == [2, 3]


def test_settle_waits_for_all_running_copies(bench: Bench) -> None:
    truth = in_slots(bench, 2)
    with torch.cuda.stream(bench.stream):
        bench.copier.fence()
        torch.cuda._sleep(BUSY_CYCLES)
        bench.copier.store(7, pairs([3, 4], [5, 6]))
        bench.copier.load("r", [pairs([60, 61], [0, 1])])
        bench.copier.load_early([2], [bench.copier.locate(pairs([58, 59], [0, 1]))])
    assert bench.copier.poll()[0] == []
    bench.copier.settle()
    stores, loads = bench.copier.poll()
    assert [(store.job_id, store.stored) for store in stores] == [(7, 2)]
    assert [(load.request_id, load.error) for load in loads] in ([], [("r", None)])
    assert bench.copier.poll_step_loads() == [2]
    assert [bench.slot(5), bench.slot(6)] == [bench.block(3), bench.block(4)]
    assert [bench.block(60), bench.block(61)] == truth


def test_slots_not_pinned_yet_are_not_used(bench: Bench) -> None:
    bench.arena._pinner.ready_bytes = 2 * bench.geometry.slab_bytes
    bench.copier.store(1, pairs([1, 2, 3], [0, 1, 2]))
    (done,), _ = bench.finish()
    assert (done.stored, done.reason) == (2, DropReason.NOT_PINNED_YET)


def test_bad_ids_are_reported_not_raised(bench: Bench) -> None:
    bench.copier.store(1, pairs([BLOCKS], [0]))
    (done,), _ = bench.finish()
    assert (done.stored, done.reason) == (0, DropReason.COPY_FAILED)
    bench.copier.fence()
    bench.copier.load("r", [pairs([0], [SLOTS])])
    _, (load,) = bench.finish()
    assert "slot_offsets" in load.error
    bench.copier.store(2, pairs([1], [0]))
    assert bench.finish()[0][0].stored == 1


def test_channel_reads_shared_memory_behind_the_fence(bench: Bench) -> None:
    """As blocks of a daemon's memory are loaded: a mapped memfd, pinned in pieces, own stream."""
    arena = SharedArena.create(64 * 102_400)
    pinner = BackgroundPinner(
        arena.region,
        functools.partial(cuda.host_register, device=0),
        functools.partial(cuda.host_unregister, device=0),
        "",
        chunk_bytes=7 * 4096 * 4,
    )
    while pinner.ready_bytes < arena.capacity_bytes:
        time.sleep(0.001)
    rng = np.random.default_rng(4)
    contents = [rng.bytes(LAYERS * PAGE) for _ in range(8)]
    offsets = [n * 102_400 for n in (3, 60, 7, 8, 9, 31, 0, 44)]
    for offset, content in zip(offsets, contents, strict=True):
        arena.view(offset, len(content))[:] = content
    channel = bench.copier.open_channel()
    channel.scatter(0, int64_array([1]), arena.region, int64_array([0]))  # loads the kernel
    channel.finish()
    with torch.cuda.stream(bench.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in bench.layers:
            layer[20].fill_(1)  # a step in flight still writes the block that was given away
        bench.copier.fence()
        torch.cuda._sleep(BUSY_CYCLES)
        behind = torch.cuda.Event()
        behind.record()
    channel.scatter(0, int64_array(list(range(20, 28))), arena.region, int64_array(offsets))
    channel.finish()
    assert not behind.query(), "the channel waited for the forward"
    assert [bench.block(20 + n) for n in range(8)] == contents
    channel.close()
    pinner.close()
    arena.close()


def test_two_mappings_of_one_memory_are_pinned_and_filled_together() -> None:
    """As ranks with the same KV do: each stores every other block, both load all of them."""
    fd = os.memfd_create("replicas")
    os.ftruncate(fd, 64 << 20)
    benches = [Bench(fd=fd) for _ in range(2)]
    os.close(fd)
    for other in benches[1:]:  # the same KV on both
        for layer, first in zip(other.layers, benches[0].layers, strict=True):
            layer.copy_(first)
    blocks = [benches[0].block(number) for number in range(9)]
    job = GroupTransfer(0, int64_array(list(range(9))), int64_array(list(range(9))))
    for replica, bench in enumerate(benches):
        share = ReplicaStriping(replica, 2)
        for job_id, transfer in ((4, job), (5, job.head(1))):
            mine = share.begin(StoreJob(job_id, transfer), len(transfer))
            bench.copier.store(job_id, mine)
        done, _ = bench.finish()
        assert [share.end(store).stored for store in done] == [9, 1]
    for bench in benches:
        assert [bench.slot(number) for number in range(9)] == blocks
        for layer in bench.layers:
            layer.zero_()
        torch.cuda.synchronize()
        bench.copier.fence()
        bench.copier.load("r", [job])
        _, loads = bench.finish()
        assert [load.error for load in loads] == [None]
        assert [bench.block(number) for number in range(9)] == blocks
    for bench in benches:
        bench.copier.close()
        bench.arena.close()
