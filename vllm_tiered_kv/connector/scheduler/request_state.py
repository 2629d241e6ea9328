"""What the scheduler half remembers of a request between vLLM's calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.cost_model import Choice
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker, RequestKeys
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookup
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import DropReason

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


_REGULAR_ENDS = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


@dataclass(frozen=True)
class Match:
    """The last answer to vLLM about a request's prefix hit, kept until vLLM admits the request."""

    computed: int  # tokens that the GPU has
    loadable: int  # further tokens that were offered to load
    limit: int  # maximum end of a hit, in tokens
    is_step_load: bool = False  # the load was offered as a step load
    choice: Choice | None = None  # what the tiers hold, and why not all of it is loaded
    verified: int = 0  # loadable tokens that are computed instead, for verification
    on_gpu: int = 0  # tokens that the GPU has, if it has all full blocks; otherwise 0
    computed_again: int = 0  # tokens that are computed although the GPU has them


@dataclass(frozen=True)
class Candidate:
    """A block to verify: it is computed although the CPU tier, or a daemon at `address`, holds
    it."""

    position: int
    address: str | None = None

    @property
    def tier(self) -> Tier:
        return Tier.CPU if self.address is None else Tier.REMOTE


@dataclass
class RequestState:
    """The cache's state of one request. The scheduler half builds it when the request arrives and
    drops it when the request finishes; only the scheduler's thread uses it."""

    request: Request
    keys: RequestKeys
    stored: list[int]  # per group: blocks already stored or planned
    on_gpu: int = 0  # tokens, if the GPU had all that could have been loaded
    computed_again: int = 0  # tokens after `on_gpu` that the GPU had too
    closed: DropReason | None = None  # why no further blocks of this sequence are stored
    lost_adapter: bool = False  # vLLM has replaced its LoRA adapter with another one
    load_failed: bool = False
    match: Match | None = None
    loaded_from_disk: int = 0  # tokens of its last load
    remote: RemoteLookup | None = None
    remote_failed: bool = False  # daemons are not asked again
    store_wait_deadline: float | None = None  # by `time.monotonic`; set by its first wait
    keeps_reservation: bool = False  # vLLM still reserves blocks for its failed load
    is_at_queue_head: bool = False
    """Its load failed and it lost its blocks, but vLLM still schedules it before all others, like a
    request that holds blocks."""
    daemon_copies: list[range] = field(default_factory=list)
    """Per group: positions that a daemon on this host holds. The CPU tier does not store them."""
    tail: Tail | None = None  # the last block of its prompt, if tails are reused
    has_tail: bool = False  # the tail needs no store: a tier holds it, or it was dropped
    to_verify: list[deque[Candidate]] = field(default_factory=list)  # per group, in order
    was_verified: bool = False

    def __post_init__(self) -> None:
        self.clear_daemon_copies()

    def clear_daemon_copies(self) -> None:
        """Forgets which blocks daemons hold, so that the CPU tier stores them again."""
        self.daemon_copies = [range(0)] * len(self.stored)
        self.has_tail = False

    def restart_after_failed_load(self) -> None:
        """An asynchronous load has failed and vLLM computes the whole request."""
        self.keeps_reservation = self.is_at_queue_head = True

    @property
    def loadable_tail(self) -> Tail | None:
        """The tail, while the request still ends with its prompt."""
        if self.tail is None or self.request.num_tokens != self.tail.end:
            return None
        return self.tail

    @property
    def loadable_keys(self) -> Sequence[list[BlockKey]]:
        """Keys of the blocks that may be loaded, per group."""
        tail = self.loadable_tail
        return self.keys.of_group if tail is None else [tail.keys]

    @property
    def ended_by_itself(self) -> bool:
        """False for an aborted request: its last step may still run, so its last tokens may not be
        computed."""
        return self.request.status.name in _REGULAR_ENDS

    def storable_tokens(self, computed: int, with_answer: bool) -> int:
        """How many of the `computed` tokens are confirmed and to be stored. The tokens after them
        that draft layers read must be confirmed too: until then a draft may be in their place, and
        the KV of the last position may be overwritten. A request from before a
        reset stores nothing, but its answer counts here too: its blocks must be marked stale,
        because others may find them on the GPU."""
        ready = min(computed, self.request.num_tokens - self.keys.lookahead)
        if with_answer or self.closed is DropReason.RESET:
            return ready
        return min(ready, self.request.num_prompt_tokens)

    def has_unplanned_blocks(self, groups: Sequence[Group], ready: int) -> bool:
        """Whether a group has full blocks among these tokens whose store is not planned yet."""
        return any(
            ready // group.block_size > stored
            for group, stored in zip(groups, self.stored, strict=True)
        )

    def tail_to_store(self, ready: int) -> Tail | None:
        """The tail, if it is partial, not stored yet, and within the first `ready` tokens."""
        tail = self.tail
        if tail is None or not tail.is_partial or self.has_tail or ready < tail.end:
            return None
        return tail

    def drop_lookup(self) -> None:
        """Drops the daemon lookup and releases its leases."""
        lookup, self.remote = self.remote, None
        if lookup is not None:
            lookup.drop()

    def close(self, reason: DropReason) -> None:
        """Stops storing this sequence: after a block that is not stored, later ones could never be
        found."""
        self.closed = self.closed or reason

    def check_adapter(self, maker: KeyMaker) -> bool:
        """Returns whether the request has lost its adapter, and records it. Call it before the
        request loads or stores."""
        is_lost = maker.has_lost_adapter(self.request, self.keys, not any(self.stored))
        if is_lost:
            self.lose_adapter()
        return is_lost

    def lose_adapter(self) -> None:
        """vLLM has loaded another adapter in place of this request's. Blocks it computes from now
        on belong to neither adapter, even after a restart, so they are not stored."""
        self.lost_adapter = True
        self.close(DropReason.RESET)

    def copy_failures(self, other: RequestState) -> None:
        """Takes over the failures that were recorded in a former state of the same request."""
        if other.lost_adapter:
            self.lose_adapter()
        self.load_failed = other.load_failed
        self.remote_failed = other.remote_failed
        self.keeps_reservation = other.keeps_reservation
        self.is_at_queue_head = other.is_at_queue_head

    def forget_blocks(self) -> None:
        """The request was preempted: it lost its blocks and starts over."""
        self.stored = [0] * len(self.stored)
        self.on_gpu = self.computed_again = 0
        self.closed = DropReason.RESET if self.lost_adapter else None
        self.keeps_reservation = self.is_at_queue_head = False
        self.drop_lookup()
        self.clear_daemon_copies()


def detect_replaced_adapters(
    states: Iterable[RequestState], lora: LoRARequest | None, adapter: bytes | None
) -> None:
    """Called for every new request with its LoRA adapter and the adapter's identity, None if it is
    unknown. vLLM may use these files from now on for all requests with the same adapter id, so
    requests whose adapter has another identity have lost it."""
    if lora is None:
        return
    for state in states:
        own = state.request.lora_request
        has_same_id = own is not None and own.lora_int_id == lora.lora_int_id
        if has_same_id and (adapter is None or state.keys.adapter != adapter):
            state.lose_adapter()


def awaits_first_token(states: Mapping[str, RequestState], scheduled: Collection[str]) -> bool:
    """Whether a client waits for a first token from this step, or from one in flight if this step
    computes nothing."""
    waiting = (states[request_id] for request_id in scheduled or states if request_id in states)
    return any(not state.request.num_output_tokens for state in waiting)
