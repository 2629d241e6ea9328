"""The stores that a daemon can have behind its own tiers, by the scheme of their URL.

A scheme names a module with the two functions of `StoreModule`. The module is imported when its
scheme is used, so that the client library of one store is not needed for another. To add a store,
add an entry to `_SCHEMES` and, if it needs a library, an extra to `pyproject.toml`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from vllm_tiered_kv.core.store import LowerStore, StoreUsage
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.options import redacted


@dataclass(frozen=True)
class BackingOptions:
    """Where a backing store is and how it may be used."""

    url: str
    capacity_bytes: int = 0  # 0: not given
    ttl_s: int = 0  # 0: not given
    timeout_s: float = 2.0  # how long a call may wait for an answer


class BackingStore(LowerStore, Protocol):
    """An open store behind the daemon's own tiers. The threads of its executors call it. The
    properties and `known_usage` only return what is known: monitors call them on any thread."""

    @property
    def is_absent(self) -> bool:
        """Whether the store knows that it cannot be reached now."""

    @property
    def damaged_blocks(self) -> int:
        """Blocks that were found but not readable, since the start."""

    @property
    def failed_blocks(self) -> int:
        """Blocks that were offered but not stored, since the start."""

    def known_usage(self) -> StoreUsage:
        """The usage as of the last time the store looked."""

    def use_memory(self, memory: HostRegion) -> None:
        """Says in which memory most buffers of later calls lie. A store may register it with its
        network; it stays mapped until the store is closed and all its calls have ended."""


class StoreModule(Protocol):
    """What the module of a scheme defines."""

    def check(self, options: BackingOptions) -> None:
        """Raises ConfigError for options that cannot work. Asks neither network nor disk."""

    def open_store(
        self, options: BackingOptions, on_unanswered: Callable[[], None]
    ) -> BackingStore:
        """Raises ConfigError or OSError if the store cannot be used. `on_unanswered` is called from
        any thread when the store could not ask one of its servers, or got no answer."""


@dataclass(frozen=True)
class _Scheme:
    module: str
    extra: str = ""  # of this distribution; brings the client library
    packages: str = ""  # of the system, that the library needs


_INSTALL = "pip install 'vllm-tiered-kv[{}]'"
_REDIS = _Scheme("vllm_tiered_kv.stores.redis.store", "redis")
_SCHEMES = {
    "file": _Scheme("vllm_tiered_kv.stores.shared_dir.backing"),
    "mooncake": _Scheme(
        "vllm_tiered_kv.stores.mooncake.store",
        "mooncake",
        "libibverbs1 librdmacm1 libnuma1 libcurl4",
    ),
    "redis": _REDIS,
    "rediss": _REDIS,
    "s3": _Scheme("vllm_tiered_kv.stores.s3.store", "s3"),
}


def check(options: BackingOptions) -> None:
    """Raises ConfigError if no store can be opened with these options, without trying to."""
    _module_of(options.url).check(options)


def open_store(
    options: BackingOptions, on_unanswered: Callable[[], None] = lambda: None
) -> BackingStore:
    """See `StoreModule.open_store`."""
    return _module_of(options.url).open_store(options, on_unanswered)


def described(schemes: Iterable[str]) -> str:
    """These schemes, with what they need, as an error lists them."""
    extras = {name: _SCHEMES[name].extra for name in schemes}
    return ", ".join(
        f"{name}://" + (f" (needs {_INSTALL.format(extra)})" if extra else "")
        for name, extra in extras.items()
    )


def _module_of(url: str) -> StoreModule:
    name, separator, _ = url.partition("://")
    scheme = _SCHEMES.get(name) if separator else None
    if scheme is None:
        known = described(_SCHEMES)
        raise ConfigError("backing", f"{redacted(url)!r} must start with one of {known}")
    try:
        return cast(StoreModule, importlib.import_module(scheme.module))
    except ImportError as error:
        if not scheme.extra or (error.name or "").startswith("vllm_tiered_kv"):
            raise
        if not isinstance(error, ModuleNotFoundError):
            raise ConfigError(
                "backing",
                f"{name}:// cannot load its library ({error}); on Debian and Ubuntu it needs "
                f"apt-get install {scheme.packages}",
            ) from error
        raise ConfigError(
            "backing",
            f"{name}:// needs a library that is not installed ({error.name}); run "
            + _INSTALL.format(scheme.extra),
        ) from error
