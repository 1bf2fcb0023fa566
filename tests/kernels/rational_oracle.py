"""NVFP4 in exact rational arithmetic, one number at a time: written from docs/numerics.md alone."""

import functools
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise


def e4m3(code):
    mantissa, exponent = code & 7, code >> 3
    return Fraction(mantissa + (8 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 10)


E2M1 = [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]
MIDPOINTS = [(a + b) / 2 for a, b in pairwise(E2M1)]
E4M3 = [e4m3(code) for code in range(127)]
CODES = range(1, 127)


def f32(x):
    """x ≥ 0 rounded to 24 bits and to multiples of 2^−149; Python rounds ties to even."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= x < Fraction(2) ** exponent
    ulp = Fraction(2) ** max(exponent - 23, -149)
    return round(x / ulp) * ulp


def max_code(block, s2):
    wanted = f32(max(map(abs, block)) / f32(6 * s2))
    if wanted == 0:
        return 0x38
    wanted = min(max(wanted, E4M3[1]), E4M3[126])
    above = bisect_left(E4M3, wanted)
    return min(above - 1, above, key=lambda code: (abs(E4M3[code] - wanted), code % 2))


def level(number, bounds):
    """How many bounds lie below; one that is met counts if the level above it is even."""
    index = bisect_left(bounds, number)
    return index + (index % 2 == 1 and index < 7 and bounds[index] == number)


def elements(block, code, s2):
    """E2M1 codes under a scale code."""
    quotients = [f32(abs(x) / f32(E4M3[code] * s2)) for x in block]
    signs = [8 if x < 0 and q > 0 else 0 for x, q in zip(block, quotients, strict=True)]
    return [level(q, MIDPOINTS) | sign for q, sign in zip(quotients, signs, strict=True)]


UNIT = 2**100  # of whole numbers that stand for |x| and for half steps


@functools.cache
def _half_steps(s2):
    halves = [int(E4M3[code] * s2 / 2 * UNIT) for code in CODES]
    return [(h, [int(2 * m * h) for m in MIDPOINTS]) for h in halves]


def errors(block, s2, weights=(1,) * 16):
    """The exact error of the block under every code, in one unit, weighted by whole numbers.

    Without F32's rounding of quotients, so for blocks and scales where none comes near a midpoint.
    """
    numbers = [int(abs(x) * UNIT) for x in block]
    doubled = [int(2 * v) for v in E2M1]
    out = []
    for half, bounds in _half_steps(s2):
        pairs = zip(numbers, weights, strict=True)
        out.append(sum(w * (n - doubled[level(n, bounds)] * half) ** 2 for n, w in pairs))
    return out


def best_codes(block, s2, tolerance, weights=(1,) * 16):
    """Codes whose exact error is at most 1 + tolerance times the least."""
    found = errors(block, s2, weights)
    limit = min(found) * (1 + tolerance)
    return {code for code, error in zip(CODES, found, strict=True) if error <= limit}
