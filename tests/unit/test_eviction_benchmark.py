"""The simulation of recorded traffic: how traces are read, and that its bound is one."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import pytest

from benchmarks.eviction import (
    BELADY,
    ENDED,
    Request,
    Trace,
    measure,
    policies,
    read_agents,
    read_chat,
    saved_seconds,
)


def made_trace(seed: int) -> Trace:
    """Sessions that take turns and grow, behind one common block."""
    rng = random.Random(seed)
    prompts = [[0] for _ in range(20)]
    fresh = 1
    requests = []
    turns = [rng.randint(1, 6) for _ in prompts]
    while any(turns):
        session = rng.choice([n for n, left in enumerate(turns) if left][:4])
        turns[session] -= 1
        count = rng.randint(1, 5)
        prompts[session] += range(fresh, fresh + count)
        fresh += count
        requests.append(Request(float(fresh), list(prompts[session]), turns[session] == 0))
    return Trace("made", 512, requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [5, 20, 60])
def test_no_policy_has_more_hits_than_belady(seed: int, capacity: int) -> None:
    trace = made_trace(seed)
    hits = {name: sum(of(trace, capacity)) for name, of in policies().items()}
    assert max(hits, key=hits.__getitem__) == BELADY or hits[BELADY] == max(hits.values())
    assert hits[ENDED] >= hits["lru"]


def test_everything_asked_before_is_a_hit_in_a_large_tier() -> None:
    trace = made_trace(0)
    seen: set[int] = set()
    expected = []
    for request in trace.requests:
        expected.append(len(seen.intersection(request.blocks)))
        seen.update(request.blocks)
    for name, hits_of in policies().items():
        assert hits_of(trace, len(seen)) == expected, name


def test_measure_reports_way_from_lru_to_belady() -> None:
    found = measure(made_trace(1), 0.1)["policies"]
    assert found["lru"]["way"] == 0
    assert found[BELADY]["way"] == 1
    assert 0 < found[ENDED]["way"] <= 1


def test_saved_seconds_grow_faster_than_the_hit() -> None:
    worth = saved_seconds(512, 40)
    assert worth[0] == 0
    assert worth[40] > 2 * worth[20] > 0


def test_read_chat_takes_full_blocks_of_one_half_and_finds_sessions(tmp_path: Path) -> None:
    rows = [
        (0, 1024, [0, 1]),
        (6000, 1600, [0, 1, 2, 3]),  # the fourth is not full
        (7000, 1024, [0, 9]),
        (8000, 2048, [0, 1, 2, 4]),
        (10000, 300, [5]),
    ]
    path = tmp_path / "chat.jsonl.xz"
    with lzma.open(path, "wt") as file:
        for time, length, blocks in rows:
            row = {"timestamp": time, "input_length": length, "hash_ids": blocks}
            file.write(json.dumps(row) + "\n")
    first, second = read_chat(path, published=False), read_chat(path, published=True)
    assert [request.blocks for request in first.requests] == [[0, 1]]
    assert [request.blocks for request in second.requests] == [[0, 1, 2], [0, 9], [0, 1, 2, 4]]
    assert [request.ends_session for request in second.requests] == [False, True, True]


def test_read_agents_takes_every_second_session(tmp_path: Path) -> None:
    sessions = [
        {"block": 64, "rows": [[0, 512, 1, 0, [[1, 8]], 1, 0], [5, 640, 1, 4, [[9, 4]], 1, 0]]},
        {"block": 64, "rows": [[0, 640, 1, 0, [[1, 9]], 1, 0]]},
    ]
    path = tmp_path / "agents.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps(session) + "\n" for session in sessions)
    tuned, published = read_agents(path, published=False), read_agents(path, published=True)
    assert tuned.block_tokens == 256
    assert [request.blocks for request in tuned.requests] == [[4, 8], [4, 12]]
    assert [request.ends_session for request in tuned.requests] == [False, True]
    assert tuned.requests[0].pause is not None
    assert tuned.requests[1].pause is None
    assert len(published.requests) == 1
    assert not set(published.requests[0].blocks) & {4, 8, 12}, "sessions share no blocks"
