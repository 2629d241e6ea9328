"""`/metrics` and `/healthz` for monitors on this host, served by threads of their own."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.server.net.endpoints import is_loopback, is_port

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 5.0  # from connecting to the end of the answer
_POLL_S = 0.5
_MAX_CONNECTIONS = 64  # beyond it, the oldest is closed for a new one


class HttpServer:
    """Serves both pages until `close`. `health_problem` returns why the daemon is unhealthy, or
    None; like `metrics`, it is called from HTTP threads."""

    def __init__(
        self, address: str, metrics: Callable[[], str], health_problem: Callable[[], str | None]
    ) -> None:
        host, port = parse_address(address)
        pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/metrics": lambda: (200, metrics()),
            "/healthz": lambda: _health(health_problem()),
        }
        try:
            self._server = _Server((host, port), _handler(pages))
        except OSError as error:
            raise ConfigError(
                "http",
                f"cannot listen on {address}: {error.strerror}; use another port, or off",
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="tiered-kv-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not is_port(port):
        raise ConfigError("http", f'{address!r} is neither like "127.0.0.1:9528" nor "off"')
    if not is_loopback(host) or ":" in host:
        raise ConfigError(
            "http",
            f"{address} must be a loopback address; use a reverse proxy for remote access",
        )
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def _health(problem: str | None) -> tuple[int, str]:
    return (200, "ok\n") if problem is None else (503, f"{problem}\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._since: dict[socket.socket, float] = {}  # open connections, oldest first
        self._lock = threading.Lock()

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


def _handler(
    pages: dict[str, Callable[[], tuple[int, str]]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S
        server_version = "tiered-kv-server"
        sys_version = ""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = (404, "try /metrics or /healthz\n") if page is None else page()
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug("http: " + format, *args)

    return Handler
