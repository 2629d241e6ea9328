"""Sessions: one for each client socket that has sent `hello`."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import zmq

from vllm_tiered_kv.core.store import StoreKey, key_prefix
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.shm.leases import Attachment
from vllm_tiered_kv.server.tiers.namespace_file import Shape

_MAX_ROWS = 100  # keeps the status page short
_IN_USE_S = 1.0  # a session used more recently than this is not closed for a new one


@dataclass(frozen=True, eq=False)
class Listener:
    """A bound ROUTER socket that clients connect to."""

    socket: zmq.Socket[bytes]
    endpoint: str
    is_local: bool  # over ipc://


class Peer(NamedTuple):
    """A client's socket as zmq identifies it. A tuple because every message looks it up some twenty
    times, and a tuple hashes without running Python code."""

    listener: Listener
    identity: bytes


make_peer: Callable[[tuple[Listener, bytes]], Peer] = functools.partial(tuple.__new__, Peer)
"""Like `Peer(...)`, but faster: it skips the generated `__new__`."""


@dataclass(slots=True, eq=False)
class Session:
    """A client after `hello`: what it may do and the shape of its keys and blocks. The gateway
    creates it. Used on the reactor's thread only."""

    peer: Peer
    client: str
    user: str  # public key of an authenticated client, empty for others
    read_only: bool
    namespace: bytes
    shape: Shape
    attachment: Attachment | None
    session_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    last_seen: float = field(default_factory=time.monotonic)
    in_flight: int = 0  # requests not yet answered
    is_open: bool = True
    largest_block: int = field(init=False)
    key_prefix: bytes = field(init=False)  # of the store's keys

    def __post_init__(self) -> None:
        self.largest_block = max(self.shape.block_bytes, default=1)
        self.key_prefix = key_prefix(self.namespace)

    def key(self, wire_key: bytes) -> StoreKey:
        return StoreKey(self.key_prefix + wire_key)

    def keys(self, width: int, wire_keys: list[bytes]) -> list[StoreKey]:
        self.require_width(width)
        return self.prefixed(wire_keys)

    def prefixed(self, wire_keys: list[bytes]) -> list[StoreKey]:
        prefix = self.key_prefix
        return cast("list[StoreKey]", [prefix + key for key in wire_keys])

    def parents(self, wire_keys: list[bytes | None]) -> list[StoreKey | None]:
        return [None if key is None else self.key(key) for key in wire_keys]

    def require_width(self, width: int) -> None:
        if width != self.shape.key_bytes:
            raise ProtocolError(
                ErrorCode.MISMATCH,
                f"the keys have {width} bytes; this session's have {self.shape.key_bytes}",
            )

    def require_lengths(self, lengths: list[int]) -> None:
        strange = set(lengths) - self.shape.block_bytes
        if strange:
            raise ProtocolError(
                ErrorCode.MISMATCH,
                f"a block has {min(strange)} bytes; this session's blocks have "
                f"{sorted(self.shape.block_bytes)}",
            )

    def require_writer(self) -> None:
        if self.read_only:
            raise ProtocolError(ErrorCode.READ_ONLY, "this client's key is read-only")

    def require_inflight_room(self, max_in_flight: int) -> None:
        """ProtocolError if `max_in_flight` requests are in flight already."""
        if self.in_flight >= max_in_flight:
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"{self.in_flight} requests of this session are in flight; wait for replies",
            )

    def require_attachment(self) -> Attachment:
        if self.attachment is None or self.attachment.is_gone:
            raise ProtocolError(ErrorCode.NO_ARENA, "no shared memory is attached to this session")
        return self.attachment


class Sessions:
    """The open sessions, limited in number. The client of a closed session only has to send
    `hello` again. Used on the reactor's thread only, apart from `facts`."""

    def __init__(
        self, max_sessions: int, idle_s: float, on_drop: Callable[[Session], None]
    ) -> None:
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._on_drop = on_drop
        self._by_peer: dict[Peer, Session] = {}  # roughly least recently used first

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def in_flight(self) -> int:
        """Requests not yet answered."""
        return sum(session.in_flight for session in self._by_peer.values())

    def facts(self) -> dict[str, Any]:
        """Each process that maps the memory, and other clients by their name: the latest first, and
        how many are left out. From any thread."""
        now = time.monotonic()
        rows: dict[tuple[str, int, str, bool], dict[str, Any]] = {}
        for session in list(self._by_peer.values()):  # copied at once, as other threads change it
            pid = 0 if session.attachment is None else session.attachment.pid
            transport = "ipc" if session.peer.listener.is_local else "tcp"
            row = rows.setdefault(
                (session.client, pid, transport, session.read_only),
                {
                    "client": session.client,
                    "pid": pid,
                    "transport": transport,
                    "read_only": session.read_only,
                    "sessions": 0,
                    "in_flight": 0,
                    "idle_s": math.inf,
                    "leased_bytes": 0 if session.attachment is None else session.attachment.nbytes,
                },
            )
            row["sessions"] += 1
            row["in_flight"] += session.in_flight
            row["idle_s"] = min(row["idle_s"], round(max(0.0, now - session.last_seen), 1))
        latest = sorted(rows.values(), key=lambda row: row["idle_s"])
        return {"rows": latest[:_MAX_ROWS], "left_out": len(latest[_MAX_ROWS:])}

    def get(self, peer: Peer) -> Session | None:
        return self._by_peer.get(peer)

    def find(self, peer: Peer, user: str) -> Session | None:
        """The session of this socket, if it still belongs to the same authenticated client."""
        session = self._by_peer.get(peer)
        if session is None or session.user != user:
            return None
        now = time.monotonic()
        if now - session.last_seen > _IN_USE_S:
            self._by_peer.pop(peer)
            self._by_peer[peer] = session
        session.last_seen = now
        return session

    def open(self, session: Session) -> None:
        before = self._by_peer.get(session.peer)
        if before is not None and before.in_flight:  # the replies belong to the old session
            raise ProtocolError(
                ErrorCode.UNAVAILABLE,
                f"{before.in_flight} requests are in flight; send hello after their replies",
            )
        self.drop(session.peer)
        if len(self._by_peer) >= self._max_sessions:
            unused = self._least_recently_used()
            if unused is None:
                raise ProtocolError(
                    ErrorCode.UNAVAILABLE, f"{self._max_sessions} sessions are open and in use"
                )
            self.drop(unused.peer)
        self._by_peer[session.peer] = session

    def _least_recently_used(self) -> Session | None:
        """The first that is idle. Sessions that are in use all the time, or wait for an answer,
        keep their place at the front."""
        limit = time.monotonic() - _IN_USE_S
        unused = (s for s in self._by_peer.values() if not s.in_flight and s.last_seen <= limit)
        return next(unused, None)

    def drop(self, peer: Peer) -> None:
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.is_open = False
            self._on_drop(session)

    def drop_idle(self) -> None:
        limit = time.monotonic() - self._idle_s
        for peer in [p for p, s in self._by_peer.items() if s.last_seen < limit]:
            if not self._by_peer[peer].in_flight:
                self.drop(peer)
