"""The global scale: ModelOpt's division or one mantissa, kept normal and invertible."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from mmq.quantize.global_scale import (
    MIN_GLOBAL_SCALE,
    SEARCH_MANTISSA,
    nvfp4_global_scale,
    reciprocal_scale,
)

F32 = np.finfo(np.float32)
SEARCHES = ["max", "mse", "four-over-six"]
MAGNITUDES = np.arange(1, 0x7F800000, 9973, dtype=np.uint32).view(np.float32)


def test_is_the_f32_quotient():
    """Rounding the F64 quotient once gives the F32 quotient: 2688 has few bits."""
    for amax in MAGNITUDES[::61]:
        wide = np.float32(np.float64(amax) / 2688)
        assert nvfp4_global_scale(amax) == max(wide, MIN_GLOBAL_SCALE)


def test_docstring_example():
    assert nvfp4_global_scale(np.float32(21)) == 2.0**-7
    assert nvfp4_global_scale(np.float32(21), "mse") == 19 / 16 * 2.0**-6


@pytest.mark.parametrize("search", SEARCHES)
def test_zero_gives_one(search):
    assert nvfp4_global_scale(np.float32(0), search) == 1
    assert nvfp4_global_scale(np.float32(-0.0), search) == 1


@pytest.mark.parametrize("search", ["mse", "four-over-six"])
def test_searches_leave_room_above_the_largest_block(search):
    """19/16 · 2^−n with the largest n at which the `max` scale of the largest block is ≤ 256."""
    edges = [np.float32(1824 * 2.0**k) for k in (-140, -126, -20, 0, 100)]
    beside = [np.nextafter(edge, np.float32(side)) for edge in edges for side in (0, np.inf)]
    for amax in [*MAGNITUDES[::61], *edges, *beside]:
        s2 = Fraction(float(nvfp4_global_scale(amax, search)))
        mantissa, exponent = math.frexp(s2)
        assert 2 * mantissa == SEARCH_MANTISSA
        assert Fraction(float(amax)) <= 6 * 256 * s2
        assert Fraction(float(amax)) > 6 * 128 * s2 or exponent - 1 == -126


def test_search_scales_survive_both_layouts():
    """Multiplier and divisor restore each other for every exponent a tensor can need."""
    for n in range(-118, 127):
        s2 = np.float32(math.ldexp(SEARCH_MANTISSA, -n))
        divisor = reciprocal_scale(s2)
        assert reciprocal_scale(divisor) == s2
        assert reciprocal_scale(reciprocal_scale(divisor)) == divisor


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("amax", [F32.smallest_subnormal, F32.smallest_normal, F32.max, 1.0])
def test_is_normal_and_invertible(amax, search):
    s2 = nvfp4_global_scale(np.float32(amax), search)
    assert isinstance(s2, np.float32)
    assert F32.smallest_normal <= s2 < np.inf
    assert F32.smallest_normal <= reciprocal_scale(s2) < np.inf


@pytest.mark.parametrize("amax", [np.nan, np.inf, -1.0])
def test_refuses_what_is_no_magnitude(amax):
    for search in SEARCHES:
        with pytest.raises(ValueError, match="amax"):
            nvfp4_global_scale(np.float32(amax), search)


def test_refuses_unknown_searches():
    with pytest.raises(ValueError, match="best"):
        nvfp4_global_scale(np.float32(1), "best")


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 2.0**-127, F32.max])
def test_reciprocal_refuses_what_has_none(scale):
    with pytest.raises(ValueError, match=r"normal|subnormal"):
        reciprocal_scale(np.float32(scale))


def test_reciprocal_rounds_once_and_is_exact_for_powers_of_two():
    for scale in np.random.default_rng(0).uniform(1e-6, 1e-3, 200).astype(np.float32):
        assert reciprocal_scale(scale) == np.float32(1 / np.float64(scale))
    for exponent in (-126, -60, 0, 60, 126):
        scale = np.float32(2.0**exponent)
        assert reciprocal_scale(reciprocal_scale(scale)) == scale


def test_double_reciprocal_is_not_always_the_identity():
    """Stated in the module: a lossless round trip must remember the first value."""
    scales = (2 ** np.random.default_rng(0).uniform(-20, -10, 4000)).astype(np.float32)
    lost = sum(reciprocal_scale(reciprocal_scale(s)) != s for s in scales)
    assert 0.10 < lost / len(scales) < 0.18
