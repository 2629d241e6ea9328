"""Block comparison accepts rounding, but not blocks of other prompts, changed bytes or NaNs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_tiered_kv.core.block_compare import LayerNumbers, NumberFormat, compare, decode
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict

ELEMENTS = 4096
NUMBERS = [f for f in NumberFormat if f is not NumberFormat.OPAQUE]
EACH = pytest.mark.parametrize("number_format", NUMBERS, ids=lambda f: f.name.lower())


def encode(values: np.ndarray, number_format: NumberFormat) -> np.ndarray:
    """Rounds to the nearest number of the format; tries all numbers of a small format."""
    if number_format is NumberFormat.FLOAT32:
        return values.astype(np.float32).view(np.uint8).copy()
    if number_format is NumberFormat.FLOAT16:
        return values.astype(np.float16).view(np.uint8).copy()
    if number_format is NumberFormat.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x8000) >> 16).astype(np.uint16).view(np.uint8).copy()
    every = decode(np.arange(256, dtype=np.uint8), number_format)
    codes = np.flatnonzero(np.isfinite(every))
    order = codes[np.argsort(every[codes], kind="stable")]
    middles = (every[order][1:] + every[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def values_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, ELEMENTS)


def against(
    held: np.ndarray, computed: np.ndarray, number_format: NumberFormat, tolerance: float = 0.05
) -> BlockVerdict:
    return compare(held, computed, [LayerNumbers("", len(held), number_format)], tolerance)


@EACH
def test_compare_equal_bytes_is_equal(number_format: NumberFormat) -> None:
    block = encode(values_of(1), number_format)
    assert against(block, block.copy(), number_format, 0.0) == BlockVerdict(Verdict.EQUAL)


@EACH
def test_compare_rounded_block_is_close_not_equal(number_format: NumberFormat) -> None:
    values = values_of(1)
    noise = np.random.default_rng(2).normal(0, 0.01, ELEMENTS) * np.abs(values)
    held, computed = encode(values, number_format), encode(values + noise, number_format)
    found = against(held, computed, number_format)
    assert found.verdict is Verdict.CLOSE
    assert 0 < found.largest < 0.05 + number_format.step
    assert against(held, computed, number_format, 0.0).verdict is Verdict.DIFFERENT


@EACH
def test_compare_block_of_other_prompt_is_different(number_format: NumberFormat) -> None:
    held, computed = (encode(values_of(seed), number_format) for seed in (1, 2))
    found = against(held, computed, number_format)
    assert found.verdict is Verdict.DIFFERENT
    assert found.overall > 1


@EACH
def test_compare_changed_cache_line_is_different(number_format: NumberFormat) -> None:
    computed = encode(values_of(1), number_format)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        held = computed.copy()
        start = 64 * int(rng.integers(len(held) // 64))
        held[start : start + 64] = rng.integers(0, 256, 64)
        assert against(held, computed, number_format).verdict is Verdict.DIFFERENT, seed


@EACH
def test_compare_zeroed_block_is_different(number_format: NumberFormat) -> None:
    computed = encode(values_of(1), number_format)
    held = computed.copy()
    held[: len(held) // 8] = 0
    assert against(held, computed, number_format).verdict is Verdict.DIFFERENT
    found = against(computed, np.zeros_like(computed), number_format)
    assert (found.verdict, found.largest) == (Verdict.DIFFERENT, math.inf)


def test_compare_nan_requires_identical_bits() -> None:
    values = values_of(1).astype(np.float32)
    values[7] = math.inf
    computed = values.view(np.uint8).copy()
    held = computed.copy()
    held.view(np.float32)[0] *= np.float32(1.0001)
    assert against(held, computed, NumberFormat.FLOAT32).verdict is Verdict.CLOSE
    held.view(np.float32)[9] = math.nan
    found = against(held, computed, NumberFormat.FLOAT32)
    assert (found.verdict, found.largest) == (Verdict.DIFFERENT, math.inf)


def test_compare_uses_scale_of_each_layer() -> None:
    large = encode(values_of(1) * 1000, NumberFormat.BFLOAT16)
    small = encode(values_of(2), NumberFormat.BFLOAT16)
    other = encode(values_of(3), NumberFormat.BFLOAT16)
    end = len(large)
    layers = [
        LayerNumbers("large", end, NumberFormat.BFLOAT16),
        LayerNumbers("its twin", end, NumberFormat.BFLOAT16),  # shares the memory of the first one
        LayerNumbers("small", 2 * end, NumberFormat.BFLOAT16),
    ]
    computed, held = np.concatenate([large, small]), np.concatenate([large, other])
    found = compare(held, computed, layers, 0.05)
    assert (found.verdict, found.layer) == (Verdict.DIFFERENT, "small")
    whole = against(held, computed, NumberFormat.BFLOAT16)
    assert whole.verdict is Verdict.CLOSE  # so the division into layers matters


def test_compare_opaque_format_requires_equal_bytes() -> None:
    computed = np.arange(64, dtype=np.uint8)
    held = computed.copy()
    held[3] ^= 1
    assert compare(held, computed, [], 0.5).verdict is Verdict.DIFFERENT
    assert against(held, computed, NumberFormat.OPAQUE, 1.0).verdict is Verdict.DIFFERENT
    assert compare(computed, computed.copy(), [], 0).verdict is Verdict.EQUAL


def test_decode_fp8_matches_ocp_definition() -> None:
    """Checks the extreme values of both formats of OCP 8-bit floating point."""
    e4m3 = decode(np.array([0x01, 0x08, 0x38, 0x7E, 0xFE, 0x7F], np.uint8), NumberFormat.FP8_E4M3)
    assert e4m3[:5].tolist() == [2**-9, 2**-6, 1.0, 448.0, -448.0]
    assert math.isnan(e4m3[5])
    e5m2 = decode(np.array([0x01, 0x04, 0x3C, 0x7B, 0x7C, 0x7E], np.uint8), NumberFormat.FP8_E5M2)
    assert e5m2[:5].tolist() == [2**-16, 2**-14, 1.0, 57344.0, math.inf]
    assert math.isnan(e5m2[5])
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(np.zeros(4, np.uint8), NumberFormat.OPAQUE)


def test_compare_single_outlier_is_different() -> None:
    computed = values_of(1).astype(np.float32)
    held = computed.copy()
    held[5] += np.abs(computed).max() / 2
    found = against(held.view(np.uint8), computed.view(np.uint8), NumberFormat.FLOAT32)
    assert found.verdict is Verdict.DIFFERENT
    assert found.overall < 0.05 < found.largest


def test_compare_small_errors_everywhere_is_different() -> None:
    computed = values_of(1).astype(np.float32)
    signs = np.random.default_rng(2).choice([-0.3, 0.3], ELEMENTS)
    held = (computed + signs).astype(np.float32)
    found = against(held.view(np.uint8), computed.view(np.uint8), NumberFormat.FLOAT32)
    assert found.verdict is Verdict.DIFFERENT
    assert found.largest < 0.05 < found.overall


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_compare_ignores_layers_that_are_not_compared(tolerance: float) -> None:
    layers = [LayerNumbers("model", 64), LayerNumbers("draft", 128, is_compared=False)]
    computed = np.arange(128, dtype=np.uint8)
    for at, verdict in ((100, Verdict.EQUAL), (10, Verdict.DIFFERENT)):
        held = computed.copy()
        held[at] ^= 0xFF
        assert compare(held, computed, layers, tolerance).verdict is verdict
