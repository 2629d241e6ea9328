"""Divides slots into parts of a few layers each, so that a forward pass can overlap its load."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.layout import BlockRuns

# With n parts the forward pass waits for 1/n of the load before it starts, and 1/n of it remains to
# be computed after the last part has arrived.
_PARTS = 8


@dataclass(frozen=True)
class LayerParts:
    """The parts of a slot, and the part that contains each layer."""

    ends: tuple[int, ...]
    """End offsets of the parts in a slot, ascending."""
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
