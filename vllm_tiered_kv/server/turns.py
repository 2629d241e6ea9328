"""Work for threads that take only so much at a time: the rest waits here for its turn.

Who has more to ask of a slow tier than it takes at once would be refused the rest, and what waits
in the tier's own queue would be given up as late before it was even begun. Whoever asks for little
does not wait until those who ask for much have all of it: they take turns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

InPool = Callable[[Callable[[], None], Callable[[], None]], None]
"""Does the first in a pool of threads; the second is called instead if that cannot be, or, where
the pool does not wait for what hangs, while the first goes on."""


InTurn = Callable[[Callable[[], None], Callable[[], None], Hashable], None]
"""As InPool, for somebody."""


class Turns:
    """An InTurn over an InPool. One of each asker's in turn, of each first come, first served. As
    much waits here as its users have under way, which they bound. From any thread."""

    def __init__(self, in_pool: InPool, at_once: int) -> None:
        self._in_pool = in_pool
        self._at_once = at_once
        # By asker; whose turn it is comes first.
        self._waiting: dict[Hashable, deque[tuple[Callable[[], None], Callable[[], None]]]] = {}
        self._under_way: set[int] = set()
        self._begun = 0
        self._is_beginning = False
        self._lock = threading.Lock()

    def __call__(
        self, work: Callable[[], None], failed: Callable[[], None], asker: Hashable = None
    ) -> None:
        with self._lock:
            self._waiting.setdefault(asker, deque()).append((work, failed))
        self._go_on()

    def _go_on(self) -> None:
        """In one thread at a time, and not within itself: a pool that takes nothing says so at
        once, of everything that waits."""
        with self._lock:
            if self._is_beginning:
                return
            self._is_beginning = True
        while (turn := self._next()) is not None:
            number, work, failed = turn
            self._in_pool(partial(self._do, work, number), partial(self._do, failed, number))

    def _next(self) -> tuple[int, Callable[[], None], Callable[[], None]] | None:
        with self._lock:
            if not self._waiting or len(self._under_way) >= self._at_once:
                self._is_beginning = False
                return None
            self._begun += 1
            self._under_way.add(self._begun)
            asker = next(iter(self._waiting))
            line = self._waiting.pop(asker)
            work, failed = line.popleft()
            if line:
                self._waiting[asker] = line  # behind the others
            return self._begun, work, failed

    def _do(self, work: Callable[[], None], number: int) -> None:
        """The turn ends with the first of its two: what hangs keeps it from nobody."""
        try:
            work()
        finally:
            with self._lock:
                self._under_way.discard(number)
            self._go_on()
