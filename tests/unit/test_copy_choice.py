"""Choice of the copy strategy, and division of slots into layer parts; needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.device.copy_tuning import FEW_BYTES, MANY_BYTES, CopyPlan, tuned_plan
from vllm_tiered_kv.device.layer_parts import LayerParts


def speeds(way: str, nbytes: int) -> float:
    """The kernel wins for few bytes, DMA for many."""
    return {"direct": 50.0, "dma": 10.0 if nbytes == FEW_BYTES else 54.0}[way]


def never(way: str, nbytes: int) -> float:
    raise AssertionError("measured although the result is known")


def test_tuned_plan_takes_fastest_strategy_per_size() -> None:
    plan = tuned_plan("gpu", ["direct", "dma"], speeds, None)
    assert plan == CopyPlan("direct", "dma")
    assert plan.choose(1) == plan.choose(FEW_BYTES) == "direct"
    assert plan.choose(MANY_BYTES) == plan.choose(1 << 40) == "dma"


def test_tuned_plan_saves_measurement_by_signature(tmp_path: Path) -> None:
    file = tmp_path / "new" / "copy.json"
    plan = tuned_plan("a", ["direct", "dma"], speeds, file)
    assert tuned_plan("a", ["direct", "dma"], never, file) == plan
    other = tuned_plan("b", ["direct", "dma"], lambda way, _: {"direct": 2, "dma": 1}[way], file)
    assert other == CopyPlan("direct", "direct")
    assert tuned_plan("a", ["direct", "dma"], never, file) == plan
    assert [path.name for path in file.parent.iterdir()] == ["copy.json"]


def test_tuned_plan_without_measurement_uses_defaults(tmp_path: Path) -> None:
    assert tuned_plan("a", ["direct", "staged"], None, None) == CopyPlan("direct", "staged")
    assert tuned_plan("a", ["direct"], never, tmp_path / "x") == CopyPlan("direct", "direct")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        '{"format": 99, "plans": {"a": {"few": "direct", "many": "direct"}}}',
        '{"format": 1, "plans": []}',
        '{"format": 1, "plans": {"a": 3}}',
        '{"format": 1, "plans": {"a": {"few": "warp", "many": "dma"}}}',
        '{"format": 1, "plans": {"a": {"few": null, "many": null}}}',
    ],
)
def test_tuned_plan_invalid_file_measures_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / "copy.json"
    file.write_text(content)
    assert tuned_plan("a", ["direct", "dma"], speeds, file) == CopyPlan("direct", "dma")
    assert json.loads(file.read_text())["plans"]["a"]["many"] == "dma"


def test_tuned_plan_unwritable_folder_is_ignored(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    plan = tuned_plan("a", ["direct", "dma"], speeds, in_the_way / "copy.json")
    assert plan == CopyPlan("direct", "dma")


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
