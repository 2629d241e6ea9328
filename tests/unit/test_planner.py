"""Loadable prefixes, compared with a brute-force search over every end and token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group, loadable_tokens, plan_store, representative_group
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES

TOKENS = 48


@dataclass(frozen=True)
class Case:
    groups: list[Group]
    keys: list[list[BlockKey]]
    here: list[set[int]]
    elsewhere: list[range]
    computed: int
    limit: int
    alignment: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3))
    windows = [draw(st.one_of(st.none(), st.integers(1, 30))) for _ in sizes]
    groups = [
        Group(number, size, 64, 0, window, is_chunked=window is not None and draw(st.booleans()))
        for number, (size, window) in enumerate(zip(sizes, windows, strict=True))
    ]
    keys = [
        [BlockKey(bytes([group.group_id, n]) * 9) for n in range(TOKENS // group.block_size)]
        for group in groups
    ]
    here, elsewhere = [], []
    for group_keys in keys:
        # Most blocks are present: with a probability of 1/2 almost every hit would be empty.
        absent = draw(st.sets(st.integers(0, len(group_keys) - 1), max_size=5))
        here.append(set(range(len(group_keys))) - absent)
        first = draw(st.integers(0, len(group_keys)))
        elsewhere.append(range(first, draw(st.integers(first, len(group_keys)))))
    alignment = math.lcm(*sizes)
    computed = draw(st.integers(0, TOKENS // alignment)) * alignment
    return Case(groups, keys, here, elsewhere, computed, draw(st.integers(0, TOKENS)), alignment)


def can_go_on(case: Case, end: int) -> bool:
    """Returns whether every token that token `end` attends to is on the GPU or in a tier."""
    for group, here, elsewhere in zip(case.groups, case.here, case.elsewhere, strict=True):
        for token in range(case.computed, end):
            is_read = group.window is None or token > end - group.window
            if group.window is not None and group.is_chunked:
                is_read = token // group.window == end // group.window
            position = token // group.block_size
            if is_read and position not in here and position not in elsewhere:
                return False
    return True


@examples(600)
@given(cases())
def test_loadable_tokens_is_longest_complete_prefix(case: Case) -> None:
    index = BlockIndex(ArenaGeometry.for_blocks(64 * 256, [64]), "lru")
    for keys, here in zip(case.keys, case.here, strict=True):
        for position in here:
            slot = index.reserve(keys[position], None, 0)
            assert slot is not None
            index.commit(slot)
    found = loadable_tokens(
        index,
        case.groups,
        case.keys,
        case.computed,
        case.limit,
        case.alignment,
        case.elsewhere,
    )
    ends = range(case.computed, case.limit + 1)
    right = max(
        (end for end in ends if end % case.alignment == 0 and can_go_on(case, end)),
        default=case.computed,
    )
    assert found == right - case.computed


@given(
    st.integers(1, 64),
    st.booleans(),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_group_needed_is_blocks_within_window(
    window: int, is_chunked: bool, size: int, blocks: int, computed: int
) -> None:
    group = Group(0, size, 64, 0, window, is_chunked=is_chunked)
    end = blocks * size
    reach = range(end - end % window if is_chunked else max(0, end - window + 1), end)
    assert list(group.needed(0, end)) == sorted({token // size for token in reach})
    rest = group.needed(computed * size, end)
    assert list(rest) == [n for n in group.needed(0, end) if n >= computed]


@given(
    st.integers(1, 64),
    st.booleans(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_blocks_of_use_are_those_that_some_hit_needs(
    window: int, is_chunked: bool, size: int, more: int, start: int, count: int
) -> None:
    group, alignment = Group(0, size, 64, 0, window, is_chunked=is_chunked), size * more
    ends = range(0, (start + count + 2 * more) * size, alignment)
    needed = {position for end in ends for position in group.needed(0, end)}
    positions = range(start, start + count)
    found = [position for part in group.of_use(positions, alignment) for position in part]
    assert set(found) >= needed & set(positions)
    assert found == sorted(set(found))
    if is_chunked or window < alignment:
        assert set(found) == needed & set(positions)


def put(index: BlockIndex, keys: list[BlockKey], skip: range = range(0)) -> list[int]:
    plan = plan_store(index, Group(0, 4, 64, 0), keys, 0, len(keys), skip)
    for slot in plan.slots:
        index.commit(slot)
    index.check()
    return plan.positions


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_plan_store_fills_gaps_in_full_tier(eviction: str) -> None:
    """Storing one block of the chain may evict another, which must then be stored again."""
    index = BlockIndex(ArenaGeometry(8 * 64, (64,)), eviction)
    keys = [BlockKey(bytes([n]) * 17) for n in range(6)]
    assert put(index, keys) == list(range(6))
    index.remove(keys[2])
    index.remove(keys[4])
    assert len(put(index, [BlockKey(bytes([100 + n]) * 17) for n in range(4)])) == 4
    assert {2, 4} < set(put(index, keys)), "none of the others had to leave"
    assert index.match_prefix(keys) == 6


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_plan_store_skipping_middle_fills_gaps(eviction: str) -> None:
    index = BlockIndex(ArenaGeometry(24 * 64, (64,)), eviction)
    keys = [BlockKey(bytes([n]) * 17) for n in range(16)]
    put(index, keys[:13], range(4, 10))
    assert len(put(index, [BlockKey(bytes([100 + n]) * 17) for n in range(17)])) == 17
    assert put(index, keys) == list(range(4, 16))
    assert index.match_prefix(keys) == 16


def test_representative_group_prefers_full_attention() -> None:
    window, full = Group(0, 4, 64, 0, 10), Group(1, 4, 64, 0)
    assert representative_group([window, full]) is full
    assert representative_group([window]) is window
