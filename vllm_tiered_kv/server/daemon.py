"""Assembles the daemon from sockets, tiers and handlers, and shuts it down in order."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from vllm_tiered_kv import __version__
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.memory import keep_large_buffers
from vllm_tiered_kv.server.net.admission import Admission
from vllm_tiered_kv.server.net.connections import Connections
from vllm_tiered_kv.server.net.curve import (
    Clients,
    ZapAuthenticator,
    load_clients,
    load_server_keys,
)
from vllm_tiered_kv.server.net.descriptors import for_connections
from vllm_tiered_kv.server.net.endpoints import (
    SocketPathLock,
    bind,
    bind_arena_socket,
    check_endpoint,
)
from vllm_tiered_kv.server.net.gateway import Gateway
from vllm_tiered_kv.server.net.http import HttpServer, parse_address, read_token
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Listener, Peer, Sessions
from vllm_tiered_kv.server.options import ServerOptions
from vllm_tiered_kv.server.page.history import History
from vllm_tiered_kv.server.page.recent_problems import RecentProblems
from vllm_tiered_kv.server.page.status_page import StatusPage
from vllm_tiered_kv.server.requests.claims import Claims
from vllm_tiered_kv.server.requests.handlers import Handlers
from vllm_tiered_kv.server.requests.pin_handlers import PinHandlers
from vllm_tiered_kv.server.requests.server_stats import Sample, ServerStats, tier_samples
from vllm_tiered_kv.server.shm.arena_server import ArenaServer
from vllm_tiered_kv.server.shm.lease_handlers import ArenaHandlers
from vllm_tiered_kv.server.tiers import opening
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.demotion import Unwritten
from vllm_tiered_kv.server.tiers.namespaces import Namespaces
from vllm_tiered_kv.server.tiers.pins import Pins
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.wire.limits import MAX_TEXT, PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_IDLE_SESSION_S = 24 * 3600.0
_REPLY_GRACE_S = 10.0  # for replies in flight when the daemon is told to stop
_THREAD_RETRY_S = 1.0  # after no thread could be started
_SLOW_LOOP_S = 15.0
_INDEX_BYTES = 600  # for each block of a tier; an upper bound, also while an index grows
_MAX_SILENT_SHOWN = 20  # keeps the reply short
_EXTRA_CONNECTIONS = 1024  # on top of sessions: a connection exists before and after its session


class Daemon:
    """The whole daemon. Create it with `open`; `run` serves on the calling thread until `stop`."""

    @classmethod
    def open(cls, options: ServerOptions) -> Daemon:
        """Binds the sockets and opens the tiers; on an error it closes everything and raises."""
        daemon = cls(options)
        try:
            daemon._open()
        except BaseException:
            daemon._close_partly_opened()
            raise
        return daemon

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._recorder = Recorder()
        self._reactor = Reactor()
        self._limits = ClientLimits.of_memory(options.memory).within(options.network_memory)
        self._instance = secrets.token_bytes(16)
        self._started_at = time.time()
        keep_large_buffers()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(options.io_threads)
        self._network = NetworkMemory(
            self._limits.network,
            self._limits.requests_per_client,
            on_excess=lambda: self._connections.schedule_shed(),
        )
        self._sessions = Sessions(
            options.max_sessions,
            _IDLE_SESSION_S,
            lambda session: self._reactor.post(self._handlers.transfers.pump),
        )
        self._connections = Connections(
            self._reactor,
            self._context,
            self._limits,
            self._network,
            min(for_connections(), options.max_sessions + _EXTRA_CONNECTIONS),
            options.stall_timeout,
            self._recorder,
            has_session=lambda peer: self._sessions.get(peer) is not None,
            has_in_flight=self._has_in_flight,
            has_leases=self._has_leases,
            on_client_idle=self._sessions.drop,
            on_client_shed=lambda peer, why: self._gateway.drop_client(peer, why),
            on_closed=lambda peer: self._outbox.connection_closed(peer),
            index_bytes=self._index_bytes,
        )
        self._path_locks: list[SocketPathLock] = []
        self._listeners: list[Listener] = []
        self._arena_sockets: list[socket.socket] = []
        self._authenticator: ZapAuthenticator | None = None
        self._http: HttpServer | None = None
        self._http_token: str | None = None
        self._history: History | None = None
        self._recent_problems = RecentProblems()
        self._opened: TieredStore | None = None
        self._stopping = False
        self.all_written = True
        """After `run`: whether every block that had to be written to a slower tier was."""
        self.unwritten: list[Unwritten] = []
        """After `run`: what was not written, including blocks that found no room."""
        self.has_hung_threads = False
        """After `run`: whether threads are left that hang in the backing tier."""

    def _open(self) -> None:
        options, reactor = self.options, self._reactor
        self._recent_problems.attach()
        clients = self._open_sockets()
        self._store = self._opened = opening.open_tiers(
            options,
            self._recorder,
            on_deleted=lambda keys: reactor.post(lambda: self._pins.void(keys)),
            watch=reactor.watch,
        )
        memory = self._store.memory
        self._outbox = Outbox(
            reactor,
            memory,
            self._limits,
            self._recorder,
            self._network,
            self._connections,
            options.stall_timeout,
            on_client_lost=lambda peer, why: self._gateway.drop_client(peer, why),
            on_room_freed=lambda: self._handlers.transfers.pump(),
        )
        self._arena = ArenaServer(
            reactor, memory, self._limits, self._instance, options.stall_timeout
        )
        self._leases = self._arena.leases
        for listening in self._arena_sockets:
            self._arena.serve(listening)
        self._pins = Pins(memory, self._limits)
        self._claims = Claims()
        folder = Path(options.ssd) if options.ssd else None
        self._namespaces = Namespaces(folder, self._limits.namespaces)
        durations = Histogram(names.REQUEST_SECONDS)
        histograms = [durations]
        if self._store.ssd is not None:
            histograms += [self._store.ssd.read_times, self._store.ssd.write_times]
        self._stats = ServerStats(self._recorder, self._gauges, self._details, histograms)
        self._handlers = Handlers(
            reactor,
            self._store,
            self._outbox,
            self._limits,
            self._recorder,
            self._network,
            ArenaHandlers(reactor, self._store, self._leases, self._recorder),
            PinHandlers(reactor, self._store, self._pins),
            self._claims,
            self.info,
            self._stats.stats,
        )
        admission = Admission(
            self._sessions,
            self._namespaces,
            self._leases,
            clients,
            self._limits,
            self._instance,
            shares_memory=bool(self._arena_sockets),
        )
        self._gateway = Gateway(
            reactor,
            self._outbox,
            self._handlers,
            self._sessions,
            admission,
            self._connections,
            self._network,
            self._limits,
            self._recorder,
            durations,
        )
        for listener in self._listeners:
            self._gateway.serve(listener)
        reactor.every(0.2, self._pins.expire)
        reactor.every(1.0, self._claims.expire)
        reactor.every(1.0, self._leases.log_silent)
        reactor.every(30.0, self._sessions.drop_idle)
        if options.http != "off":
            self._history = History(self._stats.stats, durations, list(self._store.usages()))
            self._history.start()
            self._http = HttpServer(
                options.http,
                self._stats.prometheus,
                self._health_problem,
                self._http_token,
                options.http_open,
                StatusPage(self._facts(), self._history, self._recent_problems),
            )

    def _open_sockets(self) -> Clients | None:
        """Comes before the tiers: mistakes show at once, and no other thread creates files while
        the umask is changed."""
        options = self.options
        keys = clients = None
        if options.http != "off":
            self._http_token = read_token(options.http_token) if options.http_token else None
            parse_address(options.http, self._http_token is not None or options.http_open)
        for endpoint in options.listen:
            check_endpoint(endpoint, bool(options.secret_key))
        if options.secret_key:
            keys = load_server_keys(options.secret_key)
            clients = load_clients(options.clients)
            self._authenticator = ZapAuthenticator(self._context, clients)
            self._reactor.watch(self._authenticator.socket, self._authenticator.answer)
        for endpoint in options.listen:
            if endpoint.startswith("ipc://"):
                self._path_locks.append(SocketPathLock(endpoint.removeprefix("ipc://")))
            listener = bind(self._context, endpoint, keys, self._limits, options.stall_timeout)
            self._listeners.append(listener)
            if listener.is_local:
                self._arena_sockets.append(bind_arena_socket(listener.endpoint))
            self._connections.watch(listener)
        return clients

    # ---- running and stopping -------------------------------------------------------------------

    @property
    def endpoints(self) -> list[str]:
        return [listener.endpoint for listener in self._listeners]

    @property
    def http_address(self) -> str | None:
        return None if self._http is None else self._http.address

    @property
    def tier_lines(self) -> list[str]:
        return opening.describe(self.options, self._store)

    def run(self) -> None:
        """Serves until `stop` was called and everything is written."""
        try:
            self._reactor.run()
        finally:
            self._close()

    def stop(self) -> None:
        """Stops the daemon in order. From any thread, and from signal handlers."""
        self._reactor.post(self._begin_stop)

    def _begin_stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._gateway.is_closing = True
        logger.info("stopping: new requests are refused")
        self._stop_by = time.monotonic() + _REPLY_GRACE_S
        self._await_replies()

    def _await_replies(self) -> None:
        in_flight = self._sessions.in_flight
        if (in_flight or not self._outbox.is_empty) and time.monotonic() < self._stop_by:
            self._reactor.after(0.01, self._await_replies)
            return
        if in_flight:
            logger.warning("stopping with %d requests left unanswered", in_flight)
        # Meanwhile the loop answers "unavailable", so that clients need not wait for a timeout.
        try:
            threading.Thread(target=self._drain, name="tiered-kv-stop").start()
        except RuntimeError as error:
            logger.warning("cannot start the thread that writes blocks back: %s; retrying", error)
            self._reactor.after(_THREAD_RETRY_S, self._await_replies)

    def _drain(self) -> None:
        try:
            self.unwritten = self._store.drain(
                lambda tier, left: logger.info("%d blocks are left to write to %s", left, tier)
            )
            for left in self.unwritten:
                logger.warning("%s", left)
            self.all_written = not any(left.has_failed for left in self.unwritten)
        except Exception:
            logger.exception("not everything could be written because of an internal error")
            self.all_written = False
        finally:
            self._reactor.post(self._reactor.stop)

    def _close(self) -> None:
        if self._history is not None:
            self._history.close()
        if self._http is not None:
            self._http.close()
        self._recent_problems.detach()
        self._arena.close()
        self._close_sockets(linger_ms=1000)
        self._namespaces.close()  # writes into the SSD folder, so before its lock is released
        self.has_hung_threads = not self._store.close()
        for lock in self._path_locks:
            lock.release()
        self._reactor.close()

    def _close_partly_opened(self) -> None:
        self._recent_problems.detach()
        if self._history is not None:
            self._history.close()
        if self._opened is not None:
            self._opened.close()
        for listening in self._arena_sockets:
            listening.close()
        self._close_sockets(linger_ms=0)
        for lock in self._path_locks:
            lock.release()

    def _close_sockets(self, linger_ms: int) -> None:
        """Returns when zmq is done with the sockets: it references the memory and removes files."""
        self._connections.close()
        for listener in self._listeners:
            listener.socket.close(linger=linger_ms)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def _has_in_flight(self, peer: Peer) -> bool:
        session = self._sessions.get(peer)
        return (session is not None and bool(session.in_flight)) or self._outbox.has_replies(peer)

    def _has_leases(self, peer: Peer) -> bool:
        """Whether the client's process holds leases. The reply that brings them may still be
        unread, by a process that is stopped, and would be lost with the connection."""
        session = self._sessions.get(peer)
        attachment = session.attachment if session is not None else None
        return attachment is not None and bool(attachment.leases)

    # ---- status ---------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        return {
            "server": f"tiered-kv-server {__version__}",
            "protocol": PROTOCOL_VERSION,
            "instance": self._instance.hex(),
            "pid": os.getpid(),
            "endpoints": self.endpoints,
            "tiers": {tier: usage.capacity_bytes for tier, usage in self._store.usages().items()},
            "largest_block": self._limits.largest_block,
            "message_bytes": self._limits.message,
            "silent_processes": [
                one.held[:MAX_TEXT] for one in self._leases.silent()[:_MAX_SILENT_SHOWN]
            ],
            "by_namespace": self._namespaces.rows(self._store.usages_by_namespace()),
        }

    def _gauges(self) -> Iterator[Sample]:
        for tier, usage in self._store.usages().items():
            yield from tier_samples(tier, usage)
        if self._store.ssd is not None:
            counters = self._store.ssd.counters
            yield names.EVICTED, (Tier.SSD.value,), counters.evicted_blocks
            yield names.DAMAGED, (Tier.SSD.value,), counters.bad_blocks + counters.read_errors
            not_kept = counters.failed_blocks + counters.dropped_blocks
            yield names.NOT_KEPT, (Tier.SSD.value,), not_kept
            speed = self._store.ssd.read_speed.bytes_per_s
            if speed is not None:
                yield names.READ_SPEED, (Tier.SSD.value,), round(speed)
        backing = self._store.backing
        if isinstance(backing, BackingTier):
            yield names.DAMAGED, (Tier.BACKING.value,), backing.damaged_blocks
            yield names.NOT_KEPT, (Tier.BACKING.value,), backing.failed_blocks
            is_absent = backing.is_absent or self._store.is_backing_absent
            yield names.BACKING_ABSENT, (), is_absent
        if self._authenticator is not None:
            yield names.CLIENTS_REFUSED, (), self._authenticator.refused
        for tier, (blocks, nbytes) in self._store.pending_writes().items():
            yield names.PENDING_BLOCKS, (tier,), blocks
            yield names.PENDING_BYTES, (tier,), nbytes
        yield names.SESSIONS, (), len(self._sessions)
        yield names.ATTACHMENTS, (), self._leases.attachments
        yield names.NAMESPACES, (), len(self._namespaces)
        yield names.LEASES, (), len(self._leases)
        yield names.LEASED_BYTES, (), self._leases.held_bytes
        silent_bytes = sum(one.nbytes for one in self._leases.silent())
        yield names.SILENT_LEASED_BYTES, (), silent_bytes
        yield names.CLAIMS, (), len(self._claims)
        yield names.PINS, (), len(self._pins)
        yield names.PINNED_BYTES, (), self._pins.held_bytes
        yield names.REPLY_BYTES, (), self._outbox.claimed_bytes
        yield names.PUT_BYTES, (), self._handlers.put_bytes
        yield names.NETWORK_BYTES, (), self._network.total

    def _index_bytes(self) -> int | None:
        """An upper bound of what the indexes of the tiers use; None while one is copied."""
        if self._opened is None:
            return 0
        if self._opened.ssd is not None and self._opened.ssd.is_rewriting:
            return None
        stores = (self._opened.memory, self._opened.ssd)
        return _INDEX_BYTES * sum(store.usage().blocks for store in stores if store is not None)

    def _details(self) -> Iterator[Sample]:
        yield names.BUILD_INFO, (__version__,), 1
        yield names.START_TIME, (), round(self._started_at)
        yield names.HEALTHY, (), self._health_problem() is None
        rows = self._namespaces.rows(self._store.usages_by_namespace())
        for namespace, row in rows.items():
            for tier in (Tier.MEMORY.value, Tier.SSD.value):
                nbytes = row.get(f"{tier}_bytes", 0)
                if isinstance(nbytes, int) and f"{tier}_bytes" in row:
                    labels = (namespace, str(row["model"]), tier)
                    yield names.NAMESPACE_BYTES, labels, nbytes

    def _facts(self) -> dict[str, Callable[[], Any]]:
        """For the status page."""
        return {
            "problem": self._health_problem,
            "started": lambda: self._started_at,
            "info": self.info,
            "stats": self._stats.stats,
            "evicted_by_namespace": self._evicted_by_namespace,
            "clients": self._sessions.facts,
        }

    def _evicted_by_namespace(self) -> dict[str, dict[str, int]]:
        """Blocks evicted since the start, by tier and namespace."""
        return {
            tier: {namespace.hex(): count for namespace, count in evicted.items()}
            for tier, evicted in self._store.evictions_by_namespace().items()
        }

    def _health_problem(self) -> str | None:
        if self._stopping:
            return "stopping"
        behind = time.monotonic() - self._reactor.last_turn
        return f"not responding for {behind:.0f} s" if behind > _SLOW_LOOP_S else None
