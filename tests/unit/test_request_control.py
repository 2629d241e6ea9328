"""What clients may write into `kv_transfer_params`, and everything that they must not break."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.connector.scheduler.request_control import (
    NO_CONTROL,
    SECTION,
    ControlReader,
    RequestControl,
    parse_control,
)
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder


def test_parse_control_every_key_is_read() -> None:
    control, problems = parse_control(
        {
            "do_remote_prefill": True,
            SECTION: {
                "store": False,
                "load": False,
                "tiers": ["remote"],
                "max_load_tokens": 10,
                "max_store_tokens": 0,
                "pin_seconds": 600,
                "session": "a",
                "session_ended": True,
                "tool_pending": 30,
                "compute_once": False,
            },
        }
    )
    assert not problems
    expected = RequestControl(False, False, (Tier.REMOTE,), 10, 0, 600.0, "a", True, 30.0, False)
    assert control == expected
    assert not control.sends_blocks
    assert control.hold_seconds == 600


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({SECTION: {"stor": False}}, "'stor': unknown key; did you mean store?"),
        ({SECTION: {"zzz": 1}}, "known keys: store, load"),
        ({SECTION: {"store": "maybe"}}, "store: expected true or false, got 'maybe'"),
        ({SECTION: {"tiers": ["cpu", "ssd"]}}, 'tiers: expected a list of "cpu" and "remote"'),
        ({SECTION: {"tiers": []}}, "tiers: expected"),
        ({SECTION: {"max_load_tokens": -1}}, "max_load_tokens: expected a number of tokens"),
        ({SECTION: {"max_store_tokens": 1.5}}, "max_store_tokens: expected a number of tokens"),
        ({SECTION: {"pin_seconds": 1e9}}, "pin_seconds: expected 0 to 3600 seconds"),
        ({SECTION: {"pin_seconds": float("nan")}}, "pin_seconds: expected"),
        ({SECTION: {"session": "x" * 257}}, "session: expected a text of 1 to 256"),
        ({SECTION: {"session_ended": True}}, "session_ended: needs session"),
        ({SECTION: [1]}, "tiered_kv: expected an object, got [1]"),
        ({"tiered-kv": {}}, "'tiered-kv': unknown key; did you mean tiered_kv?"),
    ],
)
def test_parse_control_mistake_is_named_and_ignored(params: object, words: str) -> None:
    control, problems = parse_control(params)
    assert control == NO_CONTROL
    assert len(problems) == 1
    assert words in problems[0]


def test_parse_control_foreign_keys_are_no_mistakes() -> None:
    foreign = {"do_remote_decode": True, "remote_engine_id": "x", "lmcache.tag": 1, "ttl": 3}
    assert parse_control(foreign) == (NO_CONTROL, [])
    assert parse_control(None) == (NO_CONTROL, [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda some: st.lists(some) | st.dictionaries(st.text(), some),
    max_leaves=8,
)
keys = st.sampled_from([*RequestControl.__dataclass_fields__, "other"]) | st.text()


@given(st.dictionaries(keys, json_values), json_values)
def test_parse_control_any_json_yields_usable_control(
    section: dict[str, object], other: object
) -> None:
    for params in ({SECTION: section}, {SECTION: other}, other):
        control, problems = parse_control(params)
        assert control.store_limit is None or control.store_limit >= 0
        assert control.load_end(8, 4) is None or control.load_end(8, 4) >= 8
        assert 0 <= control.hold_seconds <= 3600
        assert control.tiers
        assert all(len(problem) < 400 for problem in problems)


def test_load_end_rounds_down_to_whole_blocks() -> None:
    assert RequestControl(max_load_tokens=11).load_end(8, 4) == 16
    assert RequestControl(max_load_tokens=3).load_end(8, 4) == 8
    assert RequestControl(load=False, max_load_tokens=99).load_end(8, 4) == 8
    assert NO_CONTROL.load_end(8, 4) is None


def test_control_reader_logs_each_mistake_once_and_counts_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    reader = ControlReader(recorder)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader.read({SECTION: {"stor": False, "load": False}})
        reader.read({})
    assert [record.getMessage() for record in caplog.records] == [
        "ignored in a request's kv_transfer_params: 'stor': unknown key; did you mean store?"
    ]
    assert recorder.total(names.REQUEST_CONTROLS, "ignored") == 3
    assert recorder.total(names.REQUEST_CONTROLS, "load") == 3
    assert recorder.total(names.REQUEST_CONTROLS, "store") == 0


def test_control_reader_many_mistakes_log_a_bounded_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = ControlReader(Recorder())
    with caplog.at_level(logging.WARNING):
        for n in range(1000):
            reader.read(json.loads(json.dumps({SECTION: {f"key{n}": n}})))
    assert len(caplog.records) == 100


def test_request_controls_metric_has_a_series_for_every_key() -> None:
    assert {series[0] for series in names.REQUEST_CONTROLS.series} == {
        *RequestControl.__dataclass_fields__,
        "ignored",
    }
