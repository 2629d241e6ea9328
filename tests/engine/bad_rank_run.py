"""Run in a process of its own by test_failing_rank.py: an engine over two ranks and a daemon, one
rank of which fails for a while, in one way after the other.

The scheduler lives in this process, each rank in one of its own. Every case has a prompt of its own
and reports what was answered and counted at each of its turns.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.engine.bad_rank import BAD_RANK, FAULT_FILE, Fault
from tests.engine.engine_apart import answer_of, connector, tell
from tests.patience import eventually
from vllm_tiered_kv.connector.scheduler import step_load_policy
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import StoreKey, store_key
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.remote.store import RemoteStore

BLOCK = 32
STEP_TOKENS = 256
HEAD_BLOCKS = 4
# No answer completes a block: what is stored is prompts alone.
LENGTHS = {
    "in a step": 300,
    "beside steps": 290 + BLOCK,
    "stores": 420,
    "deleted": 301,
    "vanished": 302,
    "lost": 303,
    "unsent": 304,
    "bystander": 20,  # less than a block
}
COUNT = 8
_COUNTED = (
    names.HIT_TOKENS,
    names.LOADED_BLOCKS,
    names.LOAD_FAILURES,
    names.STORED_BLOCKS,
    names.DROPPED_BLOCKS,
)

Turn = dict[str, Any]


class Run:
    def __init__(self, model: str, remote: str) -> None:
        from vllm import LLM

        patience = {"remote_lookup_timeout": 20, "remote_load_timeout": 20}  # of a busy machine
        told = connector({"cpu_memory": "8MiB", "remote": remote, **patience})
        told.kv_connector = "BadRankConnector"
        told.kv_connector_module_path = "tests.engine.bad_rank"
        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            seed=0,
            disable_log_stats=False,
            block_size=BLOCK,
            max_num_batched_tokens=STEP_TOKENS,
            tensor_parallel_size=2,
            enforce_eager=True,
            kv_transfer_config=told,
        )
        self._file = Path(os.environ[FAULT_FILE])
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self.half = self._scheduler.connector.scheduler_half
        self.keys: list[BlockKey] = []
        """Of the prompt that came last."""
        self._daemon = RemoteStore(remote, self.half._identity, timeout_s=20, connect_timeout_s=20)
        self._began: list[str] = []
        self._ways: list[str] = []
        self._note_ways()

    # ---- requests -------------------------------------------------------------------------------

    def ask(self, ids: list[int], fault: Fault | None = None) -> Turn:
        self.fail(fault)
        self.begin(ids)
        return self.end()

    def begin(self, ids: list[int]) -> Any:
        """Returns what the connector knows of the request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=COUNT,
            ignore_eos=True,
            logprobs=1,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if not self._began:
            self._before = self._totals()
            self._ways.clear()
        self._began.append(str(time.monotonic_ns()))
        self._llm.llm_engine.add_request(self._began[-1], {"prompt_token_ids": ids}, params)
        *_, state = self.half._requests.values()
        state.keys.extend(state.request, len(ids))
        self.keys = list(state.keys.of_group[0])
        return state

    def step(self) -> None:
        assert not self._llm.llm_engine.step(), "it is over already"

    def end(self) -> Turn:
        """Lets all requests come to their end, and the rank be well again when the engine rests."""
        answers = {}
        deadline = time.monotonic() + 60
        while self._llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline, "a request does not end"
            for out in self._llm.llm_engine.step():
                answers[out.request_id] = answer_of(out)
        while self._scheduler.has_requests():
            assert time.monotonic() < deadline, "the engine never came to rest"
            self._core.step()
            time.sleep(0.001)
        self.fail(None)
        counted = {
            name: value - self._before.get(name, 0)
            for name, value in self._totals().items()
            if value != self._before.get(name, 0)
        }
        began, self._began = self._began, []
        return {
            "answers": [answers[name] for name in began],
            "counted": counted,
            "ways": list(self._ways),
        }

    # ---- what is done to the engine -------------------------------------------------------------

    def fail(self, fault: Fault | None) -> None:
        if fault is None:
            self._file.unlink(missing_ok=True)
        else:
            written = self._file.with_suffix(".new")
            written.write_text(fault.value)
            written.replace(self._file)

    def forget(self, also_in_cpu_tier: bool = False) -> None:
        """All that the GPU has."""
        assert self._llm.reset_prefix_cache()
        if also_in_cpu_tier:
            self.half.index.clear()

    def reset(self) -> None:
        """Nothing that any tier or daemon has is found again."""
        assert self._llm.reset_prefix_cache(reset_connector=True)

    def delete_shard(self, position: int) -> None:
        """At the daemon, that of the bad rank alone."""
        (shard,) = self._shards([self.keys[position]], BAD_RANK)
        assert self._daemon.delete([shard]) == 1

    def at_daemon(self, rank: int) -> int:
        """How many shards of the last prompt's blocks the daemon holds."""
        return sum(self._daemon.contains(self._shards(self.keys, rank)))

    # ---- what is seen of it ---------------------------------------------------------------------

    def left_behind(self) -> dict[str, int]:
        pool = self._scheduler.kv_cache_manager.block_pool
        ledger = self.half.ledger
        self.half.index.check()
        return {
            "pinned": len(self.half.index.pinned_slots()),
            "stores": ledger.has_open_stores,
            "loads": len(ledger._loads) + len(ledger._step_loads),
            "puts": ledger.has_open_puts,
            "requests": len(self.half._requests) + len(self._scheduler.requests),
            "GPU blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def _shards(self, keys: list[BlockKey], rank: int) -> list[StoreKey]:
        namespace = self._daemon.identity.namespace
        return [store_key(namespace, key, RankTag(tp=rank)) for key in keys]

    def _totals(self) -> dict[str, float]:
        return {
            f"{metric.name}[{','.join(labels)}]": value
            for metric in _COUNTED
            for labels, value in self.half.recorder.samples(metric).items()
        }

    def _note_ways(self) -> None:
        """Whether steps waited for loads, in the order in which these were planned."""
        build = self.half.build_connector_meta

        def build_and_note(output: Any) -> Any:
            metadata = build(output)
            for job in metadata.loads:
                self._ways.append("beside" if job.step_load is None else "ahead")
            return metadata

        self.half.build_connector_meta = build_and_note


# ---- cases --------------------------------------------------------------------------------------


def in_a_step(run: Run, ids: list[int]) -> dict[str, Turn]:
    """The step that computes the rest waits for the load."""
    turns = {"stored": run.ask(ids)}
    for turn, fault in (
        ("before", None),
        ("failed", Fault.LOADS_FAIL),
        ("after", None),
        ("lie", Fault.LOADS_LIE),
    ):
        run.forget()
        turns[turn] = run.ask(ids, fault)
    return turns


def beside_steps(run: Run, ids: list[int], bystander: list[int]) -> dict[str, Turn]:
    """Another request runs meanwhile, and waits for no load, however small."""
    turns = {"stored": run.ask(ids)}
    with mock.patch.object(step_load_policy, "_MAX_BYTES_WITH_OTHERS", 0):
        for turn, fault in ("before", None), ("failed", Fault.LOADS_FAIL), ("after", None):
            run.forget()
            run.begin(bystander)
            run.step()
            run.fail(fault)
            run.begin(ids)
            turns[turn] = run.end()
    return turns


def stores(run: Run, ids: list[int]) -> dict[str, Turn]:
    """They fail after the first step of a prompt that takes two."""
    request = run.begin(ids).request
    while not request.num_computed_tokens:  # the daemon is asked first
        run.step()
    run.fail(Fault.STORES_FAIL)
    turns = {"failed": run.end()}
    run.forget()
    turns["again"] = run.ask(ids)
    run.forget()
    turns["after"] = run.ask(ids)
    return turns


def deleted(run: Run, ids: list[int]) -> dict[str, Turn]:
    """The daemon has lost one shard before it is asked."""
    turns = {"stored": run.ask(ids)}
    run.forget(also_in_cpu_tier=True)
    turns["before"] = run.ask(ids)
    run.forget(also_in_cpu_tier=True)
    run.delete_shard(HEAD_BLOCKS)
    turns["failed"] = run.ask(ids)
    run.forget(also_in_cpu_tier=True)
    turns["after"] = run.ask(ids)
    return turns


def vanished(run: Run, ids: list[int]) -> dict[str, Turn]:
    """The daemon loses one shard after it was asked, and before that is loaded."""
    turns = {"stored": run.ask(ids)}
    run.forget(also_in_cpu_tier=True)
    lookup = run.begin(ids).remote.lookup
    found = lookup.future.result(timeout=60).positions()
    run.delete_shard(HEAD_BLOCKS)
    turns["failed"] = run.end()
    turns["failed"]["found"] = [len(positions) for positions in found]
    run.forget(also_in_cpu_tier=True)
    turns["after"] = run.ask(ids)
    return turns


def lost(run: Run, ids: list[int]) -> dict[str, Any]:
    """The rank loses its connection to the daemon. The CPU tier has the head of the prompt."""
    turns: dict[str, Any] = {"stored": run.ask(ids)}
    run.forget(also_in_cpu_tier=True)
    turns["head"] = run.ask(ids[: HEAD_BLOCKS * BLOCK + 2])
    run.forget()
    turns["failed"] = run.ask(ids, Fault.DAEMON_LOST)
    turns["after"] = served_again(run, ids)
    return turns


def unsent(run: Run, ids: list[int]) -> dict[str, Any]:
    """It has no connection while blocks are sent: the daemon gets those of the other rank."""
    turns: dict[str, Any] = {"failed": run.ask(ids, Fault.DAEMON_LOST)}
    turns["shards"] = [run.at_daemon(rank) for rank in (1 - BAD_RANK, BAD_RANK)]
    run.forget(also_in_cpu_tier=True)
    turns["again"] = run.ask(ids)
    turns["after"] = served_again(run, ids)
    return turns


def served_again(run: Run, ids: list[int]) -> list[Turn]:
    """All turns until the daemon serves the prompt: the rank leaves it alone for a while after
    failures."""
    turns: list[Turn] = []

    def ask() -> bool:
        run.forget(also_in_cpu_tier=True)
        turns.append(run.ask(ids))
        loaded = turns[-1]["counted"].get("loaded_blocks[remote]", 0)
        return bool(loaded == (len(ids) - 1) // BLOCK)

    eventually(ask)
    return turns


def main(model: str, remote: str) -> None:
    rng = random.Random(3)
    prompts = {
        case: [rng.randrange(3, 1000) for _ in range(length)] for case, length in LENGTHS.items()
    }
    run = Run(model, remote)
    report: dict[str, Any] = {}
    report["cold"] = {case: run.ask(ids) for case, ids in prompts.items()}
    run.reset()
    report["in a step"] = in_a_step(run, prompts["in a step"])
    report["beside steps"] = beside_steps(run, prompts["beside steps"], prompts["bystander"])
    report["stores"] = stores(run, prompts["stores"])
    report["deleted"] = deleted(run, prompts["deleted"])
    report["vanished"] = vanished(run, prompts["vanished"])
    report["lost"] = lost(run, prompts["lost"])
    report["unsent"] = unsent(run, prompts["unsent"])
    report["left behind"] = run.left_behind()
    tell(report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
