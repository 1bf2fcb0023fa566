"""NVFP4 to FP8: element times block scale, rounded to E4M3, as FP8 products of tiles need it.

    staged = e4m3(clamp(e2m1(code) · e4m3(scale), −448, 448))      to nearest, ties to even

The product has at most 2 + 4 significant bits, so F32, BF16 and F16 hold it exactly and there is
one rounding, whichever of them it goes through. A NaN scale (0x7F, 0xFF) gives NaN, always 0x7F,
under every code, zero included. The sign is the product of the signs, zero included: code 0 under a
negative scale gives −0 (0x80), and so does a small negative product that rounds to zero.
The tensor's own scale is not part of it: who uses the result multiplies with it afterwards.

Four numbers: codes [3, 7, 15, 1] (1.5, 6, −6, 0.5) under scale 0x6B (88) are 132, 528, −528, 44;
132 is a tie between 128 and 144, 528 saturates: [0x70, 0x7E, 0xFE, 0x63] (128, 448, −448, 44).

Source: `mul.rn.satfinite.e4m3x4.e2m1x4.e4m3x4` of PTX ISA 9.4, which does four at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .e4m3 import decode_e2m1, decode_e4m3, encode_e4m3

E4M3_NAN = 0x7F


def stage_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """E4M3 codes, U8, of E2M1 codes (U8, 0 … 15) under E4M3 scales (U8); the two broadcast."""
    products = decode_e2m1(codes) * decode_e4m3(scales)
    return encode_e4m3(products).masked_fill(products.isnan(), E4M3_NAN)


def stage_rows(packed_RP: Tensor, scale_RB: Tensor, block: int = 16) -> Tensor:
    """E4M3 codes, U8 [R, D], of packed NVFP4 rows: U8 [R, D/2] under E4M3 scales U8 [R, D/16]."""
    codes_RD = torch.stack([packed_RP & 15, packed_RP >> 4], dim=-1).flatten(1)
    return stage_e4m3(codes_RD, scale_RB.repeat_interleave(block, dim=1))
