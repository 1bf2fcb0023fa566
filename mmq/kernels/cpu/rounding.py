"""Roundings between F32 and the small floats, one scalar at a time, for use inside compiled loops.

    scale  = e4m3(clamp(amax / (6 · s2), 2^−9, 448))       code = e2m1(x / (e4m3(scale) · s2))

Four numbers: quotients 0.25, 0.75, 2.5, −5 are ties and go to the even codes 0 (0), 2 (1), 4 (2),
14 (−4). The definitions are in `mmq.kernels.reference`; these are the same expressions on integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import jit


def _e4m3_values() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8, -6),
        np.ldexp(1 + mantissa / 8, exponent - 7),
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


def _e8m0_values() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
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
def encode_e4m3(magnitude: np.float32) -> np.signedinteger[Any]:
    """E4M3 code of a number from 0 to 448, to nearest even."""
    if magnitude < _MIN_NORMAL:
        rounded = (magnitude + _ROUND_SUBNORMAL) - _ROUND_SUBNORMAL
        return np.int64(rounded * np.float32(512.0))
    bits = np.int64(np.float32(magnitude).view(np.uint32))
    bits += 0x7FFFF + ((bits >> 20) & 1)  # half an E4M3 ulp, a little less where the code is even
    return (bits >> 20) - (120 << 3)  # exponent bias 127 to 7


@jit
def block_scale(amax: np.float32, s2: np.float32) -> np.signedinteger[Any]:
    """E4M3 code of the `max` scale of a block of largest magnitude amax."""
    wanted = np.float32(amax / (_SIX * s2))
    if wanted == _ZERO:
        return np.int64(0x38)
    return encode_e4m3(min(max(wanted, _MIN_SUBNORMAL), _MAX))


@jit
def encode_e2m1(quotient: np.float32) -> np.signedinteger[Any]:
    """E2M1 code, ties to even; −0 gives 0 and a negative number that rounds to zero gives 8."""
    magnitude = abs(quotient)
    level = (
        np.int32(magnitude > np.float32(0.25))
        + np.int32(magnitude >= np.float32(0.75))
        + np.int32(magnitude > np.float32(1.25))
        + np.int32(magnitude >= np.float32(1.75))
        + np.int32(magnitude > np.float32(2.5))
        + np.int32(magnitude >= np.float32(3.5))
        + np.int32(magnitude > np.float32(5.0))
    )
    return level + (np.int32(quotient < _ZERO) << np.int32(3))


@jit
def bf16_bits(value: np.float32) -> np.signedinteger[Any]:
    """BF16 bits of any number: to nearest even, every NaN to 0x7FC0."""
    if value != value:
        return np.int64(0x7FC0)
    bits = np.int64(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
