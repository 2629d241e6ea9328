"""Placement is stable, even, and the same in every process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.remote.engine import IDENTITY, block_keys
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.placement import (
    RUN_BLOCKS,
    Cluster,
    Placement,
    anchor_position,
    anchors_of,
    spans,
)

SERVERS = [f"tcp://10.0.0.{n}:9527" for n in range(1, 6)]
KEYS = block_keys("placement", 4000)


def test_order_lists_each_server_once_in_any_configuration_order() -> None:
    placement = Placement(SERVERS)
    shuffled = Placement(random.Random(0).sample(SERVERS, len(SERVERS)))
    for key in KEYS[:200]:
        assert sorted(placement.order(key)) == SERVERS
        assert placement.order(key) == shuffled.order(key)


def test_order_spreads_keys_evenly() -> None:
    placement = Placement(SERVERS)
    shares = Counter(placement.order(key)[0] for key in KEYS)
    for server in SERVERS:
        assert 0.8 * len(KEYS) / 5 < shares[server] < 1.2 * len(KEYS) / 5


@pytest.mark.parametrize("gone", SERVERS)
def test_removed_server_moves_only_its_share(gone: str) -> None:
    before, after = Placement(SERVERS), Placement([s for s in SERVERS if s != gone])
    heirs: Counter[str] = Counter()
    for key in KEYS:
        was = before.order(key)
        assert list(after.order(key)) == [server for server in was if server != gone]
        if was[0] == gone:
            heirs[after.order(key)[0]] += 1
    assert len(heirs) == 4


def test_order_is_equal_in_every_process() -> None:
    program = (
        "from tests.remote.test_placement import *\n"
        "print([Placement(SERVERS).order(key)[0] for key in KEYS[:300]])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str([Placement(SERVERS).order(key)[0] for key in KEYS[:300]])


@given(st.integers(0, 10_000))
def test_anchor_position_is_the_start_of_the_run(position: int) -> None:
    anchor = anchor_position(position)
    assert anchor % RUN_BLOCKS == 0
    assert anchor <= position < anchor + RUN_BLOCKS


@given(st.integers(0, 6000), st.integers(0, 6000))
def test_spans_cover_the_positions_in_order(start: int, length: int) -> None:
    runs = list(spans(start, start + length))
    covered = [position for _, begin, end in runs for position in range(begin, end)]
    assert covered == list(range(start, start + length))
    for anchor, begin, end in runs:
        assert {anchor_position(position) for position in (begin, end - 1)} == {anchor}


@given(st.sets(st.integers(0, 5000), max_size=60))
def test_anchors_of_counts_positions_per_anchor(some: set[int]) -> None:
    keys = [b"%d" % position for position in range(5001)]
    positions = sorted(some)
    found = [key for key, count in anchors_of(keys, positions) for _ in range(count)]
    assert found == [keys[anchor_position(position)] for position in positions]


def test_anchor_position_negative_raises() -> None:
    with pytest.raises(ValueError):
        anchor_position(-1)


@pytest.mark.parametrize("shared", [100, 128, 1500, 6000])
def test_conversations_with_a_shared_prefix_spread_over_all_servers(shared: int) -> None:
    """All but the rest of the run in which they separate."""
    placement = Placement([f"tcp://10.0.0.{n}:9527" for n in range(1, 65)])
    head, own = block_keys("system prompt", shared), 750
    blocks: Counter[str] = Counter()
    for n in range(100):
        chain = head + block_keys(f"chat {n}", own)
        for anchor, start, stop in spans(shared, len(chain)):
            blocks[placement.order(chain[anchor])[0]] += stop - start
    together = -shared % RUN_BLOCKS * 100
    assert sum(blocks.values()) == 100 * own
    assert max(blocks.values()) < together + 2 * own * 100 / 64
    assert len(blocks) == 64


def test_order_of_many_anchors_stays_correct_and_its_cache_bounded() -> None:
    placement = Placement(SERVERS)
    first = [placement.order(key) for key in KEYS[:50]]
    for key in KEYS:
        placement.order(key)
    assert [placement.order(key) for key in KEYS[:50]] == first
    assert len(placement._orders) < len(KEYS) / 2


@pytest.mark.parametrize("addresses", [[], ["tcp://a:1", "tcp://A:01"], ["a:1"]])
def test_placement_invalid_addresses_raise(addresses: list[str]) -> None:
    with pytest.raises(ConfigError):
        Placement(addresses)


def test_server_for_skips_a_dead_server() -> None:
    cluster = Cluster(SERVERS[:3], IDENTITY)
    dead = cluster.stores[SERVERS[0]]
    attempt = dead.breaker.begin()
    assert attempt is not None
    dead.breaker.refuse(attempt, "closed for the test")
    for key in KEYS[:300]:
        order = cluster.placement.order(key)
        chosen = cluster.server_for(key)
        assert chosen is not None
        assert str(chosen.address) == next(s for s in order if s != SERVERS[0])
    for server in SERVERS[1:3]:
        attempt = cluster.stores[server].breaker.begin()
        assert attempt is not None
        cluster.stores[server].breaker.refuse(attempt, "closed for the test")
    assert cluster.server_for(KEYS[0]) is None
    assert not cluster.available
    cluster.close()
