"""Stands in for the Triton kernels of vLLM's `mamba_utils`, which do not run on CPUs.

With speculative decoding and prefix caching, vLLM copies recurrent states between the blocks of a
request with two kernels: before a forward that begins a new block, and after sampling, to a block
whose last token was accepted. These functions do the same with the same arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm.v1.worker import mamba_utils


@dataclass
class HostKernel:
    """Called like a Triton kernel: `kernel[grid](...)`."""

    function: Callable[..., None]
    calls: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.calls += 1
        return self.function


@dataclass(frozen=True)
class _Layout:
    """Where states are: the arguments that both kernels have in common."""

    block_tables: torch.Tensor  # per group, the address of block ids, one row a request
    row_length: int
    addresses: torch.Tensor  # per state tensor, like all below
    block_strides: torch.Tensor
    item_sizes: torch.Tensor
    inner_sizes: torch.Tensor
    widths: torch.Tensor  # of a convolution; zero: a recurrence
    groups: torch.Tensor

    def copy(self, row: int, source: int, target: int, bias: int) -> None:
        for n in range(len(self.addresses)):
            table = int(self.block_tables[self.groups[n]]) + 4 * row * self.row_length
            token = int(self.inner_sizes[n]) * int(self.item_sizes[n])
            width = int(self.widths[n])
            if width:
                # A convolution's window begins `bias` tokens later.
                begin = self._block(n, table, source) + bias * token
                nbytes = (width - bias) * token
            else:
                begin, nbytes = self._block(n, table, source + bias), token
            ctypes.memmove(self._block(n, table, target), begin, nbytes)

    def _block(self, n: int, table: int, column: int) -> int:
        block_id = ctypes.c_int32.from_address(table + 4 * column).value
        return int(self.addresses[n]) + block_id * int(self.block_strides[n])


def _before(
    columns: torch.Tensor, sources: torch.Tensor, biases: torch.Tensor, *rest: Any, **flags: Any
) -> None:
    assert not flags["HAS_IDX_MAPPING"]
    assert not flags["CONV_STATE_DIM_FIRST"]
    layout, num_requests = _Layout(*rest[:8]), rest[11]
    for row in range(num_requests):
        source, target = int(sources[row]), int(columns[row])
        if source >= 0 and source != target:
            layout.copy(row, source, target, int(biases[row]))


def _after(
    accepted: torch.Tensor,
    columns: torch.Tensor,
    scheduled: torch.Tensor,
    computed: torch.Tensor,
    drafts: torch.Tensor,
    *rest: Any,
    block_size: int,
    **flags: Any,
) -> None:
    assert not flags["CONV_STATE_DIM_FIRST"]
    layout, accepted_out, num_requests = _Layout(*rest[:8]), rest[10], rest[12]
    for row in range(num_requests):
        known = int(computed[row] + scheduled[row] - drafts[row])
        boundary = (known + int(accepted[row]) - 1) // block_size * block_size
        if boundary < known:
            continue
        source, target = int(columns[row]), boundary // block_size - 1
        if source == target:
            accepted_out[row] = 1
        if source != target or boundary != known:
            layout.copy(row, source, target, boundary - known)


@contextmanager
def on_cpu() -> Iterator[HostKernel]:
    """Lets vLLM's model runner for CPUs move states. Yields the kernel that runs after sampling."""
    after = HostKernel(_after)
    with (
        mock.patch.object(mamba_utils, "precopy_mamba_align_fused_kernel", HostKernel(_before)),
        mock.patch.object(mamba_utils, "postprocess_mamba_fused_kernel", after),
    ):
        yield after
