"""Floats to NVFP4 a block at a time, in the operations of the reference, sixteen lanes wide.

    s2       = c · 2^−n         t = x · 2^n         d(S) = t − q · e4m3(S) · c
    error(S) = tree over the 16 columns of f32(d(S)²) · w       chosen: the code S of least error

Four numbers, as if they were a block, with s2 = 2^−7: [0.5, −0.34, 0.25, 0] have the `max` code
0x53 (11) and under it the error 4 + 0.23 + 1 = 5.23; no other code has less.

All blocks go through here: BF16, F16 and F32 sources, importance weights, and those blocks of MXFP8
that tables do not cover. Which codes need not be looked at is proved in docs/numerics.md.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, U8
from ..tables import CANDIDATES, REGULAR_SEARCH
from .jit import Int, jit
from .lanes import encode_e2m1, load_float, magnitude_of, round_to_e2m1
from .row_errors import add_nvfp4_from_floats
from .scalars import E4M3, block_scale, scale_to
from .simd import (
    Lanes,
    bits_of,
    f32x16,
    f64x16,
    first_lane,
    i32x16,
    lane,
    largest_i32,
    load_f32x16,
    pack_nibbles,
    select,
    shuffle,
    smallest_i32,
    store,
    to_f32x16,
    to_f64x16,
)

MAX, MSE, FOUR_OVER_SIX = 0, 1, 2

_CANDIDATES = np.array(CANDIDATES)
_SMALLEST = CANDIDATES.index(min(CANDIDATES))
_FIRST, _LAST = REGULAR_SEARCH
_HOPELESS = 2.0**60

_even_lanes = shuffle("even_lanes", range(0, 32, 2))
_odd_lanes = shuffle("odd_lanes", range(1, 32, 2))


@jit
def _add_neighbours(a: Lanes, b: Lanes) -> Lanes:
    """a0 + a1, a2 + a3, … in the lower lanes, the same of b in the upper ones."""
    return _even_lanes(a, b) + _odd_lanes(a, b)


@jit
def _tree_sum(x: Lanes) -> np.float32:
    once = _add_neighbours(x, x)
    twice = _add_neighbours(once, once)
    halves = _add_neighbours(twice, twice)
    total: np.float32 = lane(halves, np.int32(0)) + lane(halves, np.int32(1))
    return total


@jit
def least_lane(errors: Lanes) -> Int:
    """The first lane of least error. Bits of numbers ≥ 0 are in the order of the numbers."""
    bits = bits_of(errors)
    number: int = first_lane(bits == i32x16(smallest_i32(bits)))
    return number


@jit
def _square(t: Lanes, w: Lanes, first: Int, number: Int, c: np.float32) -> Lanes:
    """f32(d²) · w under one candidate: all F32, because d is exact (q is near t, or 0)."""
    step = f32x16(E4M3[_candidate(first, number)] * c)
    d = t - round_to_e2m1(t / step) * step
    return d * d * w


@jit
def _candidate(first: Int, number: Int) -> Int:
    return min(max(first + _CANDIDATES[number], np.int64(1)), np.int64(126))


@jit
def _four_squares(t: Lanes, w: Lanes, first: Int, number: Int, c: np.float32) -> Lanes:
    """Sums of four columns under four candidates, four lanes each."""
    return _add_neighbours(
        _add_neighbours(_square(t, w, first, number, c), _square(t, w, first, number + 1, c)),
        _add_neighbours(_square(t, w, first, number + 2, c), _square(t, w, first, number + 3, c)),
    )


@jit
def _best_candidate(t: Lanes, w: Lanes, first: Int, c: np.float32) -> tuple[Int, np.float32]:
    """The `mse` code of a regular block among twelve, a lane each, and its error."""
    ab = _add_neighbours(_four_squares(t, w, first, 0, c), _four_squares(t, w, first, 4, c))
    last = _four_squares(t, w, first, 8, c)
    errors = _add_neighbours(ab, _add_neighbours(last, last))
    least = np.uint32(smallest_i32(bits_of(errors))).view(np.float32)
    return _candidate(first, least_lane(errors)), least


@jit
def _smaller_cannot_win(t: Lanes, w: Lanes, first: Int, c: np.float32, least: np.float32) -> bool:
    """Whether what lies beyond 6 steps of the smallest candidate alone is a larger error."""
    beyond = t > f32x16(np.float32(6.0) * (E4M3[first + _CANDIDATES[_SMALLEST]] * c))
    squares = _square(t, w, first, _SMALLEST, c)
    return bool(_tree_sum(select(beyond, squares, f32x16(0.0))) > least)


@jit
def _squares(
    magnitude: Lanes, t: Lanes, code: Int, s2: np.float32, c: float
) -> tuple[Lanes, Lanes]:
    """Quotients under any scale code, and f32(d²)."""
    quotient = magnitude / f32x16(E4M3[code] * s2)
    q = to_f64x16(round_to_e2m1(quotient))
    d = t - q * f64x16(np.float64(E4M3[code]) * c)
    return quotient, to_f32x16(d * d)


@jit
def _best_code(
    magnitude: Lanes,
    weights: Lanes,
    amax: np.float32,
    first: Int,
    s2: np.float32,
    c: float,
    power: float,
    everything: bool,
) -> Int:
    """The `mse` code of any block: upwards from the `max` code, then down, while a code can win."""
    t = to_f64x16(magnitude) * f64x16(power)
    best = first
    least = _tree_sum(_squares(magnitude, t, first, s2, c)[1] * weights)
    for code in range(first + 1, 127):
        # Where the largest element is stored as 3 or less, half the scale is at least as good.
        if not everything and np.float64(amax) < 3.5 * np.float64(E4M3[code] * s2):
            if code >= 16:
                break
            if code % 2 == 0:
                continue
        error = _tree_sum(_squares(magnitude, t, code, s2, c)[1] * weights)
        if error < least:
            least = error
            best = code
    for code in range(first - 1, 0, -1):
        quotient, squares = _squares(magnitude, t, code, s2, c)
        squares = squares * weights
        error = _tree_sum(squares)
        if error < least or (error == least and first - code <= abs(best - first)):
            least = error
            best = code
        # What lies beyond 6 steps only gets worse under smaller scales.
        if not everything:
            beyond = _tree_sum(select(quotient > f32x16(6.0), squares, f32x16(0.0)))
            if beyond > least:
                break
    return best


@jit
def _better_of_two(
    magnitude: Lanes,
    weights: Lanes,
    amax: np.float32,
    first: Int,
    s2: np.float32,
    c: float,
    power: float,
) -> Int:
    """The `four-over-six` code: `first`, or the one that brings amax to 4 if its error is less."""
    t = to_f64x16(magnitude) * f64x16(power)
    four = scale_to(amax, np.float32(np.float32(4.0) * s2), np.int64(1))
    six_error = _tree_sum(_squares(magnitude, t, first, s2, c)[1] * weights)
    four_error = _tree_sum(_squares(magnitude, t, four, s2, c)[1] * weights)
    return four if four_error < six_error else first


@jit
def quantize_block(
    x: Lanes,
    weights: Int,
    search: Int,
    s2: np.float32,
    c: float,
    power: float,
    everything: bool,
    packed: Int,
) -> Int:
    """Write eight packed bytes of sixteen F32 numbers; the scale code.

    Args:
        weights: address of sixteen F32, 0 for none.
        search: MAX, MSE or FOUR_OVER_SIX.
        c, power: s2 = c / power, 1 ≤ c < 2.
        everything: try all codes, because F32 would round the steps of this s2.
    """
    magnitude = magnitude_of(x)
    amax = np.uint32(largest_i32(bits_of(magnitude))).view(np.float32)
    code = block_scale(amax, s2)
    if search != MAX and np.float64(amax) < _HOPELESS * np.float64(s2):
        w = f32x16(1.0)
        if weights != 0:
            w = load_f32x16(weights)
        if search == FOUR_OVER_SIX:
            code = _better_of_two(magnitude, w, amax, code, s2, c, power)
        else:
            first, found = code, False
            if not everything and _FIRST <= code <= _LAST:
                t = magnitude * f32x16(np.float32(power))
                code, least = _best_candidate(t, w, first, np.float32(c))
                found = weights == 0 or _smaller_cannot_win(t, w, first, np.float32(c), least)
            if not found:
                code = _best_code(magnitude, w, amax, first, s2, c, power, everything)
    quotient = magnitude / f32x16(E4M3[code] * s2)
    store(packed, pack_nibbles(encode_e2m1(quotient, x)))
    return code


@jit
def quantize_nvfp4_floats(
    values: U8,
    kind: Int,
    weights: F32,
    search: Int,
    s2: np.float32,
    c: float,
    power: float,
    everything: bool,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    """Fill packed [O, P] and scale_out [O, B], and errors [O, 3] unless it has no rows.

    Args:
        values: the bytes of finite F32 or BF16 numbers (`kind`), U8 [O, K · element size].
        weights: F32 [K], or empty.
    """
    blocks = scale_out.shape[1]
    weighed = weights.ctypes.data
    for o in range(scale_out.shape[0]):
        source, written = values[o].ctypes.data, packed[o].ctypes.data
        for b in range(blocks):
            w = weighed + 64 * b if weights.size else 0
            x = load_float(source, 16 * b, kind)
            destination = written + 8 * b
            scale_out[o, b] = quantize_block(x, w, search, s2, c, power, everything, destination)
        if errors.shape[0]:
            add_nvfp4_from_floats(source, kind, packed[o], scale_out[o], s2, errors[o])
