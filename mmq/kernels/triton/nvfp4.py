"""NVFP4 kernels: quantise from MXFP8, BF16 or F32; dequantise to BF16 or F32.

Reference: `mmq.kernels.reference.nvfp4`, operation by operation.

    value = e2m1(code) · (e4m3(scale) · s2)
    scale = e4m3(clamp(amax16 / (6 · s2), 2^−9, 448))     where the quotient is 0: scale = 1
    code  = e2m1(x / (e4m3(scale) · s2))                  with the stored, rounded scale

Four numbers, as if they were a block, with s2 = 2^−7: [0.5, −0.03, 0.125, 0] have scale 0x53 (11),
codes 7, 9, 3, 0, bytes 0x97, 0x03. Divisions are `tl.div_rn`, which is IEEE division on every
target. `blocks` counts the blocks of 16 of the whole tensor, `groups` MXFP8's blocks of 32; a
program takes B = TILE / 16 blocks. Other scales than `max` come from `scale_search`.
"""

import triton
import triton.language as tl

from .blocks import (
    gather_blocks,
    load_blocks,
    load_run,
    store_block_errors,
    store_numbers,
    store_run,
    wide,
)
from .mxfp8 import load_mxfp8
from .scale_search import better_scale, encode_scale
from .small_floats import decode_e2m1, decode_e4m3, encode_e2m1


@triton.jit
def max_scale(x_BJ, s2):
    """E4M3 codes, I32 [B], that bring each block's largest magnitude to 6."""
    full_range_B = tl.full((x_BJ.shape[0],), 6.0 * s2, tl.float32)
    wanted_B = tl.div_rn(tl.max(tl.abs(x_BJ), 1), full_range_B)
    return encode_scale(tl.where(wanted_B == 0, 1.0, wanted_B))


@triton.jit
def _load_weights(importance, row_blocks, B: tl.constexpr):
    """The weights of this program's columns, F32 [B, 16], from F32 [K]: every row has the same."""
    block_B = tl.program_id(0) * B + tl.arange(0, B)
    return gather_blocks(importance, block_B % row_blocks, block_B >= 0)


@triton.jit
def _quantize(
    x_BJ, packed, scale, errors, s2, blocks, importance, row_blocks,
    SHORT: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr, ERRORS: tl.constexpr,
):  # fmt: skip
    """Store bytes and block errors of this program's F32 numbers."""
    B: tl.constexpr = x_BJ.shape[0]
    scale_B = max_scale(x_BJ, s2)
    if SEARCH != "max":
        weights_BJ = x_BJ
        if WEIGHTED:
            weights_BJ = _load_weights(importance, row_blocks, B)
        scale_B = better_scale(x_BJ, scale_B, s2, weights_BJ, SEARCH, SHORT, WEIGHTED)
    e4m3_B = decode_e4m3(scale_B)
    step_BJ = tl.broadcast_to((e4m3_B * s2)[:, None], (B, 16))
    code_BJ = encode_e2m1(tl.div_rn(x_BJ, step_BJ))
    low_BP, high_BP = tl.split(code_BJ.reshape(B, 8, 2))
    byte_BP = (low_BP | (high_BP << 4)).to(tl.uint8)
    store_run(packed, byte_BP.reshape(B * 8), blocks * 8)
    store_run(scale, scale_B.to(tl.uint8), blocks)
    if ERRORS:
        exact_step_B1 = (e4m3_B.to(tl.float64) * s2.to(tl.float64))[:, None]
        q_BJ = decode_e2m1(code_BJ).to(tl.float64) * exact_step_B1
        store_block_errors(errors, x_BJ.to(tl.float64), q_BJ, blocks)


@triton.jit
def quantize_nvfp4_from_mxfp8_kernel(
    codes, exponents, packed, scale, errors, s2, groups, importance, row_blocks,
    TILE: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr, ERRORS: tl.constexpr,
):  # fmt: skip
    """From codes and exponents of 32, U8: packed U8, scale U8, errors F64 [3, blocks].

    Args:
        importance: F32 [K] of `row_blocks` blocks, read if WEIGHTED.
        errors: written if ERRORS.
    """
    # In the interpreter a scalar argument is a Python float, with F64 arithmetic.
    s2 = tl.full((), s2, tl.float32)
    x_BJ = load_mxfp8(codes, exponents, wide(groups), TILE).reshape(TILE // 16, 16)
    _quantize(
        x_BJ, packed, scale, errors, s2, wide(groups) * 2, importance, row_blocks,
        True, SEARCH, WEIGHTED, ERRORS,
    )  # fmt: skip


@triton.jit
def quantize_nvfp4_from_float_kernel(
    values, packed, scale, errors, s2, blocks, importance, row_blocks,
    TILE: tl.constexpr, SEARCH: tl.constexpr, WEIGHTED: tl.constexpr, ERRORS: tl.constexpr,
):  # fmt: skip
    """The same from F32 numbers, or from BF16 bits (U16)."""
    s2 = tl.full((), s2, tl.float32)
    x_BJ = load_blocks(values, wide(blocks), TILE // 16)
    _quantize(
        x_BJ, packed, scale, errors, s2, wide(blocks), importance, row_blocks,
        values.dtype.element_ty == tl.uint16, SEARCH, WEIGHTED, ERRORS,
    )  # fmt: skip


@triton.jit
def dequantize_nvfp4_kernel(packed, scale, values, s2, blocks, TILE: tl.constexpr):
    """From packed U8 and scale U8: F32 numbers, or BF16 bits where `values` is U16."""
    s2 = tl.full((), s2, tl.float32)
    B: tl.constexpr = TILE // 16
    byte_P = load_run(packed, wide(blocks) * 8, TILE // 2).to(tl.int32)
    code_BJ = tl.join(byte_P & 15, byte_P >> 4).reshape(B, 16)
    step_B = decode_e4m3(load_run(scale, wide(blocks), B).to(tl.int32)) * s2
    x_BJ = decode_e2m1(code_BJ) * step_B[:, None]
    store_numbers(values, x_BJ.reshape(TILE), wide(blocks) * 16)
