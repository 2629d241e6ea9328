"""`tiered-kv up` in a process of its own, for tests to read, signal and stop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.patience import eventually

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Up:
    """The command in a process of its own; `lines` grows while it runs."""

    def __init__(self, file: Path) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_tiered_kv.api.cli", "up", str(file)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self._process.stdout)

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
        self._reader.join()

    def child_running(self, what: str) -> int:
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (child,) = [one for one in children if what in Path(f"/proc/{one}/cmdline").read_text()]
        return int(child)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
