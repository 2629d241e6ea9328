"""Runs the processes of a deployment: starts them in order, shows their logs, stops them all."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from types import FrameType
from typing import IO

from vllm_tiered_kv.api.deployment import Deployment, Program
from vllm_tiered_kv.errors import DeploymentError

_POLL_S = 0.1
_PROGRESS_S = 10.0
_HEALTH_TIMEOUT_S = 2.0
_LEFTOVERS_S = 5.0  # for processes that outlive the one that started them
_READER_S = 1.0  # for a reader of our output that may have stopped reading
_COLORS = ("36", "33", "35", "32", "34")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Screen:
    """Writes whole lines from several threads. A reader that has gone away, or that reads no more,
    ends nothing and holds up no stop: the processes must still be stopped."""

    def __init__(self, logs: int, own: int) -> None:
        """File descriptors, since a buffered stream keeps a lock while it waits for its reader."""
        self._logs = logs
        self._own = own
        self._logs_lock = threading.Lock()
        # Lines to one place must not be mixed; to two, the log must not hold up our own lines.
        is_same = os.path.sameopenfile(logs, own)
        self._own_lock = self._logs_lock if is_same else threading.Lock()
        self._stopping = False
        self._is_stuck = False

    @property
    def has_colors(self) -> bool:
        return os.isatty(self._logs)

    def begin_stop(self) -> None:
        """From now on drops lines that nobody reads: a process that cannot log cannot stop."""
        self._stopping = True

    def show_log(self, line: str) -> None:
        with self._logs_lock:
            self._write(self._logs, line, lambda: self._stopping)

    def say(self, line: str) -> None:
        """For the main thread, which must see signals: drops a line that nobody reads."""
        if self._own_lock.acquire(timeout=_READER_S):
            try:
                self._write(self._own, f"tiered-kv: {line}", lambda: True)
            finally:
                self._own_lock.release()

    def _write(self, out: int, line: str, gives_up: Callable[[], bool]) -> None:
        rest = f"{line}\n".encode(errors="replace")
        with contextlib.suppress(OSError):
            while rest and self._wait_for_room(out, gives_up):
                rest = rest[os.write(out, rest[: select.PIPE_BUF]) :]

    def _wait_for_room(self, out: int, gives_up: Callable[[], bool]) -> bool:
        """False if nobody reads and the line is to be given up."""
        poll = select.poll()
        poll.register(out, select.POLLOUT)
        left_s = 0.0 if self._is_stuck else _READER_S  # of many lines only the first one waits
        while not poll.poll(min(left_s, _POLL_S) * 1000):
            if gives_up():
                left_s -= _POLL_S
                if left_s <= 0:
                    self._is_stuck = True
                    return False
            else:
                left_s = _READER_S
        self._is_stuck = False
        return True


class Running:
    """One process, in a session of its own: a Ctrl-C reaches `tiered-kv up` alone, which decides
    who stops when. A thread passes on what it prints."""

    def __init__(self, program: Program, prefix: str, screen: Screen) -> None:
        self.program = program
        try:
            self._process = subprocess.Popen(
                program.command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **program.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise DeploymentError(
                f"{program.name} cannot be started: {program.command[0]}: {error.strerror}"
            ) from None
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=_pass_on, args=(self._process.stdout, prefix, screen), daemon=True
        )
        self._reader.start()

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def how_it_ended(self) -> str:
        status = self._process.poll()
        if status is None:  # a driver may keep it in the kernel
            return "does not end although it was killed"
        if status < 0:
            known = [one.name for one in signal.Signals if one == -status]  # not real-time ones
            return f"was ended by {known[0] if known else f'signal {-status}'}"
        return f"ended with status {status}"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)  # does nothing once the process is reaped

    def end_leftovers(self, at_once: bool = False) -> None:
        """Waits for processes that this one started, then kills them."""
        deadline = time.monotonic() + (0.0 if at_once else _LEFTOVERS_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(_POLL_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEFTOVERS_S)
        self._reader.join(_LEFTOVERS_S)

    def is_healthy(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.program.health_url, timeout=_HEALTH_TIMEOUT_S) as answer:
                healthy = int(answer.status) == 200
        except (OSError, HTTPException, ValueError):
            return False
        return healthy and self.status is None


def _pass_on(output: IO[bytes], prefix: str, screen: Screen) -> None:
    # Progress bars end their lines with \r, which is a line of its own here.
    with io.TextIOWrapper(output, "utf-8", errors="replace") as lines:
        for line in lines:
            if text := line.rstrip():
                screen.show_log(prefix + text)


class _StopRequested(Exception):
    """A signal has arrived."""


class Supervisor:
    """Runs a deployment until a signal or the end of one of its processes. For the main thread,
    which gets the signals."""

    def __init__(self, deployment: Deployment, screen: Screen) -> None:
        self._deployment = deployment
        self._screen = screen
        self._signals = 0
        self._running: list[Running] = []

    def run(self) -> int:
        """Returns the exit status: 0 if all was stopped as asked. DeploymentError says which
        process could not start, or ended by itself; then all others are stopped."""
        earlier = {
            number: signal.signal(number, self._count_signal)
            for number in _SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
        }
        try:
            try:
                self._start_all()
                self._watch()
            except _StopRequested:
                pass
            finally:
                stopped = self._stop_all()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
        return 0 if stopped else 1

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _start_all(self) -> None:
        programs = self._deployment.programs
        for program in programs:
            _require_free(program)
        width = max(len(program.name) for program in programs)
        for program, color in zip(programs, itertools.cycle(_COLORS), strict=False):
            prefix = f"{program.name:{width}} | "
            if self._screen.has_colors:
                prefix = f"\033[{color}m{prefix}\033[0m"
            self._screen.say(f"starting {program.name}")
            running = Running(program, prefix, self._screen)
            self._running.append(running)
            self._wait_until_healthy(running)
        for program in programs:
            page = "/" if program.is_daemon else "/v1"
            url = program.health_url.removesuffix(program.health_path) + page
            self._screen.say(f"  {program.name:{width}}  {url}")
        if self._deployment.daemon_address is not None:
            self._screen.say(f"  {'':{width}}  {self._deployment.daemon_address}")
        self._screen.say("all is ready; Ctrl-C stops it")

    def _wait_until_healthy(self, running: Running) -> None:
        name, began = running.program.name, time.monotonic()
        limit_s, shown = self._deployment.start_timeout_s, began
        while not running.is_healthy():
            self._check()
            now = time.monotonic()
            if now - began > limit_s:
                raise DeploymentError(
                    f"{name} did not answer at {running.program.health_url} within {limit_s} s; "
                    "see its lines above, or raise start_timeout"
                )
            if now - shown >= _PROGRESS_S:
                shown = now
                self._screen.say(f"waiting for {name}: {now - began:.0f} s of at most {limit_s} s")
            time.sleep(_POLL_S)
        self._screen.say(f"{name} is ready after {time.monotonic() - began:.1f} s")

    def _watch(self) -> None:
        while True:
            self._check()
            time.sleep(_POLL_S)

    def _check(self) -> None:
        if self._signals:
            raise _StopRequested
        for running in self._running:
            if running.status is not None:
                running.end_leftovers()  # all it printed is shown before the error
                raise DeploymentError(
                    f"{running.program.name} {running.how_it_ended()}; see its lines above"
                )

    def _stop_all(self) -> bool:
        """Servers first, together; then the daemon, which writes what they have stored. False if
        one had to be killed, or the daemon lost blocks."""
        self._screen.begin_stop()
        daemons = [running for running in self._running if running.program.is_daemon]
        servers = [running for running in self._running if not running.program.is_daemon]
        killed = self._stop(servers, self._deployment.stop_timeout_s)
        lost = False
        for daemon in daemons:
            ended_before = daemon.status is not None
            killed += self._stop([daemon], None)
            lost |= not ended_before and daemon.status != 0
        return not killed and not lost

    def _stop(self, some: Sequence[Running], timeout_s: int | None) -> list[str]:
        """Returns the names of those that had to be killed. Without a timeout, a second signal is
        passed on, and only a third one kills."""
        waiting = [running for running in some if running.status is None]
        signals = max(self._signals, 1)  # before anybody reads that it stops, and sends another
        for running in waiting:
            self._screen.say(f"stopping {running.program.name}")
            running.signal(signal.SIGTERM)
        began = shown = time.monotonic()
        killed: list[str] = []
        may_kill = timeout_s is not None
        while waiting := [
            running
            for running in waiting
            if running.status is None and running.program.name not in killed
        ]:
            now = time.monotonic()
            late = timeout_s is not None and now - began > timeout_s
            if late or self._signals > signals:
                signals = self._signals
                for running in waiting:
                    if may_kill:
                        why = f"did not stop within {timeout_s} s, and is" if late else "is"
                        self._screen.say(f"{running.program.name} {why} killed")
                        killed.append(running.program.name)
                        running.end_leftovers(at_once=True)
                    else:
                        running.signal(signal.SIGTERM)
                may_kill = True
            if now - shown >= _PROGRESS_S:
                shown = now
                names = " and ".join(running.program.name for running in waiting)
                self._screen.say(f"waiting for {names} to stop: {now - began:.0f} s")
            time.sleep(_POLL_S)
        for running in some:
            running.end_leftovers()
            self._screen.say(f"{running.program.name} {running.how_it_ended()}")
        return killed


def _require_free(program: Program) -> None:
    """Else the health page of another process would pass for that of this one."""
    host, port = program.address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise DeploymentError(
            f"{program.name} cannot listen on {host}:{port}: {error.strerror}; stop what uses it, "
            "or choose another address"
        ) from None
