"""KV events of the tiers, for routers that send a request where its prefix is cached.

vLLM publishes what its GPU cache holds if `--kv-events-config` enables that. Then this module adds
what the tiers hold, in vLLM's own format and with vLLM's own block hashes, which routers compare
with those of the GPU: `BlockStored` when all ranks hold a block, `BlockRemoved` when it is evicted,
removed or reset. The medium is `CPU` for the CPU tier and `STORAGE` for daemons.

An event needs the tokens of its block and vLLM's hashes. They are recorded when the store is
planned, because its request may be gone when the block becomes readable. Nothing is recorded, and
no object of this module exists, while vLLM's events are off.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.core.key import BlockKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_CPU = "CPU"
_STORAGE = "STORAGE"
_MAX_HASHES = 4096  # in one BlockRemoved

Announced: TypeAlias = tuple[bytes, int]
"""A block to routers: vLLM's hash, and the KV-cache group."""


def are_enabled(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    has_hashes = vllm_config.cache_config.enable_prefix_caching
    return events is not None and events.enable_kv_cache_events and bool(has_hashes)


@dataclass(frozen=True, eq=False)
class _Span:
    """What events say about consecutive blocks of a request, from position `first` on."""

    first: int
    group: Group
    hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


_Origin: TypeAlias = tuple[_Span, int]  # the position of a block within its span


class TierEvents:
    """Collects the events of all tiers between two steps. The store planner, the ledger and the
    index of the CPU tier report to it, in the scheduler's thread; the connector takes the events.
    """

    def __init__(self, max_gpu_blocks: int, max_sent_blocks: int, has_daemons: bool) -> None:
        """`max_gpu_blocks`: planned stores that are remembered. `max_sent_blocks`: announced blocks
        of daemons; beyond these the oldest ones are announced as removed."""
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._removed_event = BlockRemoved
        self._external: Callable[[Any], Any] = maybe_convert_block_hash  # a hash as in events
        self._max_planned = 2 * max_gpu_blocks
        self._max_sent = max_sent_blocks
        self._hash_size = 0
        self._specs: Sequence[tuple[str, int | None]] = ()
        self._has_daemons = has_daemons
        self._planned: OrderedDict[BlockKey, _Origin] = OrderedDict()
        self._in_cpu: dict[BlockKey, _Origin | Announced] = {}
        """With daemons, the origin is kept until the block was sent."""
        self._sent: OrderedDict[BlockKey, Announced] = OrderedDict()
        # Several of our blocks may be one to vLLM: other adapters of the same name, and with EAGLE
        # other tokens after the block.
        self._copies: dict[tuple[str, Announced], int] = {}
        self._events: list[KVCacheEvent] = []

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._hash_size = manager.block_pool.hash_block_size
        self._specs = getattr(manager, "kv_cache_event_metadata", ())

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    # ---- what happens to blocks -----------------------------------------------------------------

    def planned(
        self, request: Request, group: Group, keys: Sequence[BlockKey], positions: Sequence[int]
    ) -> None:
        """A store of these full blocks of a request is planned, or possible."""
        each = group.block_size // self._hash_size
        known = len(request.block_hashes) // each
        positions = positions[: bisect.bisect_left(positions, known)]
        if not positions:
            return
        first, stop = positions[0], positions[-1] + 1
        hashes = [request.block_hashes[(p + 1) * each - 1] for p in range(first, stop)]
        lora = request.lora_request
        span = _Span(
            first,
            group,
            hashes,
            request.block_hashes[first * each - 1] if first else None,
            request._all_token_ids[first * group.block_size : stop * group.block_size],
            _extra_keys(request, first, stop, group.block_size),
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            getattr(request, "session_id", None),
        )
        for position in positions:
            self._planned[keys[position]] = span, position - first
            self._planned.move_to_end(keys[position])
        while len(self._planned) > self._max_planned:
            self._planned.popitem(last=False)

    def committed(self, keys: Iterable[BlockKey]) -> None:
        """All ranks hold these blocks in the CPU tier."""
        origins = []
        for key in keys:
            origin = self._planned.pop(key, None)
            if origin is None:
                continue  # the tail of a prompt, which has no hash
            self._in_cpu[key] = origin if self._has_daemons else _announced(origin)
            if self._add_copy(_CPU, _announced(origin)):
                origins.append(origin)
        self._stored(origins, _CPU)

    def sent(self, keys: Iterable[BlockKey]) -> None:
        """A daemon holds these blocks of all ranks."""
        origins = []
        for key in keys:
            origin = self._in_cpu.get(key)
            if origin is None or not isinstance(origin[0], _Span):
                continue
            self._in_cpu[key] = announced = _announced(origin)
            if key not in self._sent and self._add_copy(_STORAGE, announced):
                origins.append(origin)
            self._sent[key] = announced
        self._stored(origins, _STORAGE)
        while len(self._sent) > self._max_sent:
            _, announced = self._sent.popitem(last=False)
            self._drop_copy(_STORAGE, announced)

    def evicted(self, key: bytes, nbytes: int) -> None:
        """The CPU tier evicts a block. Called while the index is changing."""
        self.removed(key)

    def removed(self, key: bytes) -> None:
        """A block is no longer in the CPU tier."""
        origin = self._in_cpu.pop(BlockKey(key), None)
        if origin is not None:
            self._drop_copy(_CPU, _announced(origin))

    def missing(self, keys: Iterable[BlockKey]) -> None:
        """Daemons have been asked for these blocks and do not hold them any more."""
        for key in keys:
            announced = self._sent.pop(key, None)
            if announced is not None:
                self._drop_copy(_STORAGE, announced)

    def reset(self) -> None:
        """The CPU tier was cleared, and this engine no longer finds its blocks at daemons."""
        for key in tuple(self._in_cpu):
            self.removed(key)
        self.missing(tuple(self._sent))
        self._planned.clear()

    # ---- inside ---------------------------------------------------------------------------------

    def _add_copy(self, medium: str, block: Announced) -> bool:
        """Whether this is the first copy of the block."""
        count = self._copies.get((medium, block), 0)
        self._copies[medium, block] = count + 1
        return not count

    def _drop_copy(self, medium: str, block: Announced) -> None:
        count = self._copies.pop((medium, block)) - 1
        if count:
            self._copies[medium, block] = count
            return
        last = self._events[-1] if self._events else None
        external = self._external(block[0])
        if (
            isinstance(last, self._removed_event)
            and (last.medium, last.group_idx) == (medium, block[1])
            and len(last.block_hashes) < _MAX_HASHES
        ):
            last.block_hashes.append(external)
            return
        self._events.append(
            self._removed_event(block_hashes=[external], medium=medium, group_idx=block[1])
        )

    def _stored(self, origins: Sequence[_Origin], medium: str) -> None:
        """Adds an event for every run of consecutive blocks of one span."""
        start = 0
        for at in range(1, len(origins) + 1):
            span, index = origins[at - 1]
            if at < len(origins) and origins[at] == (span, index + 1):
                continue
            self._events.append(self._stored_event(span, origins[start][1], index + 1, medium))
            start = at

    def _stored_event(self, span: _Span, start: int, stop: int, medium: str) -> KVCacheEvent:
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys

        size, group_id = span.group.block_size, span.group.group_id
        parent = span.hashes[start - 1] if start else span.parent
        event = BlockStored(
            block_hashes=[self._external(one) for one in span.hashes[start:stop]],
            parent_block_hash=self._external(parent) if parent is not None else None,
            token_ids=span.token_ids[start * size : stop * size],
            block_size=size,
            lora_id=span.lora_id,
            medium=medium,
            lora_name=span.lora_name,
            extra_keys=to_event_extra_keys(span.extra_keys[start:stop]),
            group_idx=group_id,
        )
        if hasattr(event, "session_id"):  # from vLLM 0.32 on
            event.session_id = span.session_id
        if group_id < len(self._specs) and hasattr(event, "kv_cache_spec_kind"):
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = self._specs[group_id]
        return event


def _announced(origin: _Origin | Announced) -> Announced:
    first, second = origin
    return (first.hashes[second], first.group.group_id) if isinstance(first, _Span) else origin  # type: ignore[return-value]


def _extra_keys(
    request: Request, first: int, stop: int, block_size: int
) -> list[tuple[Any, ...] | None]:
    """What vLLM's hash of each block covers besides its tokens."""
    is_plain = not (request.mm_features or request.lora_request or request.cache_salt)
    if is_plain and request.prompt_embeds is None:
        return [None] * (stop - first)
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found, mm_index = [], 0
    for position in range(first, stop):
        start = position * block_size
        extra, mm_index = generate_block_hash_extra_keys(
            request, start, start + block_size, mm_index
        )
        found.append(extra)
    return found
