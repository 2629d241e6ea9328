"""Our connector beside its peers: one run, the same prompts, engines that take turns.

    python -m benchmarks.peers --out result.json               7B shape on a GPU
    python -m benchmarks.peers --tiny --out result.json        the same code on a laptop

Modes: `vllm` (alone), `nothing` (a connector that does nothing), `hash_only`, `tiered` (ours as it
comes), `tiered_layerwise` (ours on vLLM's own layout), `offloading`, `offloading_blhnc` and
`offloading_fs` (vLLM's OffloadingConnector as it comes, with blocks outermost, with a disk),
`simple` (vLLM's SimpleCPUOffloadConnector). What does not run on this machine is left out. More
modes than fit on the device run in groups, each with `vllm` and `tiered`; compare within a group
only. Progress goes to the standard error, the table to the standard output, plots beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment, peer_modes, pinned_copy, plots
from benchmarks.fleet import Fleet, device_memory_mib, how_many_fit, say
from benchmarks.peer_goals import derive
from benchmarks.peer_modes import GIB, MODES, Scale
from benchmarks.peer_rounds import Rounds
from benchmarks.samples import COLUMNS, Samples
from benchmarks.sections import peers as peers_section
from benchmarks.stored_results import Result
from tests.models import QWEN2_7B

_HITS_SHARE = 0.45
"""Of a group's time for single prompts; batches get the rest."""


def scale_of(args: argparse.Namespace) -> Scale:
    if args.tiny:
        return Scale({}, args.prompts or 900, args.batch, 64 << 20, 64 << 20)
    tokens = args.prompts or 10_240
    room = Scale(QWEN2_7B, tokens, args.batch, 0, 0).prompt_bytes * args.batch
    device = max(5 * GIB, room * 9 // 8)
    return Scale(QWEN2_7B, tokens, args.batch, int(args.tier_gib * GIB), device)


class Report:
    """The result, written again after every round: a run cut short still leaves a file."""

    def __init__(self, out: Path | None, content: dict[str, Any], fleet: Fleet) -> None:
        self.content = content
        self.samples = Samples()
        self._out = out
        self._fleet = fleet

    def save(self) -> None:
        limit = self.content["pinned_copy"]
        self.content["engines"] = self._fleet.described
        self.content["derived"] = derive(self.samples, limit and limit["to_device_ms"])
        self.content["samples"] = {"columns": COLUMNS, "rows": self.samples.rows()}
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(self._text())

    def _text(self) -> str:
        """Readable, with one sample a line."""
        marker = "@samples@"
        content = {**self.content, "samples": {**self.content["samples"], "rows": marker}}
        rows = ",\n".join("   " + json.dumps(row) for row in self.samples.rows())
        text = json.dumps(content, indent=1)
        return text.replace(f'"{marker}"', f"[\n{rows}\n  ]") + "\n"


def run(args: argparse.Namespace, folder: Path) -> Report:
    start = time.monotonic()
    gpu = device_memory_mib() is not None and not args.tiny
    asked = [mode for mode in args.modes.split(",") if mode]
    unknown = sorted(set(asked) - set(MODES))
    if unknown:
        raise SystemExit(f"no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    scale = scale_of(args)
    modes = peer_modes.available(asked, gpu)
    if not modes:
        raise SystemExit(f"none of {args.modes} runs on this machine")
    fleet = Fleet(lambda mode: peer_modes.spec(mode, scale, folder), folder)
    content: dict[str, Any] = {
        "environment": environment.describe(),
        "left_out": [mode for mode in asked if mode not in modes],
        "prompt_tokens": scale.prompt_tokens,
        "prompt_bytes": scale.prompt_bytes,
        "batch": scale.batch,
        "specs": {mode: asdict(peer_modes.spec(mode, scale, Path("FOLDER"))) for mode in modes},
        "pinned_copy": pinned_copy.measure(scale.prompt_bytes) if gpu else None,
        "rounds": [],
    }
    report = Report(args.out, content, fleet)

    def elapsed() -> float:
        return time.monotonic() - start

    with fleet:
        say(f"{elapsed():.0f} s: starting {modes[0]}, which fills the compile cache")
        fleet.start(modes[:1])
        most = how_many_fit(args.engines) if gpu else args.engines
        parts = peer_modes.groups(modes, most)
        for number, group in enumerate(parts):
            begin = time.monotonic()
            left = args.budget - elapsed()
            if number and left < args.budget / 10:
                say(f"{elapsed():.0f} s: no time for {', '.join(group)}")
                content["rounds"].append({"modes": group, "skipped": "no time left"})
                continue
            share = left / (len(parts) - number)
            say(f"{elapsed():.0f} s: starting {', '.join(group)}")
            fleet.start(group)
            rounds = Rounds(fleet, scale, report.samples, number, report.save)
            rounds.warm_up()
            say(f"{elapsed():.0f} s: warm: {', '.join(fleet.running)}")
            end = begin + share
            middle = time.monotonic() + (end - time.monotonic()) * _HITS_SHARE
            done = {"modes": group, "hits": rounds.hits(args.repetitions, middle)}
            done["hook_ms"] = rounds.hooks()
            done["batches"] = rounds.batches(args.batch_rounds, end)
            content["rounds"].append(done)
            report.save()
        say(f"{elapsed():.0f} s: done")
    content["seconds"] = round(elapsed(), 1)
    report.save()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without GPU")
    parser.add_argument("--modes", default=",".join(MODES), help="which, comma-separated")
    parser.add_argument("--prompts", type=int, default=0, help="tokens of a prompt")
    parser.add_argument("--repetitions", type=int, default=16, help="rounds of single prompts")
    parser.add_argument("--batch", type=int, default=8, help="prompts asked at once")
    parser.add_argument("--batch-rounds", type=int, default=8, help="rounds of batches")
    parser.add_argument("--tier-gib", type=float, default=12.0, help="host memory of each engine")
    parser.add_argument("--engines", type=int, default=6, help="at the same time, at most")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        report = run(args, Path(folder))
    result = Result(args.out.stem if args.out else "peers", report.content)
    print(peers_section.describe(result))
    if args.out:
        draw_beside(args.out, result)


def draw_beside(out: Path, result: Result) -> None:
    """The plots of a run, into the folder of its JSON."""
    for plot in peers_section.plots_of(result):
        try:
            plots.draw(plot, out.parent)
        except ImportError:
            say("no plots: install matplotlib (requirements/benchmark.txt)")
            return
        say(f"plot: {out.parent / plot.file_name}")


if __name__ == "__main__":
    main()
