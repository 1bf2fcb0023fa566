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
by construction. They are made when first met: 19 million Gaussian or lognormal weights have
50 to 250 of the 32,640 possible pairs, made in well under 1 ms.
"""

from __future__ import annotations

import threading

import numpy as np

from ..results import F64, MAX_SCALES, U8, ScaleChoice
from .compiled import quantize_nvfp4_by_table
from .decode import dequantize_mxfp8_f32
from .float_loops import quantize_nvfp4

_ROWS = 256 * 128  # exponent · 128 + largest code


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


def quantize(
    codes_OK: U8, exponent_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """Packed codes U8 [O, K/2], scales U8 [O, K/16] and per-row errors F64 [O, 3].

    Args:
        codes_OK: E4M3 codes U8 [O, K], no NaN.
        exponent_OG: E8M0 exponents U8 [O, K/32], no NaN.
        s2: a normal positive F32.
    """
    if choice.search != "max":
        return quantize_nvfp4(dequantize_mxfp8_f32(codes_OK, exponent_OG), s2, choice)
    rows_O, columns_K = codes_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    table = _table
    table.reset(s2)
    rows = (table.built, table.scale, table.nibble, table.noise)
    quantize_nvfp4_by_table(codes_OK, exponent_OG, s2, *rows, packed_OP, scale_OB, errors_O3)
    return packed_OP, scale_OB, errors_O3 if choice.errors else errors_O3[:0]
