"""Whether a block that a tier holds is what computing it again gives.

Bytes are compared first. The same kernels in the same shapes give the same bytes; others round
differently, so what is not equal is compared as numbers, layer by layer: every element against the
largest of its layer, and all of them together (root of squares) against the layer's. The first
notices a few wild values, the second content that is of the right size and wrong.

Plain numpy: bfloat16 and fp8 are decoded by hand, as numpy knows neither.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class NumberFormat(enum.Enum):
    """How the numbers of a KV cache are written. The value: bytes of one, bits of its fraction."""

    FLOAT32 = (4, 23)
    FLOAT16 = (2, 10)
    BFLOAT16 = (2, 7)
    FP8_E4M3 = (1, 3)
    FP8_E5M2 = (1, 2)
    OPAQUE = (1, 0)  # packed or mixed: only equal bytes are equal

    @property
    def itemsize(self) -> int:
        return self.value[0]

    @property
    def step(self) -> float:
        """How far two neighbouring numbers may lie apart, relative to the larger one."""
        return math.ldexp(1.0, -self.value[1])


@dataclass(frozen=True)
class LayerNumbers:
    """One layer's part of a block: where it ends, and how its numbers are written."""

    name: str
    end: int
    number_format: NumberFormat = NumberFormat.OPAQUE


class Likeness(enum.Enum):
    EQUAL = enum.auto()  # byte by byte
    CLOSE = enum.auto()  # within the tolerance
    DIFFERENT = enum.auto()


@dataclass(frozen=True)
class Comparison:
    likeness: Likeness
    largest: float = 0.0
    """The largest difference of an element, as a part of the largest value of its layer; infinite
    where it cannot be told."""
    overall: float = 0.0
    """The same of all elements of a layer together."""
    layer: str = ""  # the worst one


def compare(
    held: Bytes, computed: Bytes, layers: Sequence[LayerNumbers], tolerance: float
) -> Comparison:
    """Compares two blocks; without layers, or with a tolerance of 0, only equal bytes will do.

    An element may be one step of its format further off than the tolerance: that is what rounding
    to the other side makes of the least difference.
    """
    if np.array_equal(held, computed):
        return Comparison(Likeness.EQUAL)
    likeness = Likeness.CLOSE if tolerance else Likeness.DIFFERENT
    largest = overall = 0.0
    where, start = "", 0
    for layer in layers or (LayerNumbers("", len(computed)),):
        if layer.end <= start:
            continue  # it shares the memory of another
        of_one, of_all = _relative(held[start : layer.end], computed[start : layer.end], layer)
        start = layer.end
        if of_one > tolerance + layer.number_format.step or of_all > tolerance:
            likeness = Likeness.DIFFERENT
        if max(of_one, of_all) > max(largest, overall):
            largest, overall, where = of_one, of_all, layer.name
    return Comparison(likeness, largest, overall, where)


def _relative(held: Bytes, computed: Bytes, layer: LayerNumbers) -> tuple[float, float]:
    """Largest difference by largest value, and root of squares by root of squares."""
    number_format = layer.number_format
    size = number_format.itemsize
    if number_format is NumberFormat.OPAQUE or len(held) % size:
        return (0.0, 0.0) if np.array_equal(held, computed) else (math.inf, math.inf)
    unsigned = np.dtype(f"u{size}")
    bits, right_bits = held.view(unsigned), computed.view(unsigned)
    differ = np.flatnonzero(bits != right_bits)
    if not len(differ):
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):  # whatever is not a number is looked for below
        right = decode(computed, number_format).astype(np.float64)
        apart = decode(held, number_format)[differ].astype(np.float64) - right[differ]
    if not np.isfinite(apart).all():
        return math.inf, math.inf
    right = right[np.isfinite(right)]
    scale, size_of_all = np.abs(right).max(initial=0.0), _root_of_squares(right)
    if not scale:
        return (math.inf, math.inf) if apart.any() else (0.0, 0.0)
    return float(np.abs(apart).max() / scale), _root_of_squares(apart) / size_of_all


def _root_of_squares(numbers: npt.NDArray[np.float64]) -> float:
    # Not `norm`: that starts as many threads as there are cores, beside an engine that needs them.
    return math.sqrt(float(np.square(numbers).sum()))


def decode(raw: Bytes, number_format: NumberFormat) -> Floats:
    """The numbers of some bytes."""
    if number_format is NumberFormat.FLOAT32:
        return raw.view(np.float32)
    if number_format is NumberFormat.FLOAT16:
        return raw.view(np.float16).astype(np.float32)
    if number_format is NumberFormat.BFLOAT16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if number_format is NumberFormat.OPAQUE:
        raise ValueError("bytes of an unknown format are no numbers")
    return _fp8_values(number_format)[raw]


@functools.cache
def _fp8_values(number_format: NumberFormat) -> Floats:
    """All 256 of them."""
    bits = number_format.value[1]
    bias = 7 if number_format is NumberFormat.FP8_E4M3 else 15
    values = np.empty(256, np.float32)
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> bits, code & ((1 << bits) - 1)
        if exponent == 0:
            value = math.ldexp(fraction, 1 - bias - bits)
        else:
            value = math.ldexp((1 << bits) + fraction, exponent - bias - bits)
        if number_format is NumberFormat.FP8_E4M3:
            value = math.nan if code & 0x7F == 0x7F else value  # it has no infinities
        elif exponent == 31:
            value = math.nan if fraction else math.inf
        values[code] = -value if code & 0x80 else value
    return values
