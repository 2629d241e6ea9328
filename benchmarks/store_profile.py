"""Where the time of a store goes that gathers and then drains (P1 outwards, layer-outermost).

    python -m benchmarks.store_profile --out result.json

One batch of random blocks, to random pinned slots. Every way is measured twice: as the connector
enqueues it (`as_called`, in which a device without work waits for the host), and behind a pause of
the device in which the host has enqueued everything (`device`). The difference is the host's.

- `memcpy`: one large copy, the limit. `drain`: the same bytes, gathered before, as blocks to their
  slots over one, two, four or eight streams. `gather`: into device memory alone.
- `parts ...`: gather and drain, where the drain of a part begins behind its gather; named by the
  shares of the parts. `joined` as the connector did it: each part's streams wait for all of the
  part before. `free`: a stream waits for the gather of its part alone. `by N`: all but the first
  part are gathered by so many CTAs instead of two for every multiprocessor.

`drain_after` is the time of the drain alone over four streams, behind a pause, by what the device
did just before: nothing, one block gathered, all of them, all to other memory than is drained, or
all and then a pause.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.block_copy import SHAPES, Bench

REPEATS = 25
PAUSE_CYCLES = 8_000_000  # some milliseconds: longer than the host needs to enqueue a batch
CTAS = (132, 96, 64, 32)
CASES = ("Qwen2.5-3B/16", "Qwen2.5-7B/16", "Llama-3.1-8B/16")
SPLITS = {
    "1": (1.0,),
    "1/8": (1 / 8, 7 / 8),
    "1/32": (1 / 32, 31 / 32),
    "1/32 1/8": (1 / 32, 1 / 8, 27 / 32),
}


class Drain:
    """Copies of whole blocks to their slots over several streams."""

    def __init__(self, bench: Bench, lanes: int) -> None:
        self._bench = bench
        self._streams = [bench.stream] + [bench.cuda.Stream(0) for _ in range(lanes - 1)]
        self._begin = bench.cuda.Event(0)
        self._ends = [bench.cuda.Event(0) for _ in self._streams[1:]]

    def begin(self) -> None:
        """Every stream waits for what the first one has been given so far."""
        self._begin.record(self._streams[0].handle)
        for stream in self._streams[1:]:
            stream.wait(self._begin)

    def wait(self, event: Any) -> None:
        for stream in self._streams:
            stream.wait(event)

    def copy(self, part: slice) -> None:
        """A part, shared by the streams."""
        bench = self._bench
        start, stop, _ = part.indices(bench.count)
        bounds = np.linspace(start, stop, len(self._streams) + 1).astype(int).tolist()
        for stream, (low, high) in zip(self._streams, itertools.pairwise(bounds), strict=True):
            if high > low:
                bench.cuda.copy_to_host(
                    bench.ring.data_ptr(),
                    bench.dense[low:high],
                    bench.arena.region.address,
                    bench.slots[low:high],
                    bench.block,
                    stream.handle,
                    device=0,
                    host_piece_bytes=bench.arena.region.piece_bytes,
                )

    def join(self) -> None:
        """The first stream waits for all others."""
        for stream, end in zip(self._streams[1:], self._ends, strict=True):
            end.record(stream.handle)
            self._streams[0].wait(end)


class Ways:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._drains = {lanes: Drain(bench, lanes) for lanes in (1, 2, 4, 8)}
        self._gathered = [bench.cuda.Event(0) for _ in range(4)]

    def all(self) -> dict[str, Callable[[], None]]:
        ways: dict[str, Callable[[], None]] = {
            "memcpy": self._bench.outbound()["memcpy"],
            "connector": self._bench.outbound()["layers staged"],
            "gather": lambda: self._gather(slice(None), self._bench.stream.handle),
        }
        for lanes in self._drains:
            ways[f"drain over {lanes}"] = self._drain(lanes)
        for name, shares in SPLITS.items():
            for joined in (True, False):
                how = "joined" if joined else "free"
                for lanes in (1, 4) if len(shares) == 1 else (4,):
                    ways[f"parts {name}, {how}, over {lanes}"] = self._parts(shares, lanes, joined)
        for ctas in CTAS:
            ways[f"gather by {ctas}"] = self._gather_by(ctas)
            for name in ("1/8", "1/32"):
                ways[f"parts {name}, joined, over 4, by {ctas}"] = self._parts(
                    SPLITS[name], 4, True, ctas
                )
        return ways

    def _gather_by(self, ctas: int) -> Callable[[], None]:
        return lambda: self._gather(slice(None), self._bench.stream.handle, ctas)

    def _drain(self, lanes: int) -> Callable[[], None]:
        drain = self._drains[lanes]

        def run() -> None:
            drain.begin()
            drain.copy(slice(None))
            drain.join()

        return run

    def _parts(
        self, shares: Sequence[float], lanes: int, joined: bool, ctas: int = 0
    ) -> Callable[[], None]:
        bench, drain = self._bench, self._drains[lanes]
        bounds = [0, *(int(bench.count * end) for end in itertools.accumulate(shares))]
        bounds[-1] = bench.count
        parts = [slice(low, high) for low, high in itertools.pairwise(bounds)]

        def run() -> None:
            bench.began.record(bench.stream.handle)
            bench.compute.wait(bench.began)
            for part, gathered in zip(parts, self._gathered, strict=False):
                self._gather(part, bench.compute.handle, ctas if part.start else 0)
                gathered.record(bench.compute.handle)
                if joined:
                    bench.stream.wait(gathered)
                    drain.begin()
                else:
                    drain.wait(gathered)
                drain.copy(part)
                if joined:
                    drain.join()
            drain.join()

        return run

    def drains(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """What happens before, and the drain."""
        bench = self._bench
        elsewhere = bench.torch.empty_like(bench.ring)
        compute = bench.torch.cuda.ExternalStream(bench.compute.handle)

        def before(part: slice, target: Any = None, pause: bool = False) -> Callable[[], None]:
            def run() -> None:
                bench.began.record(bench.stream.handle)
                bench.compute.wait(bench.began)
                self._gather(part, bench.compute.handle, target=target)
                if pause:
                    with bench.torch.cuda.stream(compute):
                        bench.torch.cuda._sleep(PAUSE_CYCLES)
                bench.gathered.record(bench.compute.handle)
                bench.stream.wait(bench.gathered)

            return run

        everything = slice(None)
        befores = {
            "nothing": lambda: None,
            "one block": before(slice(1)),
            "all": before(everything),
            "all elsewhere": before(everything, target=elsewhere),
            "all, then a pause": before(everything, pause=True),
        }
        return {name: (run, self._drain(4)) for name, run in befores.items()}

    def _gather(self, part: slice, handle: int, ctas: int = 0, target: Any = None) -> None:
        bench = self._bench
        bench.cuda.gather(
            bench.layouts["layers"],
            bench.ids[part],
            (bench.ring if target is None else target).data_ptr(),
            bench.total,
            bench.dense[part],
            handle,
            ctas=ctas,
        )


def measure(bench: Bench, ways: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Milliseconds of each way, called and behind a pause; they take turns."""
    torch = bench.torch
    stream = torch.cuda.ExternalStream(bench.stream.handle)
    taken: dict[str, dict[str, list[float]]] = {
        name: {"as_called": [], "device": []} for name in ways
    }
    for _ in range(REPEATS + 2):  # the first ones are not counted
        for name, work in ways.items():
            for how, times in taken[name].items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                if how == "device":
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(PAUSE_CYCLES)
                begin.record(stream)
                work()
                late = how == "device" and begin.query()
                end.record(stream)
                end.synchronize()
                if not late:  # as a first call may be
                    times.append(begin.elapsed_time(end))
    return {
        name: {how: _summary(times[-REPEATS:], bench.total) for how, times in hows.items()}
        for name, hows in taken.items()
    }


def measure_drains(
    bench: Bench, drains: dict[str, tuple[Callable[[], None], Callable[[], None]]]
) -> dict[str, Any]:
    """Milliseconds of a drain by what came before it; they take turns."""
    torch = bench.torch
    stream = torch.cuda.ExternalStream(bench.stream.handle)
    taken: dict[str, list[float]] = {name: [] for name in drains}
    for _ in range(REPEATS + 2):
        for name, (before, drain) in drains.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(PAUSE_CYCLES)
            before()
            begin.record(stream)
            drain()
            end.record(stream)
            end.synchronize()
            taken[name].append(begin.elapsed_time(end))
    return {name: _summary(times[2:], bench.total) for name, times in taken.items()}


def _summary(times: Sequence[float], nbytes: int) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "ms": round(median, 4),
        "q1": round(low, 4),
        "q3": round(high, 4),
        "n": len(times),
        "gb_per_s": round(nbytes / median / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--cases", default=",".join(CASES), help="shape/block size, by commas")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "environment": environment.describe(),
        "unit": "ms",
        "cases": {},
    }
    for case in args.cases.split(","):
        shape, _, block_size = case.partition("/")
        bench = Bench(*SHAPES[shape], int(block_size))
        ways = Ways(bench)
        drains = measure_drains(bench, ways.drains())
        found = measure(bench, ways.all())
        bench.close()
        report["cases"][case] = {
            "block_bytes": bench.block,
            "blocks": bench.count,
            "ways": found,
            "drain_after": drains,
        }
        print(case, "drain after", {name: told["ms"] for name, told in drains.items()}, flush=True)
        limit = {how: found["memcpy"][how]["ms"] for how in ("as_called", "device")}
        for name, hows in found.items():
            told = ", ".join(f"{how} {limit[how] / t['ms']:.3f}" for how, t in hows.items())
            print(f"{case} {name}: of memcpy {told}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
