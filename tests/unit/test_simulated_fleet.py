"""The simulation of many daemons counts what its fleet does; sizes follow from a model's bytes."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

from benchmarks import simulated_fleet
from benchmarks.simulated_fleet import (
    FEW_ANCHORS,
    POSITIONS,
    TOKENS,
    Fleet,
    Request,
    Runs,
    agent_requests,
    block_key,
    chat_requests,
    moved_share,
    over_mean,
    shared_head,
)
from tools.fleet_sizes import EXAMPLES, GIB, Example, token_bytes
from vllm_tiered_kv.remote.placement import spans

CHATS = [{"timestamp": n * 10_000, "hash_ids": [0, n % 30 + 1, n % 30 + 100]} for n in range(340)]
AGENTS = [
    {
        "block": 64,
        "rows": [[0.0, 4096, 5, 0, [[1, 64]], 1, 1], [30.0, 4608, 5, 56, [[65, 16]], 1, 1]],
    }
]


def prompt(name: int, length: int, head: int = 0) -> Request:
    return Request(0.0, shared_head(head * TOKENS) + [block_key(name, n) for n in range(length)])


def test_runs_are_those_of_the_placement() -> None:
    runs = list(Runs().between(1, 100))
    expected = list(spans(POSITIONS, 100 * POSITIONS))
    assert [tuple(n * POSITIONS for n in run) for run in runs] == expected
    assert list(Runs(FEW_ANCHORS).between(0, 20)) == [(0, 0, 2), (2, 2, 16), (16, 16, 20)]


def test_chats_share_the_head_and_nothing_else() -> None:
    first, second = (
        {key for request in chat_requests(CHATS[:1], 1, head, 0, 1) for key in request.keys}
        for head in (0, 2 * TOKENS)
    )
    assert second - first == set(shared_head(2 * TOKENS))
    requests = list(chat_requests(CHATS, 2, 2 * TOKENS, 100, 1))
    assert [r.at for r in requests] == sorted(r.at for r in requests)
    copies = [
        {key for r in requests for key in r.keys if key[:8] == bytes([n] + 7 * [0])} for n in (0, 1)
    ]
    assert len(copies[0]) == len(copies[1]) == 61


def test_agents_keep_the_prefix_that_their_trace_keeps() -> None:
    first, second = agent_requests(AGENTS, 1, TOKENS, 0, 1)
    assert (len(first.keys), len(second.keys)) == (8, 9)
    assert first.keys[0] == second.keys[0] == shared_head(TOKENS)[0]
    assert first.keys[:7] == second.keys[:7]
    assert first.keys[7] != second.keys[7]


def test_fleet_finds_what_it_put_until_its_daemons_die() -> None:
    fleet = Fleet(4, 1000, 0, Runs())
    for name in range(20):
        fleet.serve(prompt(name, 30))
    assert fleet.windows[0].loaded == 0
    assert sum(load.put for load in fleet.loads.values()) == 20 * 30
    for name in range(20):
        fleet.serve(prompt(name, 30))
    assert fleet.windows[0].loaded == 20 * 30
    lost = next(iter(fleet.daemons))
    fleet.kill([lost])
    before = fleet.loads[lost].lookups
    for name in range(20):
        fleet.serve(prompt(name, 30))
    assert fleet.loads[lost].lookups == before
    found = fleet.windows[0].loaded - 20 * 30
    assert 0 < found < 20 * 30
    fleet.restart([lost], is_warm=True)
    for name in range(20):
        fleet.serve(prompt(name, 30))
    assert fleet.windows[0].loaded - 20 * 30 - found == 20 * 30
    fleet.restart([lost], is_warm=False)
    assert len(fleet.daemons[lost]) == 0


def test_engine_serves_its_own_tier_first() -> None:
    fleet = Fleet(1, 1000, 1000, Runs())
    for _ in range(2):
        fleet.serve(prompt(1, 10))
    assert (fleet.windows[0].local, fleet.windows[0].loaded) == (10, 0)


@pytest.mark.parametrize(("anchors", "limit"), [(None, 0.3), (FEW_ANCHORS, 0.95)])
def test_long_runs_put_all_that_follows_a_shared_head_on_one_daemon(
    anchors: tuple[int, ...] | None, limit: float
) -> None:
    fleet = Fleet(16, 10_000, 0, Runs(anchors))
    for name in range(100):
        fleet.serve(prompt(name, 20, head=48))
    put = [load.put for load in fleet.loads.values()]
    assert (max(put) / sum(put) > limit) == (anchors is not None)


def test_copies_of_a_hot_head_share_its_reads() -> None:
    loaded = {}
    for copies in (1, 4):
        fleet = Fleet(8, 10_000, 0, Runs(), copies)
        for name in range(400):
            fleet.serve(prompt(name, 1, head=2))
        loaded[copies] = max(load.loaded for load in fleet.loads.values())
    assert loaded[4] < 0.6 * loaded[1]


def test_added_daemon_gets_its_share_of_the_runs() -> None:
    assert 0.5 / 17 < moved_share(16, 1) < 1.5 / 17
    assert over_mean([3, 1, 1, 1]) == 2.0


def test_tiny_run_writes_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats, agents, out = tmp_path / "chats.jsonl.xz", tmp_path / "agents.jsonl", tmp_path / "o.json"
    chats.write_bytes(lzma.compress("\n".join(map(json.dumps, CHATS)).encode()))
    agents.write_text("\n".join(json.dumps(session) for session in AGENTS * 20))
    arguments = ["--tiny", "--chats", str(chats), "--agents", str(agents), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["simulated_fleet.py", *arguments])
    simulated_fleet.main()
    found = json.loads(out.read_text())
    assert len(found["cases"]) == len(simulated_fleet.TINY)
    assert str(tmp_path) not in out.read_text()
    assert all(0 < case["hit"] < 1 for case in found["cases"])


def test_example_arithmetic() -> None:
    assert token_bytes("Llama-3.1-70B") == 320 * 1024
    one = Example("x", "Llama-3.1-70B", 2, 1.0, 1000, 24, 0.0, 0.5, 320 * 2**20, 10**12)
    assert one.new_bytes_per_s == 1024 * 320 * 1024
    assert one.loaded_bytes_per_s == 500 * 320 * 1024
    assert one.kept_s(320 * 2**20) == 2.0
    assert one.network_bytes_per_s == (1024 + 500) * 320 * 1024 / 2
    assert one.drive_writes_per_day == pytest.approx(1024 * 320 * 1024 / 2 * 86_400 / 1e12)
    assert all(example.kept_s(GIB) > 0 for example in EXAMPLES)
