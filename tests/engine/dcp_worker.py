"""A vLLM worker for CPUs that runs decode context parallelism (DCP).

vLLM's own attention for CPUs cannot: it does not return the log-sum-exp of its softmax, by which
the ranks weigh what each of them finds in its part of the tokens. This one is written for tests of
a few hundred tokens, and stands in for it in the processes of its workers.
"""

# Has to be imported first, as in vLLM's worker.
import vllm.v1.worker.cpu.shm  # noqa: F401 # isort: skip

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.worker.cpu_worker import CPUWorker


class DcpWorker(CPUWorker):
    """vLLM resolves it by name, and so imports this module."""


@dataclass
class DcpMetadata:
    """Of one step."""

    starts: list[int]  # where the tokens of each request begin, and the end of the last one's
    contexts: list[int]  # computed before: tokens of each request, on all ranks
    own_contexts: list[int]  # on this rank
    block_table: torch.Tensor


class DcpMetadataBuilder(AttentionMetadataBuilder[DcpMetadata]):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> DcpMetadata:
        starts = common.query_start_loc
        contexts = common.seq_lens - (starts[1:] - starts[:-1])
        group = get_dcp_group()
        own = get_dcp_local_seq_lens(
            contexts,
            group.world_size,
            group.rank_in_group,
            self.vllm_config.parallel_config.cp_kv_cache_interleave_size,
        )
        return DcpMetadata(
            starts.tolist(), contexts.tolist(), own.tolist(), common.block_table_tensor
        )


class DcpAttention(CPUAttentionBackendImpl):
    """Attention over one KV head per rank, as with more ranks than KV heads."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        slots = slot_mapping[: len(key)]
        is_own = slots >= 0
        block, place = slots[is_own] // kv_cache.shape[2], slots[is_own] % kv_cache.shape[2]
        kv_cache[block, :, place] = torch.cat([key, value], dim=-1)[is_own]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DcpMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output  # vLLM measures its memory
        assert self.num_kv_heads == 1
        starts = attn_metadata.starts
        for number, (start, stop) in enumerate(pairwise(starts)):
            parts = [self._attend(query[start:stop], key[start:stop], value[start:stop], True)]
            if attn_metadata.contexts[number]:
                own = attn_metadata.own_contexts[number]
                blocks = attn_metadata.block_table[number, : -(-own // kv_cache.shape[2])]
                kv = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:own]
                keys, values = kv.split(self.head_size, dim=-1)
                parts += self._context(query[start:stop], keys, values)
            outs, weights = zip(*parts, strict=True)
            weights = torch.stack(weights).softmax(dim=0)
            output[start:stop] = (torch.stack(outs) * weights.unsqueeze(-1)).sum(dim=0)
        return output

    def _context(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each rank finds in its part of the tokens, for the heads of this one."""
        group = get_dcp_group()
        out, lse = self._attend(group.all_gather(query.contiguous(), dim=1), keys, values, False)
        found = group.all_gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1)[None], dim=0)
        first = group.rank_in_group * self.num_heads
        found = found[:, :, first : first + self.num_heads]
        return [(part[..., :-1], part[..., -1]) for part in found]

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention of tokens, and its log-sum-exp; nothing where there are no keys."""
        scores = torch.einsum("qhd,kd->qhk", query, keys[:, 0]) * self.scale
        if causal:
            is_ahead = torch.ones(len(query), len(keys), dtype=torch.bool).triu(1)
            scores.masked_fill_(is_ahead[:, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        return torch.einsum("qhk,kd->qhd", scores.softmax(dim=-1), values[:, 0]), lse


class DcpAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[DcpAttention]:
        return DcpAttention

    @staticmethod
    def get_builder_cls() -> type[DcpMetadataBuilder]:
        return DcpMetadataBuilder


def _slots_of_tokens(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    block_size: int,
    ranks: int,
    rank: int,
    interleave: int,
    pad: int,
    threads: int,
) -> None:
    """Where a rank keeps each token, as vLLM's Triton kernel computes it. vLLM's own replacement
    for machines without Triton knows no context parallelism."""
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    requests = torch.arange(len(lengths)).repeat_interleave(lengths)
    at = positions[:num_tokens]
    turn, place = at % (block_size * ranks) // interleave, at % interleave
    block = block_table[requests, at // (block_size * ranks)].long()
    slots = block * block_size + turn // ranks * interleave + place
    slot_mapping[:num_tokens] = slots.where(turn % ranks == rank, pad)
    slot_mapping[num_tokens:max_num_tokens] = pad


register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{DcpAttentionBackend.__name__}")
if not HAS_TRITON:
    register_kernels(
        {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slots_of_tokens}
    )
