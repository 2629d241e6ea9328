"""A real S3 service for tests: SeaweedFS with its master, volumes and gateway in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.ports import free_port
from tests.stores.server_process import ServerProcess

BUCKET = "blocks"
ADMIN = ("admin-key", "admin-secret")  # makes the bucket
USER = ("user-key", "user-secret")
READER = ("reader-key", "reader-secret")
_PORTS = ("master", "volume", "filer", "s3")


def _program() -> str | None:
    """`weed`, which its wheel puts beside the interpreter."""
    beside = Path(sys.executable).parent
    return shutil.which("weed", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def require_s3() -> None:
    """Skips the test where there is no S3 service; with REQUIRE_S3=1 it fails instead."""
    if importlib.util.find_spec("obstore") is None:
        reason = "needs obstore; run pip install -r requirements/unit.txt with Python 3.11 or later"
    elif _program() is None:
        reason = "needs SeaweedFS; run pip install -r requirements/seaweedfs.txt"
    else:
        return
    if os.environ.get("REQUIRE_S3") == "1":
        pytest.fail(f"REQUIRE_S3=1, but this {reason}")
    pytest.skip(reason)


class S3Server(ServerProcess):
    """`weed server -s3` on free ports of loopback. Started again, it has the same blocks."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._ports = {name: (free_port(), free_port()) for name in _PORTS}
        self.host = "127.0.0.1"

    def start(self) -> S3Server:
        program = _program()
        assert program is not None
        data, users, log = (self._folder / name for name in ("data", "users.json", "log"))
        data.mkdir(parents=True, exist_ok=True)
        users.write_text(
            json.dumps(
                {
                    "identities": [
                        _identity("admin", ADMIN, "Admin"),
                        _identity("user", USER, "Read", "Write", "List"),
                        _identity("reader", READER, "Read", "List"),
                    ]
                }
            )
        )
        ports = [
            option
            for name, (port, grpc) in self._ports.items()
            for option in (f"-{name}.port={port}", f"-{name}.port.grpc={grpc}")
        ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    program, f"-logdir={self._folder}", "server", f"-dir={data}",
                    "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports, "-filer", "-s3",
                    f"-s3.config={users}", "-s3.iam=false",
                    "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.peers=none",
                    "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=50",
                    *self._options,
                ],
                stdout=output, stderr=output,
            )  # fmt: skip
        eventually(self._serves)
        return self

    def _serves(self) -> bool:
        """Its first put makes the bucket."""
        import obstore

        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            obstore.put(self.bucket(ADMIN), "started", b"")
        except (OSError, obstore.exceptions.BaseError):
            return False
        return True

    @property
    def endpoint(self) -> str:
        is_tls = any(option.startswith("-s3.cert.file") for option in self._options)
        return f"{'https' if is_tls else 'http'}://localhost:{self._ports['s3'][0]}"

    def url(self, prefix: str = "tests", bucket: str = BUCKET) -> str:
        """To which options can be added with `&`."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"

    def bucket(self, user: tuple[str, str] = USER, name: str = BUCKET) -> Any:
        """The client library, to look and to plant."""
        from obstore.store import S3Store

        return S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=user[0],
            secret_access_key=user[1],
            client_options={"allow_http": True, "allow_invalid_certificates": True},
            retry_config={"max_retries": 0},
        )


def _identity(name: str, keys: tuple[str, str], *actions: str) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
        "actions": actions,
    }


@contextlib.contextmanager
def s3_server(*options: str) -> Iterator[S3Server]:
    require_s3()
    with tempfile.TemporaryDirectory(prefix="kv-s3-") as folder:
        server = S3Server(Path(folder), *options)
        try:
            yield server.start()
        finally:
            server.kill()


def use_credentials(monkeypatch: pytest.MonkeyPatch, user: tuple[str, str] = USER) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", user[1])
