"""What can be said of a toy engine: all that its tiers hold is right, and how much it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_ranks import RankedToyEngine, ToyRank
from tests.soak.footprint import held_items, of_this_package


def ranks_of(toy: ToyEngine) -> Sequence[ToyEngine | ToyRank]:
    return toy.all_ranks if isinstance(toy, RankedToyEngine) else [toy]


def check_tiers(toy: ToyEngine, requests: Iterable[str]) -> int:
    """Every readable block holds the KV of the prefix its key was made from, on every rank; how
    many were looked at. Of engines with several groups none is: slots of several sizes share their
    memory there."""
    if len(toy.windows) > 1:
        return 0
    index = toy.half.index
    checked = 0
    for name in requests:
        request = toy.requests[name]
        keys = toy.half._key_maker.keys_for(request)
        keys.extend(request, request.num_tokens)
        for position, key in enumerate(keys.of_group[0]):
            if index.match_prefix([key]):
                _check_slot(toy, index.slot_of(key), name, position)
                checked += 1
    return checked


def _check_slot(toy: ToyEngine, slot: int, name: str, position: int) -> None:
    span = slice(position * toy.block_size, (position + 1) * toy.block_size)
    for rank in range(toy.ranks):
        if isinstance(toy, RankedToyEngine):
            toy._use(rank)
        right = toy._right(name)[span]
        for layer, content in enumerate(toy.arena[slot]):
            assert (content == right ^ layer).all(), f"slot {slot} of rank {rank} is wrong"
    if isinstance(toy, RankedToyEngine):
        toy._use(0)


def held_by(toy: ToyEngine) -> int:
    """Entries of all containers of both halves."""
    workers = [rank.worker.worker_half for rank in ranks_of(toy)]
    return held_items([toy.half, *workers], of_this_package)


def describe(toy: ToyEngine) -> str:
    """What is under way, for whoever has to find out why."""
    scheduler, half, ledger = toy.scheduler, toy.half, toy.half.ledger
    requests = [
        f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens} "
        f"{half._requests[name].remote.lookup if name in half._requests else 'unknown'}"
        for name, r in scheduler.requests.items()
    ]
    return (
        f"steps in flight: {len(toy._in_flight)}, idle: {toy.idle}, "
        f"pending work: {half.has_pending_push_work()}, "
        f"unseen: {half.stores.has_deferred}, "
        f"unfinished: {scheduler.has_unfinished_requests()}\n"
        f"open stores {list(ledger._stores)}, loads {list(ledger._loads)}, "
        f"ahead {list(ledger._step_loads)}, puts {list(ledger._puts)}\n"
        f"requests: {requests}"
    )
