"""vLLM engines in processes of their own, driven over pipes by one parent.

Engines that are compared must take turns: machines drift, so one engine after the other compares
hours, not engines. Several of them live on one device at the same time, each in a child process
that sleeps on its pipe until it is asked something. Requests and replies are JSON lines on pipes of
their own, as vLLM prints to the standard output; all that a child prints goes to its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
READY_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 30.0
_LOG_LINES = 30


class EngineFailed(Exception):
    """An engine did not start, died, raised or fell silent; the end of its log says why."""

    def __init__(self, name: str, what: str, log: str) -> None:
        super().__init__(f"engine {name!r} {what}; its log ends with:\n{log}")
        self.name = name
        self.what = what
        self.log = log


@dataclass(frozen=True)
class EngineSpec:
    """What engine to start; plain data, so that it can be written into the result."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    """Changes to the tiny model of `tests.models.write_model`; none of them: the tiny one."""
    transfer: dict[str, Any] | None = None
    """`kv_transfer_config`; None is vLLM alone."""
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `LLM`; they win over what `engine_child.py` sets by itself."""


@dataclass(frozen=True)
class Asked:
    seconds: float
    """Around `LLM.generate` in the child: the time to the first token where one was asked for."""
    tokens: list[list[int]]
    cached: list[int]
    """Prompt tokens of each request that were not computed, wherever they came from."""
    first_token_s: list[float]
    """By request; empty unless the engine runs with `disable_log_stats` False."""
    waited_s: list[float] = field(default_factory=list)
    """As `first_token_s`: until the step that began to compute."""


class EngineProcess:
    """One engine. Starting begins at once and goes on beside others until `wait_ready`."""

    def __init__(
        self,
        spec: EngineSpec,
        folder: Path | None = None,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        """`folder` is where the log goes; without one it is removed with the engine."""
        self.spec = spec
        self._reply_timeout_s = reply_timeout_s
        self.started_s = 0.0
        """How long the start took; known after `wait_ready`."""
        self._ready: dict[str, Any] | None = None
        self._owned = None
        if folder is None:
            self._owned = tempfile.TemporaryDirectory(prefix="engine-")
            folder = Path(self._owned.name)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{spec.name}.log"
        to_child, self._requests = os.pipe()
        self._replies, from_child = os.pipe()
        self._buffer = b""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_child", str(to_child), str(from_child)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(to_child, from_child),
                cwd=ROOT,
                env=_environment(spec),
            )
        os.close(to_child)
        os.close(from_child)
        self._send(asdict(spec))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        if self._ready is None:
            self._ready = self._receive(timeout_s)
            self.started_s = self._ready["started_s"]

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 1,
        transfer: dict[str, Any] | None = None,
    ) -> Asked:
        """All prompts at once, greedily; returns when the last of them is answered. `transfer`:
        their `kv_transfer_params`."""
        prompts = [list(prompt) for prompt in prompts]
        return Asked(**self._call("ask", prompts=prompts, max_tokens=max_tokens, transfer=transfer))

    def estimates(self, tokens: int) -> dict[str, Any]:
        """What `load_policy: auto` goes by; empty for any connector but ours."""
        found: dict[str, Any] = self._call("estimates", tokens=tokens)
        return found

    def time_hooks(self, prompt: Sequence[int], times: int) -> dict[str, float]:
        """Milliseconds that each hook of the connector takes per request, on average."""
        found: dict[str, float] = self._call("time_hooks", prompt=list(prompt), times=times)
        return found

    def settle(self) -> None:
        """Steps the idle engine until its stores are over."""
        self._call("settle")

    def forget_device(self) -> None:
        """Settles, then empties the device's prefix cache and nothing else."""
        self._call("forget_device")

    def set_chunk(self, tokens: int) -> None:
        """How many tokens a step may compute, at most `max_num_batched_tokens`."""
        self._call("set_chunk", tokens=tokens)

    def loaded(self) -> dict[str, float]:
        """Blocks loaded so far by tier; empty for any connector but ours."""
        found: dict[str, float] = self._call("loaded")
        return found

    def load_counters(self) -> dict[str, dict[str, float]]:
        """What became of loads so far, by counter and labels; empty for any connector but ours."""
        found: dict[str, dict[str, float]] = self._call("load_counters")
        return found

    def facts(self) -> dict[str, Any]:
        """What the engine made of its options: versions, layout, graphs, size of the cache."""
        self.wait_ready()
        assert self._ready is not None
        return dict(self._ready["facts"])

    def hang_up(self) -> None:
        """Tells the child to leave, which it also does when this process is killed."""
        for end in ("_requests", "_replies"):
            if getattr(self, end) >= 0:
                os.close(getattr(self, end))
                setattr(self, end, -1)

    def close(self) -> None:
        """Ends the child as vLLM would end by itself, or kills it if it does not."""
        self.hang_up()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget()

    def kill(self) -> None:
        """SIGKILL: nothing gets a chance to be flushed or freed."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.hang_up()
        self._forget()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, verb: str, **arguments: Any) -> Any:
        self.wait_ready()
        self._send({"verb": verb, "arguments": arguments})
        return self._receive(self._reply_timeout_s)

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview((json.dumps(message) + "\n").encode())
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except OSError:
            raise self._failure("is gone") from None

    def _receive(self, timeout_s: float) -> Any:
        if self._replies < 0:
            raise self._failure("is closed")
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                raise self._failure(f"did not answer within {timeout_s:.0f} s")
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise self._failure("died")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(f"raised {reply['error']}")
        return reply["result"]

    def _failure(self, what: str) -> EngineFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # the pipe is closed a moment before the exit code is there
        if self._process.poll() is not None:
            what += f" (exit code {self._process.returncode})"
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return EngineFailed(self.spec.name, what, "\n".join(lines[-_LOG_LINES:]))

    def _forget(self) -> None:
        if self._owned is not None:
            self._owned.cleanup()


def _environment(spec: EngineSpec) -> dict[str, str]:
    return {
        "VLLM_LOGGING_LEVEL": "INFO",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        **spec.environment,
    }


_REPLY_TIMEOUT_S = 120.0  # far more than any request here takes; a run has a budget
_MARGIN_MIB = 1024  # what a connector takes on the device beside a plain engine


class EngineGroup:
    """Engines that live side by side, by name; one that fails is dropped and the others go on.

    Context manager: no engine outlives it.
    """

    def __init__(self, spec: Callable[[str], EngineSpec], folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self.running: dict[str, EngineProcess] = {}
        self.described: dict[str, dict[str, Any]] = {}
        """What the result says about each engine, failed ones included."""

    def start(self, names: Sequence[str]) -> None:
        """Ends the engines not named, keeps those that run, starts the others together."""
        self._end([name for name in self.running if name not in names])
        fresh = [name for name in names if name not in self.described]
        for name in fresh:
            spec = self._spec(name)
            self.running[name] = EngineProcess(spec, self._folder, _REPLY_TIMEOUT_S)
        for name in fresh:
            engine = self.running[name]
            try:
                engine.wait_ready()
            except EngineFailed as error:
                self.fail(error)
            else:
                self.described[name] = {
                    "started_s": round(engine.started_s, 2),
                    "facts": {k: v for k, v in engine.facts().items() if k != "pid"},
                }

    def fail(self, error: EngineFailed) -> None:
        """Drops an engine: the others go on without it."""
        say(str(error))
        self.described[error.name] = {
            **self.described.get(error.name, {}),
            "failed": error.what[:300],
        }
        engine = self.running.pop(error.name, None)
        if engine is not None:
            engine.close()

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self.running[name].hang_up()
        for name in names:
            self.running.pop(name).close()

    @contextlib.contextmanager
    def drop_failed(self) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            self.fail(error)

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(list(self.running))


def how_many_fit(most: int) -> int:
    """Engines the device has room for, judged by the one that is running now."""
    sizes = device_memory_mib()
    if sizes is None:
        return most
    used, total = sizes
    return max(1, min(most, total // (used + _MARGIN_MIB)))


def device_memory_mib() -> tuple[int, int] | None:
    """Used and total memory of the first GPU, or None without one."""
    command = [
        "nvidia-smi",
        "--query-gpu=memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    used, total = done.stdout.splitlines()[0].split(",")
    return int(used), int(total)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
