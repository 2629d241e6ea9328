"""Prefill context parallelism (PCP): what each of its ranks holds after a step.

vLLM runs PCP on several GPUs only. Here its own code divides the tokens of steps and gathers what
the ranks computed, on a CPU; only the collective and the kernel that finds slots are stand-ins.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.attention.ops import pcp as gathering
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from tests.engine.engine_apart import run_apart
from tests.engine.toy_groups import ToyGroup

BLOCK = 4
BLOCKS = 64


def known(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function with those of these options that it has: vLLM 0.31 does not divide decodes."""
    parameters = inspect.signature(function).parameters
    return partial(function, **{key: options[key] for key in options if key in parameters})


class Rank:
    """One rank of PCP: its part of each step, and its cache of one number for each token."""

    def __init__(self, rank: int, ranks: int, turns: int) -> None:
        self.rank = rank
        self.divides_decodes = turns == 1
        self.manager = known(PCPManager, shard_decode_requests=self.divides_decodes)(
            ranks, rank, torch.device("cpu"), dcp_world_size=turns, dcp_rank=rank % turns
        )
        self.group = ToyGroup(0, None, BLOCK, 8 * BLOCK, turns, 2, rank % turns)
        self.cache = torch.full((BLOCKS * BLOCK,), -1)

    def slots(self, requests: list[SimpleNamespace]) -> torch.Tensor:
        """Where this rank keeps the tokens of a step, request after request."""
        found = []
        for one in requests:
            table, place = self.group.table(one.blocks, one.stop)
            slots = np.full(one.stop, -1)
            own = self.group.own(0, one.stop)
            slots[own] = table[own] * BLOCK + place[own]
            found.append(slots[one.start :])
        return torch.from_numpy(np.concatenate(found))

    def divide(self, requests: list[SimpleNamespace]) -> None:
        """Finds which tokens of the step the rank computes, decodes first."""
        counts = np.array([one.stop - one.start for one in requests])
        starts = np.concatenate([[0], counts.cumsum()])
        decodes = np.array([one.decodes for one in requests])
        segments, per_rank = self.manager._build_batch_layout(
            counts, np.array([one.start for one in requests]), ~decodes, starts
        )
        own = segments[self.rank]
        padded = max(per_rank)
        first = self.rank * padded
        self.tokens = self.manager._padded_gather_idx[first : first + padded]
        self.num_decodes = sum(one.num_tokens for one in own if decodes[one.global_batch_req_idx])
        self.gathered_slots = self.manager._convert_to_gathered_slot_mappings(
            self.slots(requests)[None]
        )[0]

    def write(self, kv: torch.Tensor, group: Any) -> None:
        gather = known(
            gathering.maybe_gather_mla_latent_cache_inputs,
            pcp_shard_decode_requests=self.divides_decodes,
        )
        own = kv[self.tokens][:, None]
        with mock.patch.object(gathering, "get_pcp_group", return_value=group):
            latent, positions, slots = gather(
                own, own[..., None], self.gathered_slots, self.num_decodes, True
            )
        assert torch.equal(latent[:, 0], positions[:, 0, 0])
        kept = slots >= 0
        assert len(slots[kept].unique()) == kept.sum()
        self.cache[slots[kept]] = latent[kept, 0]


def gather_of(ranks: list[Rank], kv: torch.Tensor) -> SimpleNamespace:
    """An all-gather, of whichever part of its own tokens a rank gives."""

    def all_gather(own: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        parts = [kv[rank.tokens][len(rank.tokens) - len(own) :] for rank in ranks]
        return torch.cat(parts).reshape(-1, *own.shape[1:])

    return SimpleNamespace(world_size=len(ranks), all_gather=all_gather)


@pytest.mark.parametrize("divides", [False, True], ids=["replicas", "divided"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_holds_after_a_step_what_it_would_without_pcp(size: int, divides: bool) -> None:
    """All tokens, or those that DCP gives it: at the same slots, whichever rank computed them."""
    turns = size if divides else 1
    ranks = [Rank(number, size, turns) for number in range(size)]
    expected = [rank.cache.clone() for rank in ranks]
    rng = random.Random(size)
    free = list(range(1, BLOCKS))
    requests = [
        SimpleNamespace(
            stop=0, length=rng.randrange(1, 90), blocks=[free.pop() for _ in range(28 // turns)]
        )
        for _ in range(2)
    ]
    kinds = set()
    for step in range(14):
        for one in requests:
            one.start, one.decodes = one.stop, one.stop >= one.length
            chunk = 1 if one.decodes else min(rng.choice([1, 5, 16, 33]), one.length - one.start)
            one.stop = one.start + chunk
            kinds.add((one.decodes, chunk > 2 * size))
        batch = sorted(requests, key=lambda one: not one.decodes)
        kv = torch.arange(sum(one.stop - one.start for one in batch)) + 1000 * (step + 1)
        for rank in ranks:
            rank.divide(batch)
        for rank, right in zip(ranks, expected, strict=True):
            rank.write(kv, gather_of(ranks, kv))
            slots = rank.slots(batch)
            right[slots[slots >= 0]] = kv[slots >= 0]
            assert torch.equal(rank.cache, right)
    assert len(kinds) == 3


def test_ranks_of_both_parallelisms_share_one_memory() -> None:
    """Four processes, with vLLM's groups: two tensor-parallel ranks in each of two ranks of PCP."""
    report = run_apart("prefill_context_run")
    assert report["ranks"] == [0, 1, 2, 3]
    assert report["gathered"] == [[0, 1, 2, 3]] * 4
    assert len(set(map(tuple, report["memory"]))) == 1
    assert report["written"] == ["rank 0"] * 4
