"""Tables for MXFP8 to NVFP4: what follows from a block's largest code under one global scale.

    s2 = c · 2^−n, 1 ≤ c < 2          x · 2^n = e4m3(code) · 2^shift          shift = b − 127 + n

|code| grows with the magnitude, so a block's largest |code| m and its exponent byte b decide its
`max` scale, and with a scale the E2M1 code of every element. Powers of two change nothing but
exponents: as long as nothing is subnormal, scale code = first(m) + 8 · shift, and levels and
relative errors do not depend on `shift` at all. So one table over m serves all exponents, and all
tensors whose global scales share the mantissa c.

Four codes, as if they were a block, b = 121 (2^−6), s2 = 2^−7 (shift 1): [0x30, 0x98, 0x20, 0x00]
= 2^−6 · [0.5, −0.0625, 0.125, 0]. m = 0x30: 0.5 / 6 is e4m3 code 0x1B (0.0859), so the scale is
0x1B + 8 = 0x23; the seven bounds are 0x0B, 0x18, 0x1D, 0x21, 0x25, 0x29, 0x2D, and the levels, the
number of bounds that a |code| exceeds, 7, 1, 3, 0.

Blocks whose `max` code lies outside `REGULAR_MAX` (for searches: `REGULAR_SEARCH`), zero blocks and
tensors for which `is_regular` or `is_searchable` says no have to be quantised from their values.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from .results import F32, F64, I64, U8

#: E2M1 magnitudes, and the midpoints between them; of a tie every second goes up, to an even code.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
_GOES_UP = np.array([False, True, False, True, False, True, False])

#: Values of the |codes| of E4M3 but NaN, and the largest code that each table row is about.
_ELEMENTS = np.ldexp(
    np.where(np.arange(127) < 8, 0.0, 8.0) + np.arange(127) % 8,
    np.maximum(np.arange(127) >> 3, 1) - 10,
).astype(np.float32)
_LARGEST = np.clip(np.arange(128), 1, 126)

#: Added to scale codes in tables, which may be negative before the exponent is applied.
CODE_BIAS = 64

#: Candidates around the `max` code, in the order that breaks ties: nearest first, then smaller.
#: None beyond can be best (docs/numerics.md), and 16 lanes leave room.
CANDIDATES = (0, -1, 1, -2, 2, -3, 3, -4, 4, 5, 6, 7)
LANES = 16

#: `max` codes of regular blocks: the scale, or all candidates, are E4M3 codes from 8 to 126.
REGULAR_MAX = (8, 126)
REGULAR_SEARCH = (12, 120)

#: Global scales within which no F32 operation on a regular block meets a subnormal or infinity.
_REGULAR_SCALES = (2.0**-100, 2.0**100)


def split_scale(s2: np.float32) -> tuple[float, int]:
    """(c, n) with s2 = c · 2^−n and 1 ≤ c < 2."""
    mantissa, exponent = math.frexp(float(s2))
    return 2 * mantissa, 1 - exponent


def is_regular(s2: np.float32) -> bool:
    """Whether blocks under this scale may use tables at all."""
    return _REGULAR_SCALES[0] <= float(s2) <= _REGULAR_SCALES[1]


def is_searchable(s2: np.float32) -> bool:
    """Whether, in addition, every e2m1 · e4m3 · s2 is an F32 number, as the window supposes.

    The first two have 2 and 4 significant bits, which leaves 18 of 24 for s2.
    """
    return is_regular(s2) and (split_scale(s2)[0] * 2.0**17).is_integer()


@functools.lru_cache(maxsize=64)
def max_table(c: float) -> U8:
    """U8 [128, 8]: per largest code seven bounds, then first(m) + CODE_BIAS.

    An element's level is the number of bounds that its |code| exceeds. Row 0 is not used: a zero
    block has scale 1. Row 127 (NaN, which callers exclude) repeats row 126.
    """
    first = _first_codes(c)
    table = np.empty((128, 8), np.uint8)
    table[:, :7] = _bounds(_levels(first, c))
    table[:, 7] = first + CODE_BIAS
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=8)
def search_tables(c: float) -> tuple[F32, U8]:
    """(errors, bounds) for the twelve candidates of every largest code.

    Returns:
        errors: F32 [128, 128, 16], the error of each |code| under each candidate, for shift 0; inf
            in lanes without a candidate that can win. Its memory starts at a multiple of 64 bytes.
        bounds: U8 [128, 16, 8], for each candidate what `max_table` has for the first.
    """
    first = _first_codes(c)
    errors = _aligned(128 * 128 * LANES).reshape(128, 128, LANES)
    errors[...] = np.inf
    bounds = np.zeros((128, LANES, 8), np.uint8)
    for lane, offset in enumerate(CANDIDATES):
        code = first + offset
        levels = _levels(code, c)
        bounds[:, lane, :7] = _bounds(levels)
        bounds[:, lane, 7] = code + CODE_BIAS
        distance = _ELEMENTS - _E2M1[levels] * (_scales(code) * c)[:, None]
        # Half the scale is as good where the largest element would only be stored as 3 or less.
        can_win = np.append(np.diagonal(levels) >= 6, offset == 0)
        errors[can_win, :127, lane] = (distance * distance)[can_win]
    errors[:, 127, 0] = 0
    errors.flags.writeable = bounds.flags.writeable = False
    return errors, bounds


def _first_codes(c: float) -> I64:
    """Codes of the `max` scale for shift 0, I64 [128], as if exponents had no limits."""
    wanted = _ELEMENTS[_LARGEST] / (np.float32(6) * np.float32(c))
    bits = wanted.view(np.int32).astype(np.int64)
    return np.asarray(((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3), np.int64)


def _levels(code: I64, c: float) -> I64:
    """E2M1 level, I64 [128, 127], of each |code| under each scale code, by the reference's F32."""
    step = _scales(code).astype(np.float32) * np.float32(c)
    quotient = _ELEMENTS / step[:, None]
    levels = np.zeros(quotient.shape, np.int64)
    for midpoint, goes_up in zip(_MIDPOINTS, _GOES_UP, strict=True):
        levels += quotient >= midpoint if goes_up else quotient > midpoint
    return levels


def _bounds(levels: I64) -> U8:
    """U8 [128, 7]: the largest |code| at or below each level."""
    counts = np.stack([(levels <= level).sum(axis=1) for level in range(7)], axis=1)
    return (counts - 1).astype(np.uint8)


def _scales(code: I64) -> F64:
    """Values of scale codes as if E4M3 had neither subnormals nor a largest exponent."""
    return np.asarray(np.ldexp(8.0 + (code & 7), (code >> 3) - 10), np.float64)


def _aligned(count: int) -> F32:
    """Uninitialised F32 from a multiple of 64 bytes on, so that no vector crosses a cache line."""
    raw = np.empty(count * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.float32)
