"""KV state of token sequences in running daemons, for any Python program.

docs/python-api.md is the page for those who use it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tiered_kv.api.chain_store import ChainStore, Outcome
from vllm_tiered_kv.api.token_keys import TokenKeys, Tokens
from vllm_tiered_kv.core.store import Durability
from vllm_tiered_kv.errors import ConfigError, RemoteRefusal, TokenCacheError
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.placement import Cluster
from vllm_tiered_kv.remote.shm_copy import ByteRows
from vllm_tiered_kv.wire.limits import MAX_BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer, Self

    Memory = Buffer | NDArray[Any]  # to type checkers an array is no buffer before Python 3.12

logger = logging.getLogger(__name__)

_MAX_S = 7 * 86400  # zmq counts milliseconds in 31 bits


class TokenCache:
    """Keeps `token_bytes` bytes of state for each token of a sequence, found by the token and all
    that precede it.

    State is cached in chunks of `chunk_tokens` tokens. A chunk is held as a whole or not at all,
    and what a call is given beyond its last whole chunk is ignored; with the default of 1 that is
    nothing. All calls may be made from any thread.

    What a daemon does not answer in time it does not hold: calls then return fewer tokens. With
    `strict` they raise TokenCacheError instead.
    """

    def __init__(self, chains: ChainStore, keys: TokenKeys, shape: tuple[int, int], strict: bool):
        """Use `connect`."""
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
        """Opens the cache of this name at one or several daemons.

        `namespace` stands for whatever makes states incompatible, such as the model and its number
        format. All who use it must agree on the sizes: a daemon refuses others. Those who share
        several daemons must write their addresses alike.

        `timeout` is in seconds and holds for a call, which gets one more for every 64 MiB it moves.
        `client_key` and `server_key` are certificate files for daemons that ask for keys.

        Raises ConfigError for arguments that cannot be, and TokenCacheError when a daemon refuses
        or none of them answers.
        """
        addresses = _addresses(servers)
        _require_name("namespace", namespace)
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
            _greet(cluster, namespace)
        except BaseException:
            cluster.close()
            raise
        chains = ChainStore(cluster, keys.namespace, timeout)
        return cls(chains, keys, (token_bytes, chunk_tokens), strict)

    def match(self, tokens: Tokens) -> int:
        """How many leading tokens are held. Each daemon is asked once at most."""
        self._require_open()
        return self._tokens(self._chains.match(self._keys.of((), tokens)))

    def query(self, tokens: Tokens, into: Memory) -> int:
        """Reads the state of the leading tokens that are held, and says how many these are.

        `into` is writable memory of `len(tokens) * token_bytes` bytes, a token's state after the
        other's. Behind the tokens that were read it may hold anything afterwards.
        """
        self._require_open()
        keys = self._keys.of((), tokens)
        rows = self._rows("into", into, len(tokens), must_write=True)
        return self._tokens(self._chains.read(keys, rows)) if keys else 0

    def update(
        self,
        prefix: Tokens | None,
        tokens: Tokens,
        state: Memory,
        durability: Durability | str = Durability.MEMORY,
    ) -> int:
        """Stores the state of `tokens`, which follow `prefix`, and says how many of them are held
        now, from the first without a gap, be it from before.

        `prefix` has whole chunks. Its own state is not looked at: as long as that is not held,
        nothing behind it is found. `state` is laid out as in `query` and may be changed when the
        call returns. State that is held already is not replaced.

        When it returns, what it counted can be read by everybody ("memory", the default), can be
        read even after a crash of daemon or machine ("disk"; a daemon that has none keeps nothing),
        or has reached the daemon ("received").
        """
        self._require_open()
        level = _durability(durability)
        prefix = () if prefix is None else prefix
        first, partial = divmod(len(prefix), self.chunk_tokens)
        if partial:
            raise ValueError(
                f"prefix: {len(prefix)} tokens are not whole chunks of {self.chunk_tokens}"
            )
        keys = self._keys.of(prefix, tokens)
        rows = self._rows("state", state, len(tokens))
        if len(keys) == first:
            return 0
        return self._tokens(self._chains.write(keys, first, rows, level))

    def flush(self) -> bool:
        """Returns when all that was stored is as durable as the daemons can make it; False when one
        of them failed to, or does not answer. Waits up to a minute for a disk."""
        self._require_open()
        return not self._told(self._chains.flush()).failures

    def close(self) -> None:
        """Waits for calls under way in other threads. Idempotent. What is stored stays."""
        if not self._closed:
            self._closed = True
            self._chains.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this cache is closed")

    def _told(self, outcome: Outcome) -> Outcome:
        if self._strict and outcome.failures:
            raise TokenCacheError("daemons could not be used", outcome.failures)
        return outcome

    def _tokens(self, outcome: Outcome) -> int:
        return self._told(outcome).count * self.chunk_tokens

    def _rows(self, name: str, buffer: Any, tokens: int, must_write: bool = False) -> ByteRows:
        """The whole chunks of the memory, a row each."""
        try:
            view = memoryview(buffer)
        except TypeError:
            raise TypeError(
                f"{name}: {type(buffer).__name__} is not memory like a bytearray or a numpy array; "
                "of a tensor on the CPU pass tensor.view(torch.uint8).numpy()"
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
        raise ConfigError("servers", "an address is there twice")
    return addresses


def _require_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise ConfigError(name, f"expected a name, got {value!r}")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as of a broken file name
        return False
    return True


def _require_seconds(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or not 0 < value <= _MAX_S:
        raise ConfigError(name, f"expected seconds, up to {_MAX_S}, got {value!r}")


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, f"expected a whole number of at least 1, got {value!r}")


def _chunk_bytes(token_bytes: int, chunk_tokens: int) -> int:
    _require_positive("token_bytes", token_bytes)
    _require_positive("chunk_tokens", chunk_tokens)
    if token_bytes * chunk_tokens > MAX_BLOCK_BYTES:
        raise ConfigError(
            "chunk_tokens",
            f"{chunk_tokens} tokens of {token_bytes} bytes are more than {MAX_BLOCK_BYTES} bytes",
        )
    return token_bytes * chunk_tokens


def _curve_keys(
    client_key: str | os.PathLike[str] | None, server_key: str | os.PathLike[str] | None
) -> CurveKeys | None:
    if client_key is None and server_key is None:
        return None
    if client_key is None or server_key is None:
        missing = "client_key" if client_key is None else "server_key"
        raise ConfigError(missing, "client_key and server_key are of no use without each other")
    return CurveKeys.load(client_key, server_key)


def _durability(value: Durability | str) -> Durability:
    try:
        return Durability(value)
    except ValueError:
        known = ", ".join(repr(level.value) for level in Durability)
        raise ValueError(f"durability: expected one of {known}, got {value!r}") from None


def _greet(cluster: Cluster, namespace: str) -> None:
    """Says hello to all; raises when one refuses, or nobody answers."""
    failures: dict[str, str] = {}
    for address, store in cluster.stores.items():
        store.greet()
        error = store.last_error
        if isinstance(error, RemoteRefusal) and error.refuses_session:
            raise TokenCacheError(f"namespace {namespace!r} is refused", {address: error.message})
        if error is not None:
            failures[address] = str(error)
    if len(failures) == len(cluster.stores):
        raise TokenCacheError("no daemon answers", failures)
    for address, why in failures.items():
        logger.warning("the daemon at %s does not answer (%s); continuing without it", address, why)
