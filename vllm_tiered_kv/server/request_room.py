"""How much of what clients have sent may wait for its answer.

The keys of a request are kept until it is answered, and a tier may take its time. What they take up
here is several times what they took up on the wire.
"""

from __future__ import annotations

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.allowances import Allowances
from vllm_tiered_kv.server.sessions import Session


class RequestRoom:
    """Bytes of the headers of requests under way. Used on the reactor's thread only."""

    def __init__(self, allowances: Allowances) -> None:
        self._most = allowances.request_bytes
        self._most_per_session = allowances.request_bytes_per_session
        self._taken = 0

    def take(self, session: Session, nbytes: int) -> None:
        """ProtocolError where there is none. One who has nothing under way finds some always."""
        mine = session.under_way_bytes
        fits = mine + nbytes <= self._most_per_session and self._taken + nbytes <= self._most
        if mine and not fits:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"requests of {mine} bytes of this session are under way already",
            )
        session.under_way_bytes += nbytes
        self._taken += nbytes

    def give_back(self, session: Session, nbytes: int) -> None:
        session.under_way_bytes -= nbytes
        self._taken -= nbytes
