"""`/metrics` and `/healthz`, for monitors on this host. Apart from the daemon's own loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.server.endpoints import is_loopback, is_port

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for a client to say what it wants
_AT_ONCE = 16  # connections; further ones are closed


class HttpServer:
    """Serves until `close`. `sick` says why the daemon is not well, or nothing."""

    def __init__(
        self, address: str, metrics: Callable[[], str], sick: Callable[[], str | None]
    ) -> None:
        host, port = parse_address(address)
        pages: dict[str, Callable[[], tuple[int, str]]] = {
            "/metrics": lambda: (200, metrics()),
            "/healthz": lambda: _health(sick()),
        }
        try:
            self._server = _Server((host, port), _handler(pages))
        except OSError as error:
            raise ConfigError(
                "http",
                f"cannot listen on {address}: {error.strerror}; choose another port, or off",
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tiered-kv-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not is_port(port):
        raise ConfigError("http", f'{address!r} is not like "127.0.0.1:9528", nor "off"')
    if not is_loopback(host) or ":" in host:
        raise ConfigError(
            "http", f"{address} is not on 127.0.0.1; others must not reach it but by a proxy"
        )
    return ("127.0.0.1" if host == "localhost" else host), int(port)


def _health(sick: str | None) -> tuple[int, str]:
    return (200, "ok\n") if sick is None else (503, f"{sick}\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._places = threading.BoundedSemaphore(_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had, which would give the place back
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP client failed", exc_info=True)


def _handler(
    pages: dict[str, Callable[[], tuple[int, str]]],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S
        server_version = "tiered-kv-server"
        sys_version = ""

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = (404, "try /metrics or /healthz\n") if page is None else page()
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug("http: " + format, *args)

    return Handler
