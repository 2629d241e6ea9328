"""The one definition of every option: type, default, range and meaning.

Values come from `kv_connector_extra_config` in `--kv-transfer-config`, then from environment
variables `TIERED_KV_<OPTION>` (which win, so that a deployment can be changed without editing its
JSON). This is the only module that reads either. `docs/configuration.md` is generated from here.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.option_values import (
    format_size,
    parse_addresses,
    parse_bool,
    parse_choice,
    parse_int,
    parse_number,
    parse_size,
    parse_text,
)

ENV_PREFIX = "TIERED_KV_"


class Mode(str, enum.Enum):
    """What the connector does. The last two are baselines for benchmarks."""

    TIERED = "tiered"
    HASH_ONLY = "hash_only"
    NAIVE = "naive"


class StorePolicy(str, enum.Enum):
    """When a block is copied out of the GPU."""

    EAGER = "eager"
    LAZY = "lazy"


class BlockLayout(str, enum.Enum):
    """How the KV cache is asked to lie in GPU memory."""

    CONTIGUOUS = "contiguous"
    ANY = "any"


class StepLoads(str, enum.Enum):
    """Whether a step may wait for blocks its own requests need."""

    AUTO = "auto"
    NEVER = "never"


class CopyStrategy(str, enum.Enum):
    """How blocks get to a GPU; see `device.inbound`."""

    AUTO = "auto"
    DMA = "dma"
    STAGED = "staged"
    DIRECT = "direct"


class LoadPolicy(str, enum.Enum):
    """Whether blocks a tier holds are loaded or computed again."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Eviction(str, enum.Enum):
    LRU = "lru"
    S3FIFO = "s3fifo"


def _option(default: Any, kind: str, help: str, **limits: float) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help, **limits})


@dataclass(frozen=True)
class TieredKVConfig:
    """All options of the connector, validated. Build it with `TieredKVConfig.load`."""

    mode: Mode = _option(
        Mode.TIERED,
        "choice",
        "`tiered` caches. `hash_only` computes keys but neither stores nor loads, `naive` does "
        "nothing at all: baselines that tell the cost of hashing from the cost of caching.",
    )
    cpu_memory: int = _option(
        4 << 30,
        "size",
        "Pinned CPU memory of the engine's own tier, shared evenly by the workers of the engine. "
        "Those that hold the same KV (MLA) use theirs together. An exact limit.",
    )
    store: StorePolicy = _option(
        StorePolicy.EAGER,
        "choice",
        "`eager` copies a block out as soon as it is full. `lazy` waits until vLLM is about to "
        "reuse it, which saves copies when the GPU cache is large; it needs prefix caching.",
    )
    store_decode: bool = _option(
        True,
        "bool",
        "Store blocks filled by generated tokens too (multi-turn chat), not only prompt blocks.",
    )
    reuse_partial_tail: bool = _option(
        False,
        "bool",
        "Keep the block in which a prompt ends, too, though it is not full: a repeated prompt then "
        "computes one token instead of up to a block. Costs a block for each prompt. For models "
        "with full attention in all layers, and `store: eager`.",
    )
    eviction: Eviction = _option(
        Eviction.LRU,
        "choice",
        "Order of eviction. `s3fifo` resists scans: a burst of one-time prompts does not push out "
        "what is used again and again. Under both, tails of a prefix leave before its head.",
    )
    load_policy: LoadPolicy = _option(
        LoadPolicy.AUTO,
        "choice",
        "`auto` loads whatever lies in memory of this host, and of slower tiers what is expected "
        "to be faster than computing it again, by their speeds and the model's as measured while "
        "running; after a start the first load measures. `always` loads whatever a tier holds: to "
        "save compute whatever the latency, and for tests. `never` only stores.",
    )
    lazy_window: int = _option(
        0,
        "int",
        "With `store: lazy`: how many blocks at the head of vLLM's free queue are kept stored. "
        "0 means twice what one step can allocate.",
        low=0,
        high=1 << 24,
    )
    block_layout: BlockLayout = _option(
        BlockLayout.CONTIGUOUS,
        "choice",
        "`contiguous` asks vLLM to keep all layers of a GPU block together, so that whole blocks "
        "move by DMA; attention back-ends that cannot are left as they are. `any` leaves vLLM's "
        "own layout.",
    )
    step_loads: StepLoads = _option(
        StepLoads.AUTO,
        "choice",
        "`auto`: a request is computed in the very step that loads its prefix, each layer as soon "
        "as its blocks are there; while other requests run, up to 1 GiB a step. `never`: every "
        "load runs beside the steps, which costs its request some steps more.",
    )
    copy_strategy: CopyStrategy = _option(
        CopyStrategy.AUTO,
        "choice",
        "How blocks are copied to a GPU. `auto` measures at start what is fastest and remembers "
        "it; `dma` needs contiguous blocks, `staged` goes through GPU memory, `direct` is a "
        "kernel reading CPU memory. What the layout does not allow becomes `direct`.",
    )
    copy_tuning_file: str = _option(
        "",
        "text",
        "Where that measurement is remembered. Empty: `vllm-tiered-kv/copy.json` in the user's "
        "cache folder (`$XDG_CACHE_HOME` or `~/.cache`).",
    )
    copy_threads: int = _option(
        0,
        "int",
        "Threads that copy blocks on a CPU back-end. 0 means up to 8, never more than the cores.",
        low=0,
        high=256,
    )

    namespace: str = _option(
        "",
        "text",
        "Any name. Engines with different ones share no blocks, whatever else they have in common: "
        "tenants, experiments. Within an engine, requests are kept apart by vLLM's `cache_salt`.",
    )
    remote: tuple[str, ...] = _option(
        (),
        "addresses",
        "Addresses of cache daemons (`tiered-kv-server`), one or a list. `ipc:///path` on the same "
        "host shares the daemon's memory; `tcp://host:port` goes over the network. Blocks are "
        "spread over several daemons by rendezvous hashing; one that is gone costs only its "
        "share.",
    )
    remote_lookup_timeout: float = _option(
        0.1,
        "seconds",
        "How long a new request may wait for the daemon to say what it holds. Afterwards it "
        "counts as a miss. Other requests run meanwhile.",
        low=0.001,
        high=60,
    )
    remote_load_timeout: float = _option(
        5.0,
        "seconds",
        "How long loading a request's blocks from a daemon may take. Afterwards they are "
        "recomputed.",
        low=0.01,
        high=600,
    )
    remote_queue: int = _option(
        8 << 30,
        "size",
        "Blocks of the CPU tier, in bytes per worker, that may be on their way to a daemon. What "
        "does not fit is not sent, and counted. At most half of the CPU tier is used for it.",
    )
    remote_landing: int = _option(
        128 << 20,
        "size",
        "Pinned memory per worker in which blocks from the network land on their way to the GPU.",
    )
    remote_connections: int = _option(
        4,
        "int",
        "Connections of each worker to a daemon for loads, and threads that use them.",
        low=1,
        high=64,
    )
    remote_key: str = _option(
        "",
        "text",
        "Secret key file of this client (`tiered-kv-server keygen`), for a daemon that asks for "
        "one.",
    )
    remote_server_key: str = _option(
        "",
        "text",
        "Public key file of the daemon, the same for all in `remote`. With it, connections over "
        "tcp are encrypted; `ipc://` needs no keys.",
    )

    verify_fraction: float = _option(
        0.0,
        "share",
        "Share of the requests with a hit that compute it all the same; their blocks are compared "
        "with what the tier holds. One that differs is evicted, counted and named in the log; see "
        "verification.md.",
    )
    verify_tolerance: float = _option(
        0.05,
        "share",
        "How far a verified block may be off before it counts as different, relative to the "
        "values of its layer: other kernels round differently. 0 asks for equal bytes.",
    )

    @classmethod
    def load(
        cls,
        extra_config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> TieredKVConfig:
        """Validated options from the connector's JSON and the environment."""
        environ = os.environ if environ is None else environ
        options = {f.name: f for f in dataclasses.fields(cls)}
        raw: dict[str, tuple[str, Any]] = {}
        for key, value in (extra_config or {}).items():
            require_known(key, key, options)
            raw[key] = (key, value)
        for variable, value in environ.items():
            if variable.startswith(ENV_PREFIX) and not _is_not_ours(variable):
                key = variable[len(ENV_PREFIX) :].lower()
                require_known(key, variable, options)
                raw[key] = (variable, value)
        values = {key: _parse(options[key], source, value) for key, (source, value) in raw.items()}
        if bool(values.get("remote_key")) != bool(values.get("remote_server_key")):
            raise ConfigError(
                "remote_key", "give both remote_key and remote_server_key, or neither"
            )
        config = cls(**values)
        if config.reuse_partial_tail and config.store is StorePolicy.LAZY:
            raise ConfigError(
                "reuse_partial_tail",
                'needs "store": "eager", since lazy stores know full blocks alone',
            )
        return config

    def tuning_path(self, environ: Mapping[str, str] | None = None) -> Path:
        """The file of `copy_tuning_file`."""
        if self.copy_tuning_file:
            return Path(self.copy_tuning_file)
        environ = os.environ if environ is None else environ
        cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(cache) / "vllm-tiered-kv" / "copy.json"

    def describe(self) -> str:
        """One line for the log: what differs from the defaults."""
        changed = [
            f"{f.name}={_show(getattr(self, f.name), f.metadata['kind'])}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "cpu_memory"
        ]
        return ", ".join(changed)


# Read by setup.py, and left in the environment of many an image; not options of the connector.
_OTHER_VARIABLES = frozenset(
    ENV_PREFIX + name for name in ("CUDA", "CUDA_ARCHS", "SANITIZE", "BUILD_JOBS", "KEEP_BUILT")
)


# Kubernetes sets these in every pod, by the name of each service: it may be tiered-kv.
_OF_A_SERVICE = re.compile(
    r"TIERED_KV(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def _is_not_ours(variable: str) -> bool:
    return variable in _OTHER_VARIABLES or _OF_A_SERVICE.fullmatch(variable) is not None


def require_known(key: str, source: str, options: Mapping[str, Any]) -> None:
    if key in options:
        return
    close = difflib.get_close_matches(key.lower(), options, n=1, cutoff=0.4)
    hint = f'did you mean "{close[0]}"?' if close else f"known options: {', '.join(options)}"
    raise ConfigError(source, f"unknown option; {hint}")


def _parse(option: dataclasses.Field[Any], source: str, value: object) -> Any:
    kind = option.metadata["kind"]
    if kind == "size":
        return parse_size(source, value)
    if kind == "bool":
        return parse_bool(source, value)
    if kind == "int":
        return parse_int(source, value, option.metadata["low"], option.metadata["high"])
    if kind == "seconds":
        limits = option.metadata["low"], option.metadata["high"]
        return parse_number(source, value, *limits, " seconds")
    if kind == "share":
        return parse_number(source, value, 0, 1)
    if kind == "addresses":
        return parse_addresses(source, value)
    if kind == "text":
        return parse_text(source, value)
    return parse_choice(source, value, type(option.default))


def _show(value: Any, kind: str) -> str:
    if kind == "size":
        return format_size(value)
    if kind == "addresses":
        return " ".join(value) or "none"
    if kind == "text":
        return value or "none"
    return str(value.value if isinstance(value, enum.Enum) else value).lower()


def options_table() -> str:
    """The Markdown table of `docs/configuration.md`."""
    lines = [
        "| option | type | default | environment | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for option in dataclasses.fields(TieredKVConfig):
        kind = option.metadata["kind"]
        if kind == "choice":
            choices: type[enum.Enum] = type(option.default)
            shown = " \\| ".join(f'`"{choice.value}"`' for choice in choices)
        elif kind in ("int", "seconds"):
            word = "integer" if kind == "int" else "seconds"
            shown = f"{word} {option.metadata['low']} … {option.metadata['high']}"
        else:
            shown = {
                "size": 'size, like `"20GiB"`',
                "bool": "boolean",
                "share": "number 0 … 1",
                "addresses": "address or list",
                "text": "text",
            }[kind]
        default = _show(option.default, kind)
        lines.append(
            f"| `{option.name}` | {shown} | `{default}` | `{ENV_PREFIX}{option.name.upper()}` "
            f"| {option.metadata['help']} |"
        )
    return "\n".join(lines) + "\n"
