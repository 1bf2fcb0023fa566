"""Small floats sixteen at a time: what the references' `e4m3` module says, lane by lane.

    e2m1   thresholds .25 .75 1.25 1.75 2.5 3.5 5, of a tie every second goes up
    e4m3   normal: the F32 rounded to three mantissa bits by an integer addition;
           below 2^−6: rounded to multiples of 2^−9 by adding 2^14, whose F32 ulp that is

Four quotients: 0.25, 0.75, 2.5, −5 are ties and go to the even codes 0 (0), 2 (1), 4 (2), 14 (−4).
"""

from __future__ import annotations

from .jit import jit
from .simd import (
    Lanes,
    bits_of,
    f32x16,
    floats_of,
    i32x16,
    load_f32x16,
    load_u16x16,
    select,
    to_i32x16,
    to_u8x16,
    u8x16,
    u8x64,
)

#: An E4M3 code without its sign, moved to the top of an F32's mantissa, is its value times this.
E4M3_BITS = 2.0**-120

F32_SOURCE, BF16_SOURCE = 0, 1


@jit
def load_float(address: int, index: int, kind: int) -> Lanes:
    """F32 numbers index … index + 15 of an array of F32 (kind 0) or BF16 bits (kind 1)."""
    if kind == 1:
        return floats_of(to_i32x16(load_u16x16(address + 2 * index)) << i32x16(16))
    return load_f32x16(address + 4 * index)


@jit
def magnitude_of(x: Lanes) -> Lanes:
    """|x| of F32."""
    return floats_of(bits_of(x) & i32x16(0x7FFFFFFF))


@jit
def e4m3_magnitude(codes: Lanes) -> Lanes:
    """|value| · E4M3_BITS in F32, exactly, of E4M3 codes U8."""
    return floats_of(to_i32x16(codes & u8x16(127)) << i32x16(20))


@jit
def twice_e2m1(codes: Lanes) -> Lanes:
    """Twice the magnitudes of 64 E2M1 codes, U8."""
    level = codes & u8x64(7)
    zero, one = u8x64(0), u8x64(1)
    # Up to level 4 twice the value is the level; 5, 6, 7 stand for 6, 8, 12.
    twice = level + select(level > u8x64(4), one, zero) + select(level > u8x64(5), one, zero)
    return twice + select(level > u8x64(6), u8x64(3), zero)


@jit
def encode_e2m1(quotient: Lanes, x: Lanes) -> Lanes:
    """E2M1 codes U8 of |x| / step; only a quotient that is not 0 has a sign, that of x."""
    one, zero = i32x16(1), i32x16(0)
    level = (
        select(quotient > f32x16(0.25), one, zero)
        + select(quotient >= f32x16(0.75), one, zero)
        + select(quotient > f32x16(1.25), one, zero)
        + select(quotient >= f32x16(1.75), one, zero)
        + select(quotient > f32x16(2.5), one, zero)
        + select(quotient >= f32x16(3.5), one, zero)
        + select(quotient > f32x16(5.0), one, zero)
    )
    sign = select(x < f32x16(0.0), i32x16(8), zero)
    return to_u8x16(level + select(quotient > f32x16(0.0), sign, zero))


@jit
def round_to_e2m1(quotient: Lanes) -> Lanes:
    """The E2M1 number nearest each number ≥ 0, ties to the even code, F32.

    E2M1 numbers lie 0.5 apart up to 2, then 1 up to 4, then 2. Adding the power of two whose F32
    ulp is that distance rounds to a multiple of it.
    """
    power = select(quotient < f32x16(2.0), f32x16(2.0**22), f32x16(2.0**23))
    power = select(quotient < f32x16(4.0), power, f32x16(2.0**24))
    rounded = (quotient + power) - power
    return select(rounded < f32x16(6.0), rounded, f32x16(6.0))


@jit
def encode_e4m3(magnitude: Lanes) -> Lanes:
    """E4M3 codes I32 of numbers from 0 to 448."""
    bits = bits_of(magnitude)
    # Half an E4M3 ulp, a little less where the code is even; then exponent bias 127 to 7.
    normal = (bits + i32x16(0x7FFFF) + ((bits >> i32x16(20)) & i32x16(1))) >> i32x16(20)
    power = f32x16(2.0**14)
    subnormal = bits_of(magnitude + power) - bits_of(power)
    return select(magnitude < f32x16(2.0**-6), subnormal, normal - i32x16(120 << 3))
