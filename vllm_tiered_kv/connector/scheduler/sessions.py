"""Which blocks belong to which conversation, as far as clients name them (`request_control`).

A session's *private* blocks are those that no request outside the session has used. When the
session ends, nobody is expected to ask for them again.

Everything here is a chain: whoever uses a block uses all blocks before it. So what a request shares
with the sessions is a prefix of its keys, and its end is found by bisection.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from vllm_tiered_kv.core.key import BlockKey

SessionName: TypeAlias = tuple[str | None, str]
"""The cache salt of its requests and what the client calls it: a client cannot end the sessions of
another one."""

_MAX_SESSIONS = 1 << 16
_USED_OUTSIDE = 1 << 30  # flag beside the number of sessions


class Sessions:
    """Records the blocks of each session. `Retention` calls it, in the scheduler's thread. Its
    memory is bounded: the sessions that are silent for longest are forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._blocks: OrderedDict[SessionName, dict[BlockKey, None]] = OrderedDict()
        self._users: dict[BlockKey, int] = {}
        """By block: how many sessions have it, and whether a request outside of all has used it."""

    def __len__(self) -> int:
        return len(self._blocks)

    def used(self, keys: Sequence[Sequence[BlockKey]]) -> None:
        """A request outside of all sessions uses these blocks, per group."""
        if not self._users:
            return
        for of_group in keys:
            shared = bisect.bisect_left(of_group, True, key=lambda key: key not in self._users)
            for key in reversed(of_group[:shared]):
                if self._users[key] & _USED_OUTSIDE:
                    break  # so have those before it
                self._users[key] |= _USED_OUTSIDE

    def record(self, name: SessionName, keys: Sequence[Sequence[BlockKey]]) -> None:
        """A request of this session has used these blocks, per group."""
        blocks = self._blocks.setdefault(name, {})
        self._blocks.move_to_end(name)
        for of_group in keys:
            for key in of_group:
                if key not in blocks:
                    blocks[key] = None
                    self._users[key] = self._users.get(key, 0) + 1
                    self._num_blocks += 1
        while self._num_blocks > self._max_blocks or len(self._blocks) > _MAX_SESSIONS:
            self._forget(next(iter(self._blocks)))

    def end(self, name: SessionName) -> list[BlockKey]:
        """Forgets a session; returns its private blocks."""
        private = [key for key in self._blocks.get(name, ()) if self._users[key] == 1]
        self._forget(name)
        return private

    def clear(self) -> None:
        """The keys of all blocks have changed."""
        self._blocks.clear()
        self._users.clear()
        self._num_blocks = 0

    def _forget(self, name: SessionName) -> None:
        blocks = self._blocks.pop(name, {})
        self._num_blocks -= len(blocks)
        for key in blocks:
            left = self._users[key] - 1
            if left & ~_USED_OUTSIDE:
                self._users[key] = left
            else:
                del self._users[key]
