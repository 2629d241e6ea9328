"""What each eviction policy is worth on recorded traffic.

    python -m benchmarks.eviction --chat conversation.jsonl.xz --agents sessions.jsonl.xz --out X

Drives the real index (`cache/index.py`) with the requests of a trace as the connector does: the
longest stored prefix is a hit and counts as used, the blocks behind it are reserved and committed.
Only full blocks of prompts are stored; answers are stored when the next turn asks for them. There
is one tier and no GPU cache in front of it.

Traces, which say which blocks were asked for and hold no text; both are Apache-2.0:

- `--chat`: the conversation trace of Mooncake (FAST '25), 512 tokens a block. The half to publish
  is the second half of its time, from an empty tier on; the first is for tuning policies.
- `--agents`: sessions of coding agents from kv-cache-tester, with 64 tokens a block, of which every
  fourth is taken as a block of 256. The half to publish is every second session. Starts are random
  over eight hours, because the trace has none.

Capacities are shares of the distinct blocks of the half. What a hit saves is the prefill of its
tokens less their load. A token at depth d takes 18.2 us * (1 + 2.6e-5 d): 8,192 tokens of the 7B
shape take 165 ms on an H200, and attention over d tokens adds 4 * 28 * 3,584 * d operations to 15.2
billion. It loads 57,344 bytes at 55.5 GB/s.

*belady* knows the future: it drops what is asked for last or never again, also at once instead of
storing it. A block is never asked for later than those behind it, so this drops tails before heads,
and no policy has more hits. *ended* is LRU told by `BlockIndex.mark_dead` that a session has had
its last request. In the chat trace, which does not say so, a request continues the session of the
last request that asked for the deepest block they share, if they share more than half of that
request's blocks; those who share less have the same system prompt. *told* is that and, for the
agents, `BlockIndex.expect_again`: how long the pause until the next request will be, wrong by a
random factor (lognormal, sigma 0.5). Pauses beyond ten minutes are not reported: there a person has
left, rather than a tool is running.
"""

from __future__ import annotations

import argparse
import heapq
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
ENDED = "ended"
TOLD = "told"
BELADY = "belady"
_NEVER = 1 << 40
_SECONDS_PER_TOKEN = 18.2e-6
_GROWTH_PER_TOKEN = 2.6e-5
_LOAD_SECONDS_PER_TOKEN = 57_344 / 55.5e9
_AGENT_BLOCKS = 4  # of the trace in one of ours
_AGENT_HOURS = 8
_AGENT_SEED = 7
_LONGEST_TOOL_SECONDS = 600
_PAUSE_SIGMA = 0.5


@dataclass(frozen=True)
class Request:
    seconds: float
    blocks: list[int]
    """Equal number: equal prefix up to and including that block."""
    ends_session: bool
    pause: float | None = None
    """Expected seconds until the next request of the session, where its client knows."""


@dataclass(frozen=True)
class Trace:
    name: str
    block_tokens: int
    requests: list[Request]

    @property
    def distinct(self) -> int:
        return len({block for request in self.requests for block in request.blocks})


def read_chat(path: Path, published: bool) -> Trace:
    with lzma.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    middle = rows[-1]["timestamp"] / 2
    asked = [
        (row["timestamp"] / 1e3, row["hash_ids"][: row["input_length"] // 512])
        for row in rows
        if (row["timestamp"] >= middle) == published
    ]
    last = _last_of_sessions([blocks for _, blocks in asked])
    requests = [
        Request(seconds, blocks, number in last)
        for number, (seconds, blocks) in enumerate(asked)
        if blocks
    ]
    return Trace("chat", 512, requests)


def _last_of_sessions(prompts: list[list[int]]) -> set[int]:
    """The numbers of the last request of each session."""
    asker: dict[int, int] = {}  # block -> the last request that asked for it
    session: list[int] = []
    last: dict[int, int] = {}
    for number, blocks in enumerate(prompts):
        shared = 0
        while shared < len(blocks) and blocks[shared] in asker:
            shared += 1
        before = asker[blocks[shared - 1]] if shared else number
        is_next = shared > 1 and 2 * shared > len(prompts[before])
        session.append(session[before] if is_next else number)
        last[session[number]] = number
        asker.update(dict.fromkeys(blocks, number))
    return set(last.values())


def read_agents(path: Path, published: bool) -> Trace:
    with lzma.open(path, "rt") as lines:
        sessions = [json.loads(line) for line in lines]
    rng = random.Random(_AGENT_SEED)
    guesses = random.Random(_AGENT_SEED)
    requests: list[Request] = []
    base = 0
    for number, session in enumerate(sessions):
        start = rng.uniform(0, _AGENT_HOURS * 3600)
        prompt: list[int] = []
        end = base
        for at, (seconds, _, _, kept, new, *_) in enumerate(session["rows"]):
            prompt = prompt[:kept]
            for first, count in new:
                prompt += range(base + first, base + first + count)
            end = max(end, *prompt, base)
            blocks = prompt[_AGENT_BLOCKS - 1 :: _AGENT_BLOCKS]
            if (number % 2 == 1) == published and blocks:
                following = session["rows"][at + 1 :][:1]
                pause = _expected(following[0][0] - seconds, guesses) if following else None
                requests.append(Request(start + seconds, blocks, not following, pause))
        base = end + 1
    requests.sort(key=lambda request: request.seconds)
    return Trace("agents", session["block"] * _AGENT_BLOCKS, requests)


def _expected(pause: float, guesses: random.Random) -> float | None:
    guess = pause * guesses.lognormvariate(0, _PAUSE_SIGMA)
    return guess if pause <= _LONGEST_TOOL_SECONDS else None


def saved_seconds(block_tokens: int, blocks: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What a hit of n blocks saves, for n up to `blocks`."""
    tokens = np.arange(blocks + 1) * float(block_tokens)
    prefill = _SECONDS_PER_TOKEN * (tokens + _GROWTH_PER_TOKEN * tokens**2 / 2)
    return prefill - tokens * _LOAD_SECONDS_PER_TOKEN


def hits_of_index(
    trace: Trace,
    capacity: int,
    eviction: str = "lru",
    tell_ends: bool = False,
    tell_pauses: bool = False,
) -> list[int]:
    """The hit of each request, in blocks."""
    now = 0
    index = BlockIndex(ArenaGeometry(64 * capacity, (64,)), eviction, now=lambda: now)
    hits = []
    for request in trace.requests:
        now = int(request.seconds * 1e9)
        keys = [block.to_bytes(16, "little") for block in request.blocks]
        hit = index.match_prefix(keys)
        index.touch(keys[:hit])
        pinned = index.pin(keys[:hit])
        plan = index.reserve_missing(keys, hit, len(keys), 0)
        index.commit_all(plan.slots)
        index.unpin(pinned)
        if tell_ends and request.ends_session:
            index.mark_dead(keys)
        elif tell_pauses and request.pause is not None:
            index.expect_again(keys, request.pause)
        hits.append(hit)
    index.check()
    return hits


def hits_of_belady(trace: Trace, capacity: int) -> list[int]:
    later = _next_requests(trace)
    held: dict[int, int] = {}  # block -> the next request that asks for it
    farthest: list[tuple[int, int, int]] = []  # a heap; entries that `held` contradicts are void
    hits = []
    for request, nexts in zip(trace.requests, later, strict=True):
        hit = 0
        while hit < len(request.blocks) and request.blocks[hit] in held:
            hit += 1
        for depth, (block, following) in enumerate(zip(request.blocks, nexts, strict=True)):
            held[block] = following
            heapq.heappush(farthest, (-following, -depth, block))
        while len(held) > capacity:
            following, _, block = heapq.heappop(farthest)
            if held.get(block) == -following:
                del held[block]
        hits.append(hit)
    return hits


def _next_requests(trace: Trace) -> list[list[int]]:
    """For each block of each request: the number of the next request that asks for it."""
    upcoming: dict[int, int] = {}
    later = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        later.append([upcoming.get(block, _NEVER) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return later[::-1]


def policies() -> dict[str, Callable[[Trace, int], list[int]]]:
    found: dict[str, Callable[[Trace, int], list[int]]] = {}
    for name in EVICTION_POLICIES:
        found[name] = partial(hits_of_index, eviction=name)
    found[ENDED] = partial(hits_of_index, tell_ends=True)
    found[TOLD] = partial(hits_of_index, tell_ends=True, tell_pauses=True)
    found[BELADY] = hits_of_belady
    return found


def measure(trace: Trace, share: float) -> dict[str, Any]:
    capacity = max(1, round(share * trace.distinct))
    asked = [len(request.blocks) for request in trace.requests]
    worth = saved_seconds(trace.block_tokens, max(asked))
    found: dict[str, dict[str, float]] = {}
    for name, hits_of in policies().items():
        if name == TOLD and not any(request.pause for request in trace.requests):
            continue
        hits = hits_of(trace, capacity)
        found[name] = {
            "hit": round(sum(hits) / sum(asked), 5),
            "saved_s": round(float(worth[hits].sum()), 2),
        }
    low, high = found["lru"]["saved_s"], found[BELADY]["saved_s"]
    for row in found.values():
        row["way"] = round((row["saved_s"] - low) / (high - low), 3) if high > low else 0.0
    return {"share": share, "blocks": capacity, "policies": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chat", type=Path, help="the conversation trace of Mooncake")
    parser.add_argument("--agents", type=Path, help="the sessions of kv-cache-tester")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--tuning", action="store_true", help="the half that is not published")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": describe_environment(), "traces": {}}
    for path, read in ((args.chat, read_chat), (args.agents, read_agents)):
        if path is None:
            continue
        trace = read(path, published=not args.tuning)
        asked = [len(request.blocks) for request in trace.requests]
        most = saved_seconds(trace.block_tokens, max(asked))[asked].sum()
        rows: list[dict[str, Any]] = []
        result["traces"][trace.name] = {
            "requests": len(trace.requests),
            "block_tokens": trace.block_tokens,
            "asked": sum(asked),
            "distinct": trace.distinct,
            "saved_if_all_hit_s": round(float(most), 1),
            "capacities": rows,
        }
        for share in args.shares:
            rows.append(measure(trace, share))
            print(trace.name, json.dumps(rows[-1]), flush=True)
            save(args.out, result)


if __name__ == "__main__":
    main()
