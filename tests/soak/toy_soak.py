"""Random clients and random faults on the toy engine, for as long as one likes.

An episode is an engine of random settings under a few hundred requests: shared prefixes, aborts at
every stage, timeouts, preemption, failing copies and loads, resets, sleep; beside it a real daemon
that is killed, stopped and restarted. The model checks every read of its cache. Whenever the engine
comes to rest nothing may be held any more, anywhere.

What an episode does follows from the seed and its number alone; when threads and the daemon get
their turn does not, so a failure may take several replays.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_ranks import RankedToyEngine
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.soak.footprint import Footprint, settled
from tests.soak.torment import Torment
from tests.soak.toy_checks import check_tiers, describe, held_by, ranks_of
from vllm_tiered_kv.metrics import names

_REST_EVERY = 120  # requests
_MAX_ALIVE = 24
_MAX_STEPS = 4000  # that a request may take, whatever happens around it
_MAX_SECONDS = 60.0
_RSS_SLACK = 48 << 20
_HELD_SLACK = 2000  # entries: speeds, counters and recent answers are kept within bounds
_DELAYS = (0, 1, 3, 12)
_RATES = (0.0, 0.0, 0.1, 0.5)


class SoakError(AssertionError):
    pass


@dataclass
class _Asked:
    prompt: list[int]
    count: int
    salt: str
    step: int
    at: float
    patience: int | None  # steps after which its client hangs up


@dataclass
class ToySoak:
    model: Path
    folder: Path
    seed: int
    journal: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    counts: Counter[str] = field(default_factory=Counter)
    """What happened, over all episodes."""

    def __post_init__(self) -> None:
        self.daemon = DaemonProcess(
            self.folder,
            *("--memory", "1MiB", "--ssd", str(self.folder / "ssd"), "--ssd-space", "4MiB"),
        ).start()
        self._baseline: Footprint | None = None

    def close(self) -> None:
        self.daemon.end()

    def run(self, seconds: float, least_requests: int = 0, first: int = 0) -> None:
        """Episodes until the time is over and enough was asked for."""
        end = time.monotonic() + seconds
        number = first
        while time.monotonic() < end or self.counts["requests"] < least_requests:
            self.episode(number)
            number += 1

    def episode(self, number: int, requests: int = 300) -> None:
        self.journal.clear()
        episode = None
        try:
            episode = _Episode(self, random.Random(f"{self.seed}/{number}"))
            episode.play(requests)
            self._compare(number)
        except (Exception, KeyboardInterrupt) as error:
            told = "" if episode is None else f"engine: {episode.settings}\n{episode.last_state}\n"
            last = "\n  ".join(self.journal)
            raise SoakError(
                f"seed {self.seed}, episode {number}: {type(error).__name__}: {error}\n{told}"
                f"the last actions:\n  {last}\n"
                f"again: make soak SOAK_SEED={self.seed} SOAK_EPISODE={number}"
            ) from error
        self.counts["episodes"] += 1

    def _compare(self, number: int) -> None:
        """The engine is closed: all is as it was after the first ones."""
        if number < 3 or self._baseline is None:
            self._baseline = Footprint.now()
            return
        more = settled(self._baseline, _RSS_SLACK)
        if more:
            raise SoakError(f"left behind: {', '.join(more)}")


class _Episode:
    def __init__(self, soak: ToySoak, rng: random.Random) -> None:
        self.soak, self.rng = soak, rng
        self.daemon = soak.daemon
        if not self.daemon.is_running():
            self.daemon.restart()
        self.torment = Torment(self.daemon, rng, self._note, freezes=0.7)
        self.settings, self.toy = self._open()
        self.remote = self.toy.half.remote is not None
        self.asked: dict[str, _Asked] = {}
        self.steps = 0
        self.since_rest = 0
        self.held: int | None = None
        self.last_state = ""
        self.stems = [self._tokens(8, 60) for _ in range(5)]

    # ---- the engine -----------------------------------------------------------------------------

    def _open(self) -> tuple[dict[str, Any], ToyEngine]:
        rng = self.rng
        transport = rng.choice(["none", "tcp", "ipc", "ipc"])
        extra: dict[str, Any] = {
            "eviction": rng.choice(["lru", "s3fifo"]),
            "step_loads": rng.choice(["auto", "never"]),
            "store_decode": rng.random() < 0.8,
            "verify_fraction": rng.choice([0, 0, 0.3]),
        }
        settings: dict[str, Any] = {
            "async_scheduling": rng.random() < 0.5,
            "gpu_blocks": rng.choice([28, 40, 96]),  # 28 forces preemption
            "cpu_blocks": rng.choice([30, 64, 300]),
            "max_tokens_per_step": rng.choice([6, 32, 64]),
            "store_delay": rng.choice([None, None, 2, 4]),
            "prefix_caching": rng.random() < 0.85,
            "seed": rng.randrange(1 << 30),
            "ranks": rng.choice([1, 1, 2]),
        }
        settings["replicas"] = rng.choice([1, settings["ranks"]])
        if settings["prefix_caching"] and rng.random() < 0.25:
            extra |= {"store": "lazy", "lazy_window": rng.choice([8, 24, 64])}
        elif not settings["prefix_caching"]:
            settings["gpu_blocks"] = 60
        if "store" not in extra:
            settings["windows"] = rng.choice([(None,), (None,), (10,), (None, 10)])
            # What does not fit the device at all would wait for ever.
            settings["gpu_blocks"] *= len(settings["windows"])
        if settings["prefix_caching"] and rng.random() < 0.5:
            extra["compute_once"] = True
            settings["engine_args"] = {"long_prefill_token_threshold": rng.choice([4, 16])}
        if transport != "none":
            extra |= {
                "remote": self.daemon.ipc if transport == "ipc" else self.daemon.endpoint,
                "remote_lookup_timeout": rng.choice([0.05, 0.5]),
                "remote_load_timeout": rng.choice([0.1, 1.0]),
                "remote_landing": "64KiB",
            }
        kind = RankedToyEngine if settings["ranks"] > 1 else ToyEngine
        return {**settings, **extra}, kind(self.soak.model, extra_config=extra, **settings)

    def play(self, requests: int) -> None:
        self._note(f"an engine of {self.settings}")
        actions, weights = zip(*_ACTIONS, strict=True)
        try:
            asked = 0
            while asked < requests:
                (action,) = self.rng.choices(actions, weights)
                before = self.since_rest
                action(self)
                asked += self.since_rest - before
                self._watch()
                if self.since_rest >= _REST_EVERY:
                    self.come_to_rest()
            self.come_to_rest()
        except BaseException:
            self.last_state = describe(self.toy)  # closing clears most of it away
            raise
        finally:
            self.torment.thaw()
            self.toy.close()
        self.soak.counts["steps"] += self.steps
        self.soak.counts["engines_with_windows"] += self.toy.windows != (None,)
        counted = (
            names.LOADED_BLOCKS,
            names.EARLY_LOADS,
            names.LOAD_FAILURES,
            names.EVICTED_BLOCKS,
            names.VERIFIED_BLOCKS,
            names.DIFFERING_BLOCKS,
        )
        for metric in counted:
            self.soak.counts[metric.name] += int(self.toy.half.recorder.total(metric))

    def _note(self, text: str) -> None:
        self.soak.journal.append(f"step {self.steps}: {text}")
        self.soak.counts[text.split(" ", 1)[0]] += 1

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self.rng.randrange(3, 50) for _ in range(self.rng.randrange(least, most))]

    def _alive(self) -> list[str]:
        return [name for name in self.asked if not self.toy.requests[name].is_finished()]

    # ---- what happens ---------------------------------------------------------------------------

    def add(self) -> None:
        if len(self._alive()) >= _MAX_ALIVE:
            self.step()
            return
        stem = self.rng.choice(self.stems)
        prompt = stem[: self.rng.randrange(1, len(stem) + 1)] + self._tokens(0, 20)
        count = self.rng.choice([1, 2, 5, 20])
        salt = self.rng.choice(["", "", "", "a"])
        patience = self.rng.randrange(1, 40) if self.rng.random() < 0.1 else None
        self._ask(prompt, count, salt, patience)

    def add_and_abort(self) -> None:
        """Before anybody has looked at it."""
        before = set(self.asked)
        self.add()
        for name in set(self.asked) - before:
            self._abort(name, "on arrival")

    def add_twins(self) -> None:
        """The same prompt several times at once."""
        prompt = self.rng.choice(self.stems) + self._tokens(1, 12)
        for _ in range(self.rng.randrange(2, 5)):
            self._ask(prompt, 3)

    def ask_again(self) -> None:
        """What was asked before, all at once: nothing else runs, so their step waits for loads."""
        before = list(self.asked.values())
        self._run_out()
        self._note(f"ask_again {self.toy.scheduler.reset_prefix_cache()}")
        for asked in self.rng.sample(before, min(len(before), self.rng.randrange(2, 7))):
            self._ask(asked.prompt, self.rng.choice([1, 2, 5]), asked.salt)

    def _ask(
        self, prompt: list[int], count: int, salt: str = "", patience: int | None = None
    ) -> None:
        name = self.toy.add(prompt, count, salt, control=self._control())
        self.asked[name] = _Asked(prompt, count, salt, self.steps, time.monotonic(), patience)
        self.since_rest += 1
        self.soak.counts["requests"] += 1

    def _control(self) -> dict[str, Any] | None:
        """What a few of the requests ask of the cache. No pins: an idle engine holds none."""
        if self.rng.random() < 0.8:
            return None
        choices: dict[str, Any] = {
            "store": False,
            "load": False,
            "tiers": [self.rng.choice(["cpu", "remote"])],
            "max_load_tokens": self.rng.randrange(40),
            "max_store_tokens": self.rng.randrange(40),
            "session": self.rng.choice("xyz"),
        }
        control = {name: choices[name] for name in self.rng.sample(list(choices), 2)}
        if "session" in control:
            control["session_ended"] = self.rng.random() < 0.5
        return control

    def step(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            if self.toy._in_flight or self.toy.scheduler.has_requests():
                self.toy.step()
                self.steps += 1
                if self.toy.idle:
                    time.sleep(0.0005)  # only threads can get on now

    def abort(self) -> None:
        alive = self._alive()
        if alive:
            self._abort(self.rng.choice(alive), "at random")

    def abort_while_waiting(self) -> None:
        """For its load, or for what a daemon says."""
        waiting = [name for name in self._alive() if not self.toy.requests[name].num_output_tokens]
        loading = [name for name in waiting if self.toy.half.ledger.is_loading(name)]
        if waiting:
            self._abort(self.rng.choice(loading or waiting), "while it waits")

    def abort_within_a_step(self) -> None:
        """The step is on its way: it may be the last of the request."""
        toy = self.toy
        if len(toy._in_flight) >= toy.depth or not toy.scheduler.has_requests():
            return
        output = toy.scheduler.schedule()
        toy._in_flight.append((output, toy._execute(output)))
        self.steps += 1
        scheduled = [name for name in self._alive() if name in output.num_scheduled_tokens]
        if scheduled:
            left = {n: self.asked[n].count - toy.requests[n].num_output_tokens for n in scheduled}
            self._abort(min(scheduled, key=left.__getitem__), "within its step")
        toy.land()

    def drop_gpu_cache(self) -> None:
        self._note(f"drop_gpu_cache {self.toy.scheduler.reset_prefix_cache()}")

    def reset_tiers(self) -> None:
        self._note("reset_tiers with requests under way")
        assert self.toy.scheduler.reset_connector_cache()

    def restart_running(self) -> None:
        """`reset_prefix_cache` that preempts what runs; vLLM refuses while loads are under way."""
        self._note("restart_running requests")
        self.toy.land()
        with contextlib.suppress(RuntimeError):
            self.toy.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=self.rng.random() < 0.3
            )

    def sleep(self) -> None:
        """As vLLM's engine core does: all are aborted, it comes to rest, all caches are reset, and
        the device forgets its cache. Meanwhile others may come, and wait."""
        self._note("sleep and wake up")
        scheduler = self.toy.scheduler
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if self.rng.random() < 0.5:
            self.add()
        self._run_out()
        assert scheduler.reset_prefix_cache(reset_connector=True)
        assert not self.toy.half.index.used_bytes
        for rank in ranks_of(self.toy):
            for cache in rank.caches:
                cache[:] = -9
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def change_faults(self) -> None:
        rng = self.rng
        self._note("change_faults of copies")
        for copier in [rank.copier for rank in ranks_of(self.toy)]:
            copier.max_delay = rng.choice(_DELAYS)
            copier.fail_every = rng.choice(_RATES)
            copier.drop_stores = rng.choice((*_RATES, 1.0))
            # With steps in flight a failed step cannot be taken back, and the engine ends.
            copier.fail_ahead = 0.0 if self.toy.async_scheduling else rng.choice(_RATES)

    def torment_daemon(self) -> None:
        if self.remote:
            self.torment.strike()

    # ---- what must hold -------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        for name in self._alive():
            asked = self.asked[name]
            if asked.patience is not None and self.steps - asked.step > asked.patience:
                self._abort(name, "after its client's timeout")
            elif self.steps - asked.step > _MAX_STEPS and now - asked.at > _MAX_SECONDS:
                raise SoakError(f"{name} is stuck since step {asked.step}")

    def come_to_rest(self) -> None:
        self._note("rest")
        self.torment.thaw()
        self._run_out()
        self.toy.assert_at_rest()
        self._check_answers()
        self.soak.counts["checked_blocks"] += check_tiers(self.toy, self.asked)
        if self.remote and self.daemon.is_running():
            eventually(lambda: leases_of(self.daemon) == 0)
        assert self.toy.scheduler.reset_prefix_cache(reset_connector=True)
        assert not self.toy.half.index.used_bytes
        held = held_by(self.toy)
        if self.held is not None and held > self.held + _HELD_SLACK:
            raise SoakError(f"{held} entries are kept, {self.held} at the first rest")
        self.held = self.held or held
        self._forget()

    def _run_out(self) -> None:
        self.toy.run(limit=20_000, seconds=_MAX_SECONDS)

    def _check_answers(self) -> None:
        for name, asked in self.asked.items():
            finished = self.toy.finished[name]
            right = play(asked.prompt, asked.count, asked.salt)[0]
            if finished.status is RequestStatus.FINISHED_ABORTED:
                assert finished.tokens == right[: len(finished.tokens)], name
                self.soak.counts["aborted"] += 1
            else:
                assert finished.status is RequestStatus.FINISHED_LENGTH_CAPPED, finished.status
                assert finished.tokens == right, name
                self.soak.counts["answered"] += 1

    def _forget(self) -> None:
        """The toy's own memory of what is over."""
        toy = self.toy
        self.soak.counts["preemptions"] += sum(r.num_preemptions for r in toy.requests.values())
        for kept in (toy.requests, toy.finished, toy._truth, self.asked):
            kept.clear()
        toy.reported_loads.clear()
        self.since_rest = 0

    def _abort(self, name: str, when: str) -> None:
        self._note(f"abort {name} {when}")
        self.toy.abort(name)


_ACTIONS: tuple[tuple[Callable[[_Episode], None], float], ...] = (
    (_Episode.add, 30),
    (_Episode.step, 40),
    (_Episode.add_twins, 1),
    (_Episode.ask_again, 2),
    (_Episode.add_and_abort, 1.5),
    (_Episode.abort, 2.5),
    (_Episode.abort_while_waiting, 2),
    (_Episode.abort_within_a_step, 2),
    (_Episode.drop_gpu_cache, 3),
    (_Episode.restart_running, 0.7),
    (_Episode.reset_tiers, 0.4),
    (_Episode.sleep, 0.2),
    (_Episode.change_faults, 1.5),
    (_Episode.torment_daemon, 0.8),
)
