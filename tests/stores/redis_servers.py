"""Real Redis servers for tests: one, or a cluster of three primaries with a replica each."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.ports import free_port
from tests.stores.server_process import ServerProcess

PRIMARIES = 3


def require_redis(*more_programs: str) -> None:
    """Skips the test where there is no Redis; with REQUIRE_REDIS=1 it fails instead."""
    programs = [p for p in ("redis-server", *more_programs) if shutil.which(p) is None]
    if programs:
        reason = f"needs {' '.join(programs)}; run apt-get install {' '.join(programs)}"
    elif importlib.util.find_spec("redis") is None:
        reason = "needs redis-py; run pip install -r requirements/unit.txt"
    else:
        return
    if os.environ.get("REQUIRE_REDIS") == "1":
        pytest.fail(f"REQUIRE_REDIS=1, but this {reason}")
    pytest.skip(reason)


class RedisServer(ServerProcess):
    """A `redis-server` process on a free port of loopback. After `restart` the port is the same."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._options = options

    def start(self) -> RedisServer:
        self.folder.mkdir(exist_ok=True)
        plain = () if "--tls-port" in self._options else ("--port", str(self.port))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "redis-server", *plain, "--bind", "127.0.0.1", "--save", "",
                    "--appendonly", "no", "--dir", str(self.folder), *self._options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        eventually(self._listens)
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    def client(self, **more: Any) -> Any:
        """redis-py, to look and to plant."""
        import redis

        return redis.Redis(port=self.port, protocol=2, **more)

    def restart(self) -> None:
        self.kill()
        self.start()


class RedisCluster:
    """Three primaries with a replica each. A primary that dies is replaced within seconds."""

    def __init__(self, folder: Path) -> None:
        self.servers = [self._server(folder / str(n)) for n in range(2 * PRIMARIES)]

    @staticmethod
    def _server(folder: Path) -> RedisServer:
        return RedisServer(
            folder, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
            "--cluster-port", str(free_port()), "--cluster-replica-validity-factor", "0",
            "--repl-diskless-sync-delay", "0",
        )  # fmt: skip

    @property
    def url(self) -> str:
        return "redis://" + ",".join(server.address for server in self.servers)

    def start(self) -> RedisCluster:
        for server in self.servers:
            server.start()
        clients = [server.client() for server in self.servers]
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        share = -(-16384 // PRIMARIES)
        for n, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            if n < PRIMARIES:
                last = min(16384, (n + 1) * share) - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", n * share, last)
        for server in self.servers[1:]:
            bus = server._options[server._options.index("--cluster-port") + 1]
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        for n, client in enumerate(clients[PRIMARIES:]):
            eventually(lambda c=client, n=n: ids[n] in _text(c, "NODES"))  # type: ignore[misc]
            client.execute_command("CLUSTER", "REPLICATE", ids[n])
        for client in clients:
            eventually(
                lambda c=client: (
                    "cluster_state:ok" in _text(c, "INFO")  # type: ignore[misc]
                    and _text(c, "NODES").count("slave") == PRIMARIES
                )
            )
        for client in clients[PRIMARIES:]:
            eventually(lambda c=client: c.info("replication")["master_link_status"] == "up")  # type: ignore[misc]
        for client in clients:
            client.close()
        return self

    def primaries(self) -> list[RedisServer]:
        """Those that serve now, as one of them says."""
        for server in self.servers:
            with contextlib.suppress(Exception), server.client(socket_timeout=2) as client:
                lines = _text(client, "NODES").splitlines()
                serving = [
                    int(line.split()[1].split("@")[0].rpartition(":")[2])
                    for line in lines
                    if "master" in line and "fail" not in line and len(line.split()) > 8
                ]
                return [one for one in self.servers if one.port in serving]
        return []

    def flush(self) -> None:
        for server in self.primaries():
            with server.client() as client:
                client.flushall()

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


def _text(client: Any, what: str) -> str:
    """The reply to CLUSTER INFO or CLUSTER NODES as it is sent."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("CLUSTER", what)
        return str(connection.read_response(), "utf-8")
    finally:
        client.connection_pool.release(connection)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    require_redis()
    with tempfile.TemporaryDirectory(prefix="kv-redis-") as folder:
        server = RedisServer(Path(folder), *options)
        try:
            yield server.start()
        finally:
            server.kill()


@contextlib.contextmanager
def redis_cluster() -> Iterator[RedisCluster]:
    require_redis()
    with tempfile.TemporaryDirectory(prefix="kv-redis-") as folder:
        cluster = RedisCluster(Path(folder))
        try:
            yield cluster.start()
        finally:
            cluster.kill()
