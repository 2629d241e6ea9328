"""Finds the number format of each KV-cache layer, so that blocks can be compared numerically."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.core.block_compare import LayerNumbers, NumberFormat
from vllm_tiered_kv.core.layout import BlockRuns

if TYPE_CHECKING:
    import torch

    from vllm_tiered_kv.connector.worker.kv_layout import StatePart

_BY_DTYPE = {
    "torch.float32": NumberFormat.FLOAT32,
    "torch.float16": NumberFormat.FLOAT16,
    "torch.bfloat16": NumberFormat.BFLOAT16,
    "torch.float8_e4m3fn": NumberFormat.FP8_E4M3,
    "torch.float8_e5m2": NumberFormat.FP8_E5M2,
}
# vLLM keeps fp8 in uint8 tensors; --kv-cache-dtype tells the format. Its other uint8 formats pack
# scales among the numbers, so they stay opaque.
_BY_CACHE_DTYPE = {
    "fp8": NumberFormat.FP8_E4M3,
    "fp8_e4m3": NumberFormat.FP8_E4M3,
    "fp8_e5m2": NumberFormat.FP8_E5M2,
}


def number_format(dtype: str, cache_dtype: str) -> NumberFormat:
    """Returns the format of a tensor of this dtype under vLLM's `--kv-cache-dtype`."""
    formats = _BY_DTYPE if dtype != "torch.uint8" else _BY_CACHE_DTYPE
    name = dtype if dtype != "torch.uint8" else cache_dtype
    return formats.get(name, NumberFormat.OPAQUE)


def is_draft_layer(name: str, num_layers: int) -> bool:
    """Whether a layer belongs to the draft model of a model with `num_layers` layers. vLLM has no
    mark for it: it numbers such layers after those of the model, or gives them a prefix."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return name.startswith(("draft_model.", "mtp.")) or (bool(numbers) and numbers[0] >= num_layers)


def layer_numbers(
    kv_caches: Mapping[str, torch.Tensor],
    runs: Mapping[int, BlockRuns],
    cache_dtype: str,
    state_parts: Mapping[str, Sequence[StatePart]],
    is_compared: Callable[[str], bool] = lambda name: True,
) -> dict[int, list[LayerNumbers]]:
    """Returns the layers of a block with their number formats, per group. The parts of a recurrent
    layer's state (`kv_layout.state_parts`) count as layers of their own. `is_compared`: whether a
    verification compares the layer with this name."""

    def numbers_of(name: str, end: int) -> Iterator[LayerNumbers]:
        parts = state_parts.get(name)
        if parts is None:
            dtype = str(kv_caches[name].dtype)
            yield LayerNumbers(name, end, number_format(dtype, cache_dtype), is_compared(name))
            return
        at = end - sum(part.nbytes for part in parts)
        for part in parts:
            at += part.nbytes
            numbers = number_format(part.dtype, cache_dtype)
            yield LayerNumbers(name, at, numbers, is_compared(name) and part.is_defined)

    return {
        group_id: [numbers for name, end in group.layer_ends for numbers in numbers_of(name, end)]
        for group_id, group in runs.items()
    }
