"""`tiered-kv bench`: what it reads from pages of metrics, and what it prints.
tests/engine/test_up_engine.py runs it against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tiered_kv.api.bench import Answer, Table, sources_between
from vllm_tiered_kv.api.bench_command import triangle_line
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.openai_server import Sample, read_samples

PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{model_name="a \\"b\\", {c}",source="local_compute"} {0}
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} {1}
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} {2}
vllm:tiered_kv_hit_tokens_total{engine="0",model_name="m",tier="cpu"} {3}
vllm:tiered_kv_hit_tokens_total{engine="0",model_name="m",tier="remote"} {4}
vllm:tiered_kv_hit_tokens_created{engine="0",model_name="m",tier="cpu"} 1.7950529811004415e+09
process_start_time_seconds 1.79e+09
"""


def page(*numbers: float) -> list[Sample]:
    text = PAGE
    for place, number in enumerate(numbers):
        text = text.replace(f"{{{place}}}", str(number))
    return read_samples(text)


def test_samples_are_read_with_their_labels() -> None:
    samples = page(1.0, 2.0, 3.0, 4.0, 1e20)
    assert samples[0].labels["model_name"] == 'a \\"b\\", {c}'
    assert samples[4].labels == {"engine": "0", "model_name": "m", "tier": "remote"}
    assert samples[4].value == 1e20
    assert samples[-1] == Sample("process_start_time_seconds", {}, 1.79e9)


def test_sources_are_what_was_counted_between_two_looks() -> None:
    before, after = page(100, 50, 10, 10, 0), page(116, 50, 110, 70, 40)
    assert sources_between(before, after) == {
        "computed": 16,
        "external_kv_transfer": 100,
        "cpu": 60,
        "remote": 40,
    }
    assert sources_between(before, before) == {}
    assert sources_between([], after)["gpu"] == 50  # the counters appeared meanwhile


@pytest.mark.parametrize(
    ("tokens", "daemon_tiers", "shown"),
    [
        ({"computed": 1000}, (), "computed"),
        ({"computed": 16, "gpu": 984}, (), "gpu"),
        ({"computed": 200, "gpu": 500, "cpu": 300}, (), "gpu+cpu+computed"),
        ({"computed": 16, "remote": 984}, (), "remote"),
        ({"computed": 16, "remote": 984}, ("ssd", "memory"), "remote(ssd+memory)"),
        ({}, (), "unknown"),
    ],
)
def test_served_by_names_the_large_sources(
    tokens: dict[str, int], daemon_tiers: tuple[str, ...], shown: str
) -> None:
    assert Answer(1.0, 1000, tokens, daemon_tiers).served_by == shown


def test_tables_have_a_line_for_each_row() -> None:
    computed, hit = Answer(8.0, 1000, {"computed": 1000}), Answer(0.5, 1000, {"gpu": 984})
    head, first, second = Table([("computed", computed), ("GPU", hit)]).lines()
    assert head.split() == ["TTFT", "tokens", "served", "by"]
    assert first.split() == ["computed", "8.000", "s", "1.0", "x", "1000", "computed"]
    assert second.split() == ["GPU", "0.500", "s", "16.0", "x", "1000", "gpu"]
    assert triangle_line(2, [hit, computed]).split() == ["2", "0.50", "gpu", "8.00", "computed"]


def test_too_few_prompts_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("one\ntwo\n")
    assert main(["bench", "stress", str(prompts), "--n", "3"]) == 2
    assert "has 2 prompts, and --n asks for 3" in capsys.readouterr().err


def test_absent_server_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "prompts.jsonl"
    assert main(["bench", "inputs", str(out), "--url", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert not out.exists()


def test_help_of_each_tool_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for tool in ("inputs", "speed", "stress"):
        with pytest.raises(SystemExit):
            main(["bench", tool, "--help"])
    assert "remote(ssd)" in capsys.readouterr().out
