"""Counting: totals, changes, merging; names defined once and documented."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from tools.generate_docs import DOCS, GENERATED
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.metrics import names, server_names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.metrics.recorder import Recorder, label_values, merge
from vllm_tiered_kv.wire.codec import REQUESTS


def test_totals_stay_and_changes_are_drained() -> None:
    recorder = Recorder()
    recorder.add(names.HIT_TOKENS, 5, "cpu")
    recorder.add(names.HIT_TOKENS, 2, "ssd")
    recorder.set(names.USED_BYTES, 10, "cpu")
    assert recorder.drain() == {"hit_tokens": {"cpu": 5, "ssd": 2}, "used_bytes": {"cpu": 10}}
    recorder.add(names.HIT_TOKENS, 1, "cpu")
    recorder.set(names.USED_BYTES, 10, "cpu")  # unchanged: nothing to report
    assert recorder.drain() == {"hit_tokens": {"cpu": 1}}
    assert recorder.drain() == {}
    assert recorder.total(names.HIT_TOKENS) == 8
    assert recorder.total(names.HIT_TOKENS, "cpu") == 6


def test_merging_adds_counters_and_replaces_gauges() -> None:
    a = {"hit_tokens": {"cpu": 5}, "used_bytes": {"cpu": 10}}
    merge(a, {"hit_tokens": {"cpu": 1, "ssd": 2}, "used_bytes": {"cpu": 3}})
    assert a == {"hit_tokens": {"cpu": 6, "ssd": 2}, "used_bytes": {"cpu": 3}}


def test_durations_are_kept_one_by_one_until_they_are_drained() -> None:
    recorder = Recorder()
    for seconds in (0.25, 0.5):
        recorder.observe(names.LOAD_SECONDS, seconds, "cpu")
    drained = recorder.drain()
    assert drained == {"load_seconds": {"cpu": [0.25, 0.5]}}
    assert recorder.drain() == {}
    merged = merge(drained, {"load_seconds": {"cpu": [1.0], "remote": [2.0]}})
    assert merged == {"load_seconds": {"cpu": [0.25, 0.5, 1.0], "remote": [2.0]}}
    for _ in range(5000):  # nobody drains it
        recorder.observe(names.LOAD_SECONDS, 1, "cpu")
    assert len(recorder.drain()["load_seconds"]["cpu"]) == 1000
    with pytest.raises(ValueError, match="no histogram"):
        recorder.observe(names.HIT_TOKENS, 1, "cpu")


def test_counter_can_be_shown_before_its_first_event() -> None:
    recorder = Recorder()
    recorder.show(names.DAEMON_ERRORS, "tcp://a:1")
    assert recorder.drain() == {"daemon_errors": {"tcp://a:1": 0}}
    recorder.add(names.DAEMON_ERRORS, 2, "tcp://a:1")
    recorder.show(names.DAEMON_ERRORS, "tcp://a:1")
    assert recorder.drain() == {"daemon_errors": {"tcp://a:1": 2}}


def test_histogram_counts_up_to_and_including_each_bound() -> None:
    histogram = Histogram(server_names.REQUEST_SECONDS)
    for seconds in (0.0, 0.001, 0.0011, 100.0):
        histogram.observe(seconds, "get")
    histogram.observe(0.3, "put", times=2)
    (get, counts, total), (put, put_counts, put_total) = histogram.snapshot()
    assert (put_counts[-1], put_total) == (2, 0.6)
    assert (get, put) == (("get",), ("put",))
    by_bound = dict(zip((*names.SECONDS, "all"), counts, strict=True))
    assert (by_bound[0.0001], by_bound[0.001], by_bound[0.002]) == (1, 2, 3)
    assert (by_bound[30.0], by_bound["all"]) == (3, 4)
    assert total == pytest.approx(100.0021)
    with pytest.raises(ValueError, match="op"):
        histogram.observe(1.0)


def test_histogram_loses_nothing_to_threads() -> None:
    histogram = Histogram(server_names.SSD_READ_SECONDS)
    work = [Thread(target=lambda: [histogram.observe(0.1) for _ in range(2000)]) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    ((_, counts, _),) = histogram.snapshot()
    assert counts[-1] == 8000


def test_labels_are_required_and_survive_the_way() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="reason"):
        recorder.add(names.DROPPED_BLOCKS, 1, "cpu")
    recorder.add(names.DROPPED_BLOCKS, 1, "cpu", "reset")
    ((joined, _),) = recorder.drain()["dropped_blocks"].items()
    assert label_values(joined) == ("cpu", "reset")


def test_counters_only_rise_and_kinds_are_kept_apart() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="hit_tokens"):
        recorder.add(names.HIT_TOKENS, -1, "cpu")
    with pytest.raises(ValueError, match="used_bytes"):
        recorder.add(names.USED_BYTES, 1, "cpu")
    with pytest.raises(ValueError, match="counter"):
        recorder.set(names.HIT_TOKENS, 1, "cpu")


@pytest.mark.parametrize("page", sorted(GENERATED))
def test_generated_tables_are_up_to_date(page: str) -> None:
    assert GENERATED[page]() in Path(DOCS / page.partition("#")[0]).read_text()


def test_values_of_labels_are_documented() -> None:
    page = Path(DOCS / "metrics.md").read_text()
    engine, daemon = page.split("## Daemon metrics")
    for reason in names.DropReason:
        assert f"`{reason.value}`" in engine
    causes = Path(DOCS / "misses.md").read_text()
    for cause in names.MissCause:
        assert f"| `{cause.value}` |" in causes
    for result in PutResult:
        assert f"`{result.name.lower()}`" in daemon


def test_names_are_unique_and_all_are_exported() -> None:
    defined = {value.name for value in vars(names).values() if isinstance(value, names.Metric)}
    assert defined == set(names.BY_NAME)
    assert len(names.ALL) == len(names.BY_NAME)


def test_counters_name_all_values_of_their_labels() -> None:
    for metric in names.ALL:
        is_known_ahead = metric.kind is not names.Kind.GAUGE and metric is not names.DAEMON_ERRORS
        assert bool(metric.series) == is_known_ahead, metric.name
        assert all(len(values) == len(metric.labels) for values in metric.series)
        assert len(set(metric.series)) == len(metric.series)
    for outcome in names.LookupOutcome:
        assert ("remote", outcome.value) in names.LOOKUPS.series
    assert {values[1] for values in names.DROPPED_BLOCKS.series} == {
        reason.value for reason in names.DropReason
    }


def test_counters_of_the_daemon_name_all_values_of_their_labels() -> None:
    for metric in server_names.ALL:
        has_label = metric.kind is names.Kind.COUNTER and bool(metric.labels)
        assert bool(metric.series) == has_label, metric.name
    assert {op for (op,) in server_names.REQUESTS.series} == set(REQUESTS)


def test_metric_without_labels_survives_the_way() -> None:
    recorder = Recorder()
    recorder.set(names.PREFILL_SPEED, 7)
    ((joined, value),) = recorder.drain()["prefill_tokens_per_second"].items()
    assert (label_values(joined), value) == ((), 7)
