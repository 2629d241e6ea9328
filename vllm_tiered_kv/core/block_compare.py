"""Compares a block held by a tier with the same block recomputed.

Bytes are compared first: the same kernels with the same shapes produce the same bytes. Other
kernels or shapes round differently, so blocks with different bytes are compared as numbers, layer
by layer, with two measures. The largest difference of an element, relative to the largest value of
its layer, detects a few wild values. The L2 norm of the differences, relative to the L2 norm of the
layer, detects content that has the right magnitude but is wrong.

The code uses plain numpy and decodes bfloat16 and fp8 itself, because numpy supports neither.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class NumberFormat(enum.Enum):
    """Number format of a KV cache. The value is (bytes per number, bits of the fraction)."""

    FLOAT32 = (4, 23)
    FLOAT16 = (2, 10)
    BFLOAT16 = (2, 7)
    FP8_E4M3 = (1, 3)
    FP8_E5M2 = (1, 2)
    OPAQUE = (1, 0)  # packed or mixed formats: compared by bytes only

    @property
    def itemsize(self) -> int:
        return self.value[0]

    @property
    def step(self) -> float:
        """Largest relative distance between two adjacent numbers of this format."""
        return math.ldexp(1.0, -self.value[1])


@dataclass(frozen=True)
class LayerNumbers:
    """One layer's part of a block: the offset where it ends, and its number format."""

    name: str
    end: int
    number_format: NumberFormat = NumberFormat.OPAQUE
    is_compared: bool = True


def compare(
    held: Bytes, computed: Bytes, layers: Sequence[LayerNumbers], tolerance: float
) -> BlockVerdict:
    """Compares two blocks. Without layers, or with a tolerance of 0, only equal bytes are accepted.

    An element may exceed the tolerance by one step of its format: rounding turns even the smallest
    difference into a whole step.
    """
    if np.array_equal(held, computed):
        return BlockVerdict(Verdict.EQUAL)
    verdict = Verdict.EQUAL
    largest = overall = 0.0
    worst_layer, start = "", 0
    for layer in layers or (LayerNumbers("", len(computed)),):
        if layer.end <= start:
            continue  # the layer shares the memory of an earlier one
        part, start = slice(start, layer.end), layer.end
        if not layer.is_compared or np.array_equal(held[part], computed[part]):
            continue
        if verdict is Verdict.EQUAL:
            verdict = Verdict.CLOSE if tolerance else Verdict.DIFFERENT
        of_one, of_all = _relative(held[part], computed[part], layer)
        if of_one > tolerance + layer.number_format.step or of_all > tolerance:
            verdict = Verdict.DIFFERENT
        if max(of_one, of_all) > max(largest, overall):
            largest, overall, worst_layer = of_one, of_all, layer.name
    return BlockVerdict(verdict, largest, overall, worst_layer)


def _relative(held: Bytes, computed: Bytes, layer: LayerNumbers) -> tuple[float, float]:
    """Returns the relative largest difference and the relative L2 norm of the differences."""
    number_format = layer.number_format
    size = number_format.itemsize
    if number_format is NumberFormat.OPAQUE or len(held) % size:
        return (0.0, 0.0) if np.array_equal(held, computed) else (math.inf, math.inf)
    unsigned = np.dtype(f"u{size}")
    bits, right_bits = held.view(unsigned), computed.view(unsigned)
    differ = np.flatnonzero(bits != right_bits)
    if not len(differ):
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):  # NaN and infinity are checked below
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
    # np.linalg.norm would start one BLAS thread per core and take CPU time from the engine.
    return math.sqrt(float(np.square(numbers).sum()))


def decode(raw: Bytes, number_format: NumberFormat) -> Floats:
    """Decodes bytes of this format to float32."""
    if number_format is NumberFormat.FLOAT32:
        return raw.view(np.float32)
    if number_format is NumberFormat.FLOAT16:
        return raw.view(np.float16).astype(np.float32)
    if number_format is NumberFormat.BFLOAT16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if number_format is NumberFormat.OPAQUE:
        raise ValueError("bytes of an opaque format cannot be decoded to numbers")
    return _fp8_values(number_format)[raw]


@functools.cache
def _fp8_values(number_format: NumberFormat) -> Floats:
    """Returns the decoded values of all 256 codes."""
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
            value = math.nan if code & 0x7F == 0x7F else value  # E4M3 has no infinities
        elif exponent == 31:
            value = math.nan if fraction else math.inf
        values[code] = -value if code & 0x80 else value
    return values
