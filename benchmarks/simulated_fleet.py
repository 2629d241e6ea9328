"""Simulates many daemons under recorded traffic: balance, hot prefixes, failures, bytes.

    python -m benchmarks.simulated_fleet --chats TRACE --agents TRACE --out result.json

It decides with the code that engines and daemons run: `Placement` ranks the daemons, and each
daemon and each engine's own tier is a `BlockIndex`. Bytes are only counted, and calls take no time.

A fleet has one engine and one daemon on each host. The trace is overlaid with itself: copies are
shifted in time and share no block, except the head that all prompts begin with. Every request goes
to a random engine, which is the worst case for the daemons. The engine finds a prefix in its own
tier, asks the daemons for the rest, run after run until one lacks a block, computes what is left
and puts it to its daemons.

Traces (Apache-2.0): `--chats` is the conversation trace of Mooncake (FAST '25), `--agents` are
coding-agent sessions of kv-cache-tester, with the fields that `chat_requests` and `agent_requests`
read.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import lzma
import random
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import describe_environment, save
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.remote.placement import RUN_BLOCKS, Placement, anchor_position

TOKENS = 512
"""Of a simulated block. vLLM's are smaller; blocks between two anchors are never separated."""
POSITIONS = TOKENS // 16
"""Of vLLM's blocks in a simulated one."""
_SHARED = (1 << 64) - 1  # the copy that blocks of the shared head belong to
_SLOT = 64  # bytes of a block in an index: only their number matters here
_MINUTE = 60.0


class Request(NamedTuple):
    at: float
    keys: list[bytes]


# ---- traffic -------------------------------------------------------------------------------------


def block_key(copy: int, number: int) -> bytes:
    return struct.pack("<QQ", copy, number)


def shared_head(tokens: int) -> list[bytes]:
    return [block_key(_SHARED, n) for n in range(tokens // TOKENS)]


def chat_requests(
    trace: Sequence[dict[str, Any]], copies: int, head_tokens: int, spread_s: float, seed: int
) -> Iterator[Request]:
    """Copies begin within `spread_s`; the head is put before every prompt."""
    head, rng = shared_head(head_tokens), random.Random(seed)

    def one(copy: int, start: float) -> Iterator[tuple[float, int, list[int]]]:
        for line in trace:
            yield start + line["timestamp"] / 1000, copy, line["hash_ids"]

    lines = heapq.merge(*(one(copy, rng.uniform(0, spread_s)) for copy in range(copies)))
    for at, copy, ids in lines:
        yield Request(at, head + [block_key(copy, number) for number in ids])


def agent_requests(
    trace: Sequence[dict[str, Any]], copies: int, head_tokens: int, spread_s: float, seed: int
) -> Iterator[Request]:
    """Sessions begin within `spread_s`; the head replaces the first blocks of every prompt, where
    sessions have their tools."""
    head, rng = shared_head(head_tokens), random.Random(seed)

    def one(number: int, session: dict[str, Any], start: float) -> Iterator[tuple[float, int, Any]]:
        whole = TOKENS // session["block"]
        ids: list[int] = []
        keys: list[bytes] = []
        for at, _, _, kept, added, *_ in session["rows"]:
            del ids[kept:], keys[kept // whole :]
            for first, count in added:
                ids.extend(range(first, first + count))
            # The last of the small blocks stands for the prefix up to there.
            ends = ids[(len(keys) + 1) * whole - 1 :: whole]
            keys.extend(block_key(number, end) for end in ends)
            yield start + at, number, keys[:]

    sessions = [session for _ in range(copies) for session in trace]
    rows = heapq.merge(
        *(one(n, session, rng.uniform(0, spread_s)) for n, session in enumerate(sessions)),
        key=lambda row: row[:2],
    )
    for at, _, keys in rows:
        yield Request(at, head[: len(keys)] + keys[len(head) :])


def read_trace(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    return [json.loads(line) for line in text.splitlines()]


# ---- placement -----------------------------------------------------------------------------------


class Runs:
    """Where the daemon of a chain is chosen again: as `anchor_position` says, or at other positions
    (of vLLM's blocks) to compare with it."""

    def __init__(self, anchors: Sequence[int] | None = None, blocks: int = 4096) -> None:
        self._anchors = []
        for block in range(blocks):
            position = block * POSITIONS
            if anchors is None:
                anchor = anchor_position(position)
            else:
                anchor = anchors[bisect.bisect_right(anchors, position) - 1]
            self._anchors.append(anchor // POSITIONS)
        self._stops = [0] * blocks
        stop = blocks
        for block in reversed(range(blocks)):
            self._stops[block] = stop
            if self._anchors[block] == block:
                stop = block

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (anchor, start, stop) of each run of blocks, as `placement.spans`."""
        while start < stop:
            end = min(stop, self._stops[start])
            yield self._anchors[start], start, end
            start = end


# ---- the fleet -----------------------------------------------------------------------------------


@dataclass
class Load:
    """What a daemon did since the measurement began."""

    lookups: int = 0
    loaded: int = 0  # blocks, as the next two
    put: int = 0
    by_minute: Counter[int] = field(default_factory=Counter)


@dataclass
class Window:
    """What all requests of a minute asked for and got, in blocks."""

    asked: int = 0
    local: int = 0
    loaded: int = 0


class Fleet:
    """Engines and daemons; `serve` is one request."""

    def __init__(
        self,
        daemons: int,
        daemon_blocks: int,
        engine_blocks: int,
        runs: Runs,
        hot_copies: int = 1,
        seed: int = 0,
    ) -> None:
        """`hot_copies`: how many daemons hold a run that many requests ask for."""
        self.runs = runs
        self.hot_copies = hot_copies
        self._daemon_blocks = daemon_blocks
        self._rng = random.Random(seed)
        self._engines = [_index(engine_blocks) if engine_blocks else None for _ in range(daemons)]
        self.daemons: dict[str, BlockIndex] = {}
        self.loads: dict[str, Load] = {}
        self._down: set[str] = set()
        self.add(daemons)
        self._asked_for: Counter[bytes] = Counter()
        self.requests = 0
        self.windows: dict[int, Window] = {}
        self.prompts = 0  # requests that asked a daemon

    def add(self, count: int) -> list[str]:
        """Adds daemons, and tells all engines at once."""
        new = [f"tcp://10.0.0.1:{9000 + len(self.daemons) + n}" for n in range(count)]
        self.daemons.update({address: _index(self._daemon_blocks) for address in new})
        self.loads.update({address: Load() for address in new})
        self.placement = Placement(list(self.daemons))
        return new

    def kill(self, addresses: Iterable[str]) -> None:
        self._down.update(addresses)

    def restart(self, addresses: Iterable[str], is_warm: bool) -> None:
        """`is_warm`: the daemon still has what it held, on its SSD."""
        for address in addresses:
            self._down.discard(address)
            if not is_warm:
                self.daemons[address] = _index(self._daemon_blocks)

    def measure(self) -> None:
        """Forgets the load so far. Hit rates are recorded from the start."""
        self.loads = {address: Load() for address in self.daemons}
        self.requests = self.prompts = 0

    def window(self, minute: int) -> Window:
        return self.windows.get(minute, Window())

    def serve(self, request: Request) -> None:
        keys, minute = request.keys, int(request.at / _MINUTE)
        window = self.windows.setdefault(minute, Window())
        window.asked += len(keys)
        self.requests += 1
        engine = self._rng.choice(self._engines)
        local = 0
        if engine is not None:
            local = engine.match_prefix(keys)
            engine.touch(keys[:local])
        held = self._load(keys, local, minute)
        window.local += local
        window.loaded += held - local
        if engine is not None:
            reserved = engine.reserve_missing(keys, 0, len(keys), 0)
            engine.commit_all(reserved.slots)
        self._put(keys, held, minute)

    def _load(self, keys: list[bytes], first: int, minute: int) -> int:
        """Returns how many blocks the engine and the daemons hold together."""
        held = first
        self.prompts += first < len(keys)
        for anchor, start, stop in self.runs.between(first, len(keys)):
            homes = self._homes(keys[anchor], counts=True)
            if not homes:
                break
            address = homes[0] if len(homes) == 1 else self._rng.choice(homes)
            index, load = self.daemons[address], self.loads[address]
            count = index.match_prefix(keys, start, stop)
            load.lookups += 1
            load.loaded += count
            load.by_minute[minute] += count
            if count:
                index.touch(keys[start : start + count])
            held += count
            if start + count < stop:
                break
        return held

    def _put(self, keys: list[bytes], first: int, minute: int) -> None:
        for anchor, start, stop in self.runs.between(first, len(keys)):
            for address in self._homes(keys[anchor]):
                index, load = self.daemons[address], self.loads[address]
                reserved = index.reserve_missing(keys, start, stop, 0)
                index.commit_all(reserved.slots)
                load.put += len(reserved.slots)
                load.by_minute[minute] += len(reserved.slots)

    def _homes(self, anchor: bytes, counts: bool = False) -> list[str]:
        """The daemons that hold a run: the best one that is up, and the next ones if it is hot."""
        order = self.placement.order(anchor)
        copies = 1
        if self.hot_copies > 1:
            self._asked_for[anchor] += counts
            if self._asked_for[anchor] > 10 * len(self.daemons):
                copies = self.hot_copies
        if not self._down:
            return list(order[:copies])
        return [address for address in order if address not in self._down][:copies]


def _index(blocks: int) -> BlockIndex:
    return BlockIndex(ArenaGeometry(_SLOT * blocks, (_SLOT,)), "lru")


# ---- cases ---------------------------------------------------------------------------------------

HELD = 0.6
"""Share of all distinct blocks of the trace that the daemons of a fleet hold together."""
FEW_ANCHORS = (0, 64, 512, 4096)
"""Where long runs would begin, to compare them with `placement.RUN_BLOCKS`."""
WARM_S, SPREAD_S, END_S = 1200.0, 900.0, 3500.0
"""Loads are measured after WARM_S. Chats begin within SPREAD_S, agents within END_S."""


@dataclass(frozen=True)
class Event:
    """Something that happens to the first `count` daemons; which ones they are is random anyway."""

    at: float
    what: str  # kill, restart (with what its SSD holds), replace (empty) or add
    count: int


@dataclass(frozen=True)
class Case:
    """One fleet under one kind of traffic."""

    group: str
    """The table that shows it."""
    traffic: str  # chats or agents
    daemons: int
    copies: int  # of the trace
    head_tokens: int
    long_runs: bool = False
    engine_tokens: int = 0
    """What an engine's GPU and CPU tier hold."""
    hot_copies: int = 1
    events: tuple[Event, ...] = ()


def outage(what: str, count: int) -> tuple[Event, ...]:
    return (Event(1800.0, "kill", count), Event(2400.0, what, count))


PLACED = [
    Case("placement", "chats", daemons, copies, head, long_runs)
    for daemons, copies, head in [
        (64, 1, 0),
        (64, 1, 2048),
        (64, 1, 24576),
        (16, 1, 2048),
        (256, 2, 2048),
    ]
    for long_runs in (True, False)
]
CASES = [
    *PLACED,
    Case("hot", "chats", 64, 1, 24576, hot_copies=4),
    Case("hot", "chats", 64, 1, 24576, engine_tokens=500_000),
    Case("failures", "chats", 64, 1, 2048, events=outage("replace", 1)),
    Case("failures", "chats", 64, 1, 2048, events=outage("replace", 8)),
    Case("failures", "chats", 64, 1, 2048, events=outage("restart", 8)),
    Case("failures", "chats", 64, 1, 2048, events=(Event(1800.0, "add", 16),)),
    Case("placement", "agents", 64, 1, 12288, True),
    Case("placement", "agents", 64, 1, 12288),
]
TINY = [
    Case("placement", "chats", 4, 1, 2048),
    Case("hot", "chats", 4, 1, 2048, engine_tokens=50_000, hot_copies=2),
    Case("failures", "chats", 4, 1, 2048, events=outage("replace", 1)),
    Case("placement", "agents", 4, 1, 2048, True),
]


def requests_of(case: Case, trace: Sequence[dict[str, Any]]) -> Iterator[Request]:
    if case.traffic == "chats":
        return chat_requests(trace, case.copies, case.head_tokens, SPREAD_S, seed=1)
    return agent_requests(trace, case.copies, case.head_tokens, END_S, seed=1)


def distinct_blocks(case: Case, trace: Sequence[dict[str, Any]]) -> int:
    keys: set[bytes] = set()
    for request in requests_of(case, trace):
        if request.at >= END_S:
            break
        keys.update(request.keys)
    return len(keys)


def run(case: Case, trace: Sequence[dict[str, Any]], distinct: int) -> dict[str, Any]:
    daemon_blocks = max(1, int(distinct * HELD / case.daemons))
    runs = Runs(FEW_ANCHORS if case.long_runs else None)
    fleet = Fleet(case.daemons, daemon_blocks, case.engine_tokens // TOKENS, runs, case.hot_copies)
    events = list(case.events)
    is_measuring = False
    for request in requests_of(case, trace):
        if request.at >= END_S:
            break
        if not is_measuring and request.at >= WARM_S:
            fleet.measure()
            is_measuring = True
        while events and request.at >= events[0].at:
            happen(fleet, events.pop(0))
        fleet.serve(request)
    return {**asdict(case), "daemon_tokens": daemon_blocks * TOKENS, **summary(fleet)}


def happen(fleet: Fleet, event: Event) -> None:
    some = list(fleet.daemons)[: event.count]
    if event.what == "kill":
        fleet.kill(some)
    elif event.what == "add":
        fleet.add(event.count)
    else:
        fleet.restart(some, is_warm=event.what == "restart")


def summary(fleet: Fleet) -> dict[str, Any]:
    loads = list(fleet.loads.values())
    minutes = [minute for minute in sorted(fleet.windows) if WARM_S <= minute * _MINUTE < END_S]
    windows = [fleet.windows[minute] for minute in minutes]
    asked = max(sum(window.asked for window in windows), 1)
    by_minute = sorted(load.by_minute[minute] for load in loads for minute in minutes)
    capacity = sum(index.geometry.num_slabs for index in fleet.daemons.values())
    requests = max(fleet.requests, 1)
    return {
        "requests": fleet.requests,
        "prompt_tokens": round(asked * TOKENS / requests),
        "hit": round(sum(w.local + w.loaded for w in windows) / asked, 4),
        "hit_in_engine": round(sum(w.local for w in windows) / asked, 4),
        "loaded_tokens": round(sum(load.loaded for load in loads) * TOKENS / requests),
        "put_tokens": round(sum(load.put for load in loads) * TOKENS / requests),
        "max_over_mean": {
            "requests": over_mean([load.lookups for load in loads]),
            "loaded": over_mean([load.loaded for load in loads]),
            "put": over_mean([load.put for load in loads]),
        },
        "p99_minute_over_mean": round(
            by_minute[len(by_minute) * 99 // 100] * len(by_minute) / max(sum(by_minute), 1), 2
        ),
        "capacity_used": round(sum(map(len, fleet.daemons.values())) / capacity, 4),
        "hit_by_minute": [
            round((window.local + window.loaded) / max(window.asked, 1), 4)
            for window in map(fleet.window, range(max(fleet.windows) + 1))
        ],
    }


def over_mean(values: Sequence[int]) -> float:
    return round(max(values) * len(values) / max(sum(values), 1), 2)


def moved_share(daemons: int, added: int, keys: int = 2000) -> float:
    """The share of runs that another daemon holds after some were added."""
    addresses = [f"tcp://10.0.0.1:{9000 + n}" for n in range(daemons + added)]
    before, after = Placement(addresses[:daemons]), Placement(addresses)
    some = [block_key(0, n) for n in range(keys)]
    return sum(before.order(key)[0] != after.order(key)[0] for key in some) / keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=Path, required=True, help="trace, .jsonl or .jsonl.xz")
    parser.add_argument("--agents", type=Path, required=True, help="trace, .jsonl or .jsonl.xz")
    parser.add_argument("--tiny", action="store_true", help="small fleets, to see that it works")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    traces = {"chats": read_trace(args.chats), "agents": read_trace(args.agents)}
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "run_blocks": RUN_BLOCKS,
        "held": HELD,
        "moved": {"64 + 1": moved_share(64, 1), "64 + 16": moved_share(64, 16)},
        "cases": [],
    }
    distinct: dict[tuple[Any, ...], int] = {}
    for case in TINY if args.tiny else CASES:
        trace = traces[case.traffic]
        same = (case.traffic, case.copies, case.head_tokens)
        if same not in distinct:
            distinct[same] = distinct_blocks(case, trace)
        begin = time.perf_counter()
        found = run(case, trace, distinct[same])
        report["cases"].append(found)
        print(f"{case} {found} {time.perf_counter() - begin:.1f} s", flush=True)
        save(args.out, report)


if __name__ == "__main__":
    main()
