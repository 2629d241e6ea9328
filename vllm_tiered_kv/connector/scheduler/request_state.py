"""What the scheduler half remembers of a request between its calls."""

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


_ENDS = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


@dataclass(frozen=True)
class Match:
    """The answer last given for a request, kept until vLLM admits it."""

    computed: int  # tokens the GPU has
    loadable: int  # tokens after them the tier has
    limit: int  # tokens that could have been found
    is_step_load: bool = False  # vLLM was told that the step waits for the load
    choice: Choice | None = None  # what the tiers hold, and why not all of it is loaded
    verified: int = 0  # tokens that would be loadable, and are computed to be compared
    on_gpu: int = 0  # tokens the GPU has, if those are all full blocks
    computed_again: int = 0  # tokens that are computed though the GPU has them


@dataclass(frozen=True)
class Candidate:
    """A block that is computed though a tier holds it: the CPU tier, or a daemon at `address`."""

    position: int
    address: str | None = None

    @property
    def tier(self) -> Tier:
        return Tier.CPU if self.address is None else Tier.REMOTE


@dataclass
class RequestState:
    request: Request
    keys: RequestKeys
    stored: list[int]  # per group: blocks already stored or considered
    on_gpu: int = 0  # tokens, if the GPU had all that could have been loaded
    computed_again: int = 0  # tokens after them that it had, too
    closed: DropReason | None = None  # why the rest of this sequence is not stored
    lost_adapter: bool = False  # vLLM has loaded another one in place of its own
    load_failed: bool = False
    match: Match | None = None
    loaded_from_disk: int = 0  # tokens of its last load
    remote: RemoteLookup | None = None  # what the daemons were asked about this request
    remote_failed: bool = False  # daemons are not asked again
    store_wait_deadline: float | None = None  # by `time.monotonic`: when it was asked to wait
    keeps_reservation: bool = False  # vLLM still keeps room for a load of it that failed
    is_at_queue_head: bool = False
    """vLLM still has it among the requests that hold blocks, ahead of all others, though it gives
    up its own: its load failed."""
    daemon_copies: list[range] = field(default_factory=list)
    """Per group: positions that lie in a daemon's memory on this host and are not kept twice."""
    tail: Tail | None = None  # the block its prompt ends in, if that is reused
    has_tail: bool = False  # the tiers hold it, or nothing more is done about it
    to_verify: list[deque[Candidate]] = field(default_factory=list)  # per group, in order
    was_verified: bool = False

    def __post_init__(self) -> None:
        self.clear_daemon_copies()

    def clear_daemon_copies(self) -> None:
        """No daemon is known to hold blocks of this request any more."""
        self.daemon_copies = [range(0)] * len(self.stored)
        self.has_tail = False

    def restart_after_failed_load(self) -> None:
        """A load beside the steps has failed, and vLLM computes all of it."""
        self.keeps_reservation = self.is_at_queue_head = True

    @property
    def loadable_tail(self) -> Tail | None:
        """The tail, as long as the request ends there."""
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
        """Of a request that was aborted nothing is certain that it computed: a step may be under
        way."""
        return self.request.status.name in _ENDS

    def storable_tokens(self, computed: int, with_answer: bool) -> int:
        """Of `computed` tokens, those that are confirmed and wanted. Of a request that goes on from
        before a reset nothing is stored, and the answer is looked at for that, too: others may find
        it on the GPU."""
        ready = min(computed, self.request.num_tokens)
        if with_answer or self.closed is DropReason.RESET:
            return ready
        return min(ready, self.request.num_prompt_tokens)

    def has_unplanned_blocks(self, groups: Sequence[Group], ready: int) -> bool:
        """Whether a group has full blocks among these tokens that were not considered yet."""
        return any(
            ready // group.block_size > stored
            for group, stored in zip(groups, self.stored, strict=True)
        )

    def tail_to_store(self, ready: int) -> Tail | None:
        """The block its prompt ends in, if it is full only in part and these tokens reach there."""
        tail = self.tail
        if tail is None or not tail.is_partial or self.has_tail or ready < tail.end:
            return None
        return tail

    def drop_lookup(self) -> None:
        """What the daemons were asked is of no use any more; its leases are released."""
        lookup, self.remote = self.remote, None
        if lookup is not None:
            lookup.drop()

    def close(self, reason: DropReason) -> None:
        """A block of this sequence could not be stored: what follows it would be unreachable."""
        self.closed = self.closed or reason

    def check_adapter(self, maker: KeyMaker) -> bool:
        """Whether its adapter turns out to be another one, which is noted. To be asked before the
        request loads or stores."""
        is_lost = maker.has_lost_adapter(self.request, self.keys, not any(self.stored))
        if is_lost:
            self.lose_adapter()
        return is_lost

    def lose_adapter(self) -> None:
        """Another one is loaded in place of the one that this request uses: what it fills from now
        on is neither the one's nor the other's, also if it has to start over."""
        self.lost_adapter = True
        self.close(DropReason.RESET)

    def copy_failures(self, other: RequestState) -> None:
        """This takes the place of what was known of the same request."""
        if other.lost_adapter:
            self.lose_adapter()
        self.load_failed = other.load_failed
        self.remote_failed = other.remote_failed
        self.keeps_reservation = other.keeps_reservation
        self.is_at_queue_head = other.is_at_queue_head

    def forget_blocks(self) -> None:
        """The request was preempted: its blocks are gone and it starts over."""
        self.stored = [0] * len(self.stored)
        self.on_gpu = self.computed_again = 0
        self.closed = DropReason.RESET if self.lost_adapter else None
        self.keeps_reservation = self.is_at_queue_head = False
        self.drop_lookup()
        self.clear_daemon_copies()


def detect_replaced_adapters(
    states: Iterable[RequestState], lora: LoRARequest | None, adapter: bytes | None
) -> None:
    """A request with these files of an adapter has come, or with files that nobody can tell: vLLM
    may compute with those from now on whatever has its number."""
    if lora is None:
        return
    for state in states:
        mine = state.request.lora_request
        has_number = mine is not None and mine.lora_int_id == lora.lora_int_id
        if has_number and (adapter is None or state.keys.adapter != adapter):
            state.lose_adapter()


def awaits_first_token(states: Mapping[str, RequestState], scheduled: Collection[str]) -> bool:
    """Whether a client waits for the first token of this step; or of one under way, if there is
    nothing to compute in this one."""
    some = (states[request_id] for request_id in scheduled or states if request_id in states)
    return any(not state.request.num_output_tokens for state in some)
