"""Floats to MXFP8, and the amax of MXFP8 tensors.

    b    = max(floor(log2(amax32)) − 8 + 127, 0)          code = e4m3(x / 2^(b − 127))
    amax = max over blocks of e4m3(largest |code|) · 2^(b − 127)

Four numbers, as if they were a block: [1, −0.3, 0.01, 0] have exponent 119 and codes 0x78, 0xEA,
0x42, 0x00. Dividing by a power of two and multiplying by its inverse round the same exact number.
"""

from __future__ import annotations

import numpy as np

from ..results import F64, U8
from .jit import Int, jit
from .lanes import encode_e4m3, load_float, magnitude_of
from .row_errors import add_mxfp8_from_floats
from .simd import (
    Lanes,
    bits_of,
    f32x16,
    i32x16,
    largest_i32,
    largest_u8,
    load_u8x32,
    select,
    store,
    to_u8x16,
    u8x32,
)

#: 2^(127 − b), normal for every exponent b that a block can get.
_INVERSE = np.ldexp(1.0, 127 - np.arange(256)).astype(np.float32)


@jit
def _sixteen_codes(x: Lanes, inverse: np.float32) -> Lanes:
    quotient = magnitude_of(x) * f32x16(inverse)
    limit = f32x16(448.0)
    magnitude = encode_e4m3(select(quotient < limit, quotient, limit))  # NaN becomes 448 too
    sign = (bits_of(x) >> i32x16(24)) & i32x16(128)
    return to_u8x16(magnitude | sign)


@jit
def quantize_mxfp8_floats(
    values: U8, kind: Int, codes_out: U8, exponent_out: U8, errors: F64
) -> None:
    """Fill codes_out [O, K], exponent_out [O, G] and errors [O, 3].

    Args:
        values: the bytes of finite F32 or BF16 numbers (`kind`), U8 [O, K · element size].
    """
    for o in range(codes_out.shape[0]):
        source, written = values[o].ctypes.data, codes_out[o].ctypes.data
        for g in range(exponent_out.shape[1]):
            x = load_float(source, 32 * g, kind)
            y = load_float(source, 32 * g + 16, kind)
            a, b = bits_of(magnitude_of(x)), bits_of(magnitude_of(y))
            # F32's exponent field is floor(log2) + 127 already; its 0 for subnormals clamps too.
            field = largest_i32(select(a > b, a, b)) >> 23
            exponent = max(field - np.int64(8), np.int64(0))
            exponent_out[o, g] = exponent
            store(written + 32 * g, _sixteen_codes(x, _INVERSE[exponent]))
            store(written + 32 * g + 16, _sixteen_codes(y, _INVERSE[exponent]))
        add_mxfp8_from_floats(source, kind, codes_out[o], exponent_out[o], errors[o])


@jit
def largest_code(codes: U8, exponents: U8, exponent: Int) -> Int:
    """The largest |code| among the blocks of one exponent: U8 [n, 32] and [n]."""
    source = codes.ctypes.data
    largest = u8x32(0)
    for g in range(exponents.size):
        if exponents[g] == exponent:
            magnitude = load_u8x32(source + 32 * g) & u8x32(127)
            largest = select(magnitude > largest, magnitude, largest)
    code: int = largest_u8(largest)
    return code
