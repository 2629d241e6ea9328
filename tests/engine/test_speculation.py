"""n-gram speculation on a real engine: the same tokens, and only confirmed ones are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.engine_apart import run_apart

BLOCK = 32

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tiny_model: Path) -> dict:
    return run_apart("ngram_run", str(tiny_model), VLLM_ENABLE_V1_MULTIPROCESSING="0")


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_ngram_speculation_changes_no_token(report: dict) -> None:
    from tests.engine.ngram_run import prompts

    assert report["cold_drafts"]["accepted_tokens"] > 0
    rejected = report["cold_drafts"]["draft_tokens"] - report["cold_drafts"]["accepted_tokens"]
    assert rejected > 0
    assert tokens(report["cold"]) == tokens(report["plain"])
    whole = [(len(ids) - 1) // BLOCK * BLOCK for ids in prompts()]
    assert [answer["cached"] for answer in report["cold"]] == [0] * len(whole)
    assert [answer["cached"] for answer in report["tier"]] == whole
    assert report["tier"] == report["device"]  # tokens, logprobs and cached tokens


def test_rejected_drafts_are_never_stored(report: dict) -> None:
    """A block more than confirmed tokens fill would have been made of drafts."""
    from tests.engine.ngram_run import COUNT, prompts

    full = [(len(ids) + COUNT - 1) // BLOCK for ids in prompts()]
    assert report["stored"] == sum(full)
    assert [answer["cached"] for answer in report["turn"]] == [blocks * BLOCK for blocks in full]
    assert (
        report["loaded"] == sum(full) + sum(answer["cached"] for answer in report["tier"]) // BLOCK
    )
    assert report["turn_blocks"] == report["turn_blocks_equal"] == sum(full)
    # Asked of vLLM's own cache, which holds the end of a turn as well.
    assert tokens(report["turn_device"]) == tokens(report["turn"])
