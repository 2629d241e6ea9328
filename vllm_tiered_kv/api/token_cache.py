"""Caches the KV state of token sequences in daemons or in a folder, for any Python program.

docs/python-api.md is the user documentation.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tiered_kv.api.chain_store import Chains, ChainStore, FolderChains, Outcome
from vllm_tiered_kv.api.token_keys import TokenKeys, Tokens
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.store import Durability
from vllm_tiered_kv.errors import ConfigError, RemoteRefusal, TokenCacheError
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.shm_copy import ByteRows
from vllm_tiered_kv.stores.shared_dir.backing import SharedDirBacking
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings
from vllm_tiered_kv.wire.limits import MAX_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer, Self

    Memory = Buffer | NDArray[Any]  # before Python 3.12 type checkers accept no array as a Buffer

logger = logging.getLogger(__name__)

_MAX_TIMEOUT_S = 7 * 86400  # zmq counts milliseconds in 31 bits


class TokenCache:
    """Caches `token_bytes` bytes of state per token. The key of a token's state is the token and
    all tokens before it.

    State is cached in chunks of `chunk_tokens` tokens (1 by default). A chunk is held completely or
    not at all, and calls ignore tokens after the last complete chunk. Programs create it with
    `connect` (daemons) or `open_folder` (no daemon) and may call it from any thread.

    If a daemon does not answer in time, its state counts as missing, and calls return fewer tokens.
    With `strict` they raise TokenCacheError instead.
    """

    def __init__(self, chains: Chains, keys: TokenKeys, shape: tuple[int, int], strict: bool):
        """Use `connect` or `open_folder`."""
        self.token_bytes, self.chunk_tokens = shape
        self._chains = chains
        self._keys = keys
        self._strict = strict
        self._closed = False

    @classmethod
    def connect(
        cls,
        servers: str | Sequence[str],
        namespace: str,
        token_bytes: int,
        chunk_tokens: int = 1,
        *,
        timeout: float = 2.0,
        connect_timeout: float = 2.0,
        client_key: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> Self:
        """Opens the cache of this namespace at one or several daemons.

        `namespace` identifies everything that makes states incompatible, such as the model and its
        number format. All users of a namespace must use the same sizes: a daemon refuses others.
        Programs that share several daemons must write their addresses in the same way.

        `timeout` is the limit of a call in seconds, plus one second per 64 MiB that it moves.
        `client_key` and `server_key` are certificate files for daemons that require keys.

        Raises ConfigError for invalid arguments, and TokenCacheError if a daemon refuses the client
        or no daemon answers.
        """
        addresses = _addresses(servers)
        require_name("namespace", namespace)
        chunk_bytes = _chunk_bytes(token_bytes, chunk_tokens)
        _require_seconds("timeout", timeout)
        _require_seconds("connect_timeout", connect_timeout)
        curve = _curve_keys(client_key, server_key)
        keys = TokenKeys(namespace, token_bytes, chunk_tokens)
        identity = EngineIdentity(
            keys.namespace,
            (chunk_bytes,),
            f"token cache: {chunk_tokens} tokens of {token_bytes} bytes",
            f"token cache {namespace!r} of process {os.getpid()}"[:256],
        )
        cluster = Cluster(
            addresses,
            identity,
            timeout_s=timeout,
            connect_timeout_s=connect_timeout,
            curve=curve,
        )
        try:
            _say_hello(cluster, namespace)
        except BaseException:
            cluster.close()
            raise
        chains = ChainStore(cluster, keys.namespace, timeout)
        return cls(chains, keys, (token_bytes, chunk_tokens), strict)

    @classmethod
    def open_folder(
        cls,
        root: str | os.PathLike[str],
        namespace: str,
        token_bytes: int,
        chunk_tokens: int = 1,
        *,
        capacity_bytes: int = 0,
        ttl: float | None = None,
        collect_every: float = 1800.0,
        strict: bool = False,
    ) -> Self:
        """Opens the cache of this namespace in a folder, one file per chunk, without a daemon.

        Any number of processes and hosts may use the folder at once, and daemons too, as their
        `backing`. It is created if it does not exist. Chunks that nobody uses for `ttl` seconds are
        removed, and the least recently used ones if all together exceed `capacity_bytes`; each
        process checks that every `collect_every` seconds while the cache is open.

        Raises ConfigError for invalid arguments, and if the folder cannot be used.
        """
        require_name("namespace", namespace)
        _chunk_bytes(token_bytes, chunk_tokens)
        _require_seconds("collect_every", collect_every)
        if ttl is not None:
            _require_seconds("ttl", ttl)
        if not require_whole("capacity_bytes", capacity_bytes, least=0) and ttl is None:
            raise ConfigError(
                "ttl",
                "without ttl or capacity_bytes the folder would fill its file system; set one",
            )
        # Uses must be recorded more often than blocks expire.
        interval = min(SharedDirSettings.touch_interval_s, (ttl or math.inf) / 2)
        settings = SharedDirSettings(
            os.path.abspath(root), capacity_bytes, ttl, grace_s=interval, touch_interval_s=interval
        )
        keys = TokenKeys(namespace, token_bytes, chunk_tokens)
        try:
            os.makedirs(settings.root, exist_ok=True)
            store = SharedDirBacking(settings, collect_every)
        except OSError as error:
            raise ConfigError(
                "root", f"{root} cannot be used: {error.strerror or error}"
            ) from error
        except ConfigError as error:
            raise ConfigError("root", str(error).removeprefix(f"{error.key}: ")) from error
        return cls(FolderChains(store, keys.namespace), keys, (token_bytes, chunk_tokens), strict)

    def match(self, tokens: Tokens) -> int:
        """Returns how many leading tokens are held, with at most one request per daemon."""
        self._require_open()
        return self._tokens(self._chains.match(self._keys.of((), tokens)))

    def query(self, tokens: Tokens, into: Memory, prefix: Tokens | None = None) -> int:
        """Reads the state of the leading tokens that are held; returns how many these are.

        `into` is writable memory of `len(tokens) * token_bytes` bytes, in the order of the tokens.
        Its content after the tokens that were read is undefined. With a `prefix` of complete
        chunks, the call reads tokens that follow it, and not the state of the prefix itself.
        """
        self._require_open()
        keys, first = self._chain(prefix, tokens)
        rows = self._rows("into", into, len(tokens), must_write=True)
        if len(keys) == first:
            return 0
        return self._tokens(self._chains.read(keys[first:], rows))

    def update(
        self,
        prefix: Tokens | None,
        tokens: Tokens,
        state: Memory,
        durability: Durability | str = Durability.MEMORY,
    ) -> int:
        """Stores the state of `tokens`, which follow `prefix`; returns how many leading ones of
        them are held now, including those held before.

        `prefix` must consist of complete chunks. The call does not check that its state is held,
        but as long as it is not, lookups do not find the tokens after it. `state` is laid out as in
        `query`; the caller may change it when the call returns. Held state is not replaced.

        When the call returns, the counted state is readable by all clients ("memory", the default),
        is readable even after a crash of daemon or machine ("disk"; a daemon without a disk keeps
        nothing), or has arrived at the daemon ("received").
        """
        self._require_open()
        level = _durability(durability)
        keys, first = self._chain(prefix, tokens)
        rows = self._rows("state", state, len(tokens))
        if len(keys) == first:
            return 0
        return self._tokens(self._chains.write(keys, first, rows, level))

    def flush(self) -> bool:
        """Makes all stored state as durable as the daemons can; False if one of them fails or does
        not answer. Waits up to a minute for a disk."""
        self._require_open()
        return not self._raise_if_strict(self._chains.flush()).failures

    def close(self) -> None:
        """Waits for running calls of other threads and disconnects. Stored state is kept.
        Idempotent."""
        if not self._closed:
            self._closed = True
            self._chains.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- internals ------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this cache is closed")

    def _chain(self, prefix: Tokens | None, tokens: Tokens) -> tuple[list[BlockKey], int]:
        """Returns the keys of all chunks, and how many of them belong to the prefix."""
        prefix = () if prefix is None else prefix
        first = whole_chunks(prefix, self.chunk_tokens)
        return self._keys.of(prefix, tokens), first

    def _raise_if_strict(self, outcome: Outcome) -> Outcome:
        if self._strict and outcome.failures:
            raise TokenCacheError("the cache could not be used", outcome.failures)
        return outcome

    def _tokens(self, outcome: Outcome) -> int:
        return self._raise_if_strict(outcome).count * self.chunk_tokens

    def _rows(self, name: str, buffer: Any, tokens: int, must_write: bool = False) -> ByteRows:
        """Returns the complete chunks of the memory, one per row."""
        try:
            view = memoryview(buffer)
        except TypeError:
            raise TypeError(
                f"{name}: {type(buffer).__name__} is not memory like a bytearray or a numpy array; "
                "for a tensor on the CPU pass tensor.view(torch.uint8).numpy()"
            ) from None
        if view.nbytes != tokens * self.token_bytes:
            raise ValueError(
                f"{name}: {view.nbytes} bytes, but {tokens} tokens of {self.token_bytes} bytes are "
                f"{tokens * self.token_bytes}"
            )
        if not view.c_contiguous:
            raise ValueError(f"{name}: the memory is not contiguous")
        if must_write and view.readonly:
            raise ValueError(f"{name}: the memory is read-only")
        chunks, chunk_bytes = tokens // self.chunk_tokens, self.chunk_tokens * self.token_bytes
        if not chunks:
            return np.empty((0, chunk_bytes), np.uint8)
        whole = np.frombuffer(view, np.uint8, chunks * chunk_bytes)
        return whole.reshape(chunks, chunk_bytes)


def _addresses(servers: str | Sequence[str]) -> list[str]:
    given = [servers] if isinstance(servers, str) else list(servers)
    addresses = [str(ServerAddress.parse(address, "servers")) for address in given]
    if not addresses:
        raise ConfigError("servers", "expected at least one address")
    if len(set(addresses)) != len(addresses):
        raise ConfigError("servers", "the addresses are not distinct")
    return addresses


def require_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise ConfigError(name, f"expected a name, got {value!r}")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, for example from a broken file name
        return False
    return True


def _require_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not 0 < value <= _MAX_TIMEOUT_S:
        raise ConfigError(name, f"expected seconds, up to {_MAX_TIMEOUT_S}, got {value!r}")


def whole_chunks(prefix: Tokens, chunk_tokens: int) -> int:
    """Returns how many chunks the prefix has; raises ValueError if the last one is partial."""
    chunks, partial = divmod(len(prefix), chunk_tokens)
    if partial:
        raise ValueError(f"prefix: {len(prefix)} tokens are not whole chunks of {chunk_tokens}")
    return chunks


def require_whole(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, f"expected a whole number of at least {least}, got {value!r}")
    return value


def _chunk_bytes(token_bytes: int, chunk_tokens: int) -> int:
    require_whole("token_bytes", token_bytes)
    require_whole("chunk_tokens", chunk_tokens)
    if token_bytes * chunk_tokens > MAX_BLOCK_BYTES:
        raise ConfigError(
            "chunk_tokens",
            f"{chunk_tokens} tokens of {token_bytes} bytes exceed {MAX_BLOCK_BYTES} bytes",
        )
    return token_bytes * chunk_tokens


def _curve_keys(
    client_key: str | os.PathLike[str] | None, server_key: str | os.PathLike[str] | None
) -> CurveKeys | None:
    if client_key is None and server_key is None:
        return None
    if client_key is None or server_key is None:
        missing = "client_key" if client_key is None else "server_key"
        raise ConfigError(missing, "set both client_key and server_key, or neither")
    return CurveKeys.load(client_key, server_key)


def _durability(value: Durability | str) -> Durability:
    try:
        return Durability(value)
    except ValueError:
        known = ", ".join(repr(level.value) for level in Durability)
        raise ValueError(f"durability: expected one of {known}, got {value!r}") from None


def _say_hello(cluster: Cluster, namespace: str) -> None:
    """Sends hello to all daemons; raises if one refuses the client or none answers."""
    failures: dict[str, str] = {}
    for address, store in cluster.stores.items():
        store.greet()
        error = store.last_error
        if isinstance(error, RemoteRefusal) and error.refuses_session:
            raise TokenCacheError(
                f"a daemon refuses namespace {namespace!r}", {address: error.message}
            )
        if error is not None:
            failures[address] = str(error)
    if len(failures) == len(cluster.stores):
        raise TokenCacheError("no daemon answers", failures)
    for address, reason in failures.items():
        logger.warning(
            "the daemon at %s does not answer (%s); continuing without it", address, reason
        )
