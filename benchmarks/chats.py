"""Many chats at once, as users run them: shares from cache and times to the first token.

    python -m benchmarks.chats --out result.json               7B shape on a GPU
    python -m benchmarks.chats --tiny --out result.json        the same code on a laptop

Workloads: `calm` and `tight` (closed-loop chats, a GPU cache with and without room to spare),
`agents` (a shared system prompt, private histories, tool pauses), `prefill` (distinct prompts
without pause) and `trace` (recorded traffic, `--trace FILE`). `--kill-after-turn K` adds `restart`:
the calm chats, whose engine is killed and started again.

Modes: `tiered` (ours as it comes), `tiered_daemon` (ours with a small CPU tier and a daemon on the
same host), `tiered_daemon_tcp` (the same over the loopback), `offloading` and `offloading_blhnc`
(vLLM's OffloadingConnector as it comes, with blocks outermost), `simple` (vLLM's
SimpleCPUOffloadConnector), `vllm` (alone), `limit` (alone, with a GPU cache that holds everything)
and `limit_seqs` (like `limit`, with as many requests at once as fit into the GPU cache of the
others). Each mode on each workload is a fresh engine in processes of its own; one plays after the
other, and all get the same arrival plan. `--together N` starts N engines at once, which saves time,
but then nothing is said of the memory of each. Progress goes to the standard error, the tables to
the standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import engine_configs
from benchmarks.chat_client import COLUMNS
from benchmarks.chat_engine import PLAY, Job, ready_path
from benchmarks.chat_summary import derive, without_turns
from benchmarks.chat_workloads import PRESETS, TINY, Workload, distinct_tokens, plan
from benchmarks.engine_configs import CHAT_MODES
from benchmarks.engine_process import ROOT, EngineSpec, device_memory_mib, say
from benchmarks.process_memory import MemoryWatch
from benchmarks.result_files import Result, describe_environment, raw_path, save
from benchmarks.sections import chats as chats_section
from tests.daemon.daemon_process import DaemonProcess

_ENDED = "the run ended before"
_OUT_OF_TIME = "the run's time ended"
"""Why a case that was to run did not."""
_MIN_S = 30.0
"""An engine is not started with less time left."""
_RELEASE_TIMEOUT_S = 30.0
_LOG_LINES = 40


class Case(NamedTuple):
    round: int
    workload: str
    mode: str

    @property
    def name(self) -> str:
        """As in `not_run`."""
        name = f"{self.mode} on {self.workload}"
        return f"{name} in round {self.round + 1}" if self.round else name


def workloads_of(args: argparse.Namespace) -> dict[str, Workload]:
    names = [name for name in args.workloads.split(",") if name]
    unknown = sorted(set(names) - set(PRESETS))
    if unknown:
        raise SystemExit(f"no workload {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    if "trace" in names and args.trace is None:
        raise SystemExit("the workload `trace` needs --trace FILE")
    found = {name: _sized(PRESETS[name], args) for name in names}
    if args.kill_after_turn:
        calm = _sized(PRESETS["calm"], args)
        if not args.kill_after_turn < calm.turns:
            raise SystemExit(f"--kill-after-turn must be less than the {calm.turns} turns")
        found["restart"] = dataclasses.replace(
            calm, name="restart", kill_after_turn=args.kill_after_turn
        )
    for workload in found.values():
        longest = engine_configs.max_model_len(args.tiny)
        if workload.kind != "trace" and workload.longest_tokens > longest:
            raise SystemExit(
                f"{workload.name}: prompts grow to {workload.longest_tokens} tokens, the model "
                f"takes {longest}"
            )
    return found


def _sized(workload: Workload, args: argparse.Namespace) -> Workload:
    """The preset with what the arguments change."""
    if args.tiny:
        workload = dataclasses.replace(workload, **TINY[workload.name])
    given = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(Workload)
        if getattr(args, field.name, None) is not None and field.name != "kill_after_turn"
    }
    if workload.kind != "prefill":
        given.pop("seconds", None)
    if workload.pause_range_s is not None:
        low, high = workload.pause_range_s
        given["pause_range_s"] = (low * args.pause_scale, high * args.pause_scale)
    return dataclasses.replace(workload, **given)


def cases_of(workloads: Sequence[str], modes: Sequence[str], rounds: int) -> Iterator[Case]:
    """The first mode of a round is the second of the next."""
    for number in range(rounds):
        at = -number % len(modes)
        for workload in workloads:
            for mode in (*modes[at:], *modes[:at]):
                yield Case(number, workload, mode)


class Report:
    """The result and its turns, written again after every case: a run cut short leaves files."""

    def __init__(self, out: Path | None, content: dict[str, Any]) -> None:
        self.content = content
        self._out = out

    @classmethod
    def open(cls, args: argparse.Namespace, workloads: dict[str, Workload]) -> Report:
        """A new one, or with `--resume` that of an earlier run."""
        content: dict[str, Any] = {
            "environment": _environment(args),
            "tiny": args.tiny,
            "seed": args.seed,
            "cpu_gib": args.cpu_gib,
            "daemon_cpu_gib": args.daemon_cpu_gib,
            "settle_s": args.settle,
            "trace": args.trace and args.trace.name,
            "workloads": {name: _plain(workload) for name, workload in workloads.items()},
            "not_run": {},
            "columns": list(COLUMNS),
            "entries": [],
        }
        if not (args.resume and args.out and args.out.exists()):
            return cls(args.out, content)
        turns = raw_path(args.out)
        if not turns.exists():
            raise SystemExit(f"--resume needs the turns of the earlier run, {turns}")
        earlier = json.loads(turns.read_text())
        for name in ("tiny", "seed", "cpu_gib", "daemon_cpu_gib", "settle_s", "columns"):
            if earlier[name] != content[name]:
                raise SystemExit(f"{args.out} has {name} {earlier[name]}, not {content[name]}")
        for name, sizes in content["workloads"].items():
            if earlier["workloads"].setdefault(name, sizes) != sizes:
                raise SystemExit(f"{args.out} has other sizes of the workload {name}")
        earlier["trace"] = content["trace"] or earlier["trace"]
        earlier.setdefault("resumed", []).append(content["environment"])
        return cls(args.out, earlier)

    @property
    def run(self) -> int:
        """Counts the commands that have added to this result."""
        return len(self.content.get("resumed", []))

    def has(self, case: Case) -> bool:
        return any(self._is(case, entry) and "failed" not in entry for entry in self._entries)

    def add(self, case: Case, entry: dict[str, Any]) -> None:
        self._entries[:] = [one for one in self._entries if not self._is(case, one)]
        self._entries.append({**case._asdict(), "run": self.run, **entry})
        self.content["not_run"].pop(case.name, None)
        self.save()

    def expect(self, case: Case) -> None:
        """Until it is added it counts as not run, also if this program is killed."""
        if not any(self._is(case, entry) for entry in self._entries):
            self.content["not_run"][case.name] = _ENDED

    def end_of_time(self, cases: Sequence[Case]) -> None:
        """Says of those that are still expected why they did not run."""
        for case in cases:
            if case.name in self.content["not_run"]:
                self.content["not_run"][case.name] = _OUT_OF_TIME

    def save(self) -> None:
        self.content["derived"] = derive(self.content)
        save(self._out, without_turns(self.content), self.content)

    @property
    def _entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.content["entries"]
        return found

    @staticmethod
    def _is(case: Case, entry: dict[str, Any]) -> bool:
        return case == (entry["round"], entry["workload"], entry["mode"])


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    found = describe_environment()
    if args.trace:  # its folder says something of the machine only
        found["command"] = found["command"].replace(str(args.trace), args.trace.name)
    return found


def _plain(workload: Workload) -> dict[str, Any]:
    """As it comes back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(workload)))
    return found


class CaseFailed(Exception):
    """An engine did not start, died or raised; the end of its log may say why."""

    def __init__(self, what: str, log: str) -> None:
        super().__init__(what)
        self.log = log


class CutOff(Exception):
    """The budget ended while an engine was running."""


class Runner:
    """Starts engines, each in a child process, and lets them play one after the other."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._idle_mib = _device_used_mib()

    @contextlib.contextmanager
    def start(self, case: Case, workload: Workload) -> Iterator[Child]:
        """The engine of a case, and its daemon; both end with the context."""
        folder = self._folder / "-".join(map(str, case))
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            daemon = None
            if case.mode in engine_configs.DAEMON_MODES:
                arguments = engine_configs.daemon_arguments(self._args.tiny, self._args.cpu_gib)
                daemon = stack.enter_context(DaemonProcess(folder, *arguments))
            spec = self._spec(case.mode, workload, daemon)
            yield stack.enter_context(Child(self._job(spec, workload, daemon), folder))

    def wait_for_device(self) -> None:
        """Memory of the last engines may outlive them for a while; the next need all of it."""
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        while _device_used_mib() > self._idle_mib + 1024 and time.monotonic() < deadline:
            time.sleep(0.5)

    def _spec(self, mode: str, workload: Workload, daemon: DaemonProcess | None) -> EngineSpec:
        args = self._args
        longest = engine_configs.max_model_len(args.tiny)
        tokens = workload.cache_tokens
        if mode in ("limit", "limit_seqs"):
            played = plan(workload, args.seed, args.trace, longest).sessions
            # Blocks that are not full take a little more than their tokens.
            tokens = distinct_tokens(played) * 11 // 10 + 4 * longest
        address = None
        if daemon is not None:
            address = daemon.endpoint if mode == "tiered_daemon_tcp" else daemon.ipc
        return engine_configs.chat_spec(
            mode,
            tokens,
            args.tiny,
            args.cpu_gib,
            args.daemon_cpu_gib,
            address,
            workload.requests_that_fit if mode == "limit_seqs" else None,
            shares_device=args.together > 1,
        )

    def _job(self, spec: EngineSpec, workload: Workload, daemon: DaemonProcess | None) -> Job:
        args = self._args
        return Job(
            spec=dataclasses.asdict(spec),
            workload=dataclasses.asdict(workload),
            trace=str(args.trace) if workload.kind == "trace" else None,
            seed=args.seed,
            vocab=engine_configs.vocabulary(args.tiny),
            settle_s=args.settle,
            memory_of=[daemon.pid] if daemon else [],
        )


class Child:
    """A process with one engine. It plays the workload when it is told to. Context manager."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        given, self._made = folder / "job.json", folder / "result.json"
        self._log = folder / "engine.log"
        given.write_text(json.dumps(dataclasses.asdict(job)))
        with self._log.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chat_engine", str(given), str(self._made)],
                stdin=subprocess.PIPE,  # its end is that of the child
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "VLLM_NO_USAGE_STATS": "1", **job.spec["environment"]},
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_until_started(self, end: float) -> None:
        """Also returns if the engine has failed: `play` says so."""
        while self._process.poll() is None and not ready_path(self._made).exists():
            if time.monotonic() > end:
                raise CutOff
            time.sleep(0.2)

    def play(self, end: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the engine has failed
            self._process.stdin.write(PLAY)
            self._process.stdin.flush()
        try:
            code = self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CutOff from None
        found: dict[str, Any] = {"error": f"exit code {code}"}
        if self._made.exists():
            found = json.loads(self._made.read_text())
        if "error" in found:
            lines = self._log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "ERROR" in line or "Error:" in line]
            shown = [*errors[:_LOG_LINES], "…", *lines[-_LOG_LINES:]]
            raise CaseFailed(found["error"], "\n".join(shown))
        spec = self._job.spec
        return {"transfer": spec["transfer"], "environment": spec["environment"], **found}


def _device_used_mib() -> int:
    sizes = device_memory_mib()
    return sizes[0] if sizes else 0


def run(args: argparse.Namespace, folder: Path) -> Report:
    begin = time.monotonic()
    gpu = device_memory_mib() is not None and not args.tiny
    if not gpu and not args.tiny:
        raise SystemExit("there is no GPU; --tiny runs without one")
    modes = [mode for mode in args.modes.split(",") if mode]
    unknown = sorted(set(modes) - set(CHAT_MODES))
    if unknown or not modes:
        raise SystemExit(f"no mode {', '.join(unknown)}; there are {', '.join(CHAT_MODES)}")
    workloads = workloads_of(args)
    report = Report.open(args, workloads)
    runner = Runner(args, folder)
    todo: list[Case] = []
    for case in cases_of(list(workloads), modes, args.rounds):
        why = engine_configs.why_not(case.mode, workloads[case.workload], gpu)
        if why:
            report.content["not_run"][f"{case.mode} on {case.workload}"] = why
        elif not report.has(case):
            report.expect(case)
            todo.append(case)
    longest: dict[str, float] = {}
    for cases in groups_of(todo, args.together):
        workload = workloads[cases[0].workload]
        started = time.monotonic()
        left = args.budget - (started - begin)
        if left < max(_MIN_S, longest.get(workload.name, 0.0)):
            say(f"{started - begin:.0f} s: no time left for {cases[0].mode} on {workload.name}")
            report.end_of_time(todo)
            break
        try:
            _run_group(runner, report, cases, workload, begin, begin + args.budget)
        except CutOff:
            say(f"the budget ended during {', '.join(case.mode for case in cases)}")
            report.end_of_time(todo)
            break
        took = time.monotonic() - started
        longest[workload.name] = max(took, longest.get(workload.name, 0.0))
    say(f"{time.monotonic() - begin:.0f} s: done")
    report.save()
    return report


def groups_of(cases: Sequence[Case], most: int) -> Iterator[list[Case]]:
    """Neighbours of one workload and round, in groups of at most `most`."""
    for _, same in itertools.groupby(cases, lambda case: (case.round, case.workload)):
        group = list(same)
        yield from (group[at : at + most] for at in range(0, len(group), most))


def _run_group(
    runner: Runner,
    report: Report,
    cases: Sequence[Case],
    workload: Workload,
    begin: float,
    end: float,
) -> None:
    """Starts the engines of these cases together, then lets one play after the other."""
    runner.wait_for_device()
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(MemoryWatch())
        children = [stack.enter_context(runner.start(case, workload)) for case in cases]
        for child in children:
            child.wait_until_started(end)
        for case, child in zip(cases, children, strict=True):
            at = time.monotonic()
            say(f"{at - begin:.0f} s: round {case.round}, {case.workload}, {case.mode}")
            try:
                found = child.play(end)
            except CaseFailed as error:
                say(f"{case.mode} on {case.workload} failed: {error}; its log:\n{error.log}")
                report.add(case, {"failed": str(error)[:300]})
                continue
            is_alone = len(cases) == 1  # memory of several engines says nothing of one
            found["gpu_mib"] = memory.gpu_mib if is_alone else None
            found["host_growth_mib"] = memory.host_growth_mib if is_alone else None
            report.add(case, {"engine": found.pop("engine"), **found})
            say(f"   {_line(report, case)}, took {time.monotonic() - at:.0f} s")


def _line(report: Report, case: Case) -> str:
    modes = report.content["derived"]["workloads"].get(case.workload, {})
    if case.mode not in modes:
        return "failed"
    found = modes[case.mode]
    if "tokens_per_s" in found:
        return f"{found['tokens_per_s']:,.0f} prompt tokens/s"
    ttft = found["ttft_ms"]
    return f"share {found['share']}, TTFT p50 {ttft['p50']} ms, p90 {ttft['p90']} ms"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without GPU")
    parser.add_argument("--modes", default=",".join(CHAT_MODES), help="which, in which order")
    parser.add_argument("--workloads", default="calm,tight", help="which, comma-separated")
    parser.add_argument("--rounds", type=int, default=1, help="the order of modes rotates")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, pauses and tokens")
    parser.add_argument("--cpu-gib", type=float, default=40.0, help="CPU tier of every mode")
    parser.add_argument("--daemon-cpu-gib", type=float, default=4.0, help="beside a daemon")
    parser.add_argument(
        "--together", type=int, default=1, help="engines that start together, to save time"
    )
    parser.add_argument("--settle", type=float, help="seconds between start and first prompt")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds, then it stops")
    parser.add_argument("--resume", action="store_true", help="add to --out what it lacks")
    parser.add_argument("--kill-after-turn", type=int, help="adds the workload `restart`")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    sizes = parser.add_argument_group("sizes, instead of those of the workloads")
    for name, kind in (
        ("chats", int),
        ("turns", int),
        ("shared-tokens", int),
        ("first-tokens", int),
        ("new-tokens", int),
        ("answer-tokens", int),
        ("think-s", float),
        ("cache-tokens", int),
    ):
        sizes.add_argument(f"--{name}", type=kind)
    sizes.add_argument("--seconds", type=float, help="of the workload `prefill`")
    sizes.add_argument("--pause-scale", type=float, default=1.0, help="of tool pauses")
    sizes.add_argument("--trace", type=Path, help="file of the workload `trace`")
    sizes.add_argument("--speedup", type=float, help="of a trace")
    sizes.add_argument("--length-scale", type=float, help="of a trace")
    sizes.add_argument("--max-requests", type=int, help="of a trace")
    return parser


def main() -> None:
    args = parser().parse_args()
    if args.settle is None:
        args.settle = 0.0 if args.tiny else 8.0
    with tempfile.TemporaryDirectory(prefix="chats-") as folder:
        report = run(args, Path(folder))
    print(
        chats_section.describe(
            Result(args.out.stem if args.out else "chats", without_turns(report.content))
        )
    )


if __name__ == "__main__":
    main()
