"""A real vLLM engine over a real daemon under random requests and faults, as long as one likes.

The answers are compared with those of vLLM alone: asked alone, to the last bit of their logprobs;
beside others, as far as no other rounding could have changed a token. What the process holds of the
system, and what the daemon has leased, is compared whenever all is calm.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from zmq.utils.garbage import gc as zmq_garbage

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.oracle import BLOCK_BYTES, PROMPTS
from tests.engine.real_engine import RealEngine, real_engine
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.soak.connections import ZMQ_THREAD, Connections
from tests.soak.footprint import Footprint, held_items, of_this_package, settled
from tests.soak.torment import Torment
from tests.soak.toy_soak import SoakError
from vllm_tiered_kv.metrics import names

_COUNT = 8
_DOUBT = 0.02  # nearer logprobs may change places in a batch of another shape
_RSS_SLACK = 64 << 20
_HELD_SLACK = 20_000
# Slack, not a count: native threads, our own helpers among them, start when they are first needed
# and cannot be told apart by name. A leak of one for each fault exceeds it in minutes.
_LATE_THREADS = 4
_LATE_DESCRIPTORS = 8
_CALM_EVERY = 60  # actions
_MAX_ALIVE = 12
_STUCK_S = 120.0


@dataclass(frozen=True)
class _Truth:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    certain: int  # leading tokens that no rounding changes


@dataclass
class EngineSoak:
    model: Path
    folder: Path
    seed: int
    journal: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    counts: Counter[str] = field(default_factory=Counter)
    footprints: list[Footprint] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        self.rng = random.Random(f"{self.seed}/engine")
        if zmq_garbage.thread is None:  # it has a context, too, which would come with the first put
            zmq_garbage.start()
        self.truth = self._ask_vllm_alone()
        memory = ("--memory", str(96 * BLOCK_BYTES))
        ssd = ("--ssd", str(self.folder / "engine-ssd"), "--ssd-space", str(256 * BLOCK_BYTES))
        options = {
            "cpu_memory": 48 * BLOCK_BYTES,
            "remote_lookup_timeout": 0.5,
            "remote_load_timeout": 1,
        }
        with DaemonProcess(self.folder, *memory, *ssd) as self.daemon:
            options["remote"] = self.daemon.ipc
            with real_engine(self.model, options, num_gpu_blocks_override=72) as engine:
                self.engine = engine
                _start_all(engine.half.remote._lookups._pool)
                self.live: dict[str, tuple[int, float]] = {}
                self.torment = Torment(self.daemon, self.rng, self._note, freezes=0.6)
                try:
                    self._play(time.monotonic() + seconds)
                except (Exception, KeyboardInterrupt) as error:
                    last = "\n  ".join(self.journal)
                    raise SoakError(
                        f"seed {self.seed}, real engine: {type(error).__name__}: {error}\n"
                        f"the last actions:\n  {last}\n"
                        f"again: make soak SOAK_SEED={self.seed} SOAK_ONLY=engine"
                    ) from error

    def _ask_vllm_alone(self) -> list[_Truth]:
        with real_engine(self.model, None) as engine:
            answers = []
            for ids in PROMPTS:
                answers.append(self._ask(engine, ids))
                engine.drop_gpu_cache()
            self.foreign_contexts = Footprint.now().thread_names.count(ZMQ_THREAD)
            return answers

    def _ask(self, engine: RealEngine, ids: list[int]) -> _Truth:
        params = SamplingParams(temperature=0, max_tokens=_COUNT, ignore_eos=True, logprobs=2)
        (out,) = engine.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        tokens = tuple(out.outputs[0].token_ids)
        steps = out.outputs[0].logprobs
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in steps]
        close = [n for n, (first, second, *_) in enumerate(best) if first - second < _DOUBT]
        chosen = tuple(s[t].logprob for s, t in zip(steps, tokens, strict=True))
        return _Truth(tokens, chosen, close[0] if close else _COUNT)

    # ---- what happens ---------------------------------------------------------------------------

    def _play(self, end: float) -> None:
        actions, weights = zip(*_ACTIONS, strict=True)
        while time.monotonic() < end or len(self.footprints) < 3:
            for _ in range(_CALM_EVERY):
                (action,) = self.rng.choices(actions, weights)
                action(self)
                self._watch()
            self.calm()
        assert self.engine.total(names.LOADED_BLOCKS) > 0
        assert self.counts["compared_alone"] > 0

    def _note(self, text: str) -> None:
        self.journal.append(text)
        self.counts[text.split(" ", 1)[0]] += 1

    def add(self) -> None:
        if len(self.live) >= _MAX_ALIVE:
            self.step()
            return
        number = self.rng.randrange(len(PROMPTS))
        name = f"{self.counts['requests']}-{number}"
        params = SamplingParams(
            temperature=0,
            max_tokens=_COUNT,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": PROMPTS[number]}
        self.engine.llm.llm_engine.add_request(name, prompt, params)
        self.live[name] = (number, time.monotonic())
        self.counts["requests"] += 1

    def step(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self._step()

    def _step(self) -> None:
        llm = self.engine.llm.llm_engine
        if not llm.has_unfinished_requests():
            self.engine.core.step()
            return
        for output in llm.step():
            if output.request_id not in self.live:
                continue  # it was aborted
            number, _ = self.live.pop(output.request_id)
            truth = self.truth[number]
            tokens = tuple(output.outputs[0].token_ids)
            assert len(tokens) == _COUNT, f"{output.request_id} ended early"
            certain = truth.certain
            assert tokens[:certain] == truth.tokens[:certain], f"{output.request_id} is wrong"
            self.counts["answered"] += 1

    def abort(self) -> None:
        if self.live:
            name = self.rng.choice(list(self.live))
            self._note(f"abort {name}")
            del self.live[name]
            self.engine.llm.llm_engine.abort_request([name])

    def drop_gpu_cache(self) -> None:
        self._note(f"drop_gpu_cache {self.engine.llm.reset_prefix_cache()}")

    def reset_tiers(self) -> None:
        self._note("reset_tiers")
        self.engine.scheduler.reset_connector_cache()

    def sleep(self) -> None:
        """This back-end keeps its memory; what vLLM does beside that is what concerns us."""
        self._note("sleep and wake up")
        self._run_out()
        self.engine.llm.sleep(level=1)
        assert not self.engine.half.index.used_bytes
        self.engine.llm.wake_up()

    def ask_alone(self) -> None:
        """Exactly what vLLM alone says, to the last bit."""
        self._run_out()
        number = self.rng.randrange(len(PROMPTS))
        self._note(f"ask_alone {number}")
        answer = self._ask(self.engine, PROMPTS[number])
        assert answer == self.truth[number], f"prompt {number} asked alone"
        self.counts["compared_alone"] += 1

    def torment_daemon(self) -> None:
        self.torment.strike()

    # ---- what must hold -------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        stuck = [name for name, (_, since) in self.live.items() if now - since > _STUCK_S]
        if stuck:
            raise SoakError(f"{stuck} are stuck")

    def _run_out(self) -> None:
        end = time.monotonic() + _STUCK_S
        while self.live or self.engine.scheduler.has_requests():
            if time.monotonic() > end:
                raise SoakError(f"the engine never came to rest: {list(self.live)}")
            self._step()

    def calm(self) -> None:
        self.torment.thaw()
        self.torment.revive()
        self._run_out()
        self.engine.assert_at_rest()
        regions = self.engine.worker_half._remote.regions
        # The memory of a daemon that died stays mapped for a while.
        eventually(lambda: regions.of(self.daemon.ipc) and len(regions._regions) == 1)
        self._ask(self.engine, PROMPTS[0])  # the scheduler has found the daemon that is there now
        self._run_out()
        eventually(lambda: leases_of(self.daemon) == 0)
        self.engine.kv_bytes.clear()
        held = held_items([self.engine.half, self.engine.worker_half], of_this_package)
        connections = self._connections()
        now = Footprint.now()
        news = now.news(self.footprints[-1]) if self.footprints else {}
        self._note(
            f"calm {now.rss_bytes / 2**20:.0f} MiB, {now.threads} threads, {now.descriptors} "
            f"descriptors, {held} entries, {connections}, new: {news}"
        )
        print(f"{self.counts['answered']} answered; {self.journal[-1]}", flush=True)
        self.footprints.append(now)
        warm = 3  # by then everything was used at least once
        if len(self.footprints) == warm:
            self.held, self.connections = held, connections
        if len(self.footprints) > warm:
            accounted = Counter(connections.more_than(self.connections))
            accounted.update(threads=_LATE_THREADS, descriptors=_LATE_DESCRIPTORS)
            more = settled(self.footprints[warm - 1], _RSS_SLACK, accounted=accounted)
            if held > self.held + _HELD_SLACK:
                more.append(f"{held} entries kept instead of {self.held}")
            if more:
                raise SoakError(f"it grows: {', '.join(more)}")

    def _connections(self) -> Connections:
        """Those there are. Each has a zmq context, and no other one has come since the start."""
        scheduler, worker = self.engine.half.remote, self.engine.worker_half._remote

        def counted() -> Connections | None:
            found = Connections.now(scheduler, worker)
            threads = Footprint.now().thread_names.count(ZMQ_THREAD)
            return found if threads == found.contexts + self.foreign_contexts else None

        try:
            return eventually(counted)
        except AssertionError:
            found, now = Connections.now(scheduler, worker), Footprint.now()
            raise SoakError(
                f"{now.thread_names.count(ZMQ_THREAD)} contexts of zmq, {self.foreign_contexts} of "
                f"them not ours, do not fit {found}"
            ) from None


def _start_all(pool: ThreadPoolExecutor) -> None:
    """Threads of a pool that start when several are needed at a time would look like leaks."""
    together = threading.Barrier(pool._max_workers)
    wait([pool.submit(together.wait) for _ in range(pool._max_workers)])


_ACTIONS: tuple[tuple[Callable[[EngineSoak], None], float], ...] = (
    (EngineSoak.add, 30),
    (EngineSoak.step, 40),
    (EngineSoak.abort, 4),
    (EngineSoak.drop_gpu_cache, 4),
    (EngineSoak.ask_alone, 3),
    (EngineSoak.reset_tiers, 0.5),
    (EngineSoak.sleep, 0.4),
    (EngineSoak.torment_daemon, 2),
)
