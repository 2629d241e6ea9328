"""What all planners of the scheduler half share: the CPU tier's records, facts of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group, HeldBlocks, NoBlocks
from vllm_tiered_kv.connector.scheduler.request_control import RequestControl
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.recorder import Recorder


@dataclass(frozen=True)
class EngineFacts:
    """What plans depend on in vLLM's configuration. The assembly reads it once."""

    num_ranks: int = 1
    step_tokens: int = 8192  # the maximum number of tokens that vLLM computes in a step
    computes_on_cpu: bool = False
    steps_zero_blocks: bool = False  # vLLM zeroes new blocks before it calls the connector
    first_forward_clears: bool = False
    """The first forward overwrites blocks that were loaded before it."""
    has_priorities: bool = False  # vLLM may preempt a request that the same step has scheduled
    is_inside_multi: bool = False  # a MultiConnector has other connectors beside this one
    draft_lookahead: int = 0
    """Tokens after a hit that must be known, because draft layers read them."""
    drops_last_block: bool = False
    """vLLM's own hits end one block early, so that draft layers compute it. A hit in the tiers ends
    there too: otherwise every GPU hit would be followed by a lookup and a load."""


@dataclass(frozen=True)
class CpuTier:
    """The records of the CPU tier: what it holds, and which transfers are open. The assembly builds
    one per engine; only the scheduler's thread uses it."""

    groups: Sequence[Group]
    index: BlockIndex
    ledger: TransferLedger
    recorder: Recorder

    @cached_property
    def alignment(self) -> int:
        """Hits end at multiples of this number of tokens: all groups have full blocks there."""
        return math.lcm(*(group.block_size for group in self.groups))

    def held_for(self, control: RequestControl) -> HeldBlocks:
        """What a request with this control may load from the tier."""
        return self.index if control.may_use(Tier.CPU) else _NO_BLOCKS


_NO_BLOCKS = NoBlocks()
