"""Binds the sockets clients connect to, so that only permitted clients can reach them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.server.net.curve import ServerKeys, protect
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.sessions import Listener
from vllm_tiered_kv.wire.limits import MAX_HEADER_BYTES

ARENA_SUFFIX = ".arena"
LOCK_SUFFIX = ".lock"

_MAX_UNIX_PATH = 107
_RECEIVE_HWM = 16  # messages of one client waiting in zmq; beyond it, the client's socket blocks
_SEND_HWM = 64
_MAX_INT = 2**31 - 1


def check_endpoint(endpoint: str, has_keys: bool) -> None:
    """ConfigError unless the daemon may listen on this endpoint. Looks at no file."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        _check_ipc(endpoint, rest)
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        is_bare_ipv6 = ":" in host and not host.startswith("[")
        if not host or "," in host or is_bare_ipv6 or not (port == "*" or is_port(port)):
            raise ConfigError("listen", f'{endpoint!r} is not like "tcp://127.0.0.1:9527"')
        if not has_keys and not is_loopback(host):
            raise ConfigError(
                "listen",
                f"{endpoint} can be reached from other hosts, which needs keys: create them with "
                "tiered-kv-server keygen and set secret_key and clients, or listen on 127.0.0.1",
            )
    else:
        raise ConfigError("listen", f'{endpoint!r} begins with neither "tcp://" nor "ipc:///"')


def is_port(text: str) -> bool:
    """zmq would accept a larger number and listen on another port."""
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and int(text) < 65536


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # an interface, a host name or a wildcard


def _check_ipc(endpoint: str, path: str) -> None:
    if not path.startswith("/"):
        raise ConfigError("listen", f'write the whole path, like "ipc:///run/kv.sock": {endpoint}')
    if len(os.fsencode(path + ARENA_SUFFIX)) > _MAX_UNIX_PATH:
        raise ConfigError(
            "listen",
            f"{endpoint} is too long: the path of a socket may have at most "
            f"{_MAX_UNIX_PATH - len(ARENA_SUFFIX)} bytes",
        )


def bind(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    keys: ServerKeys | None,
    limits: ClientLimits,
    stall_s: float,
) -> Listener:
    is_local = endpoint.startswith("ipc://")
    router = context.socket(zmq.ROUTER)
    try:
        router.linger = 0
        router.router_mandatory = True  # otherwise zmq drops replies silently
        router.rcvhwm = _RECEIVE_HWM
        router.sndhwm = _SEND_HWM
        router.maxmsgsize = max(limits.largest_block, MAX_HEADER_BYTES)
        router.handshake_ivl = 10_000
        if not is_local:
            router.setsockopt(zmq.TCP_MAXRT, min(int(stall_s * 1000), _MAX_INT))
            router.tcp_keepalive = 1
            router.ipv6 = "[" in endpoint
            if keys is not None:
                protect(router, keys)
        with private_files() if is_local else contextlib.nullcontext():
            router.bind(endpoint.replace("//localhost:", "//127.0.0.1:"))
    except BaseException as error:
        router.close()  # otherwise the context cannot be terminated
        if not isinstance(error, zmq.ZMQError):
            raise
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError("listen", f"{endpoint} is in use by another process") from error
        raise ConfigError("listen", f"cannot listen on {endpoint}: {error}") from error
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return Listener(router, bound.rstrip(b"\0").decode(), is_local)


def bind_arena_socket(ipc_endpoint: str) -> socket.socket:
    """The socket beside an ipc:// endpoint that passes the arena's descriptor to processes."""
    path = ipc_endpoint.removeprefix("ipc://") + ARENA_SUFFIX
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    listening = socket.socket(socket.AF_UNIX, kind)
    try:
        with private_files():
            listening.bind(path)
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise ConfigError("listen", f"cannot listen on {path}: {error.strerror}") from error
    return listening


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files created inside are private to this user. The umask belongs to the process, so no other
    thread may create files meanwhile."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


class SocketPathLock:
    """Makes this daemon the only owner of a socket path, and removes what a dead one left there.

    zmq replaces whatever exists at the path, even the socket of a running daemon.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        lock_path = path + LOCK_SUFFIX
        if not Path(path).parent.is_dir():
            raise ConfigError("listen", f"{Path(path).parent} is not a folder; create it first")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(lock_path, flags, 0o600)
        except OSError as error:
            raise ConfigError("listen", f"{lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for stale in (path, path + ARENA_SUFFIX):
                _remove_stale(stale)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError("listen", f"another daemon listens on ipc://{path}") from None
        except ConfigError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Removes the sockets and lets other daemons use the path."""
        for path in (self._path, self._path + ARENA_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.close(self._fd)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("listen", f"{path} exists and is not a socket; choose another path")
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            try:
                probe.connect(path)
            except OSError:
                continue
            raise ConfigError("listen", f"another process listens on {path}")
    os.unlink(path)
