"""The curves of the original benchmark tables go through what was measured."""

from __future__ import annotations

from typing import Any

from benchmarks.plots import Plot
from benchmarks.result_files import Result, Results
from benchmarks.sections import throughput


def cell(seconds: float, **labels: Any) -> dict[str, Any]:
    return {**labels, "requests": 10, "seconds": seconds}


def plots_of(**cells: list[dict[str, Any]]) -> list[Plot]:
    """Of results with these names, all of one machine."""
    found = (Result(f"throughput_{name}-box", {"cells": made}) for name, made in cells.items())
    return throughput.plots(Results(tuple(found)))


def points(plot: Plot) -> dict[str, tuple[tuple[Any, float], ...]]:
    return {line.label: tuple(zip(line.x, line.y, strict=True)) for line in plot.series}


def stored(seconds: float, system: str, scheduling: str, gpu_cache: bool, chunk: int) -> Any:
    labels = {"system": system, "scheduling": scheduling, "gpu_cache": gpu_cache}
    return cell(seconds, **labels, chunk=chunk)


def test_store_overhead() -> None:
    both = [
        stored(2.0, "vllm", "sync", True, 1024),
        stored(5.0, "vllm", "sync", True, 32),
        stored(1.0, "vllm", "async", True, 1024),
        stored(2.5, "tiered", "sync", True, 1024),
        stored(4.0, "daemon", "async", True, 32),
        stored(8.0, "daemon", "async", False, 32),
    ]
    cache_off = [stored(3.0, "tiered", "async", False, 512)]

    made = plots_of(store_overhead=both, store_overhead_cache_off=cache_off)

    assert {plot.name: points(plot) for plot in made} == {
        "throughput_store_overhead-box-gpu-cache-on": {
            "vllm-sync": (("1024", 5.0), ("32", 2.0)),
            "vllm-async-2": (("1024", 10.0),),
            "swap_out-sync": (("1024", 4.0),),
            "transfer_out-async-2": (("32", 2.5),),
        },
        "throughput_store_overhead-box-gpu-cache-off": {"transfer_out-async-2": (("32", 1.25),)},
        "throughput_store_overhead_cache_off-box-gpu-cache-off": {
            "swap_out-async-2": (("512", 3.333),)
        },
    }
    assert [plot.title[-3:] for plot in made] == [" on", "off", "off"]
    assert not any(plot.log_y for plot in made)


def test_hit_rates() -> None:
    cells = [
        cell(1.0 + number, column=column, scheduling=scheduling, percent=percent)
        for percent in (0, 100)
        for number, column in enumerate(["naive", "transfer_in-2"])
        for scheduling in ("sync", "async")
    ]
    del cells[-1]

    sync, asynchronous = plots_of(hit_rates=cells)

    assert sync.name == "throughput_hit_rates-box-sync"
    assert points(sync) == {
        "naive": ((0, 10.0), (100, 10.0)),
        "transfer_in-2": ((0, 5.0), (100, 5.0)),
    }
    assert asynchronous.name == "throughput_hit_rates-box-async"
    assert points(asynchronous)["transfer_in-2"] == ((0, 5.0),)


def test_long_prefill() -> None:
    cells = [
        cell(2.0, row="naive", round=1, output=2),
        cell(4.0, row="naive", round=1, output=128),
        cell(0.1, row="prefix_caching", round=2, output=128),
        cell(1.0, row="remote+no_prefix_caching", round=4, output=128),
    ]

    local, remote = plots_of(long_prefill=cells)

    assert local.name == "throughput_long_prefill-box-local"
    assert points(local) == {
        "naive": (("2", 5.0), ("128", 2.5)),
        "prefix_caching-2": (("128", 100.0),),
    }
    assert remote.name == "throughput_long_prefill-box-remote"
    assert points(remote) == {"remote+no_prefix_caching-4": (("128", 10.0),)}
    assert local.log_y
    assert remote.log_y


def test_no_plots_of_nothing() -> None:
    assert plots_of() == []
    assert plots_of(store_overhead=[], long_prefill=[]) == []
    assert plots_of(documents=[cell(1.0, what="cold")]) == []
