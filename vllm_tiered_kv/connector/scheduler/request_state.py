"""What the scheduler half remembers of a request between vLLM's calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.cost_model import Choice
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.identity.request_keys import RequestKeys
from vllm_tiered_kv.connector.scheduler.account import Account
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteAnswer, RemoteLookup
from vllm_tiered_kv.connector.scheduler.request_control import NO_CONTROL, RequestControl
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import DropReason

if TYPE_CHECKING:
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
    reachable: int = 0  # maximum end of a hit if the request limits nothing


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
class LoadState:
    """What a request has loaded, or could. The load planner alone writes it."""

    match: Match | None = None
    on_gpu: int = 0  # tokens, if the GPU had all that could have been loaded
    computed_again: int = 0  # tokens after `on_gpu` that the GPU had too
    from_disk: int = 0  # tokens of its last load
    tail: Tail | None = None  # the last block of its prompt, if tails are reused
    keeps_tail: bool = False  # the loaded tail needs no store: later requests find it again
    store_wait_deadline: float | None = None  # by `time.monotonic`; set by its first wait
    has_failed: bool = False  # the CPU tier is not asked again
    keeps_reservation: bool = False  # vLLM still reserves blocks for its failed load
    is_at_queue_head: bool = False
    """Its load failed and it lost its blocks, but vLLM still schedules it before all others, like a
    request that holds blocks."""


@dataclass
class RemoteState:
    """What daemons hold of a request. The remote tier alone fills it in."""

    lookup: RemoteLookup | None = None
    copies: dict[int, range] = field(default_factory=dict)
    """By group: positions that a daemon on this host holds. The CPU tier does not store them."""
    has_failed: bool = False  # daemons are not asked again

    @property
    def answer(self) -> RemoteAnswer | None:
        return self.lookup.answer if self.lookup is not None else None

    def take_lookup(self) -> RemoteLookup | None:
        """Returns the lookup and forgets it. Who takes it drops it, to release its leases."""
        lookup, self.lookup = self.lookup, None
        return lookup

    def drop_lookup(self) -> None:
        lookup = self.take_lookup()
        if lookup is not None:
            lookup.drop()

    def forget(self) -> None:
        """Lets daemons be asked again, and the CPU tier store all blocks."""
        self.drop_lookup()
        self.copies = {}

    def load_failed(self, tier: Tier) -> None:
        """A load has failed at this tier. The recomputed blocks may be the only copy."""
        self.copies = {}
        self.has_failed |= tier is Tier.REMOTE


@dataclass
class StoreState:
    """Which blocks of a request are stored. The store planner alone writes it."""

    planned: Counter[int] = field(default_factory=Counter)  # by group: blocks stored or planned
    has_tail: bool = False  # the tail is planned, or was dropped
    idle_until: int = 0
    """Fewer computed tokens than this fill no block that is not planned yet. A request that decodes
    is asked in every step, so this is known before anything else is looked at."""
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    """By group and position: GPU blocks with a recurrent state that vLLM has kept. The table of the
    request may not have them any more."""
    closed: DropReason | None = None
    """Why no further blocks are stored: after a block that is not stored, later ones could never be
    found."""


@dataclass
class VerificationState:
    """Which blocks of a request are still to be verified. The verification alone writes it."""

    waiting: list[deque[Candidate]] = field(default_factory=list)  # per group, in order
    has_begun: bool = False


@dataclass
class RequestState:
    """The cache's state of one request. The scheduler half builds it when the request arrives and
    drops it when the request finishes; only the scheduler's thread uses it. Each part has one
    module that writes it; the others read it."""

    request: Request
    keys: RequestKeys
    control: RequestControl = NO_CONTROL
    ignored_controls: Sequence[str] = ()  # for the response
    load: LoadState = field(default_factory=LoadState)
    remote: RemoteState = field(default_factory=RemoteState)
    store: StoreState = field(default_factory=StoreState)
    verification: VerificationState = field(default_factory=VerificationState)
    account: Account | None = None  # once it was admitted; for its response
    lost_adapter: bool = False
    """vLLM has loaded another LoRA adapter in place of this request's. Blocks it computes from now
    on belong to neither adapter, even after a restart. The scheduler half alone writes it."""

    @property
    def loadable_tail(self) -> Tail | None:
        """The tail, while the request still ends with its prompt."""
        tail = self.load.tail
        return tail if tail is not None and self.request.num_tokens == tail.end else None

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

    @property
    def closed(self) -> DropReason | None:
        """Why no further blocks of this sequence are stored."""
        return self.store.closed or (DropReason.RESET if self.lost_adapter else None)

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
        planned = self.store.planned
        return any(ready // group.block_size > planned[group.group_id] for group in groups)

    def next_to_plan(self, groups: Sequence[Group]) -> int:
        """How many tokens have to be computed before another block can be stored."""
        planned, tail = self.store.planned, self.load.tail
        stops = [(planned[group.group_id] + 1) * group.block_size for group in groups]
        return min(stops if tail is None else [*stops, tail.end])

    def stop_storing_at(self, group: Group, start: int, stop: int) -> int:
        """The end of those positions from `start` on that the request lets the cache store."""
        limit = self.control.store_limit
        return stop if limit is None else max(start, min(stop, limit // group.block_size))

    def tail_to_store(self, ready: int) -> Tail | None:
        """The tail, if it is partial, not stored yet, and within the first `ready` tokens."""
        tail, limit = self.load.tail, self.control.store_limit
        if tail is None or not tail.is_partial or ready < tail.end:
            return None
        if limit is not None and limit < tail.end:
            return None
        return None if self.store.has_tail or self.load.keeps_tail else tail
