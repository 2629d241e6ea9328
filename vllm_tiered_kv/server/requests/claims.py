"""Which client computes which blocks, so that others wait for them instead of computing them too.

A claim protects nothing and holds no memory of the tiers: it answers the question whether to wait.
It ends after its time at the latest, so that a client that dies, hangs or lies delays others by no
more than that. Its owner may extend it; who waits has a deadline of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.wire.messages import Claim, ClaimReply

_MAX_CLAIMS = 1 << 17
"""Of all clients together: about 30 MiB. Further keys are not claimed, so that all who ask compute
them, as they would without claims."""


class Claims:
    """All claims. `Handlers` calls it, and the daemon calls `expire` regularly. Used on the
    reactor's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._claims: dict[StoreKey, tuple[bytes, float]] = {}  # owner and end of each

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, call: Call, request: Claim) -> None:
        call.session.require_writer()
        keys = call.session.prefixed(request.keys)
        if not request.ttl_ms:
            call.reply(ClaimReply(self.release(keys, request.owner), 0, 0))
            return
        count, others, wait_s = self.take(keys, request.owner, request.ttl_ms / 1000)
        call.reply(ClaimReply(count, others, max(1, round(wait_s * 1000)) if others else 0))

    def take(self, keys: Sequence[StoreKey], owner: bytes, ttl_s: float) -> tuple[int, int, float]:
        """Claims the leading keys that nobody else has claimed. Returns how many that are, how many
        keys after them others have claimed, and the seconds until the first of these claims ends.
        """
        now = self._clock()
        claim = owner, now + ttl_s
        for count, key in enumerate(keys):
            known = self._claims.get(key)
            if known is not None and known[0] != owner and known[1] > now:
                return count, self._count_others(keys[count:], owner, now), known[1] - now
            if known is None and len(self._claims) >= _MAX_CLAIMS:
                return count, 0, 0.0
            self._claims[key] = claim
        return len(keys), 0, 0.0

    def release(self, keys: Sequence[StoreKey], owner: bytes) -> int:
        """Ends the claims of this owner; returns how many there were."""
        mine = [key for key in dict.fromkeys(keys) if self._claims.get(key, (b"", 0))[0] == owner]
        for key in mine:
            del self._claims[key]
        return len(mine)

    def expire(self) -> None:
        now = self._clock()
        for key in [key for key, (_, until) in self._claims.items() if until <= now]:
            del self._claims[key]

    def _count_others(self, keys: Sequence[StoreKey], owner: bytes, now: float) -> int:
        for count, key in enumerate(keys):
            known = self._claims.get(key)
            if known is None or known[0] == owner or known[1] <= now:
                return count
        return len(keys)
