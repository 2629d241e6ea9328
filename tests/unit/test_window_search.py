"""What daemons are asked about windows, and that nothing that can be served is overlooked."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from tests.unit.test_planner import TOKENS, Case, can_go_on, cases
from tests.unit.test_remote_half import Server
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group, loadable_tokens
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.window_search import WindowSearch
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.metrics.recorder import Recorder


class ListingServer(Server):
    """One that also says which blocks it has."""

    def contains_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], deadline: float
    ) -> list[bool]:
        self.asked.append(len(keys))
        return [key in self.holds for key in keys]


class OneServer:
    is_up = True

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stores = {server.address: server}

    def server_for(self, anchor: bytes) -> Server:
        return self.server


def search(
    groups: list[Group],
    keys: list[list[BlockKey]],
    here: list[set[int]],
    server: Server,
    computed: int,
    limit: int,
) -> tuple[int, list[range]]:
    """How many tokens a scheduler would offer after asking, and what the daemon told it."""
    index = BlockIndex(ArenaGeometry.for_blocks(64 * 256, [64]), "lru")
    for group_keys, positions in zip(keys, here, strict=True):
        for position in positions:
            slot = index.reserve(group_keys[position], None, 0)
            assert slot is not None
            index.commit(slot)
    servers = OneServer(server)
    lookups = RemoteLookups(servers, [RankTag()], 30.0, 60.0, Recorder(), threads=1)  # type: ignore[arg-type]
    cpu = CpuTier(groups, index, None, Recorder())  # type: ignore[arg-type]
    tier = RemoteTier(servers, lookups, None, cpu, True)  # type: ignore[arg-type]
    state = RequestState(None, SimpleNamespace(of_group=keys))  # type: ignore[arg-type]
    end = time.monotonic() + 60
    while (told := tier.positions(state, computed, limit)) is None:
        assert time.monotonic() < end, "a request waits forever"
        time.sleep(0)
    lookups.close()
    alignment = math.lcm(*(group.block_size for group in groups))
    return loadable_tokens(index, groups, keys, computed, limit, alignment, told), told


@examples(300)
@given(cases(), st.data())
def test_window_search_finds_longest_end_over_all_tiers(case: Case, data: st.DataObject) -> None:
    """The daemon has what was sent to it: most of what the CPU tier has, and more."""
    limit = case.limit // case.alignment * case.alignment
    there = [here | set(range(0, 48, 3)) for here in case.here]
    here = [data.draw(st.sets(st.sampled_from(sorted(some or {0})))) & some for some in there]
    holds = {
        keys[n] for keys, some in zip(case.keys, there, strict=True) for n in some if n < len(keys)
    }
    here = [{n for n in some if n < len(keys)} for some, keys in zip(here, case.keys, strict=True)]
    server = ListingServer("tcp://a:1", set(holds))
    found, told = search(case.groups, case.keys, here, server, case.computed, limit)
    for keys, positions in zip(case.keys, told, strict=True):
        assert all(keys[position] in holds for position in positions)
    nothing = [range(0)] * len(case.groups)
    union = Case(case.groups, case.keys, there, nothing, case.computed, limit, case.alignment)
    ends = range(case.computed, limit + 1, case.alignment)
    right = max((end for end in ends if can_go_on(union, end)), default=case.computed)
    assert found == right - case.computed


def chains(*groups: Group) -> list[list[BlockKey]]:
    return [
        [BlockKey(bytes([g.group_id, n]) * 9) for n in range(TOKENS // g.block_size)]
        for g in groups
    ]


def test_daemon_that_has_all_is_asked_twice_and_for_little() -> None:
    groups = [Group(0, 4, 64, 0), Group(1, 4, 64, 0, 10), Group(2, 4, 64, 0, 6)]
    keys = chains(*groups)
    server = ListingServer("tcp://a:1", {key for some in keys for key in some})
    found, _ = search(groups, keys, [set(), set(), set()], server, 0, 44)
    assert found == 44
    assert server.asked == [11, 3 + 2]


def test_where_a_window_is_not_whole_one_more_query_finds_the_next() -> None:
    groups = [Group(0, 4, 64, 0), Group(1, 4, 64, 0, 10)]
    keys = chains(*groups)
    server = ListingServer("tcp://a:1", set(keys[0]) | set(keys[1][:4]) | {keys[1][9]})
    found, told = search(groups, keys, [set(), {4, 10}], server, 0, 44)
    assert found == 20
    assert told == [range(11), range(2, 4)]
    assert server.asked == [11, 2, 11, 2]


def test_blocks_in_the_cpu_tier_are_not_looked_up_at_daemons() -> None:
    groups = [Group(0, 4, 64, 0), Group(1, 4, 64, 0, 10)]
    keys = chains(*groups)
    server = ListingServer("tcp://a:1")
    found, _ = search(groups, keys, [set(range(11)), {8, 9, 10}], server, 0, 44)
    assert (found, server.asked) == (44, [])
    # On the GPU lies all but the end, with its window.
    found, _ = search(groups, keys, [{10}, {10}], server, 40, 44)
    assert (found, server.asked) == (4, [])


class Forgetful:
    """A daemon that has lost a block by the time it is asked to keep all of them."""

    def __init__(self, address: str, loses: int) -> None:
        self.address = address
        self.loses = loses

    def match_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], pin_ms: int, deadline: float
    ) -> SimpleNamespace:
        return SimpleNamespace(count=len(keys) - self.loses, by_tier={})

    def contains_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], deadline: float
    ) -> list[bool]:
        return [True] * len(keys)


@pytest.mark.parametrize("loses", [0, 1])
def test_window_with_a_gap_is_a_miss(loses: int) -> None:
    """It lies on two daemons, one of which holds both of its ends."""
    keys = [BlockKey(n.to_bytes(16, "big") + b"\0") for n in range(600)]
    ends, middle = Forgetful("tcp://ends:1", 0), Forgetful("tcp://middle:1", loses)
    servers = SimpleNamespace(
        server_for=lambda key: middle if key == keys[64] else ends,
        stores={server.address: server for server in (ends, middle)},
        is_up=True,
    )
    lookups = RemoteLookups(servers, [RankTag()], 30.0, 60.0, Recorder(), threads=1)  # type: ignore[arg-type]
    group = Group(0, 4, 256, 0, window=4 * 590)
    windows = WindowSearch([group], [[False] * len(keys)], 0, 4 * len(keys), 4)
    lookup = lookups.start([keys], [len(keys)], [256], windows)
    (spans,) = lookup.future.result(timeout=60).spans
    lookups._pool.shutdown()
    parts = [position for span in spans for position in range(span.start, span.stop)]
    assert parts == ([] if loses else list(group.needed(0, 4 * len(keys))))
