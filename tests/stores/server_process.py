"""What tests do to the processes of servers."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

from tests.patience import stop


class ServerProcess:
    """A server that a test stops, freezes and kills. Subclasses start it."""

    _process: subprocess.Popen[bytes] | None = None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, also if it is stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process is not None
        stop(self._process.pid)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)
