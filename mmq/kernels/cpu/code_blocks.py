"""MXFP8 to NVFP4 on codes: tables instead of arithmetic, sixteen or thirty-two lanes wide.

A block's largest |code| m picks a table row (`mmq.kernels.tables`):

    max   seven bounds and a scale: an element's level is the number of bounds its |code| exceeds
    mse   for each |code| sixteen F32 errors, a lane for each candidate scale: sixteen rows are
          added in the tree of the definition, the first lane of least error wins; then as above

Four codes, as if they were a block, under exponent 121 and s2 = 2^−7: [0x30, 0x98, 0x20, 0x00] have
m = 0x30, scale 0x23, levels 7, 1, 3, 0, and with signs the nibbles 7, 9, 3, 0: bytes 0x97, 0x03.

Blocks that tables do not cover (zero, or far below the tensor's largest) are quantised from their
values, by `float_blocks.quantize_block`.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, U8
from ..tables import CODE_BIAS, REGULAR_MAX, REGULAR_SEARCH
from .float_blocks import MAX, MSE, least_lane, quantize_block
from .jit import Int, jit
from .lanes import E4M3_BITS, e4m3_magnitude
from .row_errors import add_nvfp4_from_codes
from .scalars import E8M0
from .simd import (
    Lanes,
    bits_of,
    f32x16,
    floats_of,
    i32x16,
    largest_u8,
    load_f32x16,
    load_u8x8,
    load_u8x16,
    load_u8x32,
    load_u64,
    pack_nibbles,
    rank,
    select,
    shuffle,
    store,
    to_i32x16,
    u8x16,
    u8x32,
)

_low = shuffle("low", range(16))
_high = shuffle("high", range(16, 32))
_join = shuffle("join", range(16))

_FIRST, _LAST = REGULAR_MAX
_FIRST_SEARCHED, _LAST_SEARCHED = REGULAR_SEARCH

_ROW_BYTES = 8
_ERROR_BYTES = 64  # of one |code|: sixteen F32


@jit
def _irregular_block(
    source: Int,
    exponent: Int,
    largest: Int,
    search: Int,
    s2: np.float32,
    c: float,
    power: float,
    everything: bool,
    packed: Int,
) -> Int:
    """A block from its values: through F32, which holds every MXFP8 number exactly."""
    codes = load_u8x16(source)
    if largest == 0:
        store(packed, pack_nibbles(codes & u8x16(0)))
        return np.int64(0x38)
    magnitude = e4m3_magnitude(codes) * f32x16(1 / E4M3_BITS) * f32x16(E8M0[exponent])
    sign = to_i32x16(codes & u8x16(128)) << i32x16(24)
    x = floats_of(bits_of(magnitude) | sign)
    return quantize_block(x, 0, search, s2, c, power, everything, packed)


@jit
def _signed(level: Lanes, codes: Lanes, eight: Lanes, zero: Lanes, minus_zero: Lanes) -> Lanes:
    """E2M1 codes: the sign is that of the number, so that −0 becomes 0."""
    return level | select(codes > minus_zero, eight, zero)


@jit
def quantize_nvfp4_codes_max(
    codes: U8,
    exponents: U8,
    rows: U8,
    shift: Int,
    s2: np.float32,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    """Fill packed [O, P] and scale_out [O, B], and errors [O, 3] unless it has no rows.

    Args:
        codes, exponents: U8 [O, K] and [O, G].
        rows: `max_table` of the mantissa of s2, or no rows: then every block is irregular.
        shift: what to add to exponent bytes for the shift of tables.
    """
    table = rows.ctypes.data
    for o in range(codes.shape[0]):
        source, written = codes[o].ctypes.data, packed[o].ctypes.data
        for g in range(exponents.shape[1]):
            both = load_u8x32(source + 32 * g)
            magnitude = both & u8x32(127)
            m, n = largest_u8(_low(magnitude, magnitude)), largest_u8(_high(magnitude, magnitude))
            first_row = load_u8x8(table + _ROW_BYTES * m)
            second_row = load_u8x8(table + _ROW_BYTES * n)
            base = 8 * (np.int64(exponents[o, g]) + shift) - CODE_BIAS
            i, j = np.int64(rows[m, 7]) + base, np.int64(rows[n, 7]) + base
            regular_i = m != 0 and _FIRST <= i <= _LAST
            regular_j = n != 0 and _FIRST <= j <= _LAST
            level = rank(magnitude, _join(first_row, second_row))
            signed = _signed(level, both, u8x32(8), u8x32(0), u8x32(128))
            store(written + 16 * g, pack_nibbles(signed))
            if not (regular_i and regular_j):
                rest = (MAX, s2, np.float64(1.0), np.float64(1.0), False)
                e, address = exponents[o, g], source + 32 * g
                if not regular_i:
                    i = _irregular_block(address, e, m, *rest, written + 16 * g)
                if not regular_j:
                    j = _irregular_block(address + 16, e, n, *rest, written + 16 * g + 8)
            scale_out[o, 2 * g], scale_out[o, 2 * g + 1] = i, j
        if errors.shape[0]:
            add_nvfp4_from_codes(codes[o], exponents[o], packed[o], scale_out[o], s2, errors[o])


@jit
def _error_row(base: Int, word: np.uint64, number: Int) -> Lanes:
    """Errors of byte `number` of a word of eight |codes|."""
    code = (word >> np.uint64(8 * number)) & np.uint64(127)
    return load_f32x16(base + np.int64(code) * _ERROR_BYTES)


@jit
def _eight_errors(base: Int, word: np.uint64) -> Lanes:
    return (
        (_error_row(base, word, 0) + _error_row(base, word, 1))
        + (_error_row(base, word, 2) + _error_row(base, word, 3))
    ) + (
        (_error_row(base, word, 4) + _error_row(base, word, 5))
        + (_error_row(base, word, 6) + _error_row(base, word, 7))
    )


@jit
def quantize_nvfp4_codes_mse(
    codes: U8,
    exponents: U8,
    error_rows: F32,
    rows: U8,
    shift: Int,
    s2: np.float32,
    c: float,
    power: float,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    """As `quantize_nvfp4_codes_max`, with both `search_tables`."""
    error_table, table = error_rows.ctypes.data, rows.ctypes.data
    for o in range(codes.shape[0]):
        source, written = codes[o].ctypes.data, packed[o].ctypes.data
        for b in range(scale_out.shape[1]):
            address = source + 16 * b
            block = load_u8x16(address)
            magnitude = block & u8x16(127)
            m = largest_u8(magnitude)
            base = 8 * (np.int64(exponents[o, b >> 1]) + shift) - CODE_BIAS
            first = np.int64(rows[m, 0, 7]) + base
            if m != 0 and _FIRST_SEARCHED <= first <= _LAST_SEARCHED:
                of_m = error_table + m * (128 * _ERROR_BYTES)
                low, high = load_u64(address), load_u64(address + 8)
                lane = least_lane(_eight_errors(of_m, low) + _eight_errors(of_m, high))
                level = rank(magnitude, load_u8x8(table + _ROW_BYTES * (16 * m + lane)))
                signed = _signed(level, block, u8x16(8), u8x16(0), u8x16(128))
                store(written + 8 * b, pack_nibbles(signed))
                scale_out[o, b] = np.int64(rows[m, lane, 7]) + base
            else:
                e = exponents[o, b >> 1]
                scale_out[o, b] = _irregular_block(
                    address, e, m, MSE, s2, c, power, False, written + 8 * b
                )
        if errors.shape[0]:
            add_nvfp4_from_codes(codes[o], exponents[o], packed[o], scale_out[o], s2, errors[o])
