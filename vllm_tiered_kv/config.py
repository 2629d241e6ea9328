"""The one definition of every option: type, default, range and meaning.

Values come from `kv_connector_extra_config` in `--kv-transfer-config`, then from environment
variables `TIERED_KV_<OPTION>` (which win, so that a deployment can be changed without editing its
JSON). This is the only module that reads either. `docs/configuration.md` is generated from here.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import (
    addresses,
    boolean,
    choice,
    integer,
    parse_options,
    seconds,
    share,
    size,
    text,
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
    """Which block leaves a full CPU tier."""

    LRU = "lru"
    S3FIFO = "s3fifo"


@dataclass(frozen=True)
class TieredKVConfig:
    """All options of the connector, validated. Build it with `TieredKVConfig.load`."""

    mode: Mode = choice(
        Mode.TIERED,
        "`tiered` caches. The others are baselines for measuring the cost of hashing and of "
        "caching: `hash_only` computes keys but neither stores nor loads; `naive` does "
        "nothing.",
    )
    cpu_memory: int = size(
        4 << 30,
        "Pinned CPU memory of the engine's own tier, divided evenly among its workers. "
        "Workers that hold the same KV (MLA) share one pool. An exact limit.",
    )
    store: StorePolicy = choice(
        StorePolicy.EAGER,
        "`eager` copies a block out as soon as it is full. `lazy` waits until vLLM is about "
        "to reuse the block, which saves copies when the GPU cache is large; it needs prefix "
        "caching.",
    )
    store_decode: bool = boolean(
        True,
        "Also store blocks filled by generated tokens (multi-turn chat), not only prompt blocks.",
    )
    reuse_partial_tail: bool = boolean(
        False,
        "Also store the last block of a prompt when it is not full, so that a repeated prompt"
        " computes one token instead of up to a block. Costs one block per prompt. Only for "
        "models with full attention in all layers, with `store: eager`, and without EAGLE or MTP.",
    )
    eviction: Eviction = choice(
        Eviction.LRU,
        "Eviction policy. `s3fifo` resists scans: a burst of one-time prompts does not evict "
        "blocks that are used repeatedly. Both evict the tail of a prefix before its head.",
    )
    load_policy: LoadPolicy = choice(
        LoadPolicy.AUTO,
        "`auto` loads every hit in this host's memory, and a hit in a slower tier if loading "
        "is expected to be faster than recomputing, from load and prefill speeds measured at "
        "run time; after a start the first loads measure both. `always` loads every hit: it saves "
        "compute regardless of latency, and is used in tests. `never` only stores.",
    )
    compute_once: bool = boolean(
        False,
        "Requests that share a prefix which neither the GPU nor a tier has wait until the first of "
        "them has computed it, within deadlines. vLLM does this by itself where a "
        "prompt takes whole steps. A request can override the option; see requests.md. "
        "Needs vLLM's prefix caching.",
    )
    pin_share: float = share(
        0.25,
        "The share of the CPU tier that requests may pin with `pin_seconds` and `tool_pending`, "
        "all together; see requests.md. 0: none.",
    )
    lazy_window: int = integer(
        0,
        "With `store: lazy`: how many blocks at the head of vLLM's free queue are kept "
        "stored. 0 means twice the number one step can allocate.",
        low=0,
        high=1 << 24,
    )
    block_layout: BlockLayout = choice(
        BlockLayout.CONTIGUOUS,
        "`contiguous` asks vLLM to keep all layers of a GPU block together, so that whole "
        "blocks move by DMA; attention back-ends that cannot do this and hybrids with recurrent "
        "layers keep their layout. `any` keeps vLLM's own layout.",
    )
    step_loads: StepLoads = choice(
        StepLoads.AUTO,
        "`auto` computes a request in the same step that loads its prefix (a step load): each"
        " layer starts as soon as its blocks have arrived. While other requests run, up to 1 "
        "GiB per step. `never` runs every load beside the steps, which delays its request by "
        "some steps.",
    )
    copy_strategy: CopyStrategy = choice(
        CopyStrategy.AUTO,
        "How blocks are copied to a GPU. `auto` chooses by layout and size; `dma` needs "
        "contiguous blocks; `staged` goes through a buffer in GPU memory; `direct` is a kernel "
        "that reads CPU memory. A strategy that the layout does not allow becomes `direct`.",
    )
    copy_threads: int = integer(
        0,
        "Threads that copy blocks on a CPU back-end. 0 means up to 8, but never more than "
        "there are cores.",
        low=0,
        high=256,
    )

    namespace: str = text(
        "",
        "Any name. Engines with different names share no blocks, whatever else they have in "
        "common; use it to separate tenants or experiments. Within an engine, vLLM's "
        "`cache_salt` separates requests.",
    )
    remote: tuple[str, ...] = addresses(
        (),
        "Addresses of cache daemons (`tiered-kv-server`), one or a list. `ipc:///path` on the"
        " same host shares the daemon's memory; `tcp://host:port` uses the network. "
        "Rendezvous hashing distributes blocks over several daemons; losing one costs only "
        "its share of the blocks. Or a [store](stores.md#without-a-daemon) without a daemon: "
        "`mooncake://master:port`, `redis://host:port`, `rediss://host:port` or `s3://bucket`.",
    )
    portable_shards: int = integer(
        0,
        "Lets engines of different tensor-parallel sizes use each other's blocks at daemons: the "
        "number of shards that a block is divided into, the same at all of these engines. It is a "
        "multiple of each tensor-parallel size, best the largest, and divides the model's number "
        "of KV heads. An engine of as many ranks copies as without the option, a smaller one in "
        "smaller pieces. 0: only engines of the same size share blocks. For models "
        "with MLA, whose ranks hold whole blocks, any number serves all sizes.",
        low=0,
        high=1024,
    )
    remote_lookup_timeout: float = seconds(
        0.1,
        "How long a new request may wait for a daemon's lookup. After that the lookup counts "
        "as a miss. Other requests run meanwhile.",
        low=0.001,
        high=60,
    )
    remote_load_timeout: float = seconds(
        5.0,
        "How long loading a request's blocks from a daemon may take. After that they are "
        "recomputed.",
        low=0.01,
        high=600,
    )
    remote_queue: int = size(
        8 << 30,
        "Write-behind queue to daemons: bytes of CPU-tier blocks per worker that are pinned until "
        "they are sent. Further blocks wait without a pin and are not sent if the CPU tier evicts "
        "them before; these are counted. At most half of the CPU tier is pinned.",
    )
    remote_landing: int = size(
        128 << 20,
        "Pinned memory per worker that receives blocks from the network on their way to the GPU.",
    )
    remote_connections: int = integer(
        4,
        "Connections of each worker to each daemon for loads, and threads of each worker that"
        " use them.",
        low=1,
        high=64,
    )
    remote_key: str = text(
        "",
        "Secret key file of this client (`tiered-kv-server keygen`), for a daemon that "
        "requires keys.",
    )
    remote_server_key: str = text(
        "",
        "Public key file of the daemons; all daemons in `remote` have the same one. It "
        "encrypts tcp connections; `ipc://` needs no keys.",
    )

    verify_fraction: float = share(
        0.0,
        "Fraction of the requests with a hit that recompute it and compare the result with "
        "the cached blocks. A block that differs is evicted, counted and logged; see "
        "verification.md.",
    )
    verify_tolerance: float = share(
        0.05,
        "How far a verified block may deviate before it counts as different, relative to the "
        "values of its layer; different kernels round differently. 0 requires equal bytes.",
    )

    @classmethod
    def load(
        cls,
        extra_config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> TieredKVConfig:
        """Validated options from the connector's JSON and the environment."""
        environ = os.environ if environ is None else environ
        given = [(key, key, value) for key, value in (extra_config or {}).items()]
        values = parse_options(cls, [*given, *_from_environment(environ)])
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
        if config.portable_shards and not config.remote:
            raise ConfigError("portable_shards", "is for blocks at daemons; set remote too")
        return config

    def describe(self) -> str:
        """One line for the log: what differs from the defaults."""
        changed = [
            f"{f.name}={f.metadata['kind'].show(getattr(self, f.name)) or 'none'}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default or f.name == "cpu_memory"
        ]
        return ", ".join(changed)


# Not options of the connector: read by setup.py and left in the environment of many an image, and
# secrets of a store.
_OTHER_VARIABLES = frozenset(
    ENV_PREFIX + name
    for name in (
        *("CUDA", "CUDA_ARCHS", "SANITIZE", "BUILD_JOBS", "KEEP_BUILT"),
        *("REDIS_USERNAME", "REDIS_PASSWORD"),
    )
)


# Kubernetes sets these in every pod, by the name of each service: it may be tiered-kv.
_OF_A_SERVICE = re.compile(
    r"TIERED_KV(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for variable, value in environ.items():
        is_other = variable in _OTHER_VARIABLES or _OF_A_SERVICE.fullmatch(variable) is not None
        if variable.startswith(ENV_PREFIX) and not is_other:
            yield variable[len(ENV_PREFIX) :].lower(), variable, value
