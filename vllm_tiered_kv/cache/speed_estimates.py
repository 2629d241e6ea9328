"""How fast a tier loads and the model computes, estimated from what was seen lately.

Both are small linear models over a short window of samples. What counts is by which factor a
prediction is off, so large and small ones count alike, and a sample that is off by a lot (a
compilation, a stalled disk) no more than one that is off by a little. Nothing here knows what time
it is.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import mul

_BOUND = math.log(2)  # how far off a sample counts at most
_TRIM = 3.0  # one that is off by more than this is left out in the end
_ROUNDS = 4
_CHANGED = 2.0  # a tier that is slower by more than this is not what it was
_TIE = 1e-4  # among explanations that are equally good, the constant one


class Typical:
    """The median of the last few values."""

    def __init__(self, assumed: float, window: int = 8) -> None:
        self.value = assumed
        self._recent: deque[float] = deque(maxlen=window)

    def observe(self, value: float) -> None:
        self._recent.append(value)
        self.value = statistics.median(self._recent)


class LoadSpeed:
    """Seconds for a number of bytes from one tier that does nothing else: latency + bytes / rate.

    An improvement is believed when most of the window shows it, a worsening as soon as two of the
    last three samples do: loading too much costs more than loading too little.
    """

    def __init__(self, latency_s: float, bytes_per_s: float, window: int = 8) -> None:
        """`latency_s` and `bytes_per_s` are assumed as long as nothing is known."""
        self._assumed = (latency_s, 1.0 / bytes_per_s)
        self._samples: deque[tuple[float, float]] = deque(maxlen=window)
        self._fit = self._assumed
        self._worse = 1.0
        self.is_told = False
        """The assumption is what the tier says of itself."""

    def told(self, bytes_per_s: float) -> None:
        """What the tier says of itself. It is believed as long as no load was seen."""
        self._assumed = (self._assumed[0], 1.0 / bytes_per_s)
        self.is_told = True
        if not self._samples:
            self._fit = self._assumed

    @property
    def count(self) -> int:
        """How many of them count."""
        return len(self._samples)

    @property
    def bytes_per_s(self) -> float:
        """Of a large load. Small ones tell little about it: see `recent_bytes_per_s`."""
        return 1.0 / (self._fit[1] * self._worse)

    @property
    def recent_bytes_per_s(self) -> float | None:
        """Of the last few loads as they were, latency included; None before the first."""
        if not self._samples:
            return None
        return sum(size for size, _ in self._samples) / sum(taken for _, taken in self._samples)

    def observe(self, nbytes: float, seconds: float) -> None:
        if nbytes <= 0 or seconds <= 0:
            return
        self._samples.append((nbytes, seconds))
        self._look()
        if self._worse > _CHANGED:
            # What was before would be mistaken for what other sizes take.
            self._samples = deque(list(self._samples)[-3:], maxlen=self._samples.maxlen)
            self._look()

    def _look(self) -> None:
        self._fit = self._fitted()
        recent = list(self._samples)[-3:]
        if len(recent) == 3:
            ratios = [taken / self._line(size) for size, taken in recent]
            self._worse = max(1.0, statistics.median(ratios))

    def seconds(self, nbytes: float) -> float:
        return self._line(nbytes) * self._worse if nbytes > 0 else 0.0

    @property
    def largest(self) -> float:
        """Bytes of the largest load seen lately."""
        return max((size for size, _ in self._samples), default=0.0)

    def cautious_seconds(self, nbytes: float) -> float:
        """For more bytes than were ever seen: loads of about one size do not tell a latency from a
        bandwidth, and of the least that was seen half is taken for the one and half for the other.
        A load that was faster than all others is not believed."""
        if not self._samples:
            return self.seconds(nbytes)
        latency = min(taken for _, taken in self._samples) / 2
        rates = sorted((taken - latency) / size for size, taken in self._samples)
        return latency + nbytes * rates[min(1, len(rates) - 1)]

    def _line(self, nbytes: float) -> float:
        return self._fit[0] + self._fit[1] * nbytes

    def _fitted(self) -> tuple[float, float]:
        sizes = [size for size, _ in self._samples]
        if max(sizes) >= 2 * min(sizes):
            rows = [(1.0, size) for size in sizes]
            latency, per_byte = fit_nonnegative(rows, [taken for _, taken in self._samples])
            if per_byte > 0:
                return latency, per_byte
        # Sizes too alike to tell the two apart.
        latency = min(self._assumed[0], min(taken for _, taken in self._samples) / 2)
        per_byte = statistics.median((taken - latency) / size for size, taken in self._samples)
        return latency, per_byte


class PrefillSpeed:
    """Seconds to compute tokens of a prompt: a cost for each step, each token, and each token
    attended to.

    Samples are kept by size: a run of short steps does not push out what long ones have taught.
    Steps of one size cannot tell a cost per step from a cost per token; the former is believed,
    but for what a step costs that computes next to nothing. That makes the prefill of long prompts
    look cheap until one was seen, and a long prefill that is chosen for that reason is the very
    sample that was missing.
    """

    def __init__(self, step_tokens: int, window: int = 6) -> None:
        """`step_tokens`: the most tokens a step computes."""
        self._step_tokens = step_tokens
        self._window = window
        self._samples: dict[int, deque[tuple[float, float, float]]] = {}
        self._least = Typical(0.0)
        self._largest = 0
        self._count = 0
        self._news = 0
        self._fit = [0.0, 0.0, 0.0]

    def observe(self, tokens: int, attended: float, seconds: float) -> None:
        """A step computed this many prompt tokens, each with so many before it (`attended`, summed
        over the tokens)."""
        if tokens <= 0 or seconds <= 0:
            return
        size = tokens.bit_length()
        samples = self._samples.setdefault(size, deque(maxlen=self._window))
        samples.append((tokens, attended, seconds))
        self._largest = max(self._largest, tokens)
        self._count += 1
        self._news += 1
        # Here and not when it is asked for: then a request is waiting for the answer.
        if self._news > min(self._count // 4, 16):  # the more is known, the less a step changes
            self._news = 0
            self._fit = self._fitted()

    def observe_least(self, seconds: float) -> None:
        """A step that computed few tokens took so long: no other costs more before its first."""
        if seconds > 0:
            self._least.observe(seconds)

    def knows(self, tokens: int) -> bool:
        """Whether steps of about the size that this many tokens take were seen."""
        return self._count >= 3 and 4 * self._largest >= min(tokens, self._step_tokens)

    def seconds(self, computed: int, tokens: float) -> float:
        """To compute tokens that follow `computed` others."""
        if tokens <= 0 or not self._count:
            return 0.0
        step, token, attended = self._fit
        # Nothing is known of steps larger than the largest: they might take no longer.
        counted = tokens * min(1.0, self._largest / min(tokens, self._step_tokens))
        return (
            step * tokens / self._step_tokens
            + token * counted
            + attended * counted * (computed + counted / 2)
        )

    def tokens_per_s(self) -> float | None:
        """At the beginning of a prompt."""
        seconds = self.seconds(0, self._step_tokens)
        return self._step_tokens / seconds if seconds > 0 else None

    def _fitted(self) -> list[float]:
        samples = list(itertools.chain.from_iterable(self._samples.values()))
        least = self._least.value
        rows = [(0.0 if least else 1.0, tokens, attended) for tokens, attended, _ in samples]
        times = [max(seconds - least, seconds / 10) for *_, seconds in samples]
        _, token, attended = fit = fit_nonnegative(rows, times)
        return [least, token, attended] if least else fit


class Backlog:
    """Loads of one tier under way, first come, first served."""

    def __init__(self) -> None:
        self._expected: OrderedDict[str, float] = OrderedDict()
        self._total = 0.0
        self._head_since = 0.0

    def __len__(self) -> int:
        return len(self._expected)

    def begin(self, name: str, expected_s: float, now: float) -> None:
        if not self._expected:
            self._head_since = now
        self._expected[name] = expected_s
        self._total += expected_s

    def end(self, name: str, now: float) -> None:
        expected = self._expected.pop(name, None)
        if expected is not None:
            self._head_since = now
            self._total = self._total - expected if self._expected else 0.0

    def seconds(self, now: float) -> float:
        """Until a load that is asked for now would begin. One that is late is expected to take
        as long again as it is late: nothing is known but that the tier is stuck."""
        if not self._expected:
            return 0.0
        head = next(iter(self._expected.values()))
        return self._total - head + abs(head - (now - self._head_since))


def fit_nonnegative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none below zero, with the least error in the logarithm, where no sample counts
    for more than `_BOUND`: neither a step that took a hundred times too long nor one
    that seems to have taken no time can pull the fit to itself. The second column is not zero.

    In plain Python: a window is a few dozen rows, and this runs between the steps of an engine.
    """
    fit = [0.0] * len(rows[0])
    fit[1] = statistics.median(taken / row[1] for row, taken in zip(rows, seconds, strict=True))
    fit = _refined(fit, rows, seconds)
    off = zip(seconds, _predicted(fit, rows), strict=True)
    kept = [n for n, (taken, expected) in enumerate(off) if 1 / _TRIM < taken / expected < _TRIM]
    if len(rows) > len(kept) >= len(rows) / 2:
        fit = _refined(fit, [rows[n] for n in kept], [seconds[n] for n in kept])
    return fit


def _predicted(fit: Sequence[float], rows: Sequence[Sequence[float]]) -> list[float]:
    return [max(sum(map(mul, row, fit)), 1e-12) for row in rows]


def _refined(
    fit: Sequence[float], rows: Sequence[Sequence[float]], seconds: Sequence[float]
) -> list[float]:
    """Newton's way to the least error in the logarithm."""
    for _ in range(_ROUNDS):
        predicted = _predicted(fit, rows)
        relative = [
            [value / before for value in row] for row, before in zip(rows, predicted, strict=True)
        ]
        off = [math.log(taken / before) for taken, before in zip(seconds, predicted, strict=True)]
        fit = _least_squares(relative, [1 + max(-_BOUND, min(_BOUND, value)) for value in off])
    return list(fit)


def _least_squares(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Tries every set of coefficients that may be other than zero; there are seven at most."""
    columns = list(zip(*rows, strict=True))
    width = len(columns)
    norms = [math.sqrt(sum(map(mul, column, column))) or 1.0 for column in columns]
    gram = [
        [sum(map(mul, columns[i], columns[j])) / (norms[i] * norms[j]) for j in range(width)]
        for i in range(width)
    ]
    right = [
        sum(map(mul, column, target)) / norm for column, norm in zip(columns, norms, strict=True)
    ]
    for n in range(1, width):
        gram[n][n] += _TIE
    best, most = [0.0] * width, 0.0
    for size in range(1, width + 1):
        for used in itertools.combinations(range(width), size):
            solved = _solve([[gram[i][j] for j in used] + [right[i]] for i in used])
            if solved is None or min(solved) < 0:
                continue
            explained = sum(value * right[i] for value, i in zip(solved, used, strict=True))
            if explained > most:
                most = explained
                best = [0.0] * width
                for value, i in zip(solved, used, strict=True):
                    best[i] = value / norms[i]
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Gauss on a matrix of at most three rows; faster than any library is called."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            return None
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[n][size] / rows[n][n] for n in range(size)]
