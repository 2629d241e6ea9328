"""A real daemon in a process of its own, for tests to start, stop, freeze and kill.

Imports take most of a daemon's start time. Within pytest the process is therefore forked from a
server that has imported everything; elsewhere, as in benchmarks, it is a new interpreter. Both run
the same code.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.patience import stop
from tests.ports import free_port

START_TIMEOUT_S = 60.0
_LISTENING = re.compile(r"listening on (\S+)")
_METRICS = re.compile(r"metrics on (http://\S+)/metrics")
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tests.daemon.daemon_process", "vllm_tiered_kv.server.daemon"])
# An exit status can be read only once, and starting another process reads it, too.
_ONE_AT_A_TIME = threading.Lock()


def _run(
    command: Sequence[str], log: Path, environment: dict[str, str], descriptors: tuple[int, int]
) -> None:
    """Runs the command in the forked process as a new interpreter would."""
    os.environ.clear()
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    into = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.close(into)
    kind, what, *arguments = command
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})


class _Forked:
    """The part of Popen's interface that `DaemonProcess` uses, for a forked process."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._command = command
        self._process = _FORKING.Process(
            target=_run,
            args=(command, log, dict(os.environ), limit),
            daemon=True,  # killed when the tests end
        )
        with _ONE_AT_A_TIME:
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        with _ONE_AT_A_TIME:
            return self._process.exitcode

    def wait(self, timeout: float) -> int:
        wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._command, timeout)
        return status


class DaemonProcess:
    """`start` returns when the daemon listens. Its sockets, files and logs lie in `folder`.

    It listens on a free tcp port and on `folder/kv.sock`. After `restart` both are the same.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        listen: Sequence[str] | None = None,
        program: Sequence[str] = ("-m", "vllm_tiered_kv.server.cli"),
    ) -> None:
        self.folder = folder
        self.arguments = list(arguments)
        self.ipc_path = folder / "kv.sock"
        if listen is None:
            listen = [f"tcp://127.0.0.1:{free_port()}", f"ipc://{self.ipc_path}"]
        self._listen = list(listen)
        self.program = list(program)
        self._process: subprocess.Popen[bytes] | _Forked | None = None
        self._log = folder / "daemon.log"
        self._log_start = 0
        self.endpoints: list[str] = []
        self.http = ""

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def endpoint(self) -> str:
        """The tcp endpoint, or the first there is."""
        return next((e for e in self.endpoints if e.startswith("tcp://")), self.endpoints[0])

    @property
    def ipc(self) -> str:
        return f"ipc://{self.ipc_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def logs(self) -> str:
        """The log since the last start."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode()

    def launch(self) -> None:
        """Starts the process and does not wait for it to listen."""
        self._log.touch()
        self._log_start = self._log.stat().st_size
        listen = [part for endpoint in self._listen for part in ("--listen", endpoint)]
        http = [] if any(a.startswith("--http") for a in self.arguments) else ["--http", "off"]
        command = [*self.program, *listen, *http, *self.arguments]
        if "pytest" in sys.modules:
            self._process = _Forked(command, self._log)
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start(self) -> DaemonProcess:
        self.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready after" not in self.logs:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start:\n{self.logs}")
            time.sleep(0.01)
        self.endpoints = _LISTENING.findall(self.logs)
        metrics = _METRICS.search(self.logs)
        self.http = metrics.group(1) if metrics else ""
        return self

    def restart(self) -> DaemonProcess:
        """Starts a stopped or killed daemon again, on the same endpoints."""
        self.end()
        self._listen = self.endpoints
        return self.start()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        stop(self.pid)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self, timeout: float = 60.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        assert self._process is not None
        return self._process.wait(timeout)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def rss_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss_bytes(self) -> int:
        """The highest resident size so far."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found.group(1)) << 10

    def end(self) -> None:
        """Ends the process, also if it is frozen."""
        # Asked to stop before, it may end by itself between these lines.
        with contextlib.suppress(ProcessLookupError):
            if self.is_running():
                self.thaw()
                if "COVERAGE_PROCESS_CONFIG" in os.environ:  # a killed one writes no coverage data
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.terminate()
                        return
                self.kill()
