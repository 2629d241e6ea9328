"""What the status page shows: samples in a fixed amount of memory, and the latest problems."""

from __future__ import annotations

import json
import logging
import re

import pytest

from tests.patience import eventually
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.server.page.history import History, quantile
from vllm_tiered_kv.server.page.recent_problems import RecentProblems
from vllm_tiered_kv.server.page.status_page import StatusPage
from vllm_tiered_kv.stores.namespaces import NamespaceUsage


class Counting:
    """Statistics of a daemon in which each look finds one more block."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> dict[str, object]:
        self.looks += 1
        return {"hit_blocks": {"ssd": self.looks}, "put_blocks": {"stored": 5, "present": 2}}


def history_of(stats: Counting, samples: int = 4) -> History:
    return History(stats, Histogram(names.REQUEST_SECONDS), ["memory", "ssd"], 3600.0, samples)


def test_history_keeps_the_last_samples_and_numbers_all() -> None:
    history = history_of(Counting())
    hit = history.columns.index("hit_ssd")
    for _ in range(10):
        history.sample()
    facts = history.facts()
    assert facts["first"] == 6
    assert [row[hit] for row in facts["rows"]] == [7, 8, 9, 10]
    assert facts["now"][hit] == 11
    assert {len(row) for row in [*facts["rows"], facts["now"]]} == {len(history.columns)}
    assert facts["now"][history.columns.index("stored")] == 5


@pytest.mark.parametrize(
    ("after", "first", "hits"),
    [(-1, 6, [7, 8, 9, 10]), (3, 6, [7, 8, 9, 10]), (7, 8, [9, 10]), (9, 10, []), (50, 10, [])],
)
def test_history_asked_for_the_rest_gives_no_more(after: int, first: int, hits: list[int]) -> None:
    history = history_of(Counting())
    for _ in range(10):
        history.sample()
    facts = history.facts(after)
    hit = history.columns.index("hit_ssd")
    assert (facts["first"], [row[hit] for row in facts["rows"]]) == (first, hits)


def test_history_takes_samples_until_it_is_closed() -> None:
    stats = Counting()
    history = History(stats, Histogram(names.REQUEST_SECONDS), ["ssd"], interval_s=0.01)
    history.start()
    eventually(lambda: stats.looks > 3)
    history.close()
    looks = stats.looks
    assert len(history.facts()["rows"]) == looks


def test_quantiles_are_of_the_requests_since_the_last_sample() -> None:
    durations = Histogram(names.REQUEST_SECONDS)
    history = History(Counting(), durations, ["memory"])
    columns = history.columns

    def now(name: str) -> float | None:
        value: float | None = history.facts()["now"][columns.index(name)]
        return value

    assert now("lookup_p99") is None
    durations.observe(3.0, "match")
    assert 2.0 <= (now("lookup_p50") or 0) <= 5.0
    history.sample()
    assert now("lookup_p50") is None
    durations.observe(0.00015, "borrow", times=99)
    durations.observe(0.3, "match")
    durations.observe(20.0, "get")
    assert 0.0001 <= (now("lookup_p50") or 0) <= 0.0002
    assert (now("lookup_p99") or 0) <= 0.0002
    assert 10.0 <= (now("read_p50") or 0) <= 30.0
    assert now("write_p50") is None


def test_quantile_is_interpolated_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile([0, 0, 0, 0], bounds, 0.5) is None
    assert quantile([4, 4, 4, 4], bounds, 0.5) == 0.5
    assert quantile([0, 4, 8, 8], bounds, 0.5) == 2.0
    assert quantile([0, 4, 8, 8], bounds, 0.75) == 3.0
    assert quantile([0, 0, 0, 8], bounds, 0.99) == 4.0  # beyond the last bound


@pytest.fixture
def problems() -> object:
    kept = RecentProblems()
    kept.attach()
    yield kept
    kept.detach()


def test_problems_are_the_latest_warnings_and_errors_of_the_package(
    problems: RecentProblems,
) -> None:
    ours = logging.getLogger("vllm_tiered_kv.server.page")
    ours.info("not kept")
    logging.getLogger("redis").error("not ours")
    ours.warning("the disk is %s", "slow")
    try:
        raise OSError(5, "Input/output error")
    except OSError:
        ours.exception("a block could not be read")
    latest, first = problems.facts()
    assert (first["level"], first["text"]) == ("warning", "the disk is slow")
    assert latest["level"] == "error"
    assert latest["text"] == "a block could not be read: OSError: [Errno 5] Input/output error"
    assert latest["time"] >= first["time"] > 1.7e9


def test_message_that_cannot_be_formatted_does_not_fail_its_caller(
    problems: RecentProblems, capsys: pytest.CaptureFixture[str]
) -> None:
    problems.handle(logging.makeLogRecord({"msg": "%d blocks", "args": ("three",)}))
    assert problems.facts() == []
    assert "Logging error" in capsys.readouterr().err


def test_problems_are_bounded_and_repeated_ones_counted(problems: RecentProblems) -> None:
    ours = logging.getLogger("vllm_tiered_kv.server.page")
    for number in range(200):
        ours.warning("number %d", number)
    for _ in range(30):
        ours.warning("x" * 1000)
    kept = problems.facts()
    assert len(kept) == 50
    assert (kept[0]["count"], len(kept[0]["text"])) == (30, 500)
    assert kept[1]["text"] == "number 199"
    problems.detach()
    ours.warning("after it was detached")
    assert problems.facts() == kept


def test_document_has_no_outside_assets_and_sets_no_markup() -> None:
    page = StatusPage({}, history_of(Counting()), RecentProblems())
    document = page.document.decode()
    assert re.findall(r"https?://[^\"]+", document) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", document)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", document)  # the policy would refuse them
    assert "unsafe" not in page.policy
    assert page.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert json.loads(page.facts(3))["history"]["rows"] == []


def test_evictions_of_many_namespaces_take_bounded_memory() -> None:
    usage = NamespaceUsage()
    busy = b"busy" * 4
    for number in range(5000):
        usage.count_eviction(busy + b"key")
        usage.count_eviction(number.to_bytes(16, "little") + b"key")
    evictions = usage.evictions()
    assert evictions[busy] == 5000
    assert len(evictions) == 100
    assert len(usage._evicted) <= 1000
