"""Our connector beside vLLM's own on single prompts and batches, engines taking turns.

    python -m benchmarks.connectors --out result.json               7B shape on a GPU
    python -m benchmarks.connectors --tiny --out result.json        the same code on a laptop

Modes: `vllm` (alone), `nothing` (a connector that does nothing), `hash_only`, `tiered` (ours as it
comes), `tiered_layerwise` (ours on vLLM's own layout), `tiered_no_early_loads` (ours, loads begin
with their step), `offloading`, `offloading_blhnc` and `offloading_fs` (vLLM's OffloadingConnector
as it comes, with blocks outermost, with a disk), `simple` (vLLM's SimpleCPUOffloadConnector). What
does not run on this machine is left out. More modes than fit on the device run in groups, each with
`vllm` and `tiered`; compare within a group only. Progress goes to the standard error, the table to
the standard output, plots beside the JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.connector_summary import COLUMNS, Sample, Samples, derive
from benchmarks.engine_configs import (
    CONNECTOR_MODES,
    GIB,
    WITHOUT_TIER,
    Scale,
    available,
    connector_spec,
    groups,
)
from benchmarks.engine_process import (
    Asked,
    EngineGroup,
    EngineProcess,
    device_memory_mib,
    how_many_fit,
    say,
)
from benchmarks.result_files import Result, describe_environment, save
from benchmarks.sections import connectors as connectors_section
from tests.models import QWEN2_7B

_PINNED_COPIES = 20


def measure_pinned_copy(nbytes: int) -> dict[str, float] | None:
    """The limit of any load: one large copy by torch between device and pinned memory.

    Returns the median GB/s in both directions and the milliseconds that `nbytes` take, or None
    without a GPU. Runs in its own process, so that it leaves nothing on the device.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(_pinned_copy, nbytes).result()


def _pinned_copy(nbytes: int) -> dict[str, float] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def milliseconds(target: torch.Tensor, source: torch.Tensor) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    milliseconds(device, host)
    loads = [milliseconds(device, host) for _ in range(_PINNED_COPIES)]
    stores = [milliseconds(host, device) for _ in range(_PINNED_COPIES)]
    load, store = statistics.median(loads), statistics.median(stores)
    return {
        "bytes": nbytes,
        "to_device_ms": round(load, 3),
        "to_device_gbs": round(nbytes / load / 1e6, 2),
        "to_host_gbs": round(nbytes / store / 1e6, 2),
    }


TURNS = 2
"""How often a prompt is found on the device and in the tier in one round."""
_DEVICE_TURNS = 4
"""How often after that on the device alone: its time varies more than what is compared."""
_HOOKS_OF = 32
_WARM_TIMEOUT_S = 30.0
_FS_DELAY = 4
"""Prompts after which an earlier one is only in the fs tier: the CPU tier holds three."""

Prompt = list[int]


class Rounds:
    """Adds samples of one group of engines; an engine that fails is left out from then on."""

    def __init__(
        self,
        engines: EngineGroup,
        scale: Scale,
        samples: Samples,
        group: int,
        save: Callable[[], None],
    ) -> None:
        self._engines = engines
        self._scale = scale
        self._samples = samples
        self._group = group
        self._save = save
        self._random = random.Random(group)
        self._answers: dict[tuple[str, int], list[list[int]]] = {}

    def warm_up(self) -> None:
        """First steps, and a tier that answers: an arena may still be being pinned."""
        batch = self._prompts(self._scale.batch)
        for mode, engine in self._each(0):
            with self._engines.drop_failed():
                engine.ask(batch)
                engine.ask(batch[:1])
                deadline = time.monotonic() + _WARM_TIMEOUT_S
                while mode not in WITHOUT_TIER and time.monotonic() < deadline:
                    prompt = self._prompts(1)
                    engine.ask(prompt)
                    engine.forget_device()
                    if self._hits(engine.ask(prompt)):
                        break
                engine.forget_device()

    def hits(self, rounds: int, deadline: float) -> int:
        """Single prompts: cold, on the device, in the tier. Returns how many rounds there were."""
        asked: list[Prompt] = []
        for number in range(rounds):
            if time.monotonic() > deadline:
                return number
            asked += self._prompts(1)
            for mode, engine in self._each(number):
                with self._engines.drop_failed():
                    found = engine.ask(asked[-1:])
                    self._note(number, 0, mode, "cold", found)
                    engine.settle()
            for turn in range(TURNS):
                for mode, engine in self._each(number + turn):
                    with self._engines.drop_failed():
                        self._hit_turn(number, turn, mode, engine, asked)
            for turn in range(TURNS, TURNS + _DEVICE_TURNS):
                for mode, engine in self._each(number + turn):
                    with self._engines.drop_failed():
                        found = self._device_hit(engine, asked[-1])
                        self._note(number, turn, mode, "device_hit", found)
            for _, engine in self._each(number):
                with self._engines.drop_failed():
                    engine.forget_device()
            self._save()
            say(f"  hits {number + 1}/{rounds}")
        return rounds

    def _hit_turn(
        self, number: int, turn: int, mode: str, engine: EngineProcess, asked: Sequence[Prompt]
    ) -> None:
        found = self._device_hit(engine, asked[-1])
        self._note(number, turn, mode, "device_hit", found)
        self._answers[mode, len(asked) - 1] = found.tokens
        if mode in WITHOUT_TIER:
            return
        which = len(asked) - 1
        if mode == "offloading_fs":
            which -= _FS_DELAY * (turn + 1)
            if which < 0:
                return
        before = engine.loaded()
        engine.forget_device()
        found = engine.ask(asked[which : which + 1])
        engine.settle()  # a load is counted when its end was reported, which may be a step later
        real = not before or engine.loaded() != before
        answer = self._answers[mode, which]
        self._note(number, turn, mode, "tier_hit", found, answer, real)

    @staticmethod
    def _device_hit(engine: EngineProcess, prompt: Prompt) -> Asked:
        engine.ask([prompt])  # unmeasured: the device has just worked for another process
        engine.settle()  # as an engine that serves does between two requests
        return engine.ask([prompt])

    def hooks(self) -> dict[str, dict[str, float]]:
        """By mode: what each hook of its connector takes of a device hit, in milliseconds."""
        (prompt,) = self._prompts(1)
        found: dict[str, dict[str, float]] = {}
        for mode, engine in self._each(0):
            with self._engines.drop_failed():
                engine.ask([prompt])
                engine.settle()
                engine.ask([prompt])
                found[mode] = engine.time_hooks(prompt, _HOOKS_OF)
                engine.forget_device()
        return found

    def batches(self, rounds: int, deadline: float) -> int:
        """Batches of fresh prompts, then the same from the tier."""
        for number in range(rounds):
            if time.monotonic() > deadline:
                return number
            batch = self._prompts(self._scale.batch)
            cold: dict[str, Asked] = {}
            for mode, engine in self._each(number):
                with self._engines.drop_failed():
                    engine.forget_device()
                    cold[mode] = engine.ask(batch)
                    self._note(number, 0, mode, "cold_batch", cold[mode])
                    engine.settle()
            for turn in range(TURNS):
                for mode, engine in self._each(number + turn):
                    if mode in WITHOUT_TIER:
                        continue
                    with self._engines.drop_failed():
                        engine.forget_device()
                        found = engine.ask(batch)
                        self._note(number, turn, mode, "tier_batch", found, cold[mode].tokens)
            self._save()
            say(f"  batches {number + 1}/{rounds}")
        return rounds

    def _each(self, rotation: int) -> Iterator[tuple[str, EngineProcess]]:
        modes = list(self._engines.running)
        at = rotation % len(modes) if modes else 0
        for mode in modes[at:] + modes[:at]:
            if mode in self._engines.running:
                yield mode, self._engines.running[mode]

    def _prompts(self, count: int) -> list[Prompt]:
        vocabulary = self._scale.model.get("vocab_size", 1024)
        length = self._scale.prompt_tokens
        return [
            [self._random.randrange(500, vocabulary - 24) for _ in range(length)]
            for _ in range(count)
        ]

    def _hits(self, asked: Asked) -> int:
        """Requests of which at most a tenth was computed."""
        return sum(cached >= 0.9 * self._scale.prompt_tokens for cached in asked.cached)

    def _note(
        self,
        number: int,
        turn: int,
        mode: str,
        kind: str,
        asked: Asked,
        expected: list[list[int]] | None = None,
        real: bool = True,
    ) -> None:
        equal = None
        if expected is not None:
            equal = sum(a == b for a, b in zip(asked.tokens, expected, strict=True))
        self._samples.add(
            Sample(
                self._group,
                number,
                turn,
                mode,
                kind,
                round(asked.seconds * 1e3, 3),
                len(asked.tokens),
                self._hits(asked) if real else 0,
                equal,
            )
        )


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

    def __init__(
        self,
        out: Path | None,
        content: dict[str, Any],
        specs: dict[str, Any],
        engines: EngineGroup,
    ) -> None:
        self._specs = specs
        self.content = content
        self.samples = Samples()
        self._out = out
        self._engines = engines

    def save(self) -> None:
        limit = self.content["pinned_copy"]
        described = self._engines.described
        self.content["failed"] = {m: e["failed"] for m, e in described.items() if "failed" in e}
        self.content["derived"] = derive(self.samples, limit and limit["to_device_ms"])
        raw = {
            "specs": self._specs,
            "engines": described,
            "samples": {"columns": COLUMNS, "rows": self.samples.rows()},
        }
        save(self._out, self.content, raw)


def run(args: argparse.Namespace, folder: Path) -> Report:
    start = time.monotonic()
    gpu = device_memory_mib() is not None and not args.tiny
    asked = [mode for mode in args.modes.split(",") if mode]
    unknown = sorted(set(asked) - set(CONNECTOR_MODES))
    if unknown:
        raise SystemExit(f"no mode {', '.join(unknown)}; there are {', '.join(CONNECTOR_MODES)}")
    scale = scale_of(args)
    modes = available(asked, gpu)
    if not modes:
        raise SystemExit(f"none of {args.modes} runs on this machine")
    engines = EngineGroup(lambda mode: connector_spec(mode, scale, folder), folder)
    content: dict[str, Any] = {
        "environment": describe_environment(),
        "not_run": [mode for mode in asked if mode not in modes],
        "prompt_tokens": scale.prompt_tokens,
        "prompt_bytes": scale.prompt_bytes,
        "batch": scale.batch,
        "pinned_copy": measure_pinned_copy(scale.prompt_bytes) if gpu else None,
        "rounds": [],
    }
    specs = {mode: asdict(connector_spec(mode, scale, Path("FOLDER"))) for mode in modes}
    report = Report(args.out, content, specs, engines)

    def elapsed() -> float:
        return time.monotonic() - start

    with engines:
        say(f"{elapsed():.0f} s: starting {modes[0]}, which fills the compile cache")
        engines.start(modes[:1])
        most = how_many_fit(args.engines) if gpu else args.engines
        parts = groups(modes, most)
        for number, group in enumerate(parts):
            begin = time.monotonic()
            left = args.budget - elapsed()
            if number and left < args.budget / 10:
                say(f"{elapsed():.0f} s: no time for {', '.join(group)}")
                content["rounds"].append({"modes": group, "skipped": "no time left"})
                continue
            share = left / (len(parts) - number)
            say(f"{elapsed():.0f} s: starting {', '.join(group)}")
            engines.start(group)
            rounds = Rounds(engines, scale, report.samples, number, report.save)
            rounds.warm_up()
            say(f"{elapsed():.0f} s: warm: {', '.join(engines.running)}")
            end = begin + share
            middle = time.monotonic() + (end - time.monotonic()) * _HITS_SHARE
            done = {"modes": group, "hits": rounds.hits(args.repetitions, middle)}
            done["hook_ms"] = {
                mode: round(sum(h.values()), 4) for mode, h in rounds.hooks().items()
            }
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
    parser.add_argument("--modes", default=",".join(CONNECTOR_MODES), help="which, comma-separated")
    parser.add_argument("--prompts", type=int, default=0, help="tokens of a prompt")
    parser.add_argument("--repetitions", type=int, default=16, help="rounds of single prompts")
    parser.add_argument("--batch", type=int, default=8, help="prompts asked at once")
    parser.add_argument("--batch-rounds", type=int, default=8, help="rounds of batches")
    parser.add_argument("--tier-gib", type=float, default=12.0, help="host memory of each engine")
    parser.add_argument("--engines", type=int, default=6, help="at the same time, at most")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="connectors-") as folder:
        report = run(args, Path(folder))
    result = Result(args.out.stem if args.out else "connectors", report.content)
    print(connectors_section.describe(result))
    if args.out:
        draw_beside(args.out, result)


def draw_beside(out: Path, result: Result) -> None:
    """The plots of a run, into the folder of its JSON."""
    for plot in connectors_section.plots_of(result):
        try:
            plots.draw(plot, out.parent)
        except ImportError:
            say("no plots: install matplotlib (requirements/benchmark.txt)")
            return
        say(f"plot: {out.parent / plot.file_name}")


if __name__ == "__main__":
    main()
