"""A real Mooncake Store for tests: a master and two store nodes, each a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import importlib.util
import os
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

NODE_BYTES = 256 << 20
CLIENT_TTL_S = 2  # the master forgets a node that is gone after this time
_PACKAGES = "libibverbs1 librdmacm1 libnuma1 libcurl4"


def require_mooncake() -> None:
    """Skips the test where there is no Mooncake; with REQUIRE_MOONCAKE=1 it fails instead."""
    if importlib.util.find_spec("mooncake") is None:
        reason = "needs Mooncake; run pip install --no-deps -r requirements/mooncake.txt"
    else:
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            reason = f"cannot load Mooncake ({error}); run apt-get install {_PACKAGES}"
        else:
            return
    if os.environ.get("REQUIRE_MOONCAKE") == "1":
        pytest.fail(f"REQUIRE_MOONCAKE=1, but this {reason}")
    pytest.skip(reason)


def program(name: str) -> str:
    """A program that Mooncake's wheel brings, as it is: its Python wrapper only starts it."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / name
    path.chmod(path.stat().st_mode | 0o111)
    return str(path)


class _Process(ServerProcess):
    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"

    def _start(self, *command: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)


class Master(_Process):
    """`mooncake_master`; after another start its ports are the same and it knows no block."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "master")
        self.port, self.metrics_port = free_port(), free_port()

    def start(self) -> None:
        self._start(
            program("mooncake_master"),
            "--rpc_address=127.0.0.1", f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={self.metrics_port}",
            f"--client_ttl={CLIENT_TTL_S}", "--default_kv_lease_ttl=500",
        )  # fmt: skip
        eventually(lambda: _listens(self.port) and _listens(self.metrics_port))


class StoreNode(_Process):
    """`mooncake_client`, which lends its memory to the store."""

    def __init__(self, folder: Path, name: str, master: Master, nbytes: int) -> None:
        super().__init__(folder, name)
        self._master = master
        self._nbytes = nbytes

    def start(self) -> None:
        self._start(
            program("mooncake_client"),
            "--host=127.0.0.1", f"--port={free_port()}", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address=127.0.0.1:{self._master.port}",
            f"--global_segment_size={self._nbytes >> 20} MB",
        )  # fmt: skip


class MooncakeServers:
    """A master and two store nodes on loopback."""

    def __init__(self, folder: Path, node_bytes: int) -> None:
        self._node_bytes = node_bytes
        self.master = Master(folder)
        self.nodes = [StoreNode(folder, f"node-{n}", self.master, node_bytes) for n in range(2)]

    @property
    def url(self) -> str:
        """To which options can be added with `&`."""
        return f"mooncake://127.0.0.1:{self.master.port}?metrics_port={self.master.metrics_port}"

    def metric(self, name: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.master.metrics_port, timeout=5)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def start(self) -> None:
        self.master.start()
        for node in self.nodes:
            node.start()
        self.wait_for_nodes(len(self.nodes))

    def wait_for_nodes(self, count: int) -> None:
        """Until this many nodes lend their memory."""
        eventually(lambda: self.metric("master_total_capacity_bytes") == count * self._node_bytes)

    def kill(self) -> None:
        for process in (*self.nodes, self.master):
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class MemoryUse:
    """Records the memory that Mooncake's client library is given, as pairs of address and length:
    the registered regions, and the payloads of the blocks that it moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.registered: list[tuple[int, int]] = []
        self.moved: list[tuple[int, int]] = []
        use = self

        class Watched(MooncakeDistributedStore):  # type: ignore[misc]
            def register_buffer(self, address: int, nbytes: int) -> Any:
                use.registered.append((address, nbytes))
                return super().register_buffer(address, nbytes)

            def batch_get_into_multi_buffers(self, names: Any, where: Any, sizes: Any) -> Any:
                use._note(where, sizes)
                return super().batch_get_into_multi_buffers(names, where, sizes)

            def batch_put_from_multi_buffers(self, names: Any, where: Any, *more: Any) -> Any:
                use._note(where, more[0])
                return super().batch_put_from_multi_buffers(names, where, *more)

        patch.setattr("vllm_tiered_kv.stores.mooncake.client.MooncakeDistributedStore", Watched)

    def _note(self, where: list[list[int]], sizes: list[list[int]]) -> None:
        self.moved += [(parts[1], size[1]) for parts, size in zip(where, sizes, strict=True)]

    def is_registered(self) -> bool:
        """Whether blocks were moved, all of them in registered memory."""
        return bool(self.moved) and all(
            any(start <= address <= start + size - nbytes for start, size in self.registered)
            for address, nbytes in self.moved
        )


@contextlib.contextmanager
def mooncake_servers(node_bytes: int = NODE_BYTES) -> Iterator[MooncakeServers]:
    require_mooncake()
    with tempfile.TemporaryDirectory(prefix="kv-mooncake-") as folder:
        servers = MooncakeServers(Path(folder), node_bytes)
        try:
            servers.start()
            yield servers
        finally:
            servers.kill()
