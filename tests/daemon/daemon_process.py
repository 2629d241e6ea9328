"""A real daemon in a process of its own, for tests to start, stop, freeze and kill.

Most of the start of a daemon goes into imports. So its process is forked from one that has them
behind it, and that does nothing else; what runs in it is what the command runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

START_TIMEOUT_S = 60.0
_LISTENING = re.compile(r"listening on (\S+)")
_METRICS = re.compile(r"metrics on (http://\S+)/metrics")
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["tests.daemon.daemon_process", "vllm_tiered_kv.server.daemon"])
# How a process ended can be read once, and whoever starts another one reads it too.
_ONE_AT_A_TIME = threading.Lock()


def _run(
    program: Sequence[str],
    arguments: Sequence[str],
    log: Path,
    environment: dict[str, str],
    descriptors: tuple[int, int],
) -> None:
    """As a new interpreter would run it, in the process of the daemon."""
    os.environ.clear()
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
    into = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.close(into)
    kind, what, *more = program
    sys.argv = [kind, *more, *arguments]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(what, {"__name__": "__main__"})


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
        self._listen = list(
            ["tcp://127.0.0.1:*", f"ipc://{self.ipc_path}"] if listen is None else listen
        )
        self.program = list(program)
        self._process: _FORKING.Process | None = None
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
        """All that was logged since the last start."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode()

    def launch(self) -> None:
        """Starts the process and does not wait for it to listen."""
        self._log.touch()
        self._log_start = self._log.stat().st_size
        listen = [part for endpoint in self._listen for part in ("--listen", endpoint)]
        http = [] if any(a.startswith("--http") for a in self.arguments) else ["--http", "off"]
        self._process = _FORKING.Process(
            target=_run,
            args=(
                self.program,
                [*listen, *http, *self.arguments],
                self._log,
                dict(os.environ),
                resource.getrlimit(resource.RLIMIT_NOFILE),
            ),
            daemon=True,  # it ends with the tests at the latest
        )
        with _ONE_AT_A_TIME:
            self._process.start()

    def start(self) -> DaemonProcess:
        self.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready after" not in self.logs:
            if not self.is_running() or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start:\n{self.logs}")
            time.sleep(0.01)
        self.endpoints = _LISTENING.findall(self.logs)
        metrics = _METRICS.search(self.logs)
        self.http = metrics.group(1) if metrics else ""
        return self

    def restart(self) -> DaemonProcess:
        """Starts again, on the same endpoints, what has been stopped or killed."""
        self.end()
        self._listen = self.endpoints
        return self.start()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """As kill -9 does."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self, timeout: float = 60.0) -> int:
        """SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60.0) -> int:
        assert self._process is not None
        if not wait([self._process.sentinel], timeout):
            raise TimeoutError(f"the daemon still runs after {timeout:g} s:\n{self.logs}")
        with _ONE_AT_A_TIME:
            status = self._process.exitcode
        assert status is not None
        return status

    def is_running(self) -> bool:
        with _ONE_AT_A_TIME:
            return self._process is not None and self._process.is_alive()

    def rss_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss_bytes(self) -> int:
        """The most it ever was."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found.group(1)) << 10

    def end(self) -> None:
        """However it may be doing."""
        if self.is_running():
            self.thaw()
            if "COVERAGE_PROCESS_CONFIG" in os.environ:  # what is killed takes its record along
                with contextlib.suppress(TimeoutError):
                    self.terminate()
                    return
            self.kill()
