"""Error sums of a row that has just been quantised, read back from what was written.

    signal = Σx²      noise = Σ(x − q)²      max_error = max |x − q|        all in F64

The order of additions is the reference's: in a block the even columns from left to right, the odd
ones, then both; blocks from left to right. Four blocks are summed side by side, a lane for each
(block, even or odd): [a0 a1 …], [b0 b1 …], [c0 c1 …], [d0 d1 …] are rearranged to a0 a1 b0 b1 c0 c1
d0 d1 | a2 a3 b2 b3 c2 c3 d2 d3 | …, and each group of eight is added to the sums in turn. Signs do
not matter: q has the sign of x or is zero.
"""

from __future__ import annotations

import numpy as np

from ..results import F64, U8
from .jit import jit
from .lanes import E4M3_BITS, e4m3_magnitude, load_e2m1, load_float, magnitude_of
from .scalars import E4M3
from .simd import (
    Lanes,
    f64x8,
    in_pairs,
    lane,
    load_u8,
    load_u8x16,
    select,
    shuffle,
    to_f64x16,
)

_pairs_low = shuffle("pairs_low", [0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23])
_pairs_high = shuffle("pairs_high", [8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31])
_quads_low = shuffle("quads_low", [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23])
_quads_high = shuffle("quads_high", [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31])
_low = shuffle("low", range(8))
_high = shuffle("high", range(8, 16))
_even = shuffle("even", [0, 2, 4, 6])
_odd = shuffle("odd", [1, 3, 5, 7])

#: 2^(b − 127) for every exponent byte b, for E4M3 codes as `e4m3_magnitude` gives them.
_POWER = np.ldexp(1.0, np.arange(256) - 127) / E4M3_BITS

Four = tuple[Lanes, Lanes, Lanes, Lanes]
Sums = tuple[Lanes, Lanes, Lanes]


@jit
def _add_columns(x: Lanes, q: Lanes, sums: Sums) -> Sums:
    """Add two even and two odd columns of four blocks: F64 [16], |x| and |q|."""
    signal, noise, worst = sums
    d = x - q
    xx = x * x
    dd = d * d
    signal = (signal + _low(xx, xx)) + _high(xx, xx)
    noise = (noise + _low(dd, dd)) + _high(dd, dd)
    worst = select(_low(dd, dd) > worst, _low(dd, dd), worst)
    worst = select(_high(dd, dd) > worst, _high(dd, dd), worst)
    return signal, noise, worst


@jit
def _add_eight(
    x_ab: Lanes, x_cd: Lanes, q_ab: Lanes, q_cd: Lanes, scales: tuple[Lanes, Lanes], sums: Sums
) -> Sums:
    x_scale, q_scale = scales
    x = to_f64x16(_quads_low(x_ab, x_cd)) * x_scale
    sums = _add_columns(x, to_f64x16(_quads_low(q_ab, q_cd)) * q_scale, sums)
    x = to_f64x16(_quads_high(x_ab, x_cd)) * x_scale
    return _add_columns(x, to_f64x16(_quads_high(q_ab, q_cd)) * q_scale, sums)


@jit
def _add_sixteen(x: Four, q: Four, scales: tuple[Lanes, Lanes], sums: Sums) -> Sums:
    """Add 16 columns of four blocks: F32 magnitudes and the F64 numbers they are to be times."""
    x_ab, x_cd = _pairs_low(x[0], x[1]), _pairs_low(x[2], x[3])
    q_ab, q_cd = _pairs_low(q[0], q[1]), _pairs_low(q[2], q[3])
    sums = _add_eight(x_ab, x_cd, q_ab, q_cd, scales, sums)
    x_ab, x_cd = _pairs_high(x[0], x[1]), _pairs_high(x[2], x[3])
    q_ab, q_cd = _pairs_high(q[0], q[1]), _pairs_high(q[2], q[3])
    return _add_eight(x_ab, x_cd, q_ab, q_cd, scales, sums)


@jit
def _add_in_order(columns: Lanes, total: float) -> float:
    """A row's sum with four more blocks: in each the even columns and the odd ones."""
    blocks = _even(columns, columns) + _odd(columns, columns)
    for block in range(4):
        total += lane(blocks, np.int32(block))
    return total


@jit
def _finish(signal: float, noise: float, worst: Lanes, row_3: F64) -> None:
    row_3[0], row_3[1], row_3[2] = signal, noise, 0.0
    for number in range(8):
        # Exact: the root of a rounded square is the number itself.
        row_3[2] = max(row_3[2], np.sqrt(lane(worst, np.int32(number))))


@jit
def _clipped(first: int, last: int) -> tuple[int, int, int, int]:
    """Four numbers from `first` on, none above `last`."""
    return first, min(first + 1, last), min(first + 2, last), min(first + 3, last)


@jit
def _spread(a: float, b: float, c: float, d: float, count: int) -> Lanes:
    """a, b, c, d in the lanes of their blocks, 0 for those beyond the first `count`."""
    return in_pairs(a, b * (count > 1), c * (count > 2), d * (count > 3))


@jit
def _load_e2m1_blocks(packed: int, a: int, b: int, c: int, d: int) -> Four:
    return (
        load_e2m1(packed + 8 * a),
        load_e2m1(packed + 8 * b),
        load_e2m1(packed + 8 * c),
        load_e2m1(packed + 8 * d),
    )


@jit
def _half_steps(scales: int, s2: np.float32, a: int, b: int, c: int, d: int, count: int) -> Lanes:
    """Half the exact step of each block, because codes come at twice their value."""
    half = 0.5 * np.float64(s2)
    return _spread(
        np.float64(E4M3[load_u8(scales + a)]) * half,
        np.float64(E4M3[load_u8(scales + b)]) * half,
        np.float64(E4M3[load_u8(scales + c)]) * half,
        np.float64(E4M3[load_u8(scales + d)]) * half,
        count,
    )


@jit
def add_nvfp4_from_codes(
    codes_K: U8, exponent_G: U8, packed_P: U8, scale_B: U8, s2: np.float32, row_3: F64
) -> None:
    """Set row_3 to signal, noise and max_error of a row of MXFP8 that became NVFP4."""
    source, exponents = codes_K.ctypes.data, exponent_G.ctypes.data
    packed, scales = packed_P.ctypes.data, scale_B.ctypes.data
    signal, noise, worst = 0.0, 0.0, f64x8(0.0)
    for first in range(0, scale_B.size, 4):
        a, b, c, d = _clipped(first, scale_B.size - 1)
        count = scale_B.size - first
        x = (
            e4m3_magnitude(load_u8x16(source + 16 * a)),
            e4m3_magnitude(load_u8x16(source + 16 * b)),
            e4m3_magnitude(load_u8x16(source + 16 * c)),
            e4m3_magnitude(load_u8x16(source + 16 * d)),
        )
        x_scale = _spread(
            _POWER[load_u8(exponents + (a >> 1))],
            _POWER[load_u8(exponents + (b >> 1))],
            _POWER[load_u8(exponents + (c >> 1))],
            _POWER[load_u8(exponents + (d >> 1))],
            count,
        )
        q_scale = _half_steps(scales, s2, a, b, c, d, count)
        q = _load_e2m1_blocks(packed, a, b, c, d)
        sums = (f64x8(0.0), f64x8(0.0), worst)
        xx, dd, worst = _add_sixteen(x, q, (x_scale, q_scale), sums)
        signal, noise = _add_in_order(xx, signal), _add_in_order(dd, noise)
    _finish(signal, noise, worst, row_3)


@jit
def _load_magnitudes(source: int, kind: int, a: int, b: int, c: int, d: int) -> Four:
    return (
        magnitude_of(load_float(source, a, kind)),
        magnitude_of(load_float(source, b, kind)),
        magnitude_of(load_float(source, c, kind)),
        magnitude_of(load_float(source, d, kind)),
    )


@jit
def add_nvfp4_from_floats(
    source: int, kind: int, packed_P: U8, scale_B: U8, s2: np.float32, row_3: F64
) -> None:
    """The same for a row of floats at an address."""
    packed, scales = packed_P.ctypes.data, scale_B.ctypes.data
    signal, noise, worst = 0.0, 0.0, f64x8(0.0)
    for first in range(0, scale_B.size, 4):
        a, b, c, d = _clipped(first, scale_B.size - 1)
        count = scale_B.size - first
        x = _load_magnitudes(source, kind, 16 * a, 16 * b, 16 * c, 16 * d)
        x_scale = _spread(1.0, 1.0, 1.0, 1.0, count)
        q_scale = _half_steps(scales, s2, a, b, c, d, count)
        q = _load_e2m1_blocks(packed, a, b, c, d)
        sums = (f64x8(0.0), f64x8(0.0), worst)
        xx, dd, worst = _add_sixteen(x, q, (x_scale, q_scale), sums)
        signal, noise = _add_in_order(xx, signal), _add_in_order(dd, noise)
    _finish(signal, noise, worst, row_3)


@jit
def add_mxfp8_from_floats(source: int, kind: int, codes_K: U8, exponent_G: U8, row_3: F64) -> None:
    """The same for a row of floats that became MXFP8."""
    codes, exponents = codes_K.ctypes.data, exponent_G.ctypes.data
    signal, noise, worst = 0.0, 0.0, f64x8(0.0)
    for first in range(0, exponent_G.size, 4):
        a, b, c, d = _clipped(first, exponent_G.size - 1)
        count = exponent_G.size - first
        both = (
            _spread(1.0, 1.0, 1.0, 1.0, count),
            _spread(
                _POWER[load_u8(exponents + a)],
                _POWER[load_u8(exponents + b)],
                _POWER[load_u8(exponents + c)],
                _POWER[load_u8(exponents + d)],
                count,
            ),
        )
        sums = (f64x8(0.0), f64x8(0.0), worst)
        for column in (0, 16):
            i, j = 32 * a + column, 32 * b + column
            k, m = 32 * c + column, 32 * d + column
            q = (
                e4m3_magnitude(load_u8x16(codes + i)),
                e4m3_magnitude(load_u8x16(codes + j)),
                e4m3_magnitude(load_u8x16(codes + k)),
                e4m3_magnitude(load_u8x16(codes + m)),
            )
            x = _load_magnitudes(source, kind, i, j, k, m)
            sums = _add_sixteen(x, q, both, sums)
        signal, noise = _add_in_order(sums[0], signal), _add_in_order(sums[1], noise)
        worst = sums[2]
    _finish(signal, noise, worst, row_3)
