"""`/metrics` and `/healthz` for monitors, a status page for people, served by threads of their own.

Beyond loopback metrics and facts are for those who send a token. The operator may say that metrics
are open; facts, which have lines of the log, never are. `/healthz` says no more than whether the
daemon is well, and kubelet sends no token. The document at `/` holds no facts: it asks its reader
for the token, and `/status.json` for the facts. On loopback without a token, requests must name
loopback as their host: else any web site could have its own name resolve to 127.0.0.1, and read the
facts through the browser of somebody on this host.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.server.net.endpoints import is_loopback, is_port
from vllm_tiered_kv.server.page.status_page import StatusPage

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 5.0  # from connecting to the end of the answer
_POLL_S = 0.5
_MAX_CONNECTIONS = 64  # beyond it, the oldest is closed for a new one
_PUBLIC = ("/", "/healthz")  # without the token


class _Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = "text/plain; version=0.0.4; charset=utf-8"  # as Prometheus wants it
    policy: str = "default-src 'none'"


Pages = Mapping[str, Callable[[str], _Answer]]
"""By path; each is called with the query."""


class HttpServer:
    """Serves the pages until `close`. `health_problem` returns why the daemon is unhealthy, or
    None; like `metrics` and `status`, it is called from HTTP threads."""

    def __init__(
        self,
        address: str,
        metrics: Callable[[], str],
        health_problem: Callable[[], str | None],
        token: str | None = None,
        is_open: bool = False,
        status: StatusPage | None = None,
    ) -> None:
        """With a `token`, metrics and facts are for those who send it, without one for this host.
        If `is_open`, metrics are for all."""
        host, port = parse_address(address, token is not None or is_open)
        pages: dict[str, Callable[[str], _Answer]] = {
            "/metrics": lambda query: _text(200, metrics()),
            "/healthz": lambda query: _health(health_problem()),
        }
        if status is not None:
            html = _Answer(200, status.document, "text/html; charset=utf-8", status.policy)
            pages["/"] = lambda query: html
            pages["/status.json"] = lambda query: _facts(status, query)
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = kind((host, port), _handler(pages, token, is_open))
        except OSError as error:
            raise ConfigError(
                "http",
                f"cannot listen on {address}: {error.strerror}; use another port, or off",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="tiered-kv-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def parse_address(address: str, may_be_remote: bool) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not re.fullmatch(r"\[[^\[\]]+\]", host)
    if not host or "/" in host or is_bare_ipv6 or not is_port(port):
        raise ConfigError("http", f'{address!r} is neither like "127.0.0.1:9528" nor "off"')
    if not is_loopback(host) and not may_be_remote:
        raise ConfigError(
            "http",
            f"{address} can be reached from other hosts: set http_token to a file with a token "
            "that monitors send, or http_open if everyone there may read the metrics",
        )
    return ("127.0.0.1" if host == "localhost" else host.strip("[]")), int(port)


def read_token(path: str) -> str:
    """Raises ConfigError if the file is not one line of what a header can hold."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError("http_token", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        token = ""
    if re.fullmatch(r"[!-~]{16,256}", token) is None:
        raise ConfigError(
            "http_token",
            f"{path} must hold 16 to 256 characters without blanks; make it with "
            "openssl rand -hex 32",
        )
    return token


def _text(status: int, text: str) -> _Answer:
    return _Answer(status, text.encode())


def _health(problem: str | None) -> _Answer:
    return _text(200, "ok\n") if problem is None else _text(503, f"{problem}\n")


def _facts(status: StatusPage, query: str) -> _Answer:
    try:
        after = int(parse_qs(query).get("after", ["-1"])[-1])
    except ValueError:
        return _text(400, "after must be the number of a sample, as in /status.json?after=12\n")
    return _Answer(200, status.facts(after).encode(), "application/json")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._since: dict[socket.socket, float] = {}  # open connections, oldest first
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Without the lookup of the host's name, for which HTTPServer may wait long."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Closes the oldest connections above the limit: real monitors send at once."""
        with self._lock:
            while len(self._since) >= _MAX_CONNECTIONS:
                self._end(next(iter(self._since)))
            self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            with self._lock:
                self._since.pop(request, None)
            raise

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # before the descriptor number is reused
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called regularly: closes clients that keep sending but never finish a request."""
        limit = time.monotonic() - _REQUEST_TIMEOUT_S
        with self._lock:
            for request in [one for one, since in self._since.items() if since < limit]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shuts the socket down; its thread notices and closes it."""
        del self._since[request]
        with contextlib.suppress(OSError):  # the client has closed it already
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP client failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(pages: Pages, token: str | None, is_open: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S
        server_version = "tiered-kv-server"
        sys_version = ""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            name, _, query = self.path.partition("?")
            page = pages.get(name)
            if page is None:
                answer = _text(404, f"try one of {' '.join(pages)}\n")
            elif name in _PUBLIC or (is_open and name == "/metrics"):
                answer = page(query)
            elif token is not None and not self._has_token(token):
                how = "send the token of http_token: Authorization: Bearer TOKEN\n"
                answer = _text(401, how)
            elif token is None and not self._is_from_here():
                others = "http_token or http_open" if name == "/metrics" else "http_token"
                how = f"ask this host for localhost or 127.0.0.1; for others it needs {others}\n"
                answer = _text(403, how)
            else:
                answer = page(query)
            self.send_response(answer.status)
            if answer.status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("Content-Security-Policy", answer.policy)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            if with_body:
                self.wfile.write(answer.body)

        def _has_token(self, token: str) -> bool:
            given = self.headers.get("Authorization", "")
            scheme, _, sent = given.partition(" ")
            same = hmac.compare_digest(sent.strip().encode("utf-8", "replace"), token.encode())
            return scheme.lower() == "bearer" and same

        def _is_from_here(self) -> bool:
            if not is_loopback(str(self.client_address[0]).removeprefix("::ffff:")):
                return False
            if (host := self.headers.get("Host")) is None:
                return True  # browsers always send it
            try:
                return is_loopback(urlsplit(f"//{host}").hostname or "")
            except ValueError:
                return False

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug("http: " + format, *args)

    return Handler
