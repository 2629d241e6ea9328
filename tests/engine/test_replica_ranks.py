"""Ranks that hold the same KV fill one arena: each block is copied out once and read by all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.toy_asking import ask, prompt, total, workload
from tests.engine.toy_groups import WrongRead
from tests.engine.toy_ranks import RankedToyEngine
from tests.patience import in_turn, mostly_slow
from vllm_tiered_kv.core.transfer import GroupTransfer
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason

pytestmark = pytest.mark.usefixtures("step_loads")


@pytest.fixture
def open_replicas(
    tiny_model: Path, async_scheduling: bool
) -> Iterator[Callable[..., RankedToyEngine]]:
    """Opens engines, and closes them in the end: some have threads."""
    opened: list[RankedToyEngine] = []

    def open_one(ranks: int = 2, context: int = 1, **settings: Any) -> RankedToyEngine:
        """`context`: the ranks of prefill context parallelism among them."""
        sizes = {
            "tensor_parallel_size": ranks // context,
            "prefill_context_parallel_size": context,
        }
        engine = RankedToyEngine(
            tiny_model,
            async_scheduling,
            ranks=ranks,
            replicas=ranks,
            parallel_config=sizes,
            **settings,
        )
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        engine.close()


def count_copies(engine: RankedToyEngine) -> list[Counter[int]]:
    """By rank: how often each slot is written from now on."""
    written: list[Counter[int]] = []
    for copier in engine.copiers:
        slots: Counter[int] = Counter()
        store = copier.store

        def counted(job_id: int, transfer: GroupTransfer, store=store, slots=slots) -> None:
            slots.update(transfer.slots.tolist())
            store(job_id, transfer)

        copier.store = counted
        written.append(slots)
    return written


@pytest.mark.parametrize(
    ("ranks", "context"),
    [(2, 1), (3, 1), (2, 2), (4, 2)],
    ids=["tensor", "tensor3", "prefill_context", "both"],
)
def test_each_block_is_copied_out_by_one_rank_and_loaded_by_all(
    open_replicas: Callable[..., RankedToyEngine], ranks: int, context: int
) -> None:
    engine = open_replicas(ranks, context, cpu_blocks=16)
    # The memory of all of them holds as many blocks, not one copy of a part for each.
    geometry = engine.half.index.geometry
    assert geometry.num_slabs * geometry.slots_per_slab == 16 * ranks
    written = count_copies(engine)
    ids = prompt(random.Random(1), 41)
    ask(engine, ids)
    assert total(engine, names.STORED_BLOCKS) == 11
    assert sum(written, Counter()).most_common()[0][1] == 1
    assert sum(map(len, written)) == 11
    assert all(written)
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.LOADED_BLOCKS) == 10
    engine.assert_at_rest()
    engine.drop_gpu_cache()
    first, second = (rank.arena for rank in engine.all_ranks[:2])
    assert first is second
    first[:] ^= 1
    with pytest.raises(WrongRead):
        ask(engine, ids)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_block_that_its_rank_did_not_store_is_a_miss_and_so_is_what_follows(
    open_replicas: Callable[..., RankedToyEngine], bad: int
) -> None:
    engine = open_replicas(3)
    engine.copiers[bad].drop_stores = 1.0
    rng = random.Random(2)
    asked = [prompt(rng, 61) for _ in range(4)]
    for ids in asked:
        ask(engine, ids, 2)
    dropped = total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.COPY_FAILED.value)
    assert dropped > 0
    assert total(engine, names.STORED_BLOCKS) + dropped == sum((len(i) + 1) // 4 for i in asked)
    assert total(engine, names.STORED_BLOCKS) > 0
    engine.copiers[bad].drop_stores = 0.0
    for ids in asked:
        engine.drop_gpu_cache()
        ask(engine, ids, 2)
    assert total(engine, names.LOAD_FAILURES) == 0
    assert total(engine, names.HIT_TOKENS) > 0
    engine.assert_at_rest()


def test_rank_never_reads_what_it_has_not_pinned(
    open_replicas: Callable[..., RankedToyEngine],
) -> None:
    """Though another one, which has pinned more, has stored it."""
    engine = open_replicas(max_tokens_per_step=64)
    slow = engine.all_ranks[1]
    pinned = 6 * engine.half.index.geometry.slab_bytes
    arena = slow.worker.worker_half.arena
    slow.worker.worker_half.arena = SimpleNamespace(
        ready_bytes=pinned, nbytes=arena.nbytes, close=arena.close
    )
    read: list[int] = []
    load, locate = slow.copier.load, slow.copier.locate

    def watched_load(request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        for transfer in transfers:
            read.extend(transfer.slots.tolist())
        load(request_id, transfers)

    def watched_locate(transfer: GroupTransfer) -> PinnedBlocks:
        read.extend(transfer.slots.tolist())
        return locate(transfer)

    slow.copier.load, slow.copier.locate = watched_load, watched_locate
    ids = prompt(random.Random(1), 41)  # in one step, before any worker has said what is pinned
    ask(engine, ids, 1)
    assert total(engine, names.STORED_BLOCKS) == 6
    dropped = total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.NOT_PINNED_YET.value)
    assert dropped == 4
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    assert sorted(set(read)) == list(range(6))
    engine.assert_at_rest()


def test_block_verified_by_one_rank_is_reported_for_all(
    open_replicas: Callable[..., RankedToyEngine],
) -> None:
    engine = open_replicas(cpu_blocks=256, extra_config={"verify_fraction": 1})
    rng = random.Random(3)
    asked = [prompt(rng, 41) for _ in range(6)]
    for ids in asked:
        ask(engine, ids)
    stored = engine.half.index.used_bytes
    written = count_copies(engine)
    for ids in asked:
        engine.drop_gpu_cache()
        ask(engine, ids)
    assert total(engine, names.VERIFIED_BLOCKS) == 10 * len(asked)
    assert total(engine, names.DIFFERING_BLOCKS) == total(engine, names.INEXACT_BLOCKS) == 0
    assert all(written)  # the ranks share this work, too
    assert sum(slots.total() for slots in written) == 10 * len(asked)
    assert engine.half.index.used_bytes == stored
    engine.arena[:] ^= 1 << 50
    for ids in asked:
        engine.drop_gpu_cache()
        ask(engine, ids)
    assert total(engine, names.DIFFERING_BLOCKS) == 10 * len(asked)
    engine.assert_at_rest()


OPTIONS: dict[str, dict] = {
    "eager": {},
    "slow": {"store_delay": 4},
    "lazy": {"store": "lazy", "lazy_window": 24},
    "verified": {"verify_fraction": 0.5},
}


@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
@pytest.mark.parametrize(
    ("options", "context"), in_turn(OPTIONS, {"tensor": 1, "prefill_context": 2})
)
def test_random_clients(
    open_replicas: Callable[..., RankedToyEngine],
    async_scheduling: bool,
    seed: int,
    options: dict,
    context: int,
) -> None:
    options = dict(options)
    engine = open_replicas(
        context * (1 + seed % 2) if context > 1 else 2 + seed % 2,
        context,
        store_delay=options.pop("store_delay", None),
        gpu_blocks=28,
        cpu_blocks=14,
        extra_config=options,
        seed=seed,
    )
    for number, copier in enumerate(engine.copiers):
        copier.fail_every = 0.2
        copier.drop_stores = 0.1
        copier.max_delay = 2 + 3 * number
        # Model Runner V2, which PCP needs, cannot take back a step.
        copier.fail_ahead = 0.0 if async_scheduling or context > 1 else 0.2
    workload(engine, seed, 60)
    engine.assert_at_rest()
    assert total(engine, names.HIT_TOKENS) > 0
    assert total(engine, names.DIFFERING_BLOCKS) == 0
