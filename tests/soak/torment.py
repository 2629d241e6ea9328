"""What befalls a daemon in a soak: it is stopped and goes on, is killed and starts again."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.daemon.daemon_process import DaemonProcess


class Torment:
    def __init__(
        self,
        daemon: DaemonProcess,
        rng: random.Random,
        note: Callable[[str], None],
        freezes: float,
    ) -> None:
        """`freezes`: which share of the blows does not kill it."""
        self._daemon = daemon
        self._rng = rng
        self._note = note
        self._freezes = freezes
        self._frozen = False

    def strike(self) -> None:
        """What is stopped or dead comes back; what runs is hit."""
        if self._frozen:
            self.thaw()
        elif not self._daemon.is_running():
            self.revive()
        elif self._rng.random() < self._freezes:
            self._note("freeze the daemon")
            self._daemon.freeze()
            self._frozen = True
        else:
            self._note("kill the daemon")
            self._daemon.kill()

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._note("thaw the daemon")
            self._daemon.thaw()

    def revive(self) -> None:
        if not self._daemon.is_running():
            self._note("restart the daemon")
            self._daemon.restart()
