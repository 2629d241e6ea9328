"""The tail: the last block of a prompt, for `reuse_partial_tail`.

vLLM's prefix cache and the tiers hold full blocks, so a repeated prompt recomputes up to a block of
tokens. With its tail it computes only the last token, for its logits.

A tail that the prompt fills only in part has its own key, over exactly the prompt's tokens in it.
The rest of the block is undefined: the request that loads the tail writes its own tokens there. If
the prompt fills its last block, the tail is that block under its normal key, and the request uses
all but its last token.
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
    """The tail of one prompt. `tail_of` builds it; the load and store planners use it."""

    keys: list[BlockKey]  # of all blocks of the prompt; the last one is the tail's
    end: int  # tokens of the prompt
    is_partial: bool  # the prompt does not fill the block

    @property
    def key(self) -> BlockKey:
        return self.keys[-1]

    @property
    def position(self) -> int:
        return len(self.keys) - 1


def tail_of(request: Request, keys: RequestKeys, block_size: int) -> Tail | None:
    """The tail of a request's prompt; None if the full blocks already cover all but the last
    token."""
    end = request.num_prompt_tokens
    if (end - 1) % block_size == 0:
        return None
    keys.extend(request, end)
    full = end // block_size
    known = keys.of_group[0][:full]
    if end % block_size == 0:
        return Tail(known, end, is_partial=False)
    return Tail([*known, keys.of_tail(request, full * block_size, end)], end, is_partial=True)
