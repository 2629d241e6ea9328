"""From slower tiers into memory: many blocks in one fetch, some of them damaged or without room."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.daemon.raw_client import block
from tests.patience import eventually
from vllm_tiered_kv.core.store import BlockFacts, Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers import promotion
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore, TierSettings
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.ssd.folder import DATA
from vllm_tiered_kv.stores.ssd.store import SsdStore

MIB = 1 << 20
SIZE = 32 << 10
COUNT = 40  # several batches
PATIENCE_S = 30.0


def key(n: int) -> StoreKey:
    return StoreKey(bytes(16) + n.to_bytes(8, "little"))


def contents(count: int = COUNT) -> list[bytes]:
    return [block(n, SIZE) for n in range(count)]


class Moody(SsdStore):
    raises = False

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        if self.raises:
            raise RuntimeError("on purpose")
        return super().get(keys, into)


class Tiers:
    """A store whose blocks are in its slower tiers alone."""

    def __init__(self, folder: Path, with_backing: bool, memory: int = 4 * MIB) -> None:
        self.recorder = Recorder()
        self.ssd = Moody(folder / "ssd", 16 * MIB)
        backing = (
            BackingTier(BackingOptions(f"file://{folder / 'shared'}", 16 * MIB))
            if with_backing
            else None
        )
        self.store = TieredStore(
            memory, self.ssd, backing, self.recorder, TierSettings(backing_timeout_s=PATIENCE_S)
        )
        items = [PutItem(key(n), None, memoryview(block(n, SIZE))) for n in range(COUNT)]
        for one in (self.ssd, backing):
            if one is not None:
                assert one.put(items, Durability.DISK) == [PutResult.STORED] * COUNT

    def fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        """What each of them came to."""
        answers = self.begin(numbers)
        found = dict(answers.get(timeout=PATIENCE_S) for _ in numbers)
        assert len(found) == len(numbers), "answered twice"
        assert answers.empty()
        return [found[position] for position in range(len(numbers))]

    def begin(self, numbers: Sequence[int]) -> queue.Queue[tuple[int, bytes | None]]:
        """Positions and contents, as they come."""
        answers: queue.Queue[tuple[int, bytes | None]] = queue.Queue()

        def ready(position: int, held: PinnedSlot | None) -> None:
            content = None if held is None else bytes(held.view)
            if held is not None:
                self.store.memory.let_go([held])
            answers.put((position, content))

        self.store.fetch([key(n) for n in numbers], ready)
        return answers

    def damage(self, number: int) -> None:
        [slot] = self.ssd._index.pin([key(number)])
        self.ssd._index.unpin([slot])
        with (self.ssd.folder / DATA).open("r+b") as file:
            file.seek(self.ssd._table.offset(slot, SIZE) + 5)
            file.write(bytes(byte ^ 1 for byte in block(number, SIZE)[5:9]))

    def total(self, metric: names.Metric, tier: Tier) -> float:
        return self.recorder.total(metric, tier.value)


@pytest.fixture
def tiers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path, with_backing=getattr(request, "param", False))
    yield tiers
    tiers.store.drain()  # answers still on their way hold what they bring
    tiers.store.memory.check()
    assert not tiers.store.memory._index.pinned_slots()
    tiers.store.close()


WITH_BACKING = pytest.mark.parametrize("tiers", [True], indirect=True, ids=["backing"])


def test_fetch_from_slower_tiers_keeps_positions(tiers: Tiers) -> None:
    order = [*range(COUNT - 1, -1, -1), 3, 3]  # some of them asked for more than once
    right = contents()
    assert tiers.fetch(order) == [right[n] for n in order]
    assert tiers.total(names.PROMOTED, Tier.SSD) == COUNT
    assert tiers.fetch(order) == [right[n] for n in order]
    assert tiers.total(names.PROMOTED, Tier.SSD) == COUNT, "they are in memory now"


def test_fetch_of_damaged_block_misses_only_that_block(tiers: Tiers) -> None:
    tiers.damage(4)
    tiers.damage(17)
    expected = [None if n in (4, 17) else right for n, right in enumerate(contents())]
    assert tiers.fetch(range(COUNT)) == expected
    assert tiers.fetch([4, 17]) == [None, None]
    assert tiers.total(names.HITS, Tier.SSD) == COUNT - 2


@WITH_BACKING
def test_fetch_of_damaged_block_uses_tier_below(tiers: Tiers) -> None:
    tiers.damage(4)
    assert tiers.fetch([*range(COUNT), 1000]) == [*contents(), None]
    assert tiers.total(names.HITS, Tier.SSD) == COUNT - 1
    assert tiers.total(names.HITS, Tier.BACKING) == 1


def sizes_of_reads(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of blocks of each read of the backing store."""
    backing = tiers.store.backing
    assert backing is not None
    sizes: list[int] = []
    get = backing.get

    def watched(keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        sizes.append(len(keys))
        return get(keys, into)

    monkeypatch.setattr(backing, "get", watched)
    return sizes


@pytest.mark.parametrize("batch", [1, 8])
@WITH_BACKING
def test_fetch_reads_as_many_blocks_at_once_as_the_store_wants(
    tiers: Tiers, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of_reads(tiers, monkeypatch)
    monkeypatch.setattr(BackingTier, "read_batch", batch)
    tiers.ssd.delete([key(n) for n in range(COUNT)])
    assert tiers.fetch(range(COUNT)) == contents()
    assert sizes == [batch] * (COUNT // batch)


@pytest.mark.parametrize(("call_bytes", "most"), [(3 * SIZE, 3), (SIZE // 2, 1)])
@WITH_BACKING
def test_fetch_of_large_blocks_reads_fewer_of_them_at_once(
    tiers: Tiers, call_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of_reads(tiers, monkeypatch)
    monkeypatch.setattr(BackingTier, "read_batch", 8)
    monkeypatch.setattr(promotion, "_BACKING_CALL_BYTES", call_bytes)
    tiers.ssd.delete([key(n) for n in range(COUNT)])
    assert tiers.fetch(range(COUNT)) == contents()
    assert max(sizes) == most
    assert sum(sizes) == COUNT, "each block is read once"


@WITH_BACKING
def test_fetch_from_ssd_does_not_wait_for_backing(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiers.store.backing is not None
    gate = threading.Event()
    describe = tiers.store.backing.describe

    def gated(keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        assert gate.wait(PATIENCE_S)
        return describe(keys)

    monkeypatch.setattr(tiers.store.backing, "describe", gated)
    tiers.damage(2)
    answers = tiers.begin([*range(COUNT), 1000])
    found = dict(answers.get(timeout=PATIENCE_S) for _ in range(COUNT - 1))
    assert found == {n: right for n, right in enumerate(contents()) if n != 2}
    gate.set()
    assert dict(answers.get(timeout=PATIENCE_S) for _ in range(2)) == {
        2: contents()[2],
        COUNT: None,
    }


def test_fetch_callback_error_does_not_affect_others(tiers: Tiers) -> None:
    def deaf(position: int, held: PinnedSlot | None) -> None:
        if held is not None:
            tiers.store.memory.let_go([held])
        raise RuntimeError("on purpose")

    tiers.store.fetch([key(n) for n in (0, 1, 1000)], deaf)
    assert tiers.fetch([0, 1, 2, 1000]) == [*contents(3), None]


def test_fetch_from_raising_tier_frees_slots(tiers: Tiers) -> None:
    tiers.ssd.raises = True
    for _ in range(10):  # more than memory could hold
        assert tiers.fetch(range(COUNT)) == [None] * COUNT
    assert tiers.store.memory.usage().used_bytes == 0
    tiers.ssd.raises = False
    assert tiers.fetch(range(COUNT)) == contents()


def all_in_use(tiers: Tiers) -> list[PinnedSlot]:
    """Pins every block in memory and reserves every free slot."""
    memory = tiers.store.memory
    held = [one for one in memory.hold([key(n) for n in range(COUNT)]) if one is not None]
    while isinstance(slot := memory.reserve(key(1000 + len(held)), None, SIZE), PinnedSlot):
        held.append(slot)
    return held


def test_fetch_without_room_is_miss(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, with_backing=False, memory=32 * SIZE)
    memory = tiers.store.memory
    assert tiers.fetch(range(COUNT)) == contents(), "room comes free as others take theirs"
    all_in_use(tiers)
    absent = next(n for n in range(COUNT) if memory.contains([key(n)]) == [False])
    before = tiers.total(names.NOT_PROMOTED, Tier.SSD)
    assert tiers.fetch([absent]) == [None]
    assert tiers.total(names.NOT_PROMOTED, Tier.SSD) == before + 1
    tiers.store.close()


def test_fetch_without_room_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "_WAIT_FOR_ROOM_S", PATIENCE_S)  # however slow this thread is
    tiers = Tiers(tmp_path, with_backing=False, memory=32 * SIZE)
    memory = tiers.store.memory
    tiers.fetch(range(COUNT))
    in_use = all_in_use(tiers)
    absent = [n for n in range(COUNT) if memory.contains([key(n)]) == [False]]
    answers = tiers.begin(absent)
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.05)
    for one in in_use:
        if one.checksum:
            memory.let_go([one])
        else:
            memory.abort(one)
    found = dict(answers.get(timeout=PATIENCE_S) for _ in absent)
    assert [found[position] for position in range(len(absent))] == [block(n, SIZE) for n in absent]
    assert tiers.total(names.NOT_PROMOTED, Tier.SSD) == 0
    tiers.store.close()


def test_fetch_without_room_gives_up_in_time(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other reads find room, but the thread that writes this block may never finish."""
    monkeypatch.setattr(promotion, "_MAX_WAIT_S", 2.0)
    memory = tiers.store.memory
    unfinished = memory.reserve(key(0), None, SIZE)
    assert isinstance(unfinished, PinnedSlot)
    answers = tiers.begin([0])

    def is_answered() -> bool:
        memory.delete([key(1)])
        assert tiers.fetch([1]) == [contents(2)[1]]
        return not answers.empty()

    eventually(is_answered, seconds=PATIENCE_S)
    assert answers.get() == (0, None)
    memory.abort(unfinished)
    assert tiers.fetch([0]) == contents(1)


def test_promoted_block_is_pinned_until_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other reads may need room, and the last block of a chain is evicted first."""
    tiers = Tiers(tmp_path, with_backing=False, memory=32 * SIZE)
    memory, hold = tiers.store.memory, tiers.store.memory.hold

    def hold_in_a_crowd(keys: Sequence[StoreKey], touch: bool = True) -> list[PinnedSlot | None]:
        slots = [memory.reserve(key(2000 + n), None, SIZE) for n in range(40)]
        for slot in slots:
            if isinstance(slot, PinnedSlot):
                memory.abort(slot)
        return hold(keys, touch)

    monkeypatch.setattr(memory, "hold", hold_in_a_crowd)
    assert tiers.fetch(range(8)) == contents(8)
    tiers.store.close()
