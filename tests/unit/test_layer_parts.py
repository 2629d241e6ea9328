"""Division of slots into layer parts; needs no GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.device.layer_parts import LayerParts


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=70))
def test_layer_parts_cover_slot_and_layers(
    sizes: list[int],
) -> None:
    ends = [(f"layer.{n}", sum(sizes[: n + 1])) for n in range(len(sizes))]
    runs = BlockRuns((Run(0, 10**9, sum(sizes), 0),), 4, tuple(ends))
    parts = LayerParts.of(runs)
    assert parts.ends[-1] == sum(sizes)
    assert list(parts.ends) == sorted(set(parts.ends))
    assert len(parts.ends) == min(8, len(sizes))
    for name, end in ends:
        assert parts.ends[parts.part_of_layer[name]] >= end
    order = [parts.part_of_layer[name] for name, _ in ends]
    assert order == sorted(order)
