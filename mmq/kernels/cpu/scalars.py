"""Small floats one number at a time: the parts of the references that work on scalars.

    scale  = e4m3(clamp(amax / (6 · s2), 2^−9, 448))

Four numbers: amax 0.5, 1, 2, 0 with s2 = 2^−7 have scale codes 0x53 (11), 0x5B (22), 0x63 (44) and
0x38 (1). Inputs are finite by contract; NaN gives meaningless codes but stays in bounds.
"""

from __future__ import annotations

import numpy as np

from ..results import F32
from .jit import Int, jit


def _e4m3_values() -> F32:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8, -6),
        np.ldexp(1 + mantissa / 8, exponent - 7),
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


def _e8m0_values() -> F32:
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


#: F32 value of every E4M3 code, E8M0 exponent and E2M1 code.
E4M3 = _e4m3_values()
E8M0 = _e8m0_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

_MIN_NORMAL = np.float32(2.0**-6)
_MIN_SUBNORMAL = np.float32(2.0**-9)
_MAX = np.float32(448.0)
_SIX = np.float32(6.0)
_ZERO = np.float32(0.0)
# Adding 2^23 · ulp to a number below it leaves no room for smaller bits: the sum is rounded to
# whole ulps, to nearest even, by the addition itself. Here the ulp is 2^−9, E4M3's smallest
# subnormal.
_ROUND_SUBNORMAL = np.float32(2.0**14)


@jit
def encode_e4m3(magnitude: np.float32) -> Int:
    """E4M3 code of a number from 0 to 448, to nearest even."""
    if magnitude < _MIN_NORMAL:
        rounded = (magnitude + _ROUND_SUBNORMAL) - _ROUND_SUBNORMAL
        return np.int64(rounded * np.float32(512.0))
    bits = np.int64(np.float32(magnitude).view(np.uint32))
    bits += 0x7FFFF + ((bits >> 20) & 1)  # half an E4M3 ulp, a little less where the code is even
    return (bits >> 20) - (120 << 3)  # exponent bias 127 to 7


@jit
def scale_to(amax: np.float32, full: np.float32, for_zero: Int) -> Int:
    """E4M3 code of the scale that brings amax to the element whose product with s2 is `full`."""
    wanted = np.float32(amax / full)
    if wanted == _ZERO:
        return for_zero
    if not wanted > _MIN_SUBNORMAL:  # written so that NaN is caught too
        wanted = _MIN_SUBNORMAL
    return encode_e4m3(min(wanted, _MAX))


@jit
def block_scale(amax: np.float32, s2: np.float32) -> Int:
    """E4M3 code of the `max` scale of a block of largest magnitude amax."""
    return scale_to(amax, np.float32(_SIX * s2), np.int64(0x38))


@jit
def bf16_bits(value: np.float32) -> Int:
    """BF16 bits of any number: to nearest even, every NaN to 0x7FC0."""
    if value != value:
        return np.int64(0x7FC0)
    bits = np.int64(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
