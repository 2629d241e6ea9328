"""What a user asks, each from one run: docs/benchmarks.md, and the rows in README.md."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.result_files import Result, Results
from benchmarks.sections import chats, connectors, markdown
from benchmarks.sections.markdown import image, median, number, table

measured_on = partial(markdown.measured_on, for_users=True)

_MODES = {
    "vllm": "vLLM alone",
    "tiered": "CPU tier",
    "tiered_daemon": "daemon, its memory mapped",
    "tiered_daemon_tcp": "daemon, over tcp on the loopback",
    "offloading": "vLLM's OffloadingConnector",
    "offloading_blhnc": "vLLM's OffloadingConnector, layout BLHNC",
    "simple": "vLLM's SimpleCPUOffloadConnector",
    "limit": "vLLM alone, with a GPU cache that holds everything",
    "limit_seqs": "the same, with as many requests at once as the others",
    "always": "load always",
    "auto": "decide by measurement",
    "never": "never load",
}

_ONE_PROMPT = """\
## What does a hit save?

Time to the first token of one prompt of {tokens:,} tokens ({megabytes:,.0f} MB of KV), in
milliseconds, medians with quartiles. The engines live on one GPU and take turns on the prompts.
The plot shows by how much a hit in host memory takes longer than one on the GPU.
"""
_DAEMON = """\
### From a daemon

Another run, with its own cold prompts and hits: medians with the range. `ipc`: the daemon is on the
same host and its memory is mapped. `tcp`: the same over the loopback.
"""
_CHATS = """\
## Many chats at once

Every engine gets the same arrivals. *From cache* is the share of prompt tokens that are not
computed, TTFT the time to the first token; both of turns from the second on. The GPU cache is too
small for all chats, except in the last row, where it holds everything and no cache behind it can do
better.
"""
_AGENTS = """\
## Agents

Sessions that share a long system prompt and pause for tools between their turns.
"""
_RESTART = """\
## What does a restart lose?

The engine is killed in the middle of its chats, and a new one starts beside the same daemon. All
chats come to the new engine at once, so that their first turn waits in its queue. *Reusable* is
what an endless cache would serve.
"""
_STORING = """\
## What does storing cost?

Distinct prompts without a pause: every block is stored and none is ever used, the worst case.
Steps have up to 8,192 tokens here. With short steps of a small model, where the processor sets the
pace, storing costs more, and sending on to a daemon more again; rounds differ much:
[swap_out and transfer_out](benchmarks-details.md#cost-of-storing-swap_out-and-transfer_out).
"""
_SSD = """\
## The SSD

What the daemon's SSD tier reads and writes, in GB/s.
"""
_SLOW = """\
### When the SSD is slower than the model

A prompt of {tokens:,} tokens lies on the SSD. Loading it pays only where the disk delivers it
faster than the GPU computes it; `load_policy: auto` measures both. Times in milliseconds.
"""
_START = """\
## What does a large CPU tier cost at the start?

Memory is pinned in the background while the engine loads its weights.
"""

_HEADLINE = """\
Medians of the time to the first token (TTFT): vLLM 0.32, an H200, a model of Qwen2.5-7B's shape.
vLLM's OffloadingConnector takes {blhnc} ms with its layout BLHNC; the daemon had a run of its own
(CPU tier: {cpu} ms). The plot: 60 chats that do not all fit on the GPU; `limit` is vLLM with room
for all. [More](docs/benchmarks.md), [goals missed](docs/benchmarks-details.md).
"""


def sections(results: Results) -> list[str]:
    """Those of docs/benchmarks.md; a section without results is empty."""
    return [
        _chats(results, _CHATS, ("calm", "tight")),
        _chats(results, _AGENTS, ("agents",)),
        _restart(results),
        _one_prompt(results),
        _daemon_hits(results),
        _storing(results),
        _ssd(results),
        _slow_tier(results),
        _start(results),
    ]


def headline(results: Results) -> str:
    """The rows in README.md: one prompt, cold and from each tier; what else belongs to them."""
    run, daemon = _named(results, "connectors-"), _named(results, "daemon_hits_ipc-")
    if run is None or daemon is None:
        return ""
    modes = run.data["derived"]["groups"][0]["modes"]
    hits = daemon.data["ways"]["ipc"]
    rows = [
        ("cold: all of it is computed", modes["tiered"]["cold"]),
        ("hit on the GPU", modes["tiered"]["device_hit"]),
        ("hit in the CPU tier", modes["tiered"]["tier_hit"]),
        ("hit in a daemon on the host", hits["daemon_hit_ms"]),
        ("hit of OffloadingConnector", modes["offloading"]["tier_hit"]),
    ]
    rest = _HEADLINE.format(
        blhnc=number(modes["offloading_blhnc"]["tier_hit"]["median"]),
        cpu=number(hits["cpu_hit_ms"]["median"]),
    )
    header = [f"a prompt of {run.data['prompt_tokens']:,} tokens", "TTFT, ms"]
    found = table(header, [[what, number(times["median"])] for what, times in rows])
    return f"{found}\n{rest}"


def _named(results: Results, beginning: str) -> Result | None:
    return next((result for result in results.all if result.name.startswith(beginning)), None)


def _name(mode: str) -> str:
    return f"{_MODES[mode]} (`{mode}`)" if mode in _MODES else f"`{mode}`"


def _one_prompt(results: Results) -> str:
    run = _named(results, "connectors-")
    if run is None:
        return ""
    rows = []
    for mode, found in run.data["derived"]["groups"][0]["modes"].items():
        if mode in _MODES:
            times = (median(found.get(kind)) for kind in ("cold", "device_hit", "tier_hit"))
            rows.append([_name(mode), *times, median(found.get("tier_batch"), 0)])
    header = ["", "cold", "hit on the GPU", "hit in host memory"]
    header.append(f"{run.data['batch']} prompts at once from host memory")
    text = _ONE_PROMPT.format(
        tokens=run.data["prompt_tokens"], megabytes=run.data["prompt_bytes"] / 1e6
    )
    images = [image(plot.name, plot.title) for plot in connectors.plots_of(run)[:1]]
    return "\n".join([text, table(header, rows), measured_on(run), *images])


def _daemon_hits(results: Results) -> str:
    kinds = ("cold", "device_hit", "cpu_hit", "daemon_hit")
    rows, runs = [], []
    for result in results.of("daemon_hits"):
        for way, found in result.data["ways"].items():
            if "failed" not in found:
                rows.append([way, *(_range(found[f"{kind}_ms"]) for kind in kinds)])
        runs.append(measured_on(result))
    if not rows:
        return ""
    header = ["", "cold", "hit on the GPU", "hit in the CPU tier", "hit in the daemon"]
    return "\n".join([_DAEMON, table(header, rows), *runs])


def _range(times: dict[str, float]) -> str:
    return f"{number(times['median'])} ({number(times['min'])} … {number(times['max'])})"


def _chats(results: Results, intro: str, workloads: tuple[str, ...]) -> str:
    parts = [_chat_run(_named(results, f"chats_{name}-")) for name in workloads]
    found = [part for part in parts if part]
    return "\n".join([intro, *found]) if found else ""


def _chat_run(result: Result | None) -> str:
    if result is None:
        return ""
    parts = []
    for name, modes in result.data["derived"]["workloads"].items():
        rows = [
            [
                _name(mode),
                number(found["share"], 3),
                *(number(found["ttft_ms"][point], 0) for point in ("p50", "p90", "p99")),
                number(found["done_s"]),
            ]
            for mode, found in modes.items()
        ]
        parts += [
            chats.load_text(result.data["workloads"][name], result.data),
            table(["", "from cache", "TTFT p50, ms", "p90", "p99", "all done, s"], rows),
        ]
    images = [image(plot.name, plot.title) for plot in chats.plots_of(result)]
    return "\n".join([*parts, _with_memory(result), *images])


def _with_memory(result: Result) -> str:
    data = result.data
    memory = (
        f"Each has {data['cpu_gib']:g} GiB of host memory, as CPU tier or in the daemon; "
        f"{data['daemon_cpu_gib']:g} GiB are the engine's beside a daemon.\n"
    )
    return "\n".join([memory, measured_on(result), *chats.without_result(result)])


def _restart(results: Results) -> str:
    run = _named(results, "chats_restart-")
    if run is None:
        return ""
    parts = [_RESTART]
    for name, modes in run.data["derived"]["workloads"].items():
        load = chats.load_text(run.data["workloads"][name], run.data)
        parts += [load, chats.restart_table(modes)]
    return "\n".join([*parts, _with_memory(run)])


def _storing(results: Results) -> str:
    runs = [_named(results, f"{name}-") for name in ("chats_prefill", "chats_prefill_tcp")]
    found = [_storing_run(run) for run in runs if run is not None]
    return "\n".join([_STORING, *found]) if found else ""


def _storing_run(run: Result) -> str:
    parts = []
    for modes in run.data["derived"]["workloads"].values():
        rows = [
            [
                _name(mode),
                number(found["tokens_per_s"], 0),
                chats.stored_blocks(found),
                chats.gib(found["gpu_mib"]),
                chats.gib(found["pss_mib"]),
            ]
            for mode, found in modes.items()
        ]
        header = ["", "prompt tokens/s", "blocks stored", "GPU memory, GiB", "host memory, GiB"]
        parts.append(table(header, rows))
    return "\n".join([*parts, measured_on(run), *chats.without_result(run)])


def _ssd(results: Results) -> str:
    run = _named(results, "ssd_tier-h200") or _named(results, "ssd_tier-")
    if run is None:
        return ""
    rows = [
        [
            name,
            f"{case['block_bytes'] / 1024:,.0f} KiB",
            *(number(case.get(f"{action}_gb_per_s"), 2) for action in ("write", "read")),
        ]
        for name, case in run.data["speed"].items()
    ]
    parts = [_SSD, table(["blocks of", "each", "written", "read"], rows)]
    recovery: dict[str, Any] | None = run.data.get("recovery")
    if recovery:
        parts.append(
            f"After a restart the daemon serves {recovery['blocks']:,} blocks from the disk again "
            f"after {recovery['seconds_to_serving']:.1f} s.\n"
        )
    return "\n".join([*parts, measured_on(run)])


def _slow_tier(results: Results) -> str:
    run = _named(results, "load_or_compute-")
    if run is None:
        return ""
    derived = run.data["derived"]
    rows = [
        [_name(mode), median(derived["ms"][mode]), number(ratio, 3)]
        for mode, ratio in derived["ratio_to_vllm"].items()
    ]
    header = ["", "time to first token", "of vLLM alone"]
    text = _SLOW.format(tokens=run.data["prompt_tokens"])
    return "\n".join([text, table(header, rows), measured_on(run)])


def _start(results: Results) -> str:
    run = _named(results, "pinning_starts-")
    if run is None:
        return ""
    starts = run.data["derived"]
    rows = [
        [
            number(run.data["gib"], 0),
            median(starts["without"], 2),
            median(starts["with"], 2),
            number(starts["later_by_s"], 2),
        ]
    ]
    header = ["CPU tier, GiB", "start without it, s", "start with it, s", "later by, s"]
    return "\n".join([_START, table(header, rows), measured_on(run)])
