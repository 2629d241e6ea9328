"""`tiered-kv up` in a process of its own, for tests to read, signal and stop."""

from __future__ import annotations

import fcntl
import select
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests.patience import eventually

ROOT = Path(__file__).parents[2]


class Up:
    """The command in a process of its own; `lines` grows while it runs."""

    def __init__(self, file: Path) -> None:
        self.lines: list[str] = []
        # It ignores signals that were ignored when it was started, as SIGINT and SIGQUIT are in
        # background jobs of a script; how the tests were started must not decide here.
        as_in_a_terminal = ["env", "--default-signal=INT,QUIT"]
        self._process = subprocess.Popen(
            [*as_in_a_terminal, sys.executable, "-m", "vllm_tiered_kv.api.cli", "up", str(file)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._may_read = threading.Event()
        self._may_read.set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._may_read.wait()

    def stop_reading(self) -> None:
        """Until it ends. Returns when the pipe is full."""
        self._may_read.clear()
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        # The first page may be read in part, and a page may have no room for another line.
        is_full = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 3 * select.PIPE_BUF

        def waiting() -> int:
            return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)

        eventually(lambda: waiting() >= is_full)

    def wait_for(self, part: str) -> int:
        """Returns the place of the first line with this text."""

        def place() -> int:
            assert self._process.poll() is None or not self._reader.is_alive()
            places = [n for n, line in enumerate(list(self.lines), 1) if part in line]
            return places[0] if places else 0

        return eventually(place)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Its exit status, when it ends by itself."""
        status = self._process.wait(60)
        self._may_read.set()
        self._reader.join()
        return status

    def stop(self) -> int:
        self.signal()
        return self.end()

    def kill(self) -> None:
        if self._process.poll() is None:
            for _ in range(3):  # the third one kills everything
                self.signal()
            self._process.wait(60)
        self._may_read.set()
        self._reader.join()

    def child_running(self, what: str) -> int:
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (child,) = [one for one in children if what in Path(f"/proc/{one}/cmdline").read_text()]
        return int(child)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
