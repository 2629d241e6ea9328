"""What the tiers cost and give: daemon, SSD, index, pinned memory, load or compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.result_files import Result, Results
from benchmarks.sections import published
from benchmarks.sections.markdown import measured_on, median, number, table

_HITS = """\
### Hits

Times to the first token in milliseconds, medians with the range. `ipc`: the daemon's memory is
mapped; `tcp`: over the loopback. Goal P7: a daemon hit takes at most 1.1 times a hit in the CPU
tier.
"""
_BYTES = """\
### Bytes

GB/s between a client and a daemon, medians. *bare*: a plain socket with as many connections, the
limit of TCP (goal P8: at least 0.9 of it).
"""
_CLIENTS = """\
### Many clients

Requests per second that eight client processes get together, each with four in flight, of a daemon
and of a bare zmq ROUTER: a loop of pyzmq that answers every message with as many frames and bytes,
looks nothing up and checks nothing. Rounds take turns; medians, and the median of their ratios
(goal: at least 0.85). Clients and server share the cores, so a client's own work dampens the ratio;
the processor time of the server process, in µs a request, is its own. *Share of a second endpoint*:
what one client that is alone on it gets, of an equal share, while seven use the first (goal: at
least 0.8).
"""


def daemon_section(results: Results) -> str:
    hits, moved = results.of("daemon_hits"), results.of("daemon_bandwidth")
    shared = results.of("daemon_clients")
    if not hits and not moved and not shared:
        return ""
    parts = ["## A daemon on the same host\n"]
    if hits:
        parts += [_HITS, *(_hits(result) for result in hits)]
    if moved:
        parts += [_BYTES, *(_bytes(result) for result in moved)]
    if shared:
        parts += [_CLIENTS, *(_clients(result) for result in shared)]
    return "\n".join(parts)


def _hits(result: Result) -> str:
    kinds = ("cold", "device_hit", "cpu_hit", "daemon_hit")
    rows = [
        [
            way,
            *(_range(found[f"{kind}_ms"]) for kind in kinds),
            number(found["daemon_over_cpu"], 2),
        ]
        for way, found in result.data["ways"].items()
        if "failed" not in found
    ]
    header = ["way", *(kind.replace("_", " ") for kind in kinds), "daemon over CPU"]
    return measured_on(result) + "\n" + table(header, rows)


def _range(times: dict[str, float], digits: int = 1) -> str:
    middle, low, high = (number(times[name], digits) for name in ("median", "min", "max"))
    return f"{middle} ({low} … {high})"


def _clients(result: Result) -> str:
    rows = [
        [
            f"{case['blocks']} of {case['nbytes'] // 1024:,} KiB",
            *(number(case["requests_per_s"][name], 0) for name in ("daemon", "bare")),
            number(case["of_bare_zmq"], 2),
            *(number(case["cpu_us_per_request"][name], 0) for name in ("daemon", "bare")),
            *(number(case[name], 2) for name in ("of_fair_share", "of_fair_share_bare")),
        ]
        for case in result.data["results"]
    ]
    header = ["blocks a request", "daemon, requests/s", "bare", "daemon of bare"]
    header += ["daemon, µs a request", "bare", "share of a second endpoint", "bare"]
    return measured_on(result) + "\n" + table(header, rows)


def _bytes(result: Result) -> str:
    cases: list[dict[str, Any]] = result.data["results"]
    ways = list(dict.fromkeys(way for case in cases for way in case["gb_per_s"]))
    ratios = list(dict.fromkeys(way for case in cases for way in case["of_bare_pair"]))
    rows = [
        [
            f"{case['block_bytes'] // 1024:,} KiB",
            str(case["connections"]),
            f"{case['total_bytes'] >> 20:,} MiB",
            *(number(case["gb_per_s"].get(way, {}).get("median"), 2) for way in ways),
            *(number(case["of_bare_pair"].get(way), 2) for way in ratios),
        ]
        for case in cases
    ]
    header = ["block", "connections", "in all", *ways, *(f"{way} of bare" for way in ratios)]
    return measured_on(result) + "\n" + table([name.replace("_", " ") for name in header], rows)


_DISTRIBUTED = """\
The store behind a daemon beside its own client library, one call at a time over the loopback, with
servers on the same cores: GB/s of the store, and in brackets the client's. *ratio*: store over
client, medians of the same rounds (goal P22: at least 0.9); *processor*: the processor time of the
client over that of the store. The store verifies what it reads and checksums what it writes; a
client does neither. A lookup is one key of 2,048.
"""


def distributed_section(results: Results) -> str:
    found = results.of("distributed_store")
    if not found:
        return ""
    return "\n".join(["## Stores behind a daemon\n", _DISTRIBUTED, *map(_distributed, found)])


def _distributed(result: Result) -> str:
    rows = []
    for size in result.data["sizes"]:
        cells = [f"{size['block_bytes'] // 1024:,} KiB"]
        for action in ("put", "get", "get_one"):
            one = size[action]
            both = [number(one[side]["gb_per_s"], 2) for side in ("store", "client")]
            cells += [f"{both[0]} ({both[1]})", number(one["ratio"]["median"], 2)]
        cells.append(number(size["get"]["cpu_ratio"]["median"], 2))
        match = size["match"]
        both = [number(match[side]["us_per_key"], 2) for side in ("store", "client")]
        cells.append(f"{both[0]} ({both[1]})")
        rows.append(cells)
    header = [
        "block", "put", "ratio", "get", "ratio", "get, single", "ratio", "processor, get",
        "lookup, µs",
    ]  # fmt: skip
    client = ", ".join(result.data["client"])
    title = f"### {result.data['store'].capitalize()}, beside {client}\n"
    parts = [title, measured_on(result), table(header, rows)]
    if "client_verified" in result.data["sizes"][0]["put"]:
        parts += [_ADDED, _added(result)]
    return "\n".join(parts)


_ADDED = """\
What the store adds to the client: speed as a part of that of the client alone, and in brackets the
client's processor time over that with it. *header* is the client with a header beside each block,
in memory of its own; *checksum* is this client when it computes checksums too, the least that a
store with this format and this promise does; *store* is the store, which also asks before a put
what is there. The last column of each is the store beside the client that does the same work:
medians of the same rounds, with quartiles.
"""


def _added(result: Result) -> str:
    rows = []
    for size in result.data["sizes"]:
        cells = [f"{size['block_bytes'] // 1024:,} KiB"]
        for action in ("put", "get"):
            store = size[action]
            for one in (store["client_header"], store["client_verified"], store):
                both = [number(one[ratio]["median"], 2) for ratio in ("ratio", "cpu_ratio")]
                cells.append(f"{both[0]} ({both[1]})")
            same = store["of_client_verified"]["ratio"]
            cells.append(
                f"{number(same['median'], 2)} ({number(same['q1'], 2)} … {number(same['q3'], 2)})"
            )
        rows.append(cells)
    ways = ("header", "checksum", "store", "store beside checksum")
    return table(
        ["block", *(f"{action}, {way}" for action in ("put", "get") for way in ways)], rows
    )


_SSD = """\
Blocks written, read and replaced, in GB/s, and as a part of what fio reaches with the same block
size and direct I/O (goal P9: at least 0.95): with as many threads, each of which reuses one buffer
(psync), and with as many buffers as ours (libaio), which has more transfers under way. On
a virtual disk, whose bytes are copied, one buffer stays in the processor's cache and many do not.
In brackets the smallest and the largest ratio of a round. fio checks nothing; every block here is
hashed. Recovery is of a tier of 100 GB (goal P14: 2 s).
"""
_SSD_INDEX = """\
Its index as it grows (goal P12: at most 150 bytes a block): what the process holds after it has
opened a folder with this number of blocks, and how long that took.
"""
_ACTIONS = ("write", "read", "replace")
_FIO = {"fio": "psync", "fio_with_as_many_places": "libaio"}


def ssd_section(results: Results) -> str:
    found = results.of("ssd_tier")
    if not found:
        return ""
    indexes = [_ssd_index(result) for result in results.of("ssd_index")]
    if indexes:
        indexes.insert(0, _SSD_INDEX)
    return "\n".join(["## The SSD tier\n", _SSD, *(_ssd(result) for result in found), *indexes])


def _ssd_index(result: Result) -> str:
    rows = [
        [
            f"{case['blocks']:,}",
            number(case["bytes_per_block"], 0),
            number(case["seconds_to_serving"], 1),
            number(case["cpu_seconds_to_serving"], 1),
        ]
        for case in result.data["index"]
    ]
    header = ["blocks", "bytes a block", "opened after, s", "processor time of it, s"]
    return measured_on(result) + "\n" + table(header, rows)


def _ssd(result: Result) -> str:
    rows = [
        [
            name,
            f"{case['block_bytes'] / 1024:,.0f} KiB",
            *(number(case.get(f"{action}_gb_per_s"), 2) for action in _ACTIONS),
            *(_ssd_ratio(case, f"{action}_of_{kind}") for kind in _FIO for action in _ACTIONS),
        ]
        for name, case in result.data["speed"].items()
    ]
    of_fio = [f"{action} of {name}" for name in _FIO.values() for action in _ACTIONS]
    header = ["shape", "block", *_ACTIONS, *of_fio]
    text = measured_on(result) + "\n" + table(header, rows)
    recovery = result.data.get("recovery")
    if recovery:
        text += (
            f"\nServing {recovery['blocks']:,} blocks {recovery['seconds_to_serving']:.1f} s after "
            f"the start, {recovery['seconds_to_serving_cold_journal']:.1f} s with a cold journal.\n"
        )
    return text


def _ssd_ratio(case: dict[str, Any], name: str) -> str:
    spread = case.get(f"{name}_spread")
    text = number(case.get(name), 2)
    return f"{text} ({number(spread[0], 2)} … {number(spread[1], 2)})" if spread else text


_TOKEN_CACHE = """\
Tokens of 5 MiB, updated and queried through `KVCache`, beside the disk's own speed with direct I/O.
*files*: a folder without a daemon, through the page cache, which is empty before the queries.
*daemon*: its SSD tier, with direct I/O, after a restart. Updates end when everything is on the
disk. Medians of all rounds; ratios are medians of those of a round.
"""


def token_cache_section(results: Results) -> str:
    found = results.of("token_cache")
    if not found:
        return ""
    ours = [_token_cache(result) for result in found]
    return "\n".join(["## KVCache\n", _TOKEN_CACHE, *ours, *published.beside("token_cache")])


def _token_cache(result: Result) -> str:
    data = result.data
    rows = []
    for name, row in data["rows"].items():
        speeds = [row[f"{action}_mib_per_s"] for action in ("query", "update")]
        per_token = data["token_bytes"] / 2**20
        rows.append(
            [
                name if name != "disk" else f"the disk, by {data['disk_by']}",
                *(number(speed["median"] / per_token, 0) for speed in speeds),
                *(
                    f"{number(speed['median'], 0)} "
                    f"({number(speed['min'], 0)} … {number(speed['max'], 0)})"
                    for speed in speeds
                ),
                *(number(row[f"{action}_of_disk"], 2) for action in ("query", "update")),
            ]
        )
    header = ["", "query, tokens/s", "update, tokens/s", "query, MiB/s", "update, MiB/s"]
    facts = (
        f"\n{data['bytes'] / 2**30:.1f} GiB a round, {data['callers']} callers at a time, "
        f"{data['prompt_tokens']} tokens a call; load average before: "
        f"{data['load_average_before']:.1f}.\n\n"
    )
    return measured_on(result) + facts + table([*header, "query of disk", "update of disk"], rows)


_LOOKUP = """\
What the scheduler half costs: keys and lookup of one long prompt (goal P11: at most 3 ms), and the
index as it grows (goal P12: constant cost, at most 150 bytes a block).
"""


def lookup_section(results: Results) -> str:
    found = results.of("lookup")
    if not found:
        return ""
    return "\n".join(["## Keys and index\n", _LOOKUP, *(_lookup(result) for result in found)])


def _lookup(result: Result) -> str:
    prompt = result.data["prompt"]
    text = measured_on(result) + (
        f"\nA prompt of {prompt['tokens']:,} tokens: keys {prompt['keys_ms']:.2f} ms, lookup "
        f"{prompt['lookup_ms']:.2f} ms, together {prompt['together_ms']:.2f} ms.\n\n"
    )
    rows = [
        [
            policy,
            f"{case['blocks']:,}",
            number(case["bytes_per_block"], 0),
            number(case["lookup_us_per_block"], 3),
            number(case["store_with_eviction_us"], 1),
        ]
        for policy, cases in result.data["index"].items()
        for case in cases
    ]
    header = ["policy", "blocks", "bytes a block", "lookup, µs a block", "store with eviction, µs"]
    return text + table(header, rows)


_PINNING = """\
Host memory is pinned in the background, after the kernel has provided its pages: the driver holds
up others while it pins. Eager engines of four layers start with and without the arena in turns,
after one start that is not counted. Goal P13: with 64 GiB an engine is ready at most 1 s later.
"""


def pinning_section(results: Results) -> str:
    found = results.of("pinning")
    if not found:
        return ""
    return "\n".join(["## A large arena at the start\n", _PINNING, *(_pinning(r) for r in found)])


def _pinning(result: Result) -> str:
    data = result.data
    text = measured_on(result) + "\n"
    starts = data["derived"]
    if starts:
        text += table(
            ["arena, GiB", "start without, s", "start with, s", "later by, s"],
            [
                [
                    number(data["gib"], 0),
                    median(starts["without"], 2),
                    median(starts["with"], 2),
                    number(starts["later_by_s"], 2),
                ]
            ],
        )
    arena = data["arena"]
    if arena:
        text += (
            f"\nOpening the arena holds up its caller for {arena['start_held_up_s']:.3f} s; all of "
            f"it is pinned after {arena['pinned_s']:.1f} s. A small kernel, launched and waited "
            "for again and again, in ms:\n\n"
        )
        text += table(
            ["", "median", "99 of 100 within", "longest"],
            [
                [name, *(number(facts[key], 3) for key in ("median", "p99", "longest"))]
                for name, facts in _launches(arena, data.get("arena_left_to_driver"))
            ],
        )
    return text


def _launches(
    arena: dict[str, Any], left_to_driver: dict[str, Any] | None
) -> Iterator[tuple[str, dict[str, float]]]:
    yield "alone", arena["launch_ms"]["alone"]
    if arena["launch_ms"]["while_pinning"]:
        yield f"while {arena['gib']:.0f} GiB are pinned", arena["launch_ms"]["while_pinning"]
    if left_to_driver and left_to_driver["launch_ms"]["while_pinning"]:
        name = f"while {left_to_driver['gib']:.0f} GiB are pinned whose pages the driver has to get"
        yield name, left_to_driver["launch_ms"]["while_pinning"]


_COMPUTE_ONCE = """\
Cold prompts at once, with `compute_once` off and on in turn: identical ones at one engine, an equal
part of them at each of several engines with one daemon, and prompts that share nothing, which shows
what the option costs. *Computed*: how many whole prompts the computed tokens would make; each
request computes its last tokens itself. *Throughput*: on over off, the median of the rounds. Goal
P15: the work of one prompt, and at least 0.995 of the throughput where nothing is shared.
"""
_COMPUTE_ONCE_CASES = {
    "one_engine": "identical, one engine",
    "engines": "identical, {} engines",
    "nothing_shared": "nothing shared, one engine",
}


def compute_once_section(results: Results) -> str:
    found = results.of("compute_once")
    if not found:
        return ""
    parts = ["## Identical prompts at once\n", _COMPUTE_ONCE]
    return "\n".join([*parts, *(_compute_once(result) for result in found)])


def _compute_once(result: Result) -> str:
    data = result.data
    rows = []
    for case, title in _COMPUTE_ONCE_CASES.items():
        row = data["derived"].get(case)
        if row is None:
            continue
        off, on = row["off"], row["on"]
        cells = [number(some["computed_prompts"], 2) for some in (off, on)]
        cells += [_range(some["seconds"], 2) for some in (off, on)]
        cells.append(number(row["speedup"], 4))
        cells.append(str(min(some["seconds"]["n"] for some in (off, on))))
        cells.append("yes" if row["reached"] else "**no**")
        rows.append([title.format(data["engines"]), *cells])
    header = ["prompts", "computed, off", "on", "seconds, off", "on"]
    shown = table([*header, "throughput", "rounds", "reached"], rows)
    size = f"{data['prompts']} prompts of {data['prompt_tokens']:,} tokens; medians with the range."
    return f"{measured_on(result)}\n{size}\n\n{shown}"


_LOAD_OR_COMPUTE = """\
Prompts that lie on the SSD of a daemon, or in its memory, asked of engines that take turns: vLLM
alone, and ours with `load_policy` always, auto and never. Times to the first token, medians with
quartiles, in milliseconds. `auto` starts without any knowledge, and its first rounds are counted.
Goal P10: `auto` never takes more than 1.05 of what vLLM alone takes.
"""


def load_or_compute_section(results: Results) -> str:
    found = results.of("load_or_compute")
    if not found:
        return ""
    return "\n".join(
        [
            "## A slow tier: load or compute\n",
            _LOAD_OR_COMPUTE,
            *(_load_or_compute(r) for r in found),
        ]
    )


def _load_or_compute(result: Result) -> str:
    derived = result.data["derived"]
    rows = [
        [
            f"`{mode}`",
            median(derived["ms"][mode]),
            number(ratio, 3),
            number(derived["worst_ratio"][mode], 3),
            number(derived["loaded_tokens"][mode]),
        ]
        for mode, ratio in derived.get("ratio_to_vllm", {}).items()
    ]
    head = ["mode", "time to first token", "of vLLM alone", "slowest, of vLLM alone"]
    head.append(f"tokens loaded of {result.data['prompt_tokens']:,}")
    return measured_on(result) + "\n" + table(head, rows)
