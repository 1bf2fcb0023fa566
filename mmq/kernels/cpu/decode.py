"""MXFP8 and NVFP4 to BF16 or F32 by table: under its scale an element has few possible values.

    MXFP8  value = e4m3(code) · 2^(b − 127)        one row of 256 values per exponent byte
    NVFP4  value = e2m1(code) · (e4m3(scale) · s2) one row of 16 values per scale byte

Four MXFP8 numbers under exponent 119 (2^−8): codes 0x78, 0xEA, 0x42, 0x00 are 1, −0.3125,
0.009765625, 0. Each table entry is made by the F32 expression of the reference, then rounded to
BF16 where BF16 is wanted.
"""

from __future__ import annotations

import functools

import numpy as np

from ..results import F32, U8, U16, AnyArray
from .jit import jit
from .scalars import E2M1, E4M3, E8M0, bf16_bits


def dequantize_mxfp8_f32(codes_OK: U8, exponent_OG: U8) -> F32:
    """F32 [O, K] from E4M3 codes and E8M0 exponents."""
    values_OK = np.empty(codes_OK.shape, np.float32)
    look_up_codes(codes_OK, exponent_OG, _mxfp8_f32_table(), values_OK)
    return values_OK


def dequantize_mxfp8_bf16(codes_OK: U8, exponent_OG: U8) -> U16:
    """BF16 bits U16 [O, K] from E4M3 codes and E8M0 exponents."""
    bits_OK = np.empty(codes_OK.shape, np.uint16)
    look_up_codes(codes_OK, exponent_OG, _mxfp8_bf16_table(), bits_OK)
    return bits_OK


def dequantize_nvfp4_f32(packed_OP: U8, scale_OB: U8, s2: np.float32) -> F32:
    """F32 [O, K] from packed E2M1 codes and E4M3 scales."""
    values_OK = np.empty((packed_OP.shape[0], packed_OP.shape[1] * 2), np.float32)
    look_up_nibbles(packed_OP, scale_OB, _nvfp4_f32_table(s2), values_OK)
    return values_OK


def dequantize_nvfp4_bf16(packed_OP: U8, scale_OB: U8, s2: np.float32) -> U16:
    """BF16 bits U16 [O, K] from packed E2M1 codes and E4M3 scales."""
    bits_OK = np.empty((packed_OP.shape[0], packed_OP.shape[1] * 2), np.uint16)
    look_up_nibbles(packed_OP, scale_OB, _to_bf16(_nvfp4_f32_table(s2)), bits_OK)
    return bits_OK


@functools.cache
def _mxfp8_f32_table() -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(E4M3[None, :] * E8M0[:, None], np.float32)


@functools.cache
def _mxfp8_bf16_table() -> U16:
    return _to_bf16(_mxfp8_f32_table())


def _nvfp4_f32_table(s2: np.float32) -> F32:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(E2M1[None, :] * (E4M3 * s2)[:, None], np.float32)


def _to_bf16(table: F32) -> U16:
    bits = np.empty(table.shape, np.uint16)
    round_to_bf16(table.reshape(-1), bits.reshape(-1))
    return bits


@jit
def round_to_bf16(values: F32, bits: U16) -> None:
    """Fill bits [n] from values [n]."""
    for i in range(values.size):
        bits[i] = bf16_bits(values[i])


@jit
def look_up_codes(codes_OK: U8, exponent_OG: U8, table: AnyArray, out_OK: AnyArray) -> None:
    """Decode MXFP8 by a table [exponent, code]."""
    for o in range(codes_OK.shape[0]):
        for g in range(exponent_OG.shape[1]):
            row = table[exponent_OG[o, g]]
            for k in range(g * 32, g * 32 + 32):
                out_OK[o, k] = row[codes_OK[o, k]]


@jit
def look_up_nibbles(packed_OP: U8, scale_OB: U8, table: AnyArray, out_OK: AnyArray) -> None:
    """Decode NVFP4 by a table [scale code, element code]."""
    for o in range(packed_OP.shape[0]):
        for b in range(scale_OB.shape[1]):
            row = table[scale_OB[o, b]]
            for p in range(b * 8, b * 8 + 8):
                pair = packed_OP[o, p]
                out_OK[o, 2 * p] = row[pair & 15]
                out_OK[o, 2 * p + 1] = row[pair >> 4]
