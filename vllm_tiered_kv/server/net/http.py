"""`/metrics` and `/healthz` for monitors, served by threads of their own.

Beyond loopback the page of metrics is for those who send a token, unless the operator says that it
is open. `/healthz` says no more than whether the daemon is well, and kubelet sends no token.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
        self,
        address: str,
        metrics: Callable[[], str],
        health_problem: Callable[[], str | None],
        token: str | None = None,
        is_open: bool = False,
    ) -> None:
        """With a `token`, `/metrics` is for those who send it."""
        host, port = parse_address(address, token is not None or is_open)
        pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/metrics": lambda: (200, metrics()),
            "/healthz": lambda: _health(health_problem()),
        }
        try:
            kind = _Server6 if ":" in host else _Server
            self._server = kind((host, port), _handler(pages, token))
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


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(
    pages: dict[str, Callable[[], tuple[int, str]]], token: str | None
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
            name = self.path.partition("?")[0]
            page = pages.get(name)
            if page is None:
                status, text = 404, "try /metrics or /healthz\n"
            elif name != "/healthz" and not self._is_admitted():
                status, text = 401, "send the token of http_token: Authorization: Bearer TOKEN\n"
            else:
                status, text = page()
            body = text.encode()
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _is_admitted(self) -> bool:
            if token is None:
                return True
            given = self.headers.get("Authorization", "")
            scheme, _, sent = given.partition(" ")
            same = hmac.compare_digest(sent.strip().encode("utf-8", "replace"), token.encode())
            return scheme.lower() == "bearer" and same

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug("http: " + format, *args)

    return Handler
