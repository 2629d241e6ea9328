"""CURVE keys: the daemon's own, those of permitted clients, and the check of each connection.

zmq asks the socket bound to a well-known inproc address about every new connection (ZAP, RFC 27);
the reactor answers. Key files have the format of `zmq.auth`.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from vllm_tiered_kv.errors import ConfigError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"tiered-kv"
READ_ONLY = "read-only"

_Z85_CHARS = 40
_KEY_LINE = re.compile(r'^\s*(public-key|secret-key)\s*=\s*"(.{40})"\s*$', re.MULTILINE)
_ACCESS_LINE = re.compile(r'^\s*access\s*=\s*"read-only"\s*$', re.MULTILINE)


@dataclass(frozen=True)
class ServerKeys:
    """The daemon's key pair, as `load_server_keys` read it."""

    public: bytes
    secret: bytes


Clients = dict[str, bool]
"""The clients that may connect: public key -> whether it may only read."""


def load_server_keys(path: str) -> ServerKeys:
    found = dict(_KEY_LINE.findall(_text_of("secret_key", path)))
    if set(found) != {"public-key", "secret-key"}:
        raise ConfigError(
            "secret_key", f"{path} is not a secret key; create one with tiered-kv-server keygen"
        )
    if os.stat(path).st_mode & 0o077:
        raise ConfigError("secret_key", f"{path} can be read by others; run: chmod 600 {path}")
    return ServerKeys(found["public-key"].encode(), found["secret-key"].encode())


def load_clients(path: str) -> Clients:
    """Reads a folder of `.key` files, or a file with one key per line."""
    where = Path(path)
    read_only: Clients = {}
    if where.is_dir():
        for file in sorted(where.glob("*.key")):
            text = _text_of("clients", str(file))
            keys = dict(_KEY_LINE.findall(text))
            if "public-key" not in keys:
                raise ConfigError("clients", f"{file} contains no public key")
            read_only[keys["public-key"]] = _ACCESS_LINE.search(text) is not None
    else:
        for number, line in enumerate(_text_of("clients", path).splitlines(), 1):
            words = line.split()
            if not words or _is_comment(words[0]):
                continue
            if len(words[0]) != _Z85_CHARS or not _is_z85(words[0]):
                raise ConfigError("clients", f"{path}, line {number}: not a public key")
            if words[1:2] not in ([], [READ_ONLY]):
                raise ConfigError(
                    "clients", f"{path}, line {number}: only {READ_ONLY!r} may follow the key"
                )
            read_only[words[0]] = len(words) > 1
    if not read_only:
        raise ConfigError("clients", f"{path} contains no client key, so nobody could connect")
    return read_only


def write_key_pair(folder: Path, name: str, read_only: bool) -> tuple[Path, Path]:
    """Writes `name.key` for peers and `name.key_secret` for the owner. Never overwrites."""
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("keygen", f"cannot create {folder}: {error.strerror}") from error
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    access = f'    access = "{READ_ONLY}"\n' if read_only else ""
    head = f'metadata\n{access}curve\n    public-key = "{public.decode()}"\n'
    _create(secret_path, head + f'    secret-key = "{secret.decode()}"\n', 0o600)
    try:
        _create(public_path, head, 0o644)
    except ConfigError:
        secret_path.unlink()
        raise
    return public_path, secret_path


def protect(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = ZAP_DOMAIN


class ZapAuthenticator:
    """Answers zmq's ZAP requests. The reactor calls `answer` when `socket` is readable."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Clients) -> None:
        self._clients = clients
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self.refused = 0

    def answer(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            split = frames.index(b"") + 1 if b"" in frames else len(frames)
            version, request_id, *rest = frames[split:] + [b""] * 2
            mechanism = rest[3] if len(rest) > 3 else b""
            user = self._user(mechanism, rest[4] if len(rest) > 4 else b"")
            status, text = (b"200", b"OK") if user else (b"400", b"this key is not allowed")
            self.refused += not user
            reply = [version or b"1.0", request_id, status, text, user.encode(), b""]
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart([*frames[:split], *reply], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()

    def _user(self, mechanism: bytes, credentials: bytes) -> str:
        if mechanism != b"CURVE" or len(credentials) != 32:
            return ""
        key = z85.encode(credentials).decode()
        return key if key in self._clients else ""


def _text_of(option: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(option, f"{path} cannot be read: {why}") from error


def _is_comment(word: str) -> bool:
    return word.startswith("#") and len(word) != _Z85_CHARS  # a key may also start with "#"


def _is_z85(word: str) -> bool:
    try:
        return len(z85.decode(word)) == 32
    except (KeyError, ValueError, AttributeError):
        return False


def _create(path: Path, text: str, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConfigError("keygen", f"{path} exists; keys are never overwritten") from None
    except OSError as error:
        raise ConfigError("keygen", f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
    except OSError as error:
        path.unlink()  # a partial key file would block the next attempt
        raise ConfigError("keygen", f"{path} cannot be written: {error.strerror}") from error
