"""Slots cut into parts of a few layers each, so that a forward can begin before all has arrived."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.layout import BlockRuns

_PARTS = 8  # the forward waits for an eighth of the load, and for an eighth of itself at the end


@dataclass(frozen=True)
class LayerParts:
    ends: tuple[int, ...]
    """Where the parts end in a slot, rising."""
    part_of_layer: dict[str, int]

    @classmethod
    def of(cls, runs: BlockRuns) -> LayerParts:
        ends = sorted({end for _, end in runs.layer_ends}) or [runs.block_bytes]
        count = min(_PARTS, len(ends))
        chosen = [ends[len(ends) * (n + 1) // count - 1] for n in range(count)]
        return cls(
            tuple(chosen),
            {
                name: next(n for n, part_end in enumerate(chosen) if end <= part_end)
                for name, end in runs.layer_ends
            },
        )
