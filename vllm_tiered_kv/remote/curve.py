"""CURVE keys for encrypted connections, from the files that `tiered-kv-server keygen` writes."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from vllm_tiered_kv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The daemon's public key and the client's key pair."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes = field(repr=False)

    @classmethod
    def load(
        cls, client_certificate: str | os.PathLike[str], server_certificate: str | os.PathLike[str]
    ) -> CurveKeys:
        """Loads zmq certificate files: the client's secret file and the daemon's public file."""
        if not zmq.has("curve"):
            raise ConfigError("curve", "this build of zmq lacks CURVE; install pyzmq from a wheel")
        public, secret = _read(client_certificate)
        server, _ = _read(server_certificate)
        if secret is None:
            raise ConfigError(
                str(client_certificate), "holds no secret key; name the file that ends in _secret"
            )
        return cls(server, public, secret)

    def apply(self, socket: zmq.SyncSocket) -> None:
        socket.curve_serverkey = self.server_key
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key


def _read(path: str | os.PathLike[str]) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate  # imports asyncio, which few clients need

    name = str(path)
    try:
        public, secret = load_certificate(Path(path))
    except OSError as error:
        why = error.strerror or os.strerror(errno.ENOENT)  # zmq sets no errno for a missing file
        raise ConfigError(name, f"cannot be read: {why}") from None
    except (ValueError, UnicodeDecodeError):
        raise ConfigError(name, "is not a zmq certificate file") from None
    for key in (public, secret):
        if key is not None and len(key) != 40:
            raise ConfigError(name, "holds a key that is not 40 characters long")
    return public, secret
