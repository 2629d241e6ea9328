"""The child of `chats.py`: one engine as `vllm serve` runs it, and the chats that use it.

    python -m benchmarks.chat_engine JOB.json RESULT.json

vLLM's `AsyncLLM` runs here, its engine core in a process of its own. The child ends with its
parent, which holds the other end of the standard input.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import chat_client, process_memory
from benchmarks.chat_client import Answer
from benchmarks.chat_workloads import Workload, plan, token_ids, warm_up_piece
from benchmarks.engine_child import model_folder
from tests.models import has_bfloat16

_COUNTERS = ("tiered_kv_", "prefix_cache_", "external_prefix_cache_", "num_preemptions")
_QUIET_TIMEOUT_S = 60.0
_WARM_UP_TOKENS = 8_192
PLAY = b"p"
"""The parent sends it when the workload is to begin."""
_SHORT_PROMPT = 4
"""Tokens of a prompt that fills no block."""

Counters = dict[str, dict[str, float]]
"""By name without prefix and suffix, and by the values of their labels."""


@dataclass(frozen=True)
class Job:
    """What one child does; plain data that `chats.py` writes."""

    spec: dict[str, Any]
    workload: dict[str, Any]
    trace: str | None
    seed: int
    vocab: int
    settle_s: float
    memory_of: list[int]
    """Processes beside this one and its own whose memory counts: the daemon."""


class Engine:
    """An `AsyncLLM` that can be killed and started again; requests that are cut are repeated."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._number = -1
        self._request = count()
        self._under_way = 0
        self._up = asyncio.Event()
        self._earlier: Counters = {}
        """Of engines that were killed, as far as they had reported."""
        self.start()

    def start(self) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        transfer = self._spec["transfer"]
        begin = time.perf_counter()
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model_folder(self._spec["model"])),
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=_dtype(self._spec["model"]),
                seed=0,
                disable_log_stats=False,
                kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
                **self._spec["options"],
            )
        )
        # As vLLM's API server does: start-up objects are not collected again.
        gc.collect()
        gc.freeze()
        self.started_s = time.perf_counter() - begin
        self._number += 1
        self._up.set()

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        from vllm.v1.engine.exceptions import EngineDeadError

        while True:
            await self._up.wait()
            self._under_way += 1
            try:
                return await self._ask(prompt, max_tokens)
            except EngineDeadError:
                if self._up.is_set():  # not killed by this benchmark: a real failure
                    raise
            finally:
                self._under_way -= 1

    async def _ask(self, prompt: list[int], max_tokens: int) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        number, first, tokens = self._number, 0.0, []
        sent = time.perf_counter()
        told = self._llm.generate({"prompt_token_ids": prompt}, params, str(next(self._request)))
        async for output in told:
            first = first or time.perf_counter()
            tokens += output.outputs[0].token_ids
        times = output.metrics
        return Answer(
            tokens=tokens,
            cached=output.num_cached_tokens or 0,
            sent=sent,
            first=first,
            end=time.perf_counter(),
            queue_s=times.scheduled_ts - times.queued_ts,
            compute_s=times.first_token_ts - times.scheduled_ts,
            engine=number,
        )

    async def kill_and_restart(self) -> float:
        """SIGKILL to the engine core, which gets no chance to flush anything; seconds it took."""
        begin = time.perf_counter()
        self._up.clear()
        try:
            await self._kill()
            self._llm.shutdown()
            self.start()
        finally:
            self._up.set()  # where the start failed, requests fail too instead of waiting
        return time.perf_counter() - begin

    async def _kill(self) -> None:
        for core in multiprocessing.active_children():
            assert core.pid is not None
            for pid in (*process_memory.descendants(core.pid), core.pid):
                os.kill(pid, signal.SIGKILL)
            core.join()  # it keeps the GPU's memory until its own is unpinned
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        while self._under_way:  # until vLLM has told every request
            if time.monotonic() > deadline:
                raise TimeoutError("requests of a killed engine never ended")
            await asyncio.sleep(0.05)
        self._earlier = self.counters()

    def counters(self) -> Counters:
        """All so far, of this engine and of those that were killed."""
        found = {name: dict(values) for name, values in self._earlier.items()}
        for name, labels, value in _prometheus_counters():
            by_label = found.setdefault(name, {})
            by_label[labels] = by_label.get(labels, 0.0) + value
        return found

    async def quiet(self) -> None:
        """Waits until nothing is stored any more. Counters come along with answers only."""
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        seen: list[Any] = []
        while time.monotonic() < deadline:
            await self.ask([1] * _SHORT_PROMPT, 1)
            found = self.counters()
            seen.append([found.get(f"tiered_kv_{name}_blocks") for name in ("stored", "dropped")])
            if len(seen) > 3 and all(one == seen[-1] for one in seen[-4:]):
                return
            await asyncio.sleep(0.2)

    def facts(self) -> dict[str, Any]:
        config = self._llm.vllm_config
        return {
            "started_s": round(self.started_s, 1),
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_model_len": config.model_config.max_model_len,
        }

    def close(self) -> None:
        self._llm.shutdown()


def _dtype(model: dict[str, Any]) -> str:
    """Without asking CUDA: an engine core that is forked later could not use it."""
    return "bfloat16" if model or has_bfloat16() else "float32"


def _prometheus_counters() -> list[tuple[str, str, float]]:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    found = []
    for metric in get_metrics_snapshot():
        name = metric.name.removeprefix("vllm:")
        if isinstance(metric, Counter) and name.startswith(_COUNTERS) and metric.value:
            labels = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
            found.append((name, "/".join(labels), float(metric.value)))
    return found


def _less(counters: Counters, before: Counters) -> Counters:
    """What was counted in between; nothing is said of counters that stayed the same."""
    found: Counters = {}
    for name, by_label in counters.items():
        for labels, value in by_label.items():
            change = value - before.get(name, {}).get(labels, 0.0)
            if change:
                found.setdefault(name, {})[labels] = change
    return found


def ready_path(result: Path) -> Path:
    """Exists once the engine has started."""
    return result.with_suffix(".ready")


async def run(job: Job, ready: Path, may_play: threading.Event) -> dict[str, Any]:
    workload = Workload(**job.workload)
    longest = job.spec["options"]["max_model_len"]
    chats = plan(workload, job.seed, Path(job.trace) if job.trace else None, longest)
    engine = Engine(job.spec)
    facts = engine.facts()
    ready.touch()
    await asyncio.to_thread(may_play.wait)
    await asyncio.sleep(job.settle_s)
    await warm_up(engine, workload, job)
    await engine.quiet()
    before = engine.counters()
    restarts: list[asyncio.Task[float]] = []

    def after_turn(turns: int) -> None:
        if workload.kill_after_turn and turns == workload.kill_after_turn * workload.chats:
            restarts.append(asyncio.create_task(engine.kill_and_restart()))

    played = await chat_client.play(
        chats.sessions, engine.ask, job.vocab, job.seed, workload.seconds, after_turn
    )
    restarted_s = [round(await restart, 2) for restart in restarts]
    await engine.quiet()
    pids = [os.getpid(), *process_memory.descendants(os.getpid()), *job.memory_of]
    result = {
        "engine": facts,
        "restarted_s": restarted_s,
        "too_long": chats.too_long,
        "pss_mib": process_memory.pss_mib(pids),
        "counters": _less(engine.counters(), before),
        "digests": played.digests,
        "rows": chat_client.to_lists(played.rows),
    }
    engine.close()
    return result


async def warm_up(engine: Engine, workload: Workload, job: Job) -> None:
    """A few prompts that no chat asks: the first ones of an engine are slow."""
    first, longest = workload.shared_tokens + workload.first_tokens, engine.facts()["max_model_len"]
    tokens = min(first, _WARM_UP_TOKENS, longest // 2)
    prompts = [token_ids([warm_up_piece(n, tokens)], job.vocab, job.seed) for n in range(2)]
    await engine.ask(prompts[0], 8)
    await asyncio.gather(*(engine.ask(prompt, 8) for prompt in prompts))


def _heed_parent(may_play: threading.Event) -> None:
    """Not through `sys.stdin`, whose lock a forked engine core would inherit."""
    while os.read(0, 1) == PLAY:
        may_play.set()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    may_play = threading.Event()
    threading.Thread(target=_heed_parent, args=(may_play,), daemon=True).start()
    result_file = Path(sys.argv[2])
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    # As `vllm serve` does; where it is not installed, the loop is Python's own.
    uvloop = importlib.util.find_spec("uvloop") and importlib.import_module("uvloop")
    try:
        result = (uvloop or asyncio).run(run(job, ready_path(result_file), may_play))
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    result_file.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to give back, and taking torch apart takes seconds


if __name__ == "__main__":
    main()
