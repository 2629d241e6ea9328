"""The measurements of `peers.py`: engines take turns on the same prompts, in rotating order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.engine_process import Asked, EngineProcess
from benchmarks.fleet import Fleet, say
from benchmarks.peer_modes import WITHOUT_TIER, Scale
from benchmarks.samples import Sample, Samples

TURNS = 2
"""How often a prompt is found on the device and in the tier in one round."""
_DEVICE_TURNS = 4
"""How often after that on the device alone: its time varies more than what is compared."""
_HOOKS_OF = 32
_WARM_TIMEOUT_S = 30.0
_FS_DELAY = 4
"""After so many prompts an earlier one is in the fs tier alone: its CPU tier holds three."""

Prompt = list[int]


class Rounds:
    """Adds samples of one group of engines; an engine that fails is left out from then on."""

    def __init__(
        self, fleet: Fleet, scale: Scale, samples: Samples, group: int, save: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._scale = scale
        self._samples = samples
        self._group = group
        self._save = save
        self._random = random.Random(group)
        self._answers: dict[tuple[str, int], list[list[int]]] = {}

    def warm_up(self) -> None:
        """First steps, and a tier that answers: an arena may still be being pinned."""
        batch = self._prompts(self._scale.batch)
        for mode, engine in self._each(0):
            with self._fleet.left_out_on_failure():
                engine.ask(batch)
                engine.ask(batch[:1])
                deadline = time.monotonic() + _WARM_TIMEOUT_S
                while mode not in WITHOUT_TIER and time.monotonic() < deadline:
                    prompt = self._prompts(1)
                    engine.ask(prompt)
                    engine.forget_device()
                    if self._hits(engine.ask(prompt)):
                        break
                engine.forget_device()

    def hits(self, rounds: int, deadline: float) -> int:
        """Single prompts: cold, on the device, in the tier. Returns how many rounds there were."""
        asked: list[Prompt] = []
        for number in range(rounds):
            if time.monotonic() > deadline:
                return number
            asked += self._prompts(1)
            for mode, engine in self._each(number):
                with self._fleet.left_out_on_failure():
                    found = engine.ask(asked[-1:])
                    self._note(number, 0, mode, "cold", found)
                    engine.settle()
            for turn in range(TURNS):
                for mode, engine in self._each(number + turn):
                    with self._fleet.left_out_on_failure():
                        self._hit_turn(number, turn, mode, engine, asked)
            for turn in range(TURNS, TURNS + _DEVICE_TURNS):
                for mode, engine in self._each(number + turn):
                    with self._fleet.left_out_on_failure():
                        found = self._device_hit(engine, asked[-1])
                        self._note(number, turn, mode, "device_hit", found)
            for _, engine in self._each(number):
                with self._fleet.left_out_on_failure():
                    engine.forget_device()
            self._save()
            say(f"  hits {number + 1}/{rounds}")
        return rounds

    def _hit_turn(
        self, number: int, turn: int, mode: str, engine: EngineProcess, asked: Sequence[Prompt]
    ) -> None:
        found = self._device_hit(engine, asked[-1])
        self._note(number, turn, mode, "device_hit", found)
        self._answers[mode, len(asked) - 1] = found.tokens
        if mode in WITHOUT_TIER:
            return
        which = len(asked) - 1
        if mode == "offloading_fs":
            which -= _FS_DELAY * (turn + 1)
            if which < 0:
                return
        before = engine.loaded()
        engine.forget_device()
        found = engine.ask(asked[which : which + 1])
        engine.settle()  # a load is counted when its end was reported, which may be a step later
        real = not before or engine.loaded() != before
        answer = self._answers[mode, which]
        self._note(number, turn, mode, "tier_hit", found, answer, real)

    @staticmethod
    def _device_hit(engine: EngineProcess, prompt: Prompt) -> Asked:
        engine.ask([prompt])  # unmeasured: the device has just worked for another process
        engine.settle()  # as an engine that serves does between two requests
        return engine.ask([prompt])

    def hooks(self) -> dict[str, dict[str, float]]:
        """By mode: what each hook of its connector takes of a device hit, in milliseconds."""
        (prompt,) = self._prompts(1)
        found: dict[str, dict[str, float]] = {}
        for mode, engine in self._each(0):
            with self._fleet.left_out_on_failure():
                engine.ask([prompt])
                engine.settle()
                engine.ask([prompt])
                found[mode] = engine.time_hooks(prompt, _HOOKS_OF)
                engine.forget_device()
        return found

    def batches(self, rounds: int, deadline: float) -> int:
        """Batches of fresh prompts, then the same from the tier."""
        for number in range(rounds):
            if time.monotonic() > deadline:
                return number
            batch = self._prompts(self._scale.batch)
            cold: dict[str, Asked] = {}
            for mode, engine in self._each(number):
                with self._fleet.left_out_on_failure():
                    engine.forget_device()
                    cold[mode] = engine.ask(batch)
                    self._note(number, 0, mode, "cold_batch", cold[mode])
                    engine.settle()
            for turn in range(TURNS):
                for mode, engine in self._each(number + turn):
                    if mode in WITHOUT_TIER:
                        continue
                    with self._fleet.left_out_on_failure():
                        engine.forget_device()
                        found = engine.ask(batch)
                        self._note(number, turn, mode, "tier_batch", found, cold[mode].tokens)
            self._save()
            say(f"  batches {number + 1}/{rounds}")
        return rounds

    def _each(self, rotation: int) -> Iterator[tuple[str, EngineProcess]]:
        modes = list(self._fleet.running)
        at = rotation % len(modes) if modes else 0
        for mode in modes[at:] + modes[:at]:
            if mode in self._fleet.running:
                yield mode, self._fleet.running[mode]

    def _prompts(self, count: int) -> list[Prompt]:
        vocabulary = self._scale.model.get("vocab_size", 1024)
        length = self._scale.prompt_tokens
        return [
            [self._random.randrange(500, vocabulary - 24) for _ in range(length)]
            for _ in range(count)
        ]

    def _hits(self, asked: Asked) -> int:
        """Requests of which at most a tenth was computed."""
        return sum(cached >= 0.9 * self._scale.prompt_tokens for cached in asked.cached)

    def _note(
        self,
        number: int,
        turn: int,
        mode: str,
        kind: str,
        asked: Asked,
        expected: list[list[int]] | None = None,
        real: bool = True,
    ) -> None:
        equal = None
        if expected is not None:
            equal = sum(a == b for a, b in zip(asked.tokens, expected, strict=True))
        self._samples.add(
            Sample(
                self._group,
                number,
                turn,
                mode,
                kind,
                round(asked.seconds * 1e3, 3),
                len(asked.tokens),
                self._hits(asked) if real else 0,
                equal,
            )
        )
