"""MXFP8: E4M3 elements, one power-of-two scale for 32 columns.

    value = e4m3(code) · 2^(b − 127)
    b     = floor(log2(amax32)) − 8 + 127, clamped to 0 … 254        code = e4m3(x / 2^(b − 127))

The 8 is the exponent of 256, E4M3's largest power of two. Rounding is to nearest, ties to even, and
saturates.

Four numbers, as if they were a block: [1, −0.3, 0.01, 0]. amax = 1 = 2^0, so b = 0 − 8 + 127 = 119
and the scale is 2^−8. Divided: [256, −76.8, 2.56, 0]. Codes: 0x78 (256), 0xEA (−80), 0x42 (2.5),
0x00. Back: [1, −0.3125, 0.009765625, 0].

An element above 448 · scale (amax 1.75 … 2 times its power of two) saturates: that is the OCP rule.
Source: OCP Microscaling Formats 1.0 §5.2, §6.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import in_blocks, row_errors
from .e4m3 import decode_e4m3, decode_e8m0, encode_e4m3

BLOCK = 32
E4M3_EMAX = 8


def dequantize_mxfp8(codes_OK: Tensor, scale_OG: Tensor) -> Tensor:
    """MXFP8 to F32 [O, K] from codes U8 [O, K] and E8M0 exponents U8 [O, K/32].

    Exact, but inf for products of 2^128 and more, which exponents from 247 on can give.
    """
    values_OGN = in_blocks(decode_e4m3(codes_OK), BLOCK)
    return (values_OGN * decode_e8m0(scale_OG)[..., None]).flatten(1)


def floor_log2(magnitudes: Tensor) -> Tensor:
    """floor(log2(x)) of F32 numbers x ≥ 0, as I32, read from the exponent field and so exact.

    Subnormals and zero count as −127. That is below every exponent a scale byte can express, so the
    difference never shows.
    """
    return (magnitudes.view(torch.int32) >> 23) - 127


def quantize_mxfp8(values_OK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F32 [O, K], finite, to codes U8 [O, K], exponents U8 [O, K/32] and per-row errors F64 [O, 3].

    A zero block gets exponent 0 (2^−127): what the formula gives when the missing logarithm is
    clamped, and what torchao and ModelOpt store. Signs of zeros are kept.
    """
    values_OGN = in_blocks(values_OK, BLOCK)
    exponent_OG = (floor_log2(values_OGN.abs().amax(-1)) - E4M3_EMAX + 127).clamp(0, 254)
    scale_OG = exponent_OG.to(torch.uint8)
    step_OG1 = decode_e8m0(scale_OG)[..., None]
    # Division by a power of two is exact, except for quotients far below E4M3's smallest number.
    codes_OK = encode_e4m3(values_OGN / step_OG1).flatten(1)
    restored_OGN = in_blocks(decode_e4m3(codes_OK), BLOCK).double() * step_OG1.double()
    return codes_OK, scale_OG, row_errors(values_OGN.double(), restored_OGN)
