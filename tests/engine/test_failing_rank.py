"""One of two ranks of a real engine fails for a while, the other one is fine: no answer is wrong,
nothing is served by halves, and what has failed is served again when the rank is well.

Ranks are processes of their own, and what fails lies below the connector: copies of the device, the
connection to a daemon, blocks there (`bad_rank`). Toy engines do more of this, faster, in
test_ranks.py and test_remote_ranks.py; here it is vLLM that gathers what the ranks report.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.bad_rank import FAULT_FILE
from tests.engine.bad_rank_run import BLOCK, COUNT, HEAD_BLOCKS, LENGTHS, STEP_TOKENS
from tests.engine.engine_apart import run_apart

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Report = dict[str, Any]
Turn = dict[str, Any]


@pytest.fixture(scope="module")
def report(random_model: Path) -> Report:
    """All cases on one engine: to start it takes longer than they do."""
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
        DaemonProcess(Path(folder), "--memory", "64MiB") as daemon,
    ):
        return run_apart(
            "bad_rank_run",
            str(random_model),
            daemon.endpoint,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            **{FAULT_FILE: str(Path(folder) / "fault")},
        )


def blocks_of(case: str) -> int:
    """As many as can be loaded: vLLM always computes the last token of a prompt."""
    return (LENGTHS[case] - 1) // BLOCK


def is_right(turn: Turn, report: Report, *cases: str) -> bool:
    """Whether the prompts of these cases were answered as with nothing cached."""
    cold = [report["cold"][case]["answers"][0] for case in cases]
    return all(
        mine["tokens"] == theirs["tokens"]
        # A step that another request shares rounds in another way.
        and mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
        for mine, theirs in zip(turn["answers"], cold, strict=True)
    )


def counted(turn: Turn, name: str) -> float:
    return float(turn["counted"].get(name, 0))


def assert_served(turn: Turn, tier: str, blocks: int) -> None:
    """So many blocks of the prompt came from this tier on all ranks, and nothing failed."""
    assert turn["answers"][-1]["cached"] == blocks * BLOCK
    assert counted(turn, f"hit_tokens[{tier}]") == blocks * BLOCK
    assert counted(turn, f"loaded_blocks[{tier}]") == blocks
    assert not any(name.startswith("load_failures") for name in turn["counted"])


def assert_not_served(turn: Turn) -> None:
    assert not any(name.startswith("loaded_blocks") for name in turn["counted"])


def test_answers_to_compare_with_are_computed(report: Report) -> None:
    for case, turn in report["cold"].items():
        (answer,) = turn["answers"]
        assert answer["cached"] == 0, case
        assert not turn["ways"], case
        assert len(answer["tokens"]) == COUNT, case
    assert len({tuple(turn["answers"][0]["tokens"]) for turn in report["cold"].values()}) == len(
        LENGTHS
    )


def test_wrong_bytes_on_one_rank_change_the_answer(report: Report) -> None:
    """Or equal answers would say nothing."""
    lie = report["in a step"]["lie"]
    assert_served(lie, "cpu", blocks_of("in a step"))
    assert lie["answers"][0]["tokens"] != report["cold"]["in a step"]["answers"][0]["tokens"]


@pytest.mark.parametrize(
    ("case", "way", "asked"),
    [
        ("in a step", "ahead", ["in a step"]),
        ("beside steps", "beside", ["bystander", "beside steps"]),
    ],
    ids=["in-a-step", "beside-steps"],
)
def test_load_that_one_rank_cannot_do_is_recomputed(
    report: Report, case: str, way: str, asked: list[str]
) -> None:
    turns, blocks = report[case], blocks_of(case)
    assert is_right(turns["stored"], report, case)
    assert counted(turns["stored"], "stored_blocks[cpu]") == blocks
    for turn in ("before", "failed", "after"):
        assert is_right(turns[turn], report, *asked), turn
        assert turns[turn]["ways"] == [way], turn
    assert_served(turns["before"], "cpu", blocks)
    assert counted(turns["failed"], "load_failures[cpu]") == 1
    assert_not_served(turns["failed"])
    assert counted(turns["failed"], "stored_blocks[cpu]") == blocks  # anew
    assert_served(turns["after"], "cpu", blocks)


def test_blocks_not_stored_by_one_rank_are_a_miss(report: Report) -> None:
    """The other one has all of it."""
    turns, blocks = report["stores"], blocks_of("stores")
    stored = STEP_TOKENS // BLOCK
    for turn in turns:
        assert is_right(turns[turn], report, "stores"), turn
    assert counted(turns["failed"], "stored_blocks[cpu]") == stored
    assert counted(turns["failed"], "dropped_blocks[cpu,copy_failed]") == blocks - stored
    assert_served(turns["again"], "cpu", stored)
    assert counted(turns["again"], "stored_blocks[cpu]") == blocks - stored
    assert_served(turns["after"], "cpu", blocks)


def test_hit_ends_where_the_daemon_has_no_shard_of_one_rank(report: Report) -> None:
    turns, blocks = report["deleted"], blocks_of("deleted")
    for turn in turns:
        assert is_right(turns[turn], report, "deleted"), turn
    assert_served(turns["before"], "remote", blocks)
    assert_served(turns["failed"], "remote", HEAD_BLOCKS)
    assert_served(turns["after"], "remote", blocks)  # the missing shard was sent again


def test_load_for_which_the_daemon_lacks_a_shard_is_recomputed(report: Report) -> None:
    """It had all of them when it was asked."""
    turns, blocks = report["vanished"], blocks_of("vanished")
    for turn in turns:
        assert is_right(turns[turn], report, "vanished"), turn
    assert turns["failed"]["found"] == [blocks]
    assert turns["failed"]["ways"] == ["beside"]
    assert counted(turns["failed"], "load_failures[remote]") == 1
    assert_not_served(turns["failed"])
    assert_served(turns["after"], "remote", blocks)


def test_load_that_loses_the_daemon_on_one_rank_uses_the_part_of_the_cpu_tier(
    report: Report,
) -> None:
    """By a second load, of another way: what the first one brought to the other rank counts for
    nothing."""
    turns, blocks = report["lost"], blocks_of("lost")
    assert is_right(turns["stored"], report, "lost")
    assert counted(turns["head"], "stored_blocks[cpu]") == HEAD_BLOCKS
    failed = turns["failed"]
    assert is_right(failed, report, "lost")
    assert failed["ways"] == ["beside", "ahead"]
    assert counted(failed, "load_failures[remote]") == 1
    assert counted(failed, "loaded_blocks[remote]") == 0
    assert counted(failed, "loaded_blocks[cpu]") == HEAD_BLOCKS
    assert all(is_right(turn, report, "lost") for turn in turns["after"])
    assert_served(turns["after"][-1], "remote", blocks)


def test_blocks_not_sent_by_one_rank_are_a_miss_at_the_daemon(report: Report) -> None:
    turns, blocks = report["unsent"], blocks_of("unsent")
    assert is_right(turns["failed"], report, "unsent")
    assert counted(turns["failed"], "stored_blocks[cpu]") == blocks
    assert counted(turns["failed"], "stored_blocks[remote]") == 0
    assert turns["shards"] == [blocks, 0]  # all of the other rank's
    assert is_right(turns["again"], report, "unsent")
    assert turns["again"]["answers"][0]["cached"] == 0
    assert not turns["again"]["ways"]
    assert all(is_right(turn, report, "unsent") for turn in turns["after"])
    assert_served(turns["after"][-1], "remote", blocks)


def test_failures_of_a_rank_leak_nothing(report: Report) -> None:
    assert not any(report["left behind"].values()), report["left behind"]
