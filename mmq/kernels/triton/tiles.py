"""Tiles of matrices that several kernels multiply, loaded and decoded.

Four numbers, MXFP8: codes 0x38 (1), 0xC0 (−2) under exponents 127 and 128 are 1, −2 and 2, −4.

Dimensions: R rows of a tile, C or BK of its columns, K columns of the matrix.
"""

import triton
import triton.language as tl

from .small_floats import decode_e4m3, decode_e8m0


@triton.jit
def load_tile(pointer, row_R, inside_R, column, columns, C: tl.constexpr):
    """[R, C] of rows of a matrix of `columns` columns, from `column` on; 0 outside."""
    column_C = column + tl.arange(0, C)
    offset_RC = row_R.to(tl.int64)[:, None] * columns + column_C[None, :]
    inside_RC = inside_R[:, None] & (column_C < columns)[None, :]
    return tl.load(pointer + offset_RC, mask=inside_RC, other=0)


@triton.jit
def mxfp8_tile(codes, exponents, row_R, inside_R, k, K, BK: tl.constexpr):
    """BF16 [R, BK] of MXFP8: exact between 2^−133 and 2^128."""
    R: tl.constexpr = row_R.shape[0]
    code_RK = load_tile(codes, row_R, inside_R, k, K, BK).to(tl.int32)
    exponent_RG = load_tile(exponents, row_R, inside_R, k // 32, K // 32, BK // 32).to(tl.int32)
    value_RGJ = decode_e4m3(code_RK).reshape(R, BK // 32, 32) * decode_e8m0(exponent_RG)[:, :, None]
    return value_RGJ.reshape(R, BK).to(tl.bfloat16)
