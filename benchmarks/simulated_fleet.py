"""Simulates many daemons under recorded traffic: balance, hot prefixes, failures, bytes.

    python -m benchmarks.simulated_fleet --chats TRACE --agents TRACE --out result.json

It decides with the code that engines and daemons run: `Placement` ranks the daemons, and each
daemon and each engine's own tier is a `BlockIndex`. Bytes are only counted, and calls take no time.

A fleet has one engine and one daemon on each host. The trace is overlaid with itself: copies are
shifted in time and share no block, except the head that all prompts begin with. Every request goes
to a random engine, which is the worst case for the daemons. The engine finds a prefix in its own
tier, asks the daemons for the rest, run after run until one lacks a block, computes what nobody has
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import describe_environment, save
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.remote.placement import Placement, anchor_position

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
            for n in range(len(keys), len(ids) // whole):
                keys.append(block_key(number, ids[(n + 1) * whole - 1]))
            yield start + at, number, keys[:]

    sessions = [session for _ in range(copies) for session in trace]
    rows = heapq.merge(
        *(one(n, session, rng.uniform(0, spread_s)) for n, session in enumerate(sessions)),
        key=lambda row: row[:2],
    )
    for at, _, keys in rows:
        yield Request(at, head[: len(keys)] + keys[len(head) :])


def read_trace(path: Path) -> list[dict[str, Any]]:
    opened = lzma.open(path, "rt") if path.suffix == ".xz" else path.open()
    with opened as lines:
        return [json.loads(line) for line in lines]


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


# ---- scenarios -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much of everything; `--tiny` is for tests."""

    daemons: tuple[int, ...]
    compared: int  # daemons where placements, copies and failures are compared
    copies_per_daemon: float
    agent_copies: int
    warm_s: float  # no load is measured before
    spread_s: float  # copies begin within
    end_s: float


FULL = Scale((16, 64, 256), 64, 0.25, 4, 1200.0, 900.0, 3500.0)
TINY = Scale((2, 4), 4, 0.5, 1, 60.0, 30.0, 120.0)

SHORT_HEAD, LONG_HEAD = 2048, 24576
AGENT_HEAD = 12288
"""Tokens of tools that the sessions of one product share."""
FEW_ANCHORS = (0, 64, 512, 4096)
ALTERNATIVES: dict[str, tuple[int, ...]] = {
    "first block only": (0,),
    "0, 64, 512, 4096": FEW_ANCHORS,
    "every 1024": tuple(range(0, 1 << 14, 1024)),
    "every 512": tuple(range(0, 1 << 14, 512)),
    "every 256": tuple(range(0, 1 << 14, 256)),
    "every 128": tuple(range(0, 1 << 14, 128)),
    "every 64": tuple(range(0, 1 << 14, 64)),
}


@dataclass(frozen=True)
class Event:
    """Something that happens to daemons at a time; their number is a share of all."""

    at: float
    what: str  # kill, restart (with its SSD), replace (empty) or add
    count: int


@dataclass(frozen=True)
class Case:
    """One fleet under one kind of traffic."""

    traffic: str  # chats or agents
    daemons: int
    head_tokens: int
    anchors: str = ""  # of ALTERNATIVES; empty: as the code places
    engine_tokens: int = 0
    hot_copies: int = 1
    events: tuple[Event, ...] = ()


class Simulation:
    """Runs cases; the bytes of a token turn capacities into blocks."""

    def __init__(
        self,
        scale: Scale,
        traces: dict[str, Sequence[dict[str, Any]]],
        kib_per_token: dict[str, float],
        daemon_bytes: int,
    ) -> None:
        self.scale = scale
        self.traces = traces
        self.block_bytes = {name: int(kib * 1024 * TOKENS) for name, kib in kib_per_token.items()}
        self.daemon_bytes = daemon_bytes

    def requests(self, case: Case) -> Iterator[Request]:
        scale, trace = self.scale, self.traces[case.traffic]
        if case.traffic == "chats":
            copies = max(1, round(case.daemons * scale.copies_per_daemon))
            return chat_requests(trace, copies, case.head_tokens, scale.spread_s, seed=1)
        return agent_requests(trace, scale.agent_copies, case.head_tokens, scale.end_s, seed=1)

    def run(self, case: Case) -> dict[str, Any]:
        begin, scale = time.perf_counter(), self.scale
        block_bytes = self.block_bytes[case.traffic]
        fleet = Fleet(
            case.daemons,
            self.daemon_bytes // block_bytes,
            case.engine_tokens // TOKENS,
            Runs(ALTERNATIVES[case.anchors] if case.anchors else None),
            case.hot_copies,
        )
        events = sorted(case.events, key=lambda event: event.at)
        is_measuring = False
        for request in self.requests(case):
            if request.at >= scale.end_s:
                break
            if not is_measuring and request.at >= scale.warm_s:
                fleet.measure()
                is_measuring = True
            while events and request.at >= events[0].at:
                happen(fleet, events.pop(0))
            fleet.serve(request)
        found = summary(fleet, scale.warm_s, scale.end_s, block_bytes)
        if case.events:
            found["hit_by_minute"] = [
                round((window.local + window.loaded) / max(window.asked, 1), 4)
                for _, window in sorted(fleet.windows.items())
            ]
        print(f"{case} {found} {time.perf_counter() - begin:.1f} s", flush=True)
        return found


def happen(fleet: Fleet, event: Event) -> None:
    """The first daemons of the list are the ones that fail: which they are is random anyway."""
    some = list(fleet.daemons)[: event.count]
    if event.what == "kill":
        fleet.kill(some)
    elif event.what == "add":
        fleet.add(event.count)
    else:
        fleet.restart(some, is_warm=event.what == "restart")


def summary(fleet: Fleet, begin_s: float, end_s: float, block_bytes: int) -> dict[str, Any]:
    loads = list(fleet.loads.values())
    minutes = range(int(begin_s / _MINUTE), int(end_s / _MINUTE))
    windows = [fleet.windows[minute] for minute in minutes if minute in fleet.windows]
    asked = max(sum(window.asked for window in windows), 1)
    seconds = end_s - begin_s
    in_and_out = [load.loaded + load.put for load in loads]
    by_minute = sorted(load.by_minute[minute] for load in loads for minute in minutes)
    mean_minute = max(sum(by_minute) / len(by_minute), 1e-9)
    capacity = sum(index.geometry.num_slabs for index in fleet.daemons.values())
    return {
        "requests_per_s": round(fleet.requests / seconds, 2),
        "hit": round(sum(window.local + window.loaded for window in windows) / asked, 4),
        "hit_in_engine": round(sum(window.local for window in windows) / asked, 4),
        "lookups_per_prompt": round(
            sum(load.lookups for load in loads) / max(fleet.prompts, 1), 2
        ),
        "max_over_mean": {
            "lookups": over_mean([load.lookups for load in loads]),
            "loaded": over_mean([load.loaded for load in loads]),
            "put": over_mean([load.put for load in loads]),
            "bytes": over_mean(in_and_out),
        },
        "p99_minute_over_mean": round(by_minute[len(by_minute) * 99 // 100] / mean_minute, 2),
        "capacity_used": round(sum(map(len, fleet.daemons.values())) / capacity, 4),
        "gb_per_s": {
            "loaded_in_all": round(sum(x.loaded for x in loads) * block_bytes / seconds / 1e9, 3),
            "put_in_all": round(sum(x.put for x in loads) * block_bytes / seconds / 1e9, 3),
            "busiest": round(max(in_and_out) * block_bytes / seconds / 1e9, 3),
            "mean": round(sum(in_and_out) / len(loads) * block_bytes / seconds / 1e9, 3),
        },
    }


def over_mean(values: Sequence[int]) -> float:
    return round(max(values) * len(values) / max(sum(values), 1), 2)
