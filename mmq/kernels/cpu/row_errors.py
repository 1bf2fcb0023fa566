"""Error sums of a row that has just been quantised, read back from what was written.

    signal = Σx²      noise = Σ(x − q)²      max_error = max |x − q|        all in F64

The order of additions is the reference's: in a block the even columns from left to right, the odd
ones, then both; blocks from left to right. Four blocks are summed side by side, a lane for each
(block, even or odd): [a0 a1 …], [b0 b1 …], [c0 c1 …], [d0 d1 …] are rearranged to a0 a1 b0 b1 c0 c1
d0 d1 | a2 a3 b2 b3 c2 c3 d2 d3 | …, and each group of eight is added to the sums in turn. Signs do
not matter: q has the sign of x or is zero.

Sums are in units of a block's own power of two until the block is complete: scaling by it is exact,
before or after.
"""

from __future__ import annotations

import numpy as np

from ..results import F64, U8
from .jit import jit
from .lanes import E4M3_BITS, e4m3_magnitude, load_float, magnitude_of, twice_e2m1
from .scalars import E4M3
from .simd import (
    Lanes,
    f64x8,
    in_pairs,
    lane,
    load_u8,
    load_u8x8,
    load_u8x16,
    select,
    shuffle,
    to_f64x16,
    to_i32x16,
    unpack_nibbles,
)

_pairs_low = shuffle("pairs_low", [0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23])
_pairs_high = shuffle("pairs_high", [8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31])
_quads_low = shuffle("quads_low", [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23])
_quads_high = shuffle("quads_high", [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31])
_join_8 = shuffle("join_8", range(16))
_join_16 = shuffle("join_16", range(32))
_join_32 = shuffle("join_32", range(64))
#: All 64 bytes of four blocks in the order above, and a quarter of them.
_in_turn = shuffle(
    "in_turn", [16 * b + 2 * k + i for k in range(8) for b in range(4) for i in (0, 1)]
)
_first = shuffle("first", range(16))
_second = shuffle("second", range(16, 32))
_third = shuffle("third", range(32, 48))
_fourth = shuffle("fourth", range(48, 64))
_low = shuffle("low", range(8))
_high = shuffle("high", range(8, 16))
_even = shuffle("even", [0, 2, 4, 6])
_odd = shuffle("odd", [1, 3, 5, 7])

#: 2^(b − 127) for every exponent byte b, for E4M3 codes as `e4m3_magnitude` gives them; inverses.
_POWER = np.ldexp(1.0, np.arange(256) - 127) / E4M3_BITS
_INVERSE = 1.0 / _POWER
_SCALE = E4M3.astype(np.float64)

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
def _add_sixteen(x: Four, q: Four, step: Lanes, sums: Sums) -> Sums:
    """Add 16 columns of four blocks, in turn: F64; q is to be times `step`."""
    sums = _add_columns(x[0], q[0] * step, sums)
    sums = _add_columns(x[1], q[1] * step, sums)
    sums = _add_columns(x[2], q[2] * step, sums)
    return _add_columns(x[3], q[3] * step, sums)


@jit
def _floats_in_turn(x: Four) -> Four:
    """F32 of four blocks as F64 in the order above."""
    ab, cd = _pairs_low(x[0], x[1]), _pairs_low(x[2], x[3])
    first, second = to_f64x16(_quads_low(ab, cd)), to_f64x16(_quads_high(ab, cd))
    ab, cd = _pairs_high(x[0], x[1]), _pairs_high(x[2], x[3])
    return first, second, to_f64x16(_quads_low(ab, cd)), to_f64x16(_quads_high(ab, cd))


@jit
def _codes_in_turn(codes: int, a: int, b: int, c: int, d: int) -> Four:
    """Magnitudes of E4M3 codes from four offsets, times E4M3_BITS."""
    ab = _join_16(load_u8x16(codes + a), load_u8x16(codes + b))
    cd = _join_16(load_u8x16(codes + c), load_u8x16(codes + d))
    turned = _join_32(ab, cd)
    turned = _in_turn(turned, turned)
    return (
        to_f64x16(e4m3_magnitude(_first(turned, turned))),
        to_f64x16(e4m3_magnitude(_second(turned, turned))),
        to_f64x16(e4m3_magnitude(_third(turned, turned))),
        to_f64x16(e4m3_magnitude(_fourth(turned, turned))),
    )


@jit
def _elements_in_turn(packed: int, a: int, b: int, c: int, d: int) -> Four:
    """Twice the magnitudes of the E2M1 codes of four blocks."""
    ab = _join_8(load_u8x8(packed + 8 * a), load_u8x8(packed + 8 * b))
    cd = _join_8(load_u8x8(packed + 8 * c), load_u8x8(packed + 8 * d))
    twice = twice_e2m1(unpack_nibbles(_join_16(ab, cd)))
    turned = _in_turn(twice, twice)
    return (
        to_f64x16(to_i32x16(_first(turned, turned))),
        to_f64x16(to_i32x16(_second(turned, turned))),
        to_f64x16(to_i32x16(_third(turned, turned))),
        to_f64x16(to_i32x16(_fourth(turned, turned))),
    )


@jit
def _half_steps(scales: int, half: float, a: int, b: int, c: int, d: int, power: Lanes) -> Lanes:
    """Half the exact step of each block times `power`: `half` is s2 / 2, as codes come twice."""
    step = in_pairs(
        _SCALE[load_u8(scales + a)],
        _SCALE[load_u8(scales + b)],
        _SCALE[load_u8(scales + c)],
        _SCALE[load_u8(scales + d)],
    )
    return step * in_pairs(half, half, half, half) * power


@jit
def _add_in_order(columns: Lanes, total: float) -> float:
    """A row's sum with four more blocks: in each the even columns and the odd ones."""
    blocks = _even(columns, columns) + _odd(columns, columns)
    for block in range(4):
        total += lane(blocks, np.int32(block))
    return total


@jit
def _complete(sums: Sums, unit: Lanes, row: Sums) -> Sums:
    """A row's (signal, noise, worst) with the sums of four blocks, each in units of its own."""
    unit = _low(unit, unit)
    worst = sums[2] * unit
    return (
        _add_in_order(sums[0] * unit, row[0]),
        _add_in_order(sums[1] * unit, row[1]),
        select(worst > row[2], worst, row[2]),
    )


@jit
def _finish(row: Sums, row_3: F64) -> None:
    row_3[0], row_3[1], row_3[2] = row[0], row[1], 0.0
    for number in range(8):
        # Exact: the root of a rounded square is the number itself.
        row_3[2] = max(row_3[2], np.sqrt(lane(row[2], np.int32(number))))


@jit
def _clipped(first: int, last: int) -> tuple[int, int, int, int]:
    """Four numbers from `first` on, none above `last`."""
    return first, min(first + 1, last), min(first + 2, last), min(first + 3, last)


@jit
def _present(count: int) -> Lanes:
    """1 in the lanes of the first `count` blocks, 0 in the others."""
    return in_pairs(1.0, 1.0 * (count > 1), 1.0 * (count > 2), 1.0 * (count > 3))


@jit
def add_nvfp4_from_codes(
    codes_K: U8, exponent_G: U8, packed_P: U8, scale_B: U8, s2: np.float32, row_3: F64
) -> None:
    """Set row_3 to signal, noise and max_error of a row of MXFP8 that became NVFP4."""
    source, exponents = codes_K.ctypes.data, exponent_G.ctypes.data
    packed, scales = packed_P.ctypes.data, scale_B.ctypes.data
    half, blocks = np.float64(s2) * 0.5, scale_B.size
    zero, row = f64x8(0.0), (0.0, 0.0, f64x8(0.0))
    for a in range(0, blocks, 4):
        b, c, d = a + 1, a + 2, a + 3
        if d >= blocks:
            a, b, c, d = _clipped(a, blocks - 1)
        i, j = load_u8(exponents + a // 2), load_u8(exponents + c // 2)
        x = _codes_in_turn(source, 16 * a, 16 * b, 16 * c, 16 * d)
        q = _elements_in_turn(packed, a, b, c, d)
        power = in_pairs(_POWER[i], _POWER[i], _POWER[j], _POWER[j])
        inverse = in_pairs(_INVERSE[i], _INVERSE[i], _INVERSE[j], _INVERSE[j])
        step = _half_steps(scales, half, a, b, c, d, inverse)
        sums = _add_sixteen(x, q, step, (zero, zero, zero))
        unit = power * power
        if blocks - a < 4:
            unit = unit * _present(blocks - a)
        row = _complete(sums, unit, row)
    _finish(row, row_3)


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
    half, blocks = np.float64(s2) * 0.5, scale_B.size
    zero, row = f64x8(0.0), (0.0, 0.0, f64x8(0.0))
    for first in range(0, blocks, 4):
        a, b, c, d = _clipped(first, blocks - 1)
        present = _present(blocks - first)
        x = _floats_in_turn(_load_magnitudes(source, kind, 16 * a, 16 * b, 16 * c, 16 * d))
        q = _elements_in_turn(packed, a, b, c, d)
        step = _half_steps(scales, half, a, b, c, d, present)
        row = _complete(_add_sixteen(x, q, step, (zero, zero, zero)), present, row)
    _finish(row, row_3)


@jit
def add_mxfp8_from_floats(source: int, kind: int, codes_K: U8, exponent_G: U8, row_3: F64) -> None:
    """The same for a row of floats that became MXFP8."""
    codes, exponents = codes_K.ctypes.data, exponent_G.ctypes.data
    blocks = exponent_G.size
    zero, row = f64x8(0.0), (0.0, 0.0, f64x8(0.0))
    for first in range(0, blocks, 4):
        a, b, c, d = _clipped(first, blocks - 1)
        step = in_pairs(
            _POWER[load_u8(exponents + a)],
            _POWER[load_u8(exponents + b)],
            _POWER[load_u8(exponents + c)],
            _POWER[load_u8(exponents + d)],
        )
        sums = (zero, zero, zero)
        for column in (0, 16):
            i, j = 32 * a + column, 32 * b + column
            k, m = 32 * c + column, 32 * d + column
            x = _floats_in_turn(_load_magnitudes(source, kind, i, j, k, m))
            sums = _add_sixteen(x, _codes_in_turn(codes, i, j, k, m), step, sums)
        row = _complete(sums, _present(blocks - first), row)
    _finish(row, row_3)
