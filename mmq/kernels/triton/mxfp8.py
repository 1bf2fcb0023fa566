"""MXFP8 kernels: quantise from BF16 or F32; dequantise to BF16 or F32.

Reference: `mmq.kernels.reference.mxfp8`.

    value = e4m3(code) · 2^(b − 127)
    b     = floor(log2(amax32)) − 8 + 127, clamped to 0 … 254        code = e4m3(x / 2^(b − 127))

Four numbers, as if they were a block: [1, −0.3, 0.01, 0] have exponent 119 and codes 0x78 (256),
0xEA (−80), 0x42 (2.5), 0x00. `groups` counts the blocks of 32 of the whole tensor; a program takes
G = TILE / 32 of them.
"""

import triton
import triton.language as tl

from .blocks import load_numbers, load_run, store_block_errors, store_numbers, store_run, wide
from .small_floats import bits_of, decode_e4m3, decode_e8m0, encode_magnitude, number_of


@triton.jit
def load_mxfp8(codes, exponents, groups, TILE: tl.constexpr):
    """This program's numbers, F32 [TILE]: exact products, inf from 2^128."""
    G: tl.constexpr = TILE // 32
    e4m3_GJ = decode_e4m3(load_run(codes, groups * 32, TILE).to(tl.int32)).reshape(G, 32)
    power_G = decode_e8m0(load_run(exponents, groups, G).to(tl.int32))
    return (e4m3_GJ * power_G[:, None]).reshape(TILE)


@triton.jit
def quantize_mxfp8_kernel(values, codes, exponents, errors, groups, TILE: tl.constexpr):
    """From F32 numbers or BF16 bits (U16): codes U8, exponents U8, errors F64 [3, groups]."""
    G: tl.constexpr = TILE // 32
    groups = wide(groups)
    bits_GJ = bits_of(load_numbers(values, groups * 32, TILE)).reshape(G, 32)
    magnitude_GJ = bits_GJ & 0x7FFFFFFF
    # F32's exponent field is floor(log2) + 127 already; its 0 for subnormals clamps too.
    exponent_G = tl.maximum((tl.max(magnitude_GJ, 1) >> 23) - 8, 0)
    # 2^(127 − b) is a normal F32 for every b that a finite amax gives (0 … 246), so multiplying
    # by it rounds as dividing by 2^(b − 127) does.
    inverse_G1 = number_of((254 - exponent_G) << 23)[:, None]
    quotient_GJ = tl.minimum(number_of(magnitude_GJ) * inverse_G1, 448.0)
    code_GJ = encode_magnitude(quotient_GJ, 3, 7) | ((bits_GJ >> 24) & 0x80)
    store_run(codes, code_GJ.to(tl.uint8).reshape(TILE), groups * 32)
    store_run(exponents, exponent_G.to(tl.uint8), groups)
    power_G1 = decode_e8m0(exponent_G)[:, None]
    q_GJ = decode_e4m3(code_GJ).to(tl.float64) * power_G1.to(tl.float64)
    store_block_errors(errors, number_of(bits_GJ).to(tl.float64), q_GJ, groups)


@triton.jit
def dequantize_mxfp8_kernel(codes, exponents, values, groups, TILE: tl.constexpr):
    """From codes U8 and exponents U8: F32 numbers, or BF16 bits where `values` is U16."""
    groups = wide(groups)
    store_numbers(values, load_mxfp8(codes, exponents, groups, TILE), groups * 32)
