"""What `tiered-kv ls` and `tiered-kv top` make of a daemon's facts."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_tiered_kv.api.daemon_view import frame, namespace_lines, size

INFO: dict[str, Any] = {
    "server": "tiered-kv-server 1",
    "by_namespace": {
        "aa" * 16: {
            "model": "Qwen\n3",
            "memory_blocks": 1200,
            "memory_bytes": 3 << 30,
            "ssd_blocks": 5,
            "ssd_bytes": 1 << 20,
        },
        "bb" * 16: {"model": "", "memory_blocks": 0, "memory_bytes": 0},
    },
}


def test_namespaces_are_a_table_with_one_line_each() -> None:
    head, first, second = namespace_lines(INFO)
    assert head.split() == [
        "namespace",
        "memory",
        "memory",
        "blocks",
        "ssd",
        "ssd",
        "blocks",
        "model",
    ]
    assert first.split() == ["aa" * 16, "3.0", "GiB", "1,200", "1.0", "MiB", "5", r"Qwen\n3"]
    assert second.endswith("not seen since the daemon started")
    assert namespace_lines(INFO, 1)[-1] == "and 1 more"
    assert namespace_lines({}) == ["no namespaces: nothing was stored"]


def test_look_shows_rates_of_the_interval() -> None:
    before = {"hit_blocks": {"memory": 100}, "missed_blocks": 50, "received_bytes": 0}
    after = {
        "hit_blocks": {"memory": 160, "ssd": 30},
        "missed_blocks": 60,
        "received_bytes": 4 << 20,
        "sent_bytes": 0,
        "requests": {"get": 2},
        "capacity_bytes": {"memory": 4 << 30, "backing": 0},
        "used_bytes": {"memory": 1 << 30, "backing": 7 << 10},
        "pending_write_bytes": {"ssd": 2 << 20},
        "errors": {"internal": 1},
    }
    text = "\n".join(frame("tcp://a:1", INFO, before, after, 2.0))
    assert "90.0%" in text  # 90 of 100 blocks
    assert "blocks found 45/s, not found 5.0/s" in text
    assert "2.0 MiB/s in" in text
    assert "25.0%  1.0 GiB of 4.0 GiB" in text
    assert "7.0 KiB, no limit" in text
    assert "2.0 MiB to ssd" in text
    assert "wrong    errors internal 0.5/s" in text


def test_counters_of_a_restarted_daemon_begin_at_zero() -> None:
    before = {"hit_blocks": {"memory": 1000}, "missed_blocks": 5000}
    after = {"hit_blocks": {"memory": 30}, "missed_blocks": 10}
    assert "75.0%" in "\n".join(frame("a", {}, before, after, 1.0))


def test_look_at_a_daemon_of_another_version_leaves_out_what_is_missing() -> None:
    assert "no request" in "\n".join(
        frame("a", {"by_namespace": 3}, {}, {"capacity_bytes": 1}, 1.0)
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (2 << 40, "2.0 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
