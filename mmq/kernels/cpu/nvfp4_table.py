"""MXFP8 to NVFP4 on codes: a table instead of arithmetic.

For one global scale s2 everything about a 16-column block follows from two bytes: its E8M0 exponent
e and its largest |code| m, because |code| grows with the magnitude. A table row (e, m) holds

    scale      e4m3(clamp(amax / (6 · s2), 2^−9, 448)) with amax = e4m3(m) · 2^(e − 127)
    nibble[c]  e2m1(x / (e4m3(scale) · s2)) with x = e4m3(c) · 2^(e − 127), for each code c ≤ m
    noise[c]   (x − q)² in F64, with q the exact product

Four codes, as if they were a block, e = 120 (2^−7), s2 = 2^−7: [0x30, 0x98, 0x20, 0x00] = 2^−7 ·
[0.5, −0.0625, 0.125, 0]. m = 0x30, so amax = 2^−8; amax / (6 · 2^−7) = 0.0833 gives scale 0x1B
(0.0859); the quotients 5.82, −0.73, 1.45, 0 give nibbles 7, 9, 3, 0: bytes 0x97, 0x03.

Rows are made by the F32 expressions of the reference, so ties, zeros and subnormal scales are right
by construction. They are made when first met: a real tensor uses about 500 of the 32,640, in well
under 1 ms.
"""

from __future__ import annotations

import threading

import numpy as np

from ..results import F64, U8, AnyArray
from .jit import jit
from .rounding import E2M1, E4M3, E8M0, block_scale, encode_e2m1

_ROWS = 256 * 128  # exponent · 128 + largest code

#: e4m3(c)² for every |c|, and (2^(e − 127))² for every exponent: their products are exact in F64.
_SQUARE = E4M3[:128].astype(np.float64) ** 2
_POWER = E8M0.astype(np.float64) ** 2


class _Table(threading.local):
    """The rows met so far under one s2, one table per thread.

    The arrays span all rows but only touched pages take memory: about 1 KB a row met.
    """

    def __init__(self) -> None:
        self.s2 = np.float32(0.0)
        self.built = np.zeros(_ROWS, np.bool_)
        self.scale = np.empty(_ROWS, np.uint8)
        self.nibble = np.empty((_ROWS, 256), np.uint8)
        self.noise = np.empty((_ROWS, 128), np.float64)

    def reset(self, s2: np.float32) -> None:
        """Forget the rows unless they were made for s2. Chunks of one tensor share them."""
        if self.s2 != s2:
            self.built[:] = False
            self.s2 = s2


_table = _Table()


def quantize(codes_OK: U8, exponent_OG: U8, s2: np.float32) -> tuple[U8, U8, F64]:
    """Packed codes U8 [O, K/2], scales U8 [O, K/16] and per-row errors F64 [O, 3].

    Args:
        codes_OK: E4M3 codes U8 [O, K], no NaN.
        exponent_OG: E8M0 exponents U8 [O, K/32], no NaN.
        s2: a normal positive F32.
    """
    rows_O, columns_K = codes_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    table = _table
    table.reset(s2)
    rows = (table.built, table.scale, table.nibble, table.noise)
    _quantize(codes_OK, exponent_OG, s2, *rows, packed_OP, scale_OB, errors_O3)
    return packed_OP, scale_OB, errors_O3


@jit
def _build_row(
    row: int, s2: np.float32, built: AnyArray, scales: U8, nibbles: U8, noises: F64
) -> None:
    power = E8M0[row >> 7]
    largest = row & 127
    scale = block_scale(E4M3[largest] * power, s2)
    step = E4M3[scale] * s2
    exact_step = np.float64(E4M3[scale]) * np.float64(s2)
    for code in range(largest + 1):
        value = E4M3[code] * power
        nibble = encode_e2m1(value / step)
        nibbles[row, code] = nibble
        nibbles[row, code + 128] = encode_e2m1(-value / step)
        error = np.float64(value) - np.float64(E2M1[nibble]) * exact_step
        noises[row, code] = error * error
    scales[row] = scale
    built[row] = True


@jit
def _quantize(
    codes: U8,
    exponents: U8,
    s2: np.float32,
    built: AnyArray,
    scales: U8,
    nibbles: U8,
    noises: F64,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    for o in range(codes.shape[0]):
        signal = 0.0
        noise = 0.0
        worst = 0.0
        for b in range(scale_out.shape[1]):
            first = b * 16
            exponent = exponents[o, b >> 1]
            largest = 0
            for j in range(16):
                largest = max(largest, codes[o, first + j] & 127)
            row = (exponent << 7) | largest
            if not built[row]:
                _build_row(row, s2, built, scales, nibbles, noises)
            scale_out[o, b] = scales[row]
            even = 0.0
            odd = 0.0
            squares = 0.0
            for j in range(8):
                low = codes[o, first + 2 * j]
                high = codes[o, first + 2 * j + 1]
                packed[o, b * 8 + j] = nibbles[row, low] | (nibbles[row, high] << 4)
                noise_low = noises[row, low & 127]
                noise_high = noises[row, high & 127]
                even += noise_low
                odd += noise_high
                worst = max(worst, noise_low, noise_high)
                squares += _SQUARE[low & 127] + _SQUARE[high & 127]
            noise += even + odd
            signal += squares * _POWER[exponent]
        errors[o, 0] = signal
        errors[o, 1] = noise
        errors[o, 2] = np.sqrt(worst)  # exact: the root of a rounded square is the number itself
