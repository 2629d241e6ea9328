"""The block in which a prompt ends, for `reuse_partial_tail`.

vLLM's prefix cache and the tiers know full blocks, so a repeated prompt computes up to a block of
tokens again. With its last block it computes one: the last token, whose logits are wanted.

A block that the prompt fills only in part has a key of its own, over exactly the tokens that count.
What lies behind them is nobody's: the request that loads it writes its own tokens there. A prompt
that fills its last block loads that one under the key it has anyway, and uses all but one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_tiered_kv.connector.identity.request_keys import RequestKeys
from vllm_tiered_kv.core.key import BlockKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Tail:
    keys: list[BlockKey]  # of all blocks of the prompt, the last one is the tail's
    end: int  # tokens of the prompt
    is_partial: bool  # a key that no other block has

    @property
    def key(self) -> BlockKey:
        return self.keys[-1]

    @property
    def position(self) -> int:
        return len(self.keys) - 1


def tail_of(request: Request, keys: RequestKeys, block_size: int) -> Tail | None:
    """None if the full blocks leave only the last token of the prompt to be computed."""
    end = request.num_prompt_tokens
    if (end - 1) % block_size == 0:
        return None
    keys.extend(request, end)
    full = end // block_size
    known = keys.of_group[0][:full]
    if end % block_size == 0:
        return Tail(known, end, is_partial=False)
    return Tail([*known, keys.of_tail(request, full * block_size, end)], end, is_partial=True)
