"""Who is connected: one session for each client socket that has said hello."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import zmq

from vllm_tiered_kv.core.store import StoreKey, key_prefix
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.shm.leases import Attachment
from vllm_tiered_kv.server.tiers.namespace_file import Shape

_FRESH_S = 1.0  # a session used more recently than this is not dropped for a new one


@dataclass(frozen=True, eq=False)
class Listener:
    """A bound ROUTER socket."""

    socket: zmq.Socket[bytes]
    endpoint: str
    is_local: bool  # over ipc://


class Peer(NamedTuple):
    """A client's socket as zmq knows it. A tuple: it is looked up some twenty times for a message,
    and the hash of a dataclass is Python code."""

    listener: Listener
    identity: bytes


@dataclass(slots=True, eq=False)
class Session:
    peer: Peer
    client: str
    user: str  # public key of an authenticated client, or empty
    read_only: bool
    namespace: bytes
    shape: Shape
    attachment: Attachment | None
    session_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    last_seen: float = field(default_factory=time.monotonic)
    under_way: int = 0  # requests not yet answered
    is_open: bool = True
    _prefix: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._prefix = key_prefix(self.namespace)

    @property
    def largest_block(self) -> int:
        return max(self.shape.block_bytes, default=1)

    def key(self, wire_key: bytes) -> StoreKey:
        return StoreKey(self._prefix + wire_key)

    def keys(self, width: int, wire_keys: list[bytes]) -> list[StoreKey]:
        self.require_width(width)
        return self.prefixed(wire_keys)

    def prefixed(self, wire_keys: list[bytes]) -> list[StoreKey]:
        prefix = self._prefix
        return cast("list[StoreKey]", [prefix + key for key in wire_keys])

    def parents(self, wire_keys: list[bytes | None]) -> list[StoreKey | None]:
        return [None if key is None else self.key(key) for key in wire_keys]

    def require_width(self, width: int) -> None:
        if width != self.shape.key_bytes:
            raise ProtocolError(
                ErrorCode.MISMATCH,
                f"keys of {width} bytes; this session's have {self.shape.key_bytes}",
            )

    def require_lengths(self, lengths: list[int]) -> None:
        strange = set(lengths) - self.shape.block_bytes
        if strange:
            raise ProtocolError(
                ErrorCode.MISMATCH,
                f"a block of {min(strange)} bytes; this session's blocks have "
                f"{sorted(self.shape.block_bytes)}",
            )

    def require_writer(self) -> None:
        if self.read_only:
            raise ProtocolError(ErrorCode.READ_ONLY, "this client may only read")

    def require_room(self, most: int) -> None:
        """For one more request, with so many under way at most."""
        if self.under_way >= most:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"{self.under_way} requests of this session are under way already",
            )

    def require_attachment(self) -> Attachment:
        if self.attachment is None or self.attachment.is_gone:
            raise ProtocolError(ErrorCode.NO_ARENA, "no shared memory is attached to this session")
        return self.attachment


class Sessions:
    """At most so many. A session that is dropped has to say hello again, nothing else."""

    def __init__(self, most: int, idle_s: float, on_drop: Callable[[Session], None]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._on_drop = on_drop
        self._by_peer: dict[Peer, Session] = {}  # longest unused first, about

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def under_way(self) -> int:
        """Requests not yet answered."""
        return sum(session.under_way for session in self._by_peer.values())

    def at(self, peer: Peer) -> Session | None:
        return self._by_peer.get(peer)

    def find(self, peer: Peer, user: str) -> Session | None:
        """The session of this socket, if the same client still speaks through it."""
        session = self._by_peer.get(peer)
        if session is None or session.user != user:
            return None
        now = time.monotonic()
        if now - session.last_seen > _FRESH_S:
            self._by_peer.pop(peer)
            self._by_peer[peer] = session
        session.last_seen = now
        return session

    def open(self, session: Session) -> None:
        before = self._by_peer.get(session.peer)
        if before is not None and before.under_way:  # their replies belong to that session
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"{before.under_way} requests are under way; say hello when they are answered",
            )
        self.drop(session.peer)
        if len(self._by_peer) >= self._most:
            unused = self._longest_unused()
            if unused is None:
                raise ProtocolError(
                    ErrorCode.UNAVAILABLE, f"{self._most} sessions are open, and all are in use"
                )
            self.drop(unused.peer)
        self._by_peer[session.peer] = session

    def _longest_unused(self) -> Session | None:
        """Not just the first: one that never rests stays where it is, and so does one that waits
        for its answer, while clients that have gone leave their sessions behind them."""
        limit = time.monotonic() - _FRESH_S
        unused = (s for s in self._by_peer.values() if not s.under_way and s.last_seen <= limit)
        return next(unused, None)

    def drop(self, peer: Peer) -> None:
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.is_open = False
            self._on_drop(session)

    def drop_idle(self) -> None:
        limit = time.monotonic() - self._idle_s
        for peer in [p for p, s in self._by_peer.items() if s.last_seen < limit]:
            if not self._by_peer[peer].under_way:
                self.drop(peer)
